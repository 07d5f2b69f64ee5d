"""Files that a run leaves behind: metrics, trackers' files, checkpoints."""

from __future__ import annotations

import json
import math
import re
import shlex
import shutil
from pathlib import Path

import pytest
from commands import Megamem, evaluations, rows, steps

from tests.rotation import in_turn


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, megamem: Megamem, config_file: Path) -> Path:
    """A finished run on one rank, with every tracker."""
    path = tmp_path_factory.mktemp("outputs") / "run"
    result = megamem("train", config_file, "--run-dir", path, "logging.tensorboard=true", "logging.wandb_mode=offline")
    assert result.code == 0, result.output
    return path


def test_metrics_have_a_row_per_step(run: Path) -> None:
    found = [row for row in rows(run) if "loss" in row]
    assert [row["step"] for row in found] == list(range(1, 21))
    names = "step loss grad_norm lr value_lr consumed_samples consumed_tokens step_s tokens_per_s tflops_per_gpu num_skipped"
    assert all(row.keys() - {"memory"} == set(names.split()) for row in found)
    # Looking into the memory is for some steps only (logging.memory_every_steps).
    assert [row["step"] for row in found if "memory" in row] == [10, 20]
    assert set(found[-1]["memory"]["0"]) >= {"coverage", "kl_to_uniform", "top1_score", "topk_score", "output_std"}
    assert [row["consumed_samples"] for row in found] == [8 * step for step in range(1, 21)]
    assert [row["consumed_tokens"] for row in found] == [256 * step for step in range(1, 21)]
    assert all(row["step_s"] > 0 and row["tokens_per_s"] * row["step_s"] == pytest.approx(256) for row in found)
    assert found[-1]["loss"] < found[0]["loss"] - 1
    assert found[0]["value_lr"] == pytest.approx(3 * found[0]["lr"])
    assert found[-1]["lr"] == pytest.approx(4e-4)


def test_the_last_step_is_evaluated(run: Path) -> None:
    (evaluation,) = evaluations(run)
    assert evaluation["step"] == 20
    assert evaluation["validation_tokens"] == 8 * 32


def test_the_run_folder_holds_its_configuration_and_tokenizer(run: Path) -> None:
    assert "pre_value_lr_multiplier: 2.0" in (run / "config.yaml").read_text()
    assert (run / "tokenizer" / "info.json").is_file()
    assert [path.name for path in sorted((run / "checkpoints").iterdir())] == ["step_00000010", "step_00000020"]


def test_tensorboard_has_the_metrics(run: Path) -> None:
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = event_accumulator.EventAccumulator(str(run / "tensorboard")).Reload()
    loss = events.Scalars("loss")
    assert [event.step for event in loss] == list(range(1, 21))
    assert [event.value for event in loss] == pytest.approx([row["loss"] for row in steps(run)])
    assert [event.step for event in events.Scalars("validation_loss")] == [20]


def log_payload(path: Path) -> bytes:
    """Content of a file in LevelDB's log format without the headers: blocks of 32 KiB, of fragments with checksum,
    length and type.
    """
    content, payload, at = path.read_bytes(), b"", 7
    while at + 7 <= len(content):
        if 32768 - at % 32768 < 7:
            # No header fits into the rest of the block.
            at += 32768 - at % 32768
            continue
        length = int.from_bytes(content[at + 4 : at + 6], "little")
        payload += content[at + 7 : at + 7 + length]
        at += 7 + length
    return payload


def test_wandb_has_the_metrics_offline(run: Path) -> None:
    (path,) = (run / "logs").glob("wandb/offline-run-*/*.wandb")
    payload = log_payload(path)
    # Records hold values as JSON.
    missing = [row["step"] for row in steps(run) if json.dumps(row["loss"]).encode() not in payload]
    assert not missing


@in_turn(1)
def test_a_run_that_goes_on_is_the_same_one_in_wandb(megamem: Megamem, config_file: Path, tmp_path: Path) -> None:
    """Offline there is a folder for each start, named after the run's id."""
    run = tmp_path / "run"
    for number in (1, 2):
        overrides = (f"train.num_steps={number}", "optimizer.warmup_steps=0", "logging.wandb_mode=offline")
        result = megamem("train", config_file, "--run-dir", run, *overrides)
        assert result.code == 0, result.output
    run_id = (run / "wandb_id").read_text()
    assert re.fullmatch("[0-9a-f]{16}", run_id)
    files = sorted((run / "logs").glob("wandb/offline-run-*/*.wandb"))
    assert [file.name for file in files] == [f"run-{run_id}.wandb"] * 2
    # The second one goes on where the first one was: the row of its step, and no other.
    found = steps(run)
    for file, row, other in zip(files, found, reversed(found), strict=True):
        payload = log_payload(file)
        assert json.dumps(row["loss"]).encode() in payload
        assert json.dumps(other["loss"]).encode() not in payload


