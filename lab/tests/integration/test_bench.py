"""The command that times configurations and layouts."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from commands import Megamem


def test_layouts_of_one_configuration_are_timed_one_after_the_other(megamem: Megamem, config_file: Path) -> None:
    options = ("--vary", "parallel.memory=1,2,4", "--nproc", 4, "--rounds", 2, "--steps", 1)
    result = megamem("bench", config_file, "train.micro_batch_size=1", *options)
    assert result.code == 0, result.output
    rows = re.findall(r"parallel\.memory=(\d) .* ([\d.]+)x  [\d.]+ s/step  ([\d.]+) MB sent", result.output)
    assert [group for group, _, _ in rows] == ["1", "2", "4"]
    assert rows[0][1] == "1.00"
    sent = [float(megabytes) for _, _, megabytes in rows]
    assert sent[0] == 0 < sent[1] < sent[2]


def test_what_is_held_is_counted_beside_the_times(megamem: Megamem, config_file: Path) -> None:
    """Training two layers of four takes fewer gradients and moments; a dry run tells the same bytes."""
    options = ("--nproc", 2, "--rounds", 1, "--steps", 1, "--memory", "--vocab-size", 257)
    result = megamem("bench", config_file, "--vary", "optimizer.trained_layers=null,[3]", *options)
    assert result.code == 0, result.output
    rows = re.findall(r"([\d.,]+) MB held  ([\d.,]+) MB at peak +([\d.]+)x", result.output)
    assert len(rows) == 2
    (held, peak, one), (less, lower, ratio) = [[float(cell.replace(",", "")) for cell in row] for row in rows]
    assert one == 1.0
    assert less < held < peak
    assert less < lower < peak
    words = ("model.vocab_size=257", "optimizer.trained_layers=[3]", "--world-size", 2, "--json")
    told = megamem("dryrun", config_file, *words)
    (rank,) = json.loads(told.output[told.output.index("{") :])["ranks"]
    assert (less, lower) == tuple(round(sum(rank[key].values()) / 1e6, 1) for key in ("held_bytes", "peak_bytes"))
    # Both are printed to a tenth of a megabyte.
    assert ratio == pytest.approx(lower / peak, abs=0.005 + 0.1 / peak)


def test_what_to_vary_is_a_key_with_values(megamem: Megamem, config_file: Path) -> None:
    for vary in ("parallel.memory", "parallel.memory=1,,2"):
        result = megamem("bench", config_file, "--vary", vary)
        assert result.code == 2
        assert f"--vary is {vary}: write a key and its values" in result.output


def test_a_vocabulary_has_at_least_one_id(megamem: Megamem, config_file: Path) -> None:
    result = megamem("bench", config_file, "--vocab-size", 0)
    assert result.code == 2
    assert "--vocab-size is 0: it must be at least 1" in result.output


def test_long_sequences_are_measured_in_every_way_that_the_heads_allow(megamem: Megamem, config_file: Path) -> None:
    options = ("--lengths", "24,48", "--sizes", "1,2", "--nproc", 2, "--rounds", 1, "--steps", 1)
    result = megamem("bench", "context", config_file, *options)
    assert result.code == 0, result.output
    rows = re.findall(r"^ +(\d+) +(\d) +(\S+) +([\d,]+) +([\d.,]+) +([\d.]+) +([\d.]+)$", result.output, re.MULTILINE)
    ways = [("1", "-"), ("2", "gather"), ("2", "heads"), ("2", "ring")]
    assert [row[:3] for row in rows] == [(length, *way) for length in ("24", "48") for way in ways]
    assert all(float(row[3].replace(",", "")) > 0 for row in rows)


def test_lengths_are_numbers(megamem: Megamem, config_file: Path) -> None:
    result = megamem("bench", "context", config_file, "--lengths", "24,")
    assert result.code == 2
    assert "'24,' is no list of numbers of 1 or more, as in 1,2,4" in result.output


def test_tokens_are_timed_with_tables_in_memory_and_on_disk(megamem: Megamem, tmp_path: Path) -> None:
    shipped = Path(__file__).parents[2] / "configs" / "compare" / "move.yaml"
    small = ("model.num_layers=2", "model.vocab_size=300", "model.memory.vocab_size=300", "model.ffn_hidden_size=32")
    options = ("--sizes", "0.01,0.02", "--tokens", 6, "--context", 4, "--dir", tmp_path)
    result = megamem("bench", "tables", shipped, *small, *options)
    assert result.code == 0, result.output
    time = r" +[\d.]+ \([\d.]+\)"
    rows = re.findall(rf"^ +(0\.0[12]){time}(?:{time}| +no room){time} +[\d.]+{time}$", result.output, re.MULTILINE)
    assert rows == ["0.01", "0.02"]
    assert not list(tmp_path.iterdir())
    for words, message in (
        ((*small, "--sizes", "0.0001", "--dir", tmp_path), "but the model's tables take 0.001 GiB already"),
        ((*small, "--sizes", "1e6", "--dir", tmp_path), "GiB free, of which 2 shall stay"),
        ((*small, "--dir", tmp_path / "none"), "which is no folder"),
        (("model.memory=null", "--dir", tmp_path), "this model has no memory"),
        (("--sizes", "1,0", "--dir", tmp_path), "'1,0' is no list of sizes above 0"),
    ):
        result = megamem("bench", "tables", shipped, *words)
        assert result.code == 2, result.output
        assert message in " ".join(result.output.split())


def test_generation_of_models_is_timed_side_by_side(megamem: Megamem, config_file: Path) -> None:
    midus = ("kind=midus", "num_heads=4", "num_keys=8", "value_dim=4", "placement.blocks=[1]")
    words = ("model.vocab_size=40", *(f"model.memory.{word}" for word in midus))
    options = ("--prompts", "3,9", "--tokens", 3, "--rounds", 2)
    result = megamem(
        "bench", "generate", config_file, *words, "--vary", "model.memory.top_k=2,4", "--expand-values", *options
    )
    assert result.code == 0, result.output
    spread = r" +[\d.]+ \([\d.]+ \.\. [\d.]+\)"
    rows = re.findall(
        rf"^ +(\d+){spread}{spread} +[\d.]+ +([\d.]+)x +([\d.]+)  \S+ model\.memory\.top_k=(\d)( expanded)?$",
        result.output,
        re.MULTILINE,
    )
    named = [(top_k, expanded) for top_k in "24" for expanded in ("", " expanded")]
    assert [(row[0], *row[3:]) for row in rows] == [(length, *name) for length in "39" for name in named]
    assert rows[0][1] == rows[4][1] == "1.00"
    # 64 rows of every head's own values, in fp32 as wide as the model; a longer text is remembered in more bytes.
    held = [float(row[2]) for row in rows]
    assert held[0] == held[2] < held[1] == held[3]
    assert held[4] >= held[0]
    result = megamem("bench", "generate", config_file, "--tokens", 1)
    assert result.code == 2
    assert "--tokens is 1: the time of a token is that of the second and later ones" in result.output


def test_updates_of_tables_are_measured_by_size_where_they_have_room(
    megamem: Megamem, config_file: Path, tmp_path: Path
) -> None:
    page = tmp_path / "page.md"
    options = ("--vary", "model.memory.num_keys=8,1000000", "--rounds", 2, "--steps", 1, "--report", page)
    result = megamem("bench", "updates", config_file, *options)
    assert result.code == 0, result.output
    written = page.read_text()
    assert "--rounds 2" in written
    assert (tmp_path / "page.svg").read_text().count("<svg") == 1
    for text in (result.output, written):
        small, large = (
            [cell.strip() for cell in line.strip("|").split("|")]
            for line in text.splitlines()
            if re.match(r"\| [\d.,]+M", line)
        )
        assert all(float(speed.replace(",", "")) > 0 for speed in small[1:5])
        assert all(float(gigabytes) >= 0 for gigabytes in small[5:])
        assert large[1:5] == ["no room"] * 4
        # Of fp32 tables: weight, gradient and two moments; then without moments; gradients of 2 bytes; of rows that are read.
        planned = [float(re.fullmatch(r"\(([\d.]+)\)", cell)[1]) for cell in large[5:]]
        parameters = float(large[0].rstrip("M").replace(",", "")) * 1e6
        assert planned[0] * 1e9 == pytest.approx(16 * parameters, rel=0.01)
        (told,) = re.findall(
            r"adamw ([\d.]+), row_wise ([\d.]+), bf16 gradients ([\d.]+), rows ([\d.]+)\.", " ".join(text.split())
        )
        told = [float(number) for number in told]
        assert told[0] == 16
        assert told[1] - 2 == pytest.approx(told[2])
        assert told[2] > 6 > told[3] > 4
        assert planned[1:] == pytest.approx([parameters * each / 1e9 for each in told[1:]], rel=0.01)
    for words, message in (
        ((config_file, "model.memory=null", "--vary", "train.micro_batch_size=1"), "has no memory, and so no tables"),
        ((config_file, "--vary", "seed=1", "--rounds", 0), "use --rounds and --steps of at least 1"),
        ((config_file,), "the following arguments are required: --vary"),
    ):
        refused = megamem("bench", "updates", *words)
        assert refused.code == 2
        assert message in " ".join(refused.output.split())


def test_steps_are_timed_with_tables_on_the_device_and_in_files(megamem: Megamem, tmp_path: Path) -> None:
    """Digests of all tables are compared by the command; files are gone when it ends."""
    config = Path(__file__).parents[3] / "configs/engram/small.yaml"
    words = (
        *("optimizer.tables=row_wise", "optimizer.table_gradients=rows", "train.sequence_length=32"),
        *("model.memory.rows_per_head=64", "--rounds", 2, "--steps", 1, "--vocab-size", 256),
    )
    result = megamem("bench", "files", config, *words, "--folders", f"{tmp_path}/one,{tmp_path}/two")
    assert result.code == 0, result.output
    rows = {
        cells[0]: cells[1:]
        for line in result.output.splitlines()
        if line.startswith("| ")
        for cells in [[cell.strip() for cell in line.strip("|").split("|")]]
    }
    assert list(rows)[2:] == ["device", f"{tmp_path}/one", f"{tmp_path}/two"]
    assert rows["device"][1:5] == [""] * 4
    for folder in ("one", "two"):
        fetching, writing, waited, hidden, _ = rows[f"{tmp_path}/{folder}"][1:]
        assert min(float(each) for each in (fetching, writing, waited)) >= 0
        assert re.fullmatch(r"-?\d+ %", hidden)
        assert not list((tmp_path / folder).iterdir())
    result = megamem("bench", "files", config, *words, "--folders", tmp_path, "--only-files")
    assert "| device" not in result.output
    for change in ((config.parents[1] / "quickstart_dense.yaml",), (config, "--rounds", 0)):
        refused = megamem("bench", "files", *change, "--folders", tmp_path)
        said = " ".join(refused.output.split())
        assert refused.code == 2
        assert "has no memory, and so no tables" in said or "use --rounds and --steps of at least 1" in said
