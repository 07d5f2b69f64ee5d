"""The check of GPUs from end to end, with ranks on the CPU in the place of GPUs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from commands import Megamem

from lab.gpu_check import command
from lab.gpu_check.command import Check
from lab.gpu_check.plan import CheckPlan, Command, ShortTraining, full_plan, with_keys
from tools import cli

TINY = (
    "model.num_layers=2",
    "model.hidden_size=32",
    "model.ffn_hidden_size=48",
    "model.vocab_size=512",
    "model.memory.num_keys=12",
    "model.memory.top_k=4",
    "model.memory.key_dim=8",
    "model.memory.value_dim=16",
    "train.num_steps=6",
    "train.sequence_length=32",
)


@pytest.fixture(scope="module")
def plan() -> CheckPlan:
    config = with_keys(full_plan().trials[0].config, *TINY)
    return CheckPlan(
        trials=(
            ShortTraining("cpu", config, on_cpu=True),
            ShortTraining("one", config, like="cpu", holds=True),
            ShortTraining("two", with_keys(config, "parallel.memory=2"), 2, like="one", tolerance=1e-4),
            ShortTraining("other", with_keys(config, "optimizer.lr=0.02"), like="one", tolerance=1e-4),
            ShortTraining("unable", with_keys(config, "model.vocab_size=100"), like="one"),
            ShortTraining("of unable", config, like="unable"),
            ShortTraining("many", with_keys(config, "parallel.memory=2"), 4, like="one"),
        ),
        first={
            "Order": Command(("lab.gpu_check.sanitized", "2"), 2),
            "Writes": Command(("zipfile", "-c", "{folder}/made.zip", "Makefile")),
            "Of 4": Command(("platform",), 4),
        },
        commands={
            "Says": Command(("platform", "terse")),
            "Reads": Command(("zipfile", "-l", "{folder}/made.zip")),
            "Fails": Command(("tools.cli", "nonsense")),
            "Missing": Command(("package_that_is_not_there",)),
        },
        resumed=replace(config, train=replace(config.train, num_steps=40, global_batch_size=2)),
    )


@pytest.fixture
def in_forks(megamem: Megamem, corpus: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Commands of the check run in forks of this process, on the tests' texts, but for the one that is to be killed: on
    one core all of them have one thread.
    """

    def run(*words: object) -> None:
        result = megamem(*(corpus.parent / "sources" if word == "python-stdlib" else word for word in words))
        if result.code:
            raise RuntimeError(result.output)

    monkeypatch.setattr(command, "megamem", run)
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    yield
    os.sched_setaffinity(0, cores)


def test_everything_is_run_judged_and_written_down(
    plan: CheckPlan, in_forks: None, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "page.md"
    check = Check(plan, output, num_gpus=2, minutes=10)
    assert check.run() == 1
    states = {verdict.name: verdict.state for verdict in check._verdicts}
    assert list(states)[:4] == ["Order", "Writes", "Of 4", "killed and resumed"]
    assert states == {
        "Order": "ok",
        "Writes": "ok",
        "Of 4": "skipped",
        "Reads": "ok",
        "cpu": "ok",
        "one": "ok",
        "two": "ok",
        "other": "differs",
        "unable": "failed",
        "of unable": "skipped",
        "many": "skipped",
        "killed and resumed": "ok",
        "Says": "ok",
        "Fails": "failed",
        "Missing": "skipped",
    }
    text = output.read_text()
    assert "- **other**: other losses: " in text
    assert "| unable | failed | rank 0 failed with " in text
    assert "$ python -m platform terse\nLinux" in text
    assert "$ python -m lab.gpu_check.sanitized 2\n" in text
    assert "3 steps on 2 ranks, memories on a stream of their own: no GPU, and so no streams to look at" in text
    assert "| Of 4 | skipped | needs 4 GPUs |" in text
    assert "| many | skipped | needs 4 GPUs |" in text
    assert "| killed and resumed | ok | the same bits in all 40 steps |" in text
    assert "3 checks of 15 are not as it should be" in " ".join(capfd.readouterr().out.split())


def test_nothing_is_started_when_the_time_is_over(plan: CheckPlan, tmp_path: Path) -> None:
    check = Check(replace(plan, trials=plan.trials[:1]), tmp_path / "page.md", num_gpus=2, minutes=0.0)
    assert check.run() == 0
    assert {verdict.state for verdict in check._verdicts} == {"skipped"}
    assert "no time was left" in (tmp_path / "page.md").read_text()


def test_a_machine_without_gpus_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert cli.main(["gpu-check"]) == 2
    assert "this machine has no GPU" in " ".join(capsys.readouterr().err.split())
    assert cli.main(["gpu-check", "--device", "cpu", "--minutes", "0"]) == 2