def test_running_a_finished_run_again_says_so(run: Path, megamem: Megamem, config_file: Path) -> None:
    before = (run / "metrics.jsonl").read_bytes()
    result = megamem("train", config_file, "--run-dir", run)
    assert result.code == 0
    assert "is finished: 20 steps done" in result.output
    assert (run / "metrics.jsonl").read_bytes() == before


def test_a_run_that_is_shorter_than_what_is_done_says_what_that_means(
    saved_run: Path, megamem: Megamem, config_file: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(saved_run, tmp_path / "run")
    result = megamem("train", config_file, "--run-dir", run, "train.num_steps=4", "checkpoint.every_steps=3")
    assert result.code == 0, result.output
    assert "has 6 steps done, and train.num_steps is 4: there is nothing left to train. Raise it" in result.output


def test_what_a_run_says_of_itself(megamem: Megamem, config_file: Path, corpus: Path, tmp_path: Path) -> None:
    """A file of it has no carriage returns, nothing twice, one of a thing in the singular, a prompt of its own data."""
    run = tmp_path / "run"
    said = megamem("train", config_file, "--run-dir", run, "train.num_steps=1", "optimizer.warmup_steps=0").output
    assert "1 rank (tensor 1" in said
    assert "1 step of 256 tokens" in said
    assert "0.0M" not in said
    assert "\r" not in said
    lines = [line for line in said.splitlines() if line]
    assert len(set(lines)) == len(lines)
    prompt = re.search(r"megamem generate \S+ --prompt (.*)", said)
    assert prompt is not None
    (words,) = shlex.split(prompt[1])
    assert any(words.split()[0] in path.read_text() for path in (corpus.parent / "sources").iterdir())


EVERY_SO_MANY = (
    "train.num_steps=11",
    "optimizer.value_offload=cpu",
    "optimizer.value_clip_grad=0.5",
    "logging.every_steps=3",
    "logging.memory_every_steps=4",
    "evaluation.every_steps=5",
    "evaluation.max_sequences=3",
    "checkpoint.every_steps=2",
    "checkpoint.keep_last=2",
    "checkpoint.keep_every_steps=4",
)


def test_rows_evaluations_and_checkpoints_are_those_that_were_asked_for(
    megamem: Megamem, config_file: Path, tmp_path: Path
) -> None:
    """The run's tables are stepped by the host and clipped apart, and it says so."""
    path = tmp_path / "run"
    result = megamem("train", config_file, "--run-dir", path, *EVERY_SO_MANY)
    assert result.code == 0, result.output
    assert "tables' main weights and moments in host memory (" in result.output
    assert [row["step"] for row in steps(path)] == [3, 4, 6, 8, 9, 11]
    assert [row["step"] for row in steps(path) if "memory" in row] == [4, 8]
    assert all(row["value_grad_norm"] > 0 for row in steps(path))
    assert [(row["step"], row["validation_tokens"]) for row in evaluations(path)] == [(5, 96), (10, 96), (11, 96)]
    kept = sorted(folder.name for folder in (path / "checkpoints").iterdir())
    # Multiples of four, and the last two of 2, 4, 6, 8, 10 and the end.
    assert kept == [f"step_{step:08d}" for step in (4, 8, 10, 11)]


def test_the_rows_learning_rates_are_those_of_the_schedule(trained: Path) -> None:
    """160 steps with three of warm-up, a cosine from 1e-2 to 4e-4, and tables at 5 times that, falling to twice."""
    found = [row for row in rows(trained) if "loss" in row]
    assert [row["step"] for row in found] == list(range(1, 161))
    for step, row in enumerate(found):
        lr = 1e-2 * (step + 1) / 3 if step < 3 else 4e-4 + 96e-4 * (1 + math.cos(math.pi * (step - 3) / 156)) / 2
        assert row["lr"] == pytest.approx(lr, rel=1e-12), step
        assert row["value_lr"] == pytest.approx(lr * (5 - 3 * step / 160), rel=1e-12), step


@in_turn(0)
def test_a_run_says_which_gradients_of_tables_were_taken(megamem: Megamem, config_file: Path, tmp_path: Path) -> None:
    """By one rank rows, of which the run's configuration then speaks, and goes on by two, whose kernels make dense ones."""
    keys = ("optimizer.tables=row_wise", "optimizer.table_gradients=auto")
    run = (
        *keys,
        "model.memory.num_keys=128",
        "optimizer.warmup_steps=0",
        "checkpoint.every_steps=2",
        "--run-dir",
        tmp_path / "run",
    )
    for num_steps, num_ranks, more, taken in (
        (2, 1, (), "rows: a step reads "),
        (3, 2, ("train.kernels=naive",), "dense: train.kernels is naive"),
    ):
        result = megamem("train", config_file, f"train.num_steps={num_steps}", *run, *more, "--nproc", num_ranks)
        assert result.code == 0, result.output
        assert f"\noptimizer.table_gradients (auto): {taken}" in result.output
        saved = (tmp_path / "run" / "config.yaml").read_text()
        assert f"table_gradients: {taken.partition(':')[0]}\n" in saved
