"""`megamem analyse`: each analysis of tiny runs, against other commands and against what follows from the weights."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from commands import Megamem

from pretrain.config.schema import ParallelConfig
from pretrain.convert.native.format import NativeFormat
from pretrain.data.held_out import HeldOutDataset
from pretrain.data.manifest import TRAIN, open_dataset
from pretrain.run.folder import RunFolder
from pretrain.run.saved_run import find_checkpoint, saved_config

SECOND = {"two families": "engram", "embeddings too": "move"}
"""Second families, by the runs that have one."""
NO_MEMORY = ("value_lr_multiplier", "value_lr_end_multiplier", "pre_value_lr_multiplier")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, megamem: Megamem, config_file: Path) -> dict[str, Path]:
    """A dense model, TIDE, MoVE, Engram, with two streams too, Engram beside learned keys, and MoVE in a block of learned keys."""
    content = yaml.safe_load(config_file.read_text())
    folder = tmp_path_factory.mktemp("analysed")
    content["model"]["num_layers"] = 3
    # Held-out documents are read in few microbatches.
    content["train"] |= {"num_steps": 8, "sequence_length": 64, "micro_batch_size": 8}
    content["optimizer"] = {key: value for key, value in content["optimizer"].items() if key not in NO_MEMORY} | {
        "lr": 1e-2
    }
    memories: dict[str, dict[str, Any] | None] = {
        "dense": None,
        "tide": {"kind": "tide", "vocab_size": 257, "value_dim": 32, "num_tables": 3},
        "move": {"kind": "move", "vocab_size": 257, "value_dim": 16, "num_slots": 2, "num_gate_heads": 2}
        | {"placement": {"blocks": [1]}},
        "engram": {"kind": "engram", "value_dim": 8, "heads_per_order": 2, "rows_per_head": 101}
        | {"boundary_id": 256, "placement": {"blocks": [0, 2]}},
        "streams": {"kind": "engram", "value_dim": 8, "heads_per_order": 2, "rows_per_head": 101, "boundary_id": 256},
        "two families": {"num_keys": 16, "top_k": 4, "value_dim": 16, "pre_value_dim": 8, "placement": {"blocks": [1]}},
        "embeddings too": {
            "num_keys": 16,
            "top_k": 4,
            "value_dim": 16,
            "pre_value_dim": 8,
            "placement": {"blocks": [1, 2]},
        },
    }
    found = {}
    for name, memory in memories.items():
        content["model"]["memory"] = memory
        content["model"]["residual_streams"] = {"count": 2} if name == "streams" else None
        if name in SECOND:
            content["model"]["second_memory"] = memories[SECOND[name]]
            content["logging"] = {"memory_every_steps": 4}
        path = folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(content))
        found[name] = folder / name
        result = megamem("train", path, "--run-dir", found[name])
        assert result.code == 0, result.output
    return found


def analyse(megamem: Megamem, name: str, *words: object) -> tuple[list[dict[str, Any]], str]:
    """Findings of each run named, and the printed text."""
    result = megamem("analyse", name, *words)
    assert result.code == 0, result.output
    paths = [Path(word) for word in words if isinstance(word, Path)]
    page = (paths[0] / f"{name}.html").read_text()
    assert page.count("<svg") == 1
    # Needs nothing from elsewhere.
    assert "<script" not in page
    assert "src=" not in page
    return [json.loads((path / f"{name}.json").read_text()) for path in paths], result.output


def evaluated(megamem: Megamem, run: Path, *words: object) -> dict[str, Any]:
    result = megamem("eval", run, "--json", "--nproc", 1, *words)
    row: dict[str, Any] = json.loads(result.last_line)
    return row


def weights_of(run: Path, name: str) -> torch.Tensor:
    reader = NativeFormat().open(run, None, None).reader
    return reader.read(reader.tensors[name].whole(name))


def test_losses_of_bins_add_up(megamem: Megamem, runs: dict[str, Path], corpus: Path) -> None:
    found, printed = analyse(megamem, "frequency", runs["dense"], runs["tide"], "--nproc", 2)
    assert "tide gains" in printed
    for run, of_run in zip((runs["dense"], runs["tide"]), found, strict=True):
        parts = [*of_run["bins"], of_run["in_no_bin"]]
        whole = evaluated(megamem, run)
        assert sum(part["tokens"] for part in parts) == whole["validation_tokens"]
        nats = sum(part["tokens"] * (part["nats"] or 0) for part in parts)
        assert nats / whole["validation_tokens"] == pytest.approx(whole["validation_loss"], rel=1e-6)
    # Held-out tokens of each bin, counted again: the tokens of this corpus are bytes.
    documents = {split: open_dataset(corpus).open_split(split) for split in (TRAIN, "validation")}
    splits = {split: np.concatenate(list(of_split)) for split, of_split in documents.items()}
    counts = np.bincount(splits[TRAIN], minlength=257)
    kept = [byte for byte in range(128) if chr(byte).isalnum() and counts[byte]]
    order = sorted(kept, key=lambda byte: (counts[byte], byte))
    for number, of_bin in enumerate(found[0]["bins"]):
        types = [byte for rank, byte in enumerate(order) if rank * 10 // len(order) == number]
        assert of_bin["types"] == len(types)
        assert of_bin["tokens"] == int(np.isin(splits["validation"], types).sum())
        assert (of_bin["lowest_count"], of_bin["highest_count"]) == (counts[types[0]], counts[types[-1]])


def test_layers_left_out_are_those_of_the_ablation(megamem: Megamem, runs: dict[str, Path]) -> None:
    (found,), _ = analyse(megamem, "layer-drop", runs["tide"], "--own-layout", "--nproc", 1)
    whole = evaluated(megamem, runs["tide"], "--ablate")
    assert found["nats"] == pytest.approx(whole["validation_loss"], rel=1e-6)
    losses = [layer["nats"] for layer in found["layers"]]
    assert [layer["block"] for layer in found["layers"]] == [0, 1, 2]
    assert len({found["nats"], *losses, whole["without_memory"]["validation_loss"]}) == 5
    # A memory that one block has is lost with it.
    (found,), _ = analyse(megamem, "layer-drop", runs["move"], "--nproc", 2)
    whole = evaluated(megamem, runs["move"], "--ablate")
    assert [layer["block"] for layer in found["layers"]] == [1]
    assert found["layers"][0]["nats"] == pytest.approx(whole["without_memory"]["validation_loss"], rel=1e-6)


def test_weights_of_slots_are_shares_or_gates(megamem: Megamem, runs: dict[str, Path]) -> None:
    (tide,), printed = analyse(megamem, "routing", runs["tide"], "--nproc", 2)
    assert tide["slots"] == ["1", "2", "3", "null"]
    assert "null" in printed
    for layer in tide["layers"]:
        for row in (layer["mean"], *filter(None, layer["by_bin"])):
            assert sum(row) == pytest.approx(1, abs=1e-5)
        weighted = np.array([row or [0] * 4 for row in layer["by_bin"]]).T @ tide["tokens_by_bin"]
        assert layer["mean"] == pytest.approx(weighted / sum(tide["tokens_by_bin"]))
    (move,), _ = analyse(megamem, "routing", runs["move"], "--nproc", 1)
    assert move["slots"] == ["own value", "1", "2"]
    assert all(0 < gate < 2 for layer in move["layers"] for gate in layer["mean"])
    # Whoever trains moves them from 1.
    assert any(abs(gate - 1) > 1e-4 for layer in move["layers"] for gate in layer["mean"])


def test_distances_are_those_of_the_embeddings_at_first(megamem: Megamem, runs: dict[str, Path]) -> None:
    words = ("--contexts", 4, "--num-pairs", 3, "--context-tokens", 8)
    found, _ = analyse(megamem, "collapse", runs["dense"], runs["tide"], *words, "--nproc", 2)
    for of_run in found:
        assert set(of_run["categories"]) == {"rare", "mid", "common", "numbers"}
        for kind in of_run["categories"].values():
            assert len(kind["distance"]) == len(kind["relative"]) == 4
            assert all(0 < relative <= 2 for relative in kind["relative"])
            assert len({token for pair in kind["pairs"] for token in pair}) == 6
    for run, of_run in zip((runs["dense"], runs["tide"]), found, strict=True):
        embeddings = weights_of(run, "embedding.word_embeddings.weight").double()
        for kind in of_run["categories"].values():
            pairs = [[embeddings[ord(token)] for token in pair] for pair in kind["pairs"]]
            apart = [float((u - v).norm()) for u, v in pairs]
            relative = [2 * x / float(u.norm() + v.norm()) for x, (u, v) in zip(apart, pairs, strict=True)]
            assert kind["distance"][0] == pytest.approx(np.mean(apart), rel=1e-5)
            assert kind["relative"][0] == pytest.approx(np.mean(relative), rel=1e-5)
    again, _ = analyse(megamem, "collapse", runs["tide"], *words, "--nproc", 1)
    for kind, of_kind in again[0]["categories"].items():
        assert of_kind["distance"] == pytest.approx(found[1]["categories"][kind]["distance"], rel=1e-6)
    named, _ = analyse(megamem, "collapse", runs["dense"], "--pairs", "a/b,7/8", "--nproc", 1)
    assert named[0]["categories"]["named"]["pairs"] == [["a", "b"], ["7", "8"]]


def test_several_streams_are_told_apart_as_one_state(megamem: Megamem, runs: dict[str, Path]) -> None:
    """Both begin as the embedding: distances are sqrt(2) times as large at first, and relative ones the same."""
    found, _ = analyse(megamem, "collapse", runs["streams"], "--pairs", "a/b,7/8", "--contexts", 4, "--nproc", 1)
    named = found[0]["categories"]["named"]
    embeddings = weights_of(runs["streams"], "embedding.word_embeddings.weight").double()
    pairs = [[embeddings[ord(token)] for token in pair] for pair in named["pairs"]]
    apart = [float((u - v).norm()) for u, v in pairs]
    relative = [2 * x / float(u.norm() + v.norm()) for x, (u, v) in zip(apart, pairs, strict=True)]
    assert named["distance"][0] == pytest.approx(2**0.5 * np.mean(apart), rel=1e-5)
    assert named["relative"][0] == pytest.approx(np.mean(relative), rel=1e-5)
    assert len(named["distance"]) == 4
    gates, _ = analyse(megamem, "routing", runs["streams"], "--nproc", 1)
    assert all(0 < gate < 1 for layer in gates[0]["layers"] for gate in layer["mean"])


def test_rows_of_ngrams_are_those_counted_by_hand(megamem: Megamem, runs: dict[str, Path], corpus: Path) -> None:
    (found,), printed = analyse(megamem, "ngrams", runs["engram"], "--tokens", 3000, "--nproc", 2)
    whole = evaluated(megamem, runs["engram"])
    assert found["nats"] == pytest.approx(whole["validation_loss"], rel=1e-6)
    assert abs(found["nats_shuffled"] - found["nats"]) > 1e-5
    assert [layer["block"] for layer in found["layers"]] == [0, 2]
    documents = open_dataset(corpus).open_split(TRAIN)
    text = np.concatenate(list(documents))[:3000].tolist()
    assert found["sampled"] == 3000
    primes = [101, 103, 107, 109, 113, 127, 131, 137]
    for at, layer in enumerate(found["layers"]):
        multipliers = weights_of(runs["engram"], f"decoder.layers.{layer['block']}.entry.memory.multipliers").tolist()
        for load in layer["orders"]:
            order = load["order"]
            # Oldest first, as they stand in the text.
            grams = [tuple(text[i : i + order]) for i in range(len(text) - order + 1)]
            reads: Counter[tuple[int, int]] = Counter()
            members: dict[tuple[int, int], set[tuple[int, ...]]] = {}
            for head in range(2):
                size = primes[4 * at + 2 * (order - 2) + head]
                for gram in grams:
                    mixed = 0
                    for token, multiplier in zip(reversed(gram), multipliers, strict=False):
                        mixed ^= token * multiplier
                    reads[head, mixed % size] += 1
                    members.setdefault((head, mixed % size), set()).add(gram)
            assert load["ngrams"] == len(set(grams))
            assert load["rows"] == sum(primes[4 * at + 2 * (order - 2) :][:2])
            assert load["rows_read"] == len(reads)
            assert load["most_ngrams"] == max(map(len, members.values()))
            assert load["ngrams_per_row"] == pytest.approx(2 * len(set(grams)) / len(reads))
            alone = sum(reads[row] for row, of_row in members.items() if len(of_row) == 1)
            assert load["alone"] == pytest.approx(alone / reads.total())
            assert load["hottest_row"] == pytest.approx(max(reads.values()) / len(grams))
            assert load["hottest_percent"] == pytest.approx(sum(sorted(reads.values())[-2:]) / reads.total())
        for gates in (layer["gates"], layer["gates_shuffled"]):
            assert all(gate is None or 0 < gate < 1 for gate in gates)
        assert layer["gates"] != layer["gates_shuffled"]
    # Held-out tokens by the count of the three tokens that end there, windows apart.
    counts = Counter(zip(text, text[1:], text[2:], strict=False))
    assert found["counts"] == [0, 1, 2, 4, 8, 16, 32, 64, 128, 256]
    bins = [0] * 10
    held = evaluated(megamem, runs["engram"])["validation_tokens"]
    for window in held_out_windows(runs["engram"]):
        for gram in zip(window, window[1:], window[2:], strict=False):
            bins[int(np.searchsorted(found["counts"], counts[gram], side="right")) - 1] += 1
    assert found["tokens"] == bins
    assert 0 < bins[0] < sum(bins) <= held
    assert f"{found['nats_shuffled']:.4f}" in printed


def held_out_windows(run: Path) -> list[list[int]]:
    config = saved_config(find_checkpoint(RunFolder(run), None), ParallelConfig())
    held_out = HeldOutDataset(config.evaluated, config.train.sequence_length)
    return [held_out[number]["tokens"].tolist() for number in range(len(held_out))]


def test_families_of_one_model_are_analysed_apart(megamem: Megamem, runs: dict[str, Path], tmp_path: Path) -> None:
    """Rows are those of the layers of n-grams; usage has a figure of scores for learned keys alone."""
    run = runs["two families"]
    (found,), _ = analyse(megamem, "ngrams", run, "--tokens", 3000, "--nproc", 1)
    (alone,), _ = analyse(megamem, "ngrams", runs["engram"], "--tokens", 3000, "--nproc", 1)
    assert [layer["block"] for layer in found["layers"]] == [0, 2]
    assert [layer["orders"] for layer in found["layers"]] == [layer["orders"] for layer in alone["layers"]]
    (routing,), _ = analyse(megamem, "routing", run, "--nproc", 1)
    assert [layer["block"] for layer in routing["layers"]] == [0, 2]
    dropped, _ = analyse(megamem, "layer-drop", run, "--nproc", 1)
    assert [layer["block"] for layer in dropped[0]["layers"]] == [0, 1, 2]
    exported = tmp_path / "exported"
    assert megamem("checkpoint", "convert", run, exported, "--format", "huggingface").code == 0
    content = json.loads((exported / "config.json").read_text())
    assert [content[section]["scoring"] for section in ("memory", "second_memory")] == ["tucker", "ngrams"]
    refused = megamem("checkpoint", "convert", run, tmp_path / "released", "--format", "released")
    assert (refused.code, "memories of two kinds, ultramem_v2 and engram" in refused.output) == (2, True)
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    observed = [row["memory"] for row in metrics if "memory" in row]
    assert observed
    assert all(list(of_blocks) == ["0", "1", "2"] for of_blocks in observed)
    assert all(("top1_score" in of_blocks[block]) == (block == "1") for of_blocks in observed for block in of_blocks)


def test_of_two_memories_in_a_block_the_one_behind_attention_is_observed(
    megamem: Megamem, runs: dict[str, Path]
) -> None:
    """Leaving out layers tells both apart."""
    run = runs["embeddings too"]
    dropped, printed = analyse(megamem, "layer-drop", run, "--nproc", 1)
    layers = [(layer["block"], layer["family"]) for layer in dropped[0]["layers"]]
    assert layers == [(1, "ultramem_v2"), (1, "move"), (2, "ultramem_v2")]
    assert len({layer["nats"] for layer in dropped[0]["layers"]}) == 3
    assert "1, move" in printed
    assert "2, ultramem_v2" not in printed
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    observed = [row["memory"] for row in metrics if "memory" in row]
    assert observed
    assert all(list(of_blocks) == ["1", "2"] for of_blocks in observed)
    assert all("top1_score" in figures for of_blocks in observed for figures in of_blocks.values())


def test_ngrams_go_out_as_modules_and_come_in(megamem: Megamem, runs: dict[str, Path], tmp_path: Path) -> None:
    """In the names of the public code, without rows that pad a table."""
    run, modules, back = runs["engram"], tmp_path / "modules", tmp_path / "back"
    assert megamem("checkpoint", "convert", run, modules, "--format", "released").code == 0
    written = torch.load(modules / "model.pt", weights_only=True)
    assert {name.split(".")[2] for name in written} == {"0", "2"}
    config = tmp_path / "unpadded.yaml"
    changes = {"vocab_size": 257, "memory": {"rows_multiple": 1}}
    config.write_text(yaml.safe_dump({"base": str(run / "config.yaml"), "model": changes}))
    result = megamem("checkpoint", "convert", modules, back, "--config", config)
    assert result.code == 0, result.output
    for name in ("multipliers", "key_gain", "conv"):
        name = f"decoder.layers.2.entry.memory.{name}"
        assert torch.equal(weights_of(back, name), weights_of(run, name))
    table = weights_of(back, "banks.1.values")
    assert torch.equal(table, weights_of(run, "banks.1.values")[: len(table)])
    assert len(table) == len(written["model.engram_layers.2.multi_head_embedding.embedding.weight"])


def test_what_cannot_be_analysed_is_told(
    megamem: Megamem, runs: dict[str, Path], saved_run: Path, tmp_path: Path
) -> None:
    again = tmp_path / "again"
    shutil.copytree(runs["dense"], again)
    for words, message in (
        (("layer-drop", runs["dense"]), "is a model without memory"),
        (("routing", saved_run), "whose rows are retrieved"),
        (("ngrams", saved_run), "whose rows no n-gram addresses"),
        (("frequency", again, again), "a run is named twice"),
        (("collapse", again, "--pairs", "their/there", "--nproc", 1), "--pairs has their/there: give two words"),
        (("collapse", again, "--contexts", 0), "'0' is no number of 1 or more"),
    ):
        result = megamem("analyse", *words)
        assert message in " ".join(result.output.split()), result.output
        assert result.code == 2


def test_importance_of_heads_by_block(megamem: Megamem, runs: dict[str, Path], tmp_path: Path) -> None:
    """A grown model is the base with blocks between whose heads nothing hangs on yet."""
    grown = tmp_path / "grown"
    memory = ("model.memory.kind=midus", "model.memory.num_heads=4", "model.memory.num_keys=4")
    result = megamem("upscale", runs["dense"], "--output", grown, "--blocks", 1, *memory)
    assert result.code == 0, result.output
    found, printed = analyse(megamem, "heads", runs["dense"], grown, "--nproc", 2)
    base, more = (of_run["readings"] for of_run in found)
    assert found[1]["inserted"] == [2]
    for reading in ("sum", "mean"):
        own = [scores for block, scores in enumerate(more[reading]["scores"]) if block != 2]
        np.testing.assert_allclose(own, base[reading]["scores"], rtol=1e-4)
        assert more[reading]["scores"][2] == [0.0] * 4
        scores = np.array(base[reading]["scores"])
        assert (scores > 0).all()
        np.testing.assert_allclose(base[reading]["variance_of_heads"], scores.var(1), rtol=1e-9)
        np.testing.assert_allclose(base[reading]["sample_variance_of_heads"], scores.var(1, ddof=1), rtol=1e-9)
    assert "2 (memory)" in printed
    assert f"{base['sum']['scores'][1][3]:.4g}" in printed
    means, printed = analyse(megamem, "heads", runs["dense"], "--nll", "mean", "--nproc", 1)
    np.testing.assert_allclose(means[0]["readings"]["sum"]["scores"], base["sum"]["scores"], rtol=1e-4)
    assert f"{base['mean']['scores'][1][3]:.3g}"[:4] in printed
