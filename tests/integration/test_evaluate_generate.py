"""A trained run is evaluated alike on every layout and uses its memory; what cannot be is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from commands import Megamem, evaluations

from pretrain.checkpoint.folder import sealed
from pretrain.data.prepare import prepare
from pretrain.data.tokenizer import ByteTokenizer
from tests.rotation import in_rotation, in_turn
from tools.cli import main


def evaluate(megamem: Megamem, run: Path, *options: object) -> dict[str, Any]:
    result = megamem("eval", run, "--json", *options)
    assert result.code == 0, result.output
    row: dict[str, Any] = json.loads(result.last_line)
    return row


@pytest.fixture(scope="module")
def held_out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set of one short text, all of which is evaluated, as it holds nothing out: eleven windows of 128 tokens."""
    folder = tmp_path_factory.mktemp("held_out")
    (folder / "text.txt").write_text(Path(json.__file__).read_text(encoding="utf-8")[:1400])
    prepare([str(folder / "text.txt")], folder / "data", ByteTokenizer(), validation_fraction=0, num_workers=1)
    return folder / "data"


@in_turn(1)
def test_every_layout_evaluates_alike(megamem: Megamem, config_file: Path, held_out: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    result = megamem(
        "train",
        config_file,
        "--run-dir",
        run,
        "parallel.tensor=2",
        "parallel.pipeline=2",
        "parallel.memory=2",
        "train.num_steps=3",
        "train.sequence_length=128",
        "evaluation.max_sequences=null",
        f"evaluation.datasets=[{{path: {held_out}}}, {{path: {held_out}, name: again}}]",
    )
    assert result.code == 0, result.output
    (trained,) = evaluations(run)
    for options in in_rotation([("--nproc", 1), ("--nproc", 2), ("--own-layout",)]):
        row = evaluate(megamem, run, *options)
        assert list(row["domains"]) == ["data", "again"]
        for found, wanted in (
            (row, trained),
            *((row["domains"][name], trained["domains"][name]) for name in row["domains"]),
        ):
            for key in ("validation_loss", "bits_per_byte"):
                assert found[key] == pytest.approx(wanted[key], rel=1e-5)
            for key in ("validation_tokens", "validation_bytes"):
                assert found[key] == wanted[key]
        assert row["checkpoint"].endswith("step_00000003")
        nats = [part["validation_loss"] * part["validation_tokens"] for part in (row, *row["domains"].values())]
        assert nats[0] == pytest.approx(nats[1] + nats[2], rel=1e-6)


def test_the_trained_model_uses_its_memory(megamem: Megamem, trained: Path) -> None:
    """Switched off, its validation loss is clearly worse; so the memory does work that the rest of the model does not."""
    with_memory = evaluate(megamem, trained, "--ablate")
    without_memory = with_memory["without_memory"]
    assert without_memory["validation_loss"] > with_memory["validation_loss"] + 0.1
    assert with_memory["bits_per_byte"] < 8
    assert 0 < with_memory["xz -9 bits_per_byte"] < with_memory["bits_per_byte"]


IMPOSSIBLE = (
    (2, "the temperature is -1.0", "generate", "--temperature=-1"),
    (2, "the temperature is nan", "generate", "--temperature=nan"),
    (2, "--temperature: 'warm' is not a number", "generate", "--temperature=warm"),
    (2, "top-p is 0.0", "generate", "--top-p=0"),
    (2, "top-p is 1.5", "generate", "--top-p=1.5"),
    (2, "--max-tokens is 0", "generate", "--max-tokens=0"),
    (2, "top-k is 0", "generate", "--top-k=0"),
    (2, "--samples is 0", "generate", "--samples=0"),
    (2, "--stop is empty", "generate", "--stop="),
    (2, "the seed of the sampling is -1", "generate", "--seed=-1"),
    (2, "--prompt-file is none", "generate", "--prompt-file=none"),
    (2, "model.memory.value_dim is 32, which parallel.memory 3 does not divide", "generate", "--nproc=3"),
    (4, "has no checkpoint of step 81: there are 80, 160", "generate", "--step=81"),
    (4, "has no checkpoint of step 81: there are 80, 160", "eval", "--step=81"),
    (2, "model.num_layers=3 cannot be overridden in an evaluation", "eval", "model.num_layers=3"),
    (2, "train.kernels is triton, which needs an NVIDIA GPU", "eval", "train.kernels=triton"),
)


@pytest.mark.parametrize(("code", "message", "command", "option"), IMPOSSIBLE)
def test_options_that_cannot_be_are_refused(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    trained: Path,
    code: int,
    message: str,
    command: str,
    option: str,
) -> None:
    """Before ranks are started, so the command runs in this process."""
    monkeypatch.delenv("TRITON_INTERPRET")
    assert main([command, str(trained), option]) == code
    said = capsys.readouterr()
    assert message in " ".join(said.err.split())
    assert not said.out


def test_data_that_has_moved_is_named_by_hand(megamem: Megamem, trained: Path, corpus: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(trained, tmp_path / "run"))
    for state in run.glob("checkpoints/*/state.json"):
        content = json.loads(state.read_text().replace(str(corpus), str(tmp_path / "gone")))
        state.write_text(json.dumps(sealed(content)))
    result = megamem("eval", run)
    assert result.code == 3
    said = " ".join(result.output.split())
    assert "gone: no such data set" in said
    assert f"If it is elsewhere now: `megamem eval {run} --data DIR`" in said
    assert evaluate(megamem, run, "--data", corpus) == {
        **evaluate(megamem, trained),
        "checkpoint": str(run / "checkpoints" / "step_00000160"),
    }


def test_data_of_another_tokenizer_is_refused(megamem: Megamem, trained: Path, tmp_path: Path) -> None:
    (tmp_path / "corpus").mkdir()
    for name, text in (("a", "some words and some more"), ("b", "other words")):
        (tmp_path / "corpus" / f"{name}.txt").write_text(100 * text)
    tokenizer = tmp_path / "tokenizer.json"
    assert megamem("data", "tokenizer", tmp_path / "corpus", "--vocab-size", 280, "--output", tokenizer).code == 0
    other = tmp_path / "other"
    made = megamem(
        "data",
        "prepare",
        tmp_path / "corpus",
        "--tokenizer",
        tokenizer,
        "--validation-fraction",
        0.5,
        "--output",
        other,
    )
    assert made.code == 0, made.output
    result = megamem("eval", trained, "--data", other)
    assert result.code == 3
    assert "prepared with another tokenizer than the run's" in " ".join(result.output.split())


def test_a_config_edited_by_hand_is_told_that_it_does_not_count(
    megamem: Megamem, trained: Path, tmp_path: Path
) -> None:
    run = Path(shutil.copytree(trained, tmp_path / "run"))
    assert "note:" not in megamem("generate", run, "--max-tokens", 1).output
    config = run / "config.yaml"
    config.write_text(
        config.read_text().replace("hidden_size: 32", "hidden_size: 64", 1).replace("lr: 0.01", "lr: 0.02")
    )
    for words in (("eval", run), ("generate", run, "--max-tokens", 1)):
        result = megamem(*words)
        assert result.code == 0, result.output
        assert "config.yaml differs from the configuration in" in result.output
        assert "model.hidden_size: 32 -> 64" in result.output
        assert "lr" not in result.output.partition("config.yaml differs")[2].partition("\n")[0]
    config.write_text("[")
    assert f"note: {config} is not read, as the checkpoint holds the configuration" in megamem("eval", run).output


def test_a_dense_model_has_no_memory_to_switch_off(megamem: Megamem, config_file: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    result = megamem("train", config_file, "--run-dir", run, "model.memory=null", "train.num_steps=3")
    assert result.code == 0, result.output
    assert "dense" in result.output
    result = megamem("eval", run, "--without-memory")
    assert result.code == 2
    assert "is a model without memory: leave --without-memory out" in " ".join(result.output.split())


def generate(megamem: Megamem, run: Path, *options: object) -> str:
    result = megamem("generate", run, "--max-tokens", 30, "--prompt", "def ", *options)
    assert result.code == 0, result.output
    assert result.output.startswith("def ")
    return result.generated


@in_turn(1)
def test_a_run_on_uneven_stages_is_evaluated_and_goes_on_on_even_ones(
    megamem: Megamem, config_file: Path, held_out: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    common = (
        *("train", config_file, "--run-dir", run, "parallel.pipeline=2", "train.sequence_length=128"),
        f"evaluation.datasets=[{{path: {held_out}}}]",
    )
    uneven = megamem(*common, "parallel.pipeline_layout=E|t*4L", "train.num_steps=3")
    assert uneven.code == 0, uneven.output
    here, there = (evaluate(megamem, run, *options) for options in (("--own-layout",), ("--nproc", 1)))
    assert here["validation_loss"] == pytest.approx(there["validation_loss"], rel=1e-5)
    even = megamem(*common, "train.num_steps=4")
    assert even.code == 0, even.output
    assert "changed since: parallel.pipeline_layout: E|t*4L -> null" in even.output
    assert [row["step"] for row in evaluations(run)] == [3, 4]
    split = megamem(*common, "parallel.pipeline_layout=Ettt|tL", "train.num_steps=5")
    assert split.code == 2
    assert "splits blocks 2..3" in split.output


@in_turn(0)
def test_a_run_on_cut_sequences_is_evaluated_and_goes_on_on_whole_ones(
    megamem: Megamem, config_file: Path, held_out: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    common = (
        *("train", config_file, "--run-dir", run, "parallel.memory=2", "train.sequence_length=64"),
        f"evaluation.datasets=[{{path: {held_out}}}]",
    )
    cut = megamem(*common, "parallel.context=2", "train.num_steps=3", "evaluation.max_sequences=null")
    assert cut.code == 0, cut.output
    assert "2 ranks (tensor 1 x pipeline 1 x context 2 x data 1)" in cut.output
    (trained,) = evaluations(run)
    for options in (("--own-layout",), ("--nproc", 1)):
        row = evaluate(megamem, run, *options)
        assert row["validation_loss"] == pytest.approx(trained["validation_loss"], rel=1e-5)
        assert row["validation_tokens"] == trained["validation_tokens"]
    text = generate(megamem, run)
    assert len(text) > len("def \n")
    assert generate(megamem, run, "--nproc", 2) == text
    whole = megamem(*common, "train.num_steps=4")
    assert whole.code == 0, whole.output
    assert "changed since: " in whole.output
    assert "parallel.context: 2 -> 1" in whole.output
    assert [row["step"] for row in evaluations(run)] == [3, 4]
