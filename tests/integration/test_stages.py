"""A run of three stages: it goes through them by itself, survives being killed anywhere, and can be gone on with from
another folder.
"""

from __future__ import annotations

import math
import os
import random
import shutil
import signal
import sysconfig
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from commands import TINY, Megamem, assert_same_tensors, checkpoint, evaluations, last_step, steps

import pretrain.train.callbacks
from pretrain.data.prepare import prepare
from pretrain.data.tokenizer import ByteTokenizer
from pretrain.run.owner import Owner
from pretrain.train.callback import Callback, Priority, Row
from pretrain.train.callbacks import default_callbacks
from pretrain.train.run import Run
from tests.rotation import in_rotation, in_turn

NUM_KILLS = int(os.environ.get("MEGAMEM_KILLS", "3"))
"""Kills of the run that is killed; the suite's are the first of them."""
ENDS = (6, 10, 14)


@pytest.fixture(scope="module")
def staged_file(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    """Constant with a ramp; a cosine on a blend; four times the context, cut over two ranks, of separate documents."""
    folder = tmp_path_factory.mktemp("staged")
    (folder / "sources").mkdir()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("d*.py")):
        shutil.copy(path, folder / "sources")
    other = folder / "other"
    prepare([str(folder / "sources")], other, ByteTokenizer(), validation_fraction=0.05, num_workers=1)
    config: dict[str, Any] = {
        **TINY,
        "model": {**TINY["model"], "num_layers": 2},
        "train": {"global_batch_size": 8, "micro_batch_size": 2, "sequence_length": 32},
        "optimizer": {
            "lr": 4e-3,
            "schedule": "constant",
            "value_lr_multiplier": 3.0,
            "value_lr_end_multiplier": 1.0,
            "value_lr_decay_tokens": 2000,
        },
        "evaluation": {"max_sequences": 4},
        "checkpoint": {"every_steps": 3},
        "logging": {"memory_every_steps": 4},
        "data": {"datasets": [{"path": str(corpus)}]},
        "stages": [
            {
                "name": "pretrain",
                "num_steps": 6,
                "train": {"batch_ramp": {"start_size": 4, "increment": 4, "over_tokens": 250}},
                "optimizer": {"warmup_steps": 2},
            },
            {
                "name": "decay",
                "num_tokens": 1000,
                "optimizer": {"schedule": "cosine", "min_lr": 4e-4},
                "data": {"datasets": [{"path": str(corpus)}, {"path": str(other), "weight": 3.0}]},
            },
            {
                "name": "long",
                "num_steps": 4,
                "model": {"rotary_base": 50000},
                "train": {"sequence_length": 128, "global_batch_size": 2},
                "optimizer": {"lr": 1e-3, "value_lr_from": "stage", "value_lr_decay_tokens": 0},
                "parallel": {"context": 2},
                "data": {"documents": "separate"},
            },
        ],
    }
    path = folder / "staged.yaml"
    path.write_text(yaml.safe_dump(config, sort_keys=False))
    return path


@pytest.fixture(scope="module")
def straight(staged_file: Path, tmp_path_factory: pytest.TempPathFactory, megamem: Megamem) -> Path:
    """All three stages without a break."""
    path = tmp_path_factory.mktemp("straight") / "run"
    result = megamem("train", staged_file, "--run-dir", path, "--nproc", 2)
    assert result.code == 0, result.output
    for name in ("pretrain", "decay", "long"):
        assert f"tiny, stage {name}: " in result.output
    return path


class EndOfRank(Callback):
    """Sends this rank a signal: within a step, after it, when the stage opens in which the run takes it, or when that has
    ended with it. Before all other callbacks.
    """

    priority = Priority.WATCH

    def __init__(self, step: int, moment: str, number: int) -> None:
        self._step, self._moment, self._number = step, moment, number

    def on_start(self, run: Run) -> None:
        if self._moment == "opened" and run.state.step < self._step <= run.config.train.num_steps:
            self._send()
        self._arm(run)

    def on_step(self, run: Run, row: Row) -> None:
        if self._moment == "after" and run.state.step == self._step:
            self._send()
        self._arm(run)

    def on_end(self, run: Run) -> None:
        if self._moment == "ended" and run.state.step == self._step:
            self._send()

    def _arm(self, run: Run) -> None:
        """Arm the signal in the middle of the step: after its first microbatch went forward."""
        if self._moment == "within" and run.state.step == self._step - 1:
            run.chunks[-1].register_forward_hook(lambda *_: self._send())

    def _send(self) -> None:
        os.kill(os.getpid(), self._number)


def with_callback(callback: Callback, rank: int) -> None:
    """Add a callback to those of all runs that this process and its forks train, on one rank."""

    def more(run: Run, owner: Owner | None = None) -> list[Callback]:
        return [*([callback] if run.groups.rank == rank else []), *default_callbacks(run, owner)]

    pretrain.train.callbacks.default_callbacks = more


def assert_same_run(actual: Path, expected: Path) -> None:
    assert steps(actual) == steps(expected)
    assert evaluations(actual) == evaluations(expected)
    assert_same_tensors(checkpoint(actual, 14), checkpoint(expected, 14))


def test_a_run_that_is_killed_again_and_again_is_the_run_that_was_not(
    straight: Path, staged_file: Path, tmp_path: Path, megamem: Megamem
) -> None:
    """Killed and asked to stop while a stage opens, within steps, and behind them; often at the end of a stage. A run
    that has come to its end is compared, and another one begins.
    """
    path, num_runs = tmp_path / "run_0", 0
    for number_of_kill in in_rotation(range(NUM_KILLS), 2):
        draw = random.Random(number_of_kill)
        done = last_step(path)
        if done >= ENDS[-1]:
            assert megamem("train", staged_file, "--nproc", 2, "--run-dir", path).code == 0
            assert_same_run(path, straight)
            num_runs += 1
            path, done = tmp_path / f"run_{num_runs}", 0
        moment = draw.choice(("opened", "within", "after", "ended"))
        ends = [end for end in ENDS if end > done]
        # Only the last step of a stage is one with which it has ended.
        step = draw.choice(ends if moment == "ended" else [*ends, min(draw.randint(done + 1, done + 4), ENDS[-1])])
        number = draw.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGTERM))
        end = EndOfRank(step, moment, number)
        rank = draw.choice((0, 1))
        result = megamem(
            "train", staged_file, "--nproc", 2, "--run-dir", path, before=partial(with_callback, end, rank)
        )
        # A run that is asked to stop when it is done is done.
        asked = (75, 0) if step == ENDS[-1] else (75,)
        assert result.code in ((1,) if number == signal.SIGKILL else asked), (moment, step, result.output)
    result = megamem("train", staged_file, "--nproc", 2, "--run-dir", path)
    assert result.code == 0, result.output
    assert_same_run(path, straight)


def test_the_ramp_the_schedules_and_the_samples_are_those_of_the_stages(straight: Path) -> None:
    rows = steps(straight)
    assert [row["stage"] for row in rows] == ["pretrain"] * 6 + ["decay"] * 4 + ["long"] * 4
    assert [row["step"] for row in rows] == list(range(1, 15))
    # Four sequences of 32 until there are 250 tokens, then eight; 1,000 tokens are four steps of 256; then two of 128.
    assert [row["consumed_samples"] for row in rows] == [4, 8, 16, 24, 32, 40, 48, 56, 64, 72, 74, 76, 78, 80]
    tokens = [128, 256, 512, 768, 1024, 1280, 1536, 1792, 2048, 2304, 2560, 2816, 3072, 3328]
    assert [row["consumed_tokens"] for row in rows] == tokens
    cosine = [4e-4 + 3.6e-3 * 0.5 * (1 + math.cos(math.pi * step / 3)) for step in range(4)]
    rates = [2e-3, 4e-3, 4e-3, 4e-3, 4e-3, 4e-3, *cosine, 1e-3, 1e-3, 1e-3, 1e-3]
    assert [row["lr"] for row in rows] == pytest.approx(rates, rel=1e-12)
    # From 3 to 1 over the first 2,000 tokens of the run; in the last stage, over its own 1,024.
    of_run = [3 - 2 * min(1.0, before / 2000) for before in [0, *tokens[:9]]]
    of_stage = [3 - 2 * before / 1024 for before in (0, 256, 512, 768)]
    multipliers = [row["value_lr"] / row["lr"] for row in rows]
    assert multipliers == pytest.approx([*of_run, *of_stage], rel=1e-12)
    assert [row["step"] for row in evaluations(straight)] == list(ENDS)
    assert sorted(path.name for path in (straight / "checkpoints").iterdir()) == [
        f"step_{step:08d}" for step in (6, 10, 12, 14)
    ]


@in_turn(0)
def test_another_layout_from_a_stage_on_is_the_same_run_to_rounding(
    straight: Path, staged_file: Path, tmp_path: Path, megamem: Megamem
) -> None:
    run = tmp_path / "run"
    layouts = ("stages.decay.parallel.tensor=2", "stages.long.parallel={tensor: 2, context: 1}")
    result = megamem("train", staged_file, "--run-dir", run, "--nproc", 2, *layouts)
    assert result.code == 0, result.output
    for key in ("loss", "grad_norm"):
        actual, expected = ([row[key] for row in steps(path)] for path in (run, straight))
        assert actual[:6] == expected[:6]
        assert actual == pytest.approx(expected, rel=1e-5)


@in_turn(0)
def test_stages_one_by_one_are_all_at_once(straight: Path, staged_file: Path, tmp_path: Path, megamem: Megamem) -> None:
    run = tmp_path / "run"
    train = ("train", staged_file, "--nproc", 2, "--run-dir", run, "--stage")
    early = megamem(*train, "decay")
    assert early.code == 4
    assert "is of step 0, before stage decay begins at step 6" in " ".join(early.output.split())
    for name, end in zip(("pretrain", "decay", "long"), ENDS, strict=True):
        result = megamem(*train, name)
        assert result.code == 0, result.output
        assert last_step(run) == end
    assert steps(run) == steps(straight)
    assert_same_tensors(checkpoint(run, 14), checkpoint(straight, 14))
    again = megamem(*train, "decay")
    assert again.code == 0
    assert f"stage decay of {run} is finished" in " ".join(again.output.split())
    unknown = megamem(*train, "lang")
    assert unknown.code == 2
    assert "--stage is lang: name one with --stage: pretrain, decay, long" in " ".join(unknown.output.split())


def continued(staged_file: Path, path: Path, *names: str, **changes: Any) -> Path:
    """The file with some of its stages alone."""
    config = yaml.safe_load(staged_file.read_text())
    config["stages"] = [stage | changes for stage in config["stages"] if stage["name"] in names]
    path.write_text(yaml.safe_dump(config, sort_keys=False))
    return path


def test_going_on_in_another_folder_is_going_on(
    straight: Path, staged_file: Path, tmp_path: Path, megamem: Megamem
) -> None:
    """The later stages from the first one's checkpoint, which may be gone once the new run has one of its own."""
    source, run = tmp_path / "source", tmp_path / "run"
    shutil.copytree(straight, source)
    path = continued(staged_file, tmp_path / "continued.yaml", "decay", "long")
    train = ("train", path, "--nproc", 2, "--run-dir", run)
    stop = partial(with_callback, EndOfRank(8, "after", signal.SIGTERM), 1)
    result = megamem(*train, "--from", source / "checkpoints" / "step_00000006", before=stop)
    assert result.code == 75, result.output
    shutil.rmtree(source)
    result = megamem(*train)
    assert result.code == 0, result.output
    assert steps(run) == steps(straight)[6:]
    assert_same_tensors(checkpoint(run, 14), checkpoint(straight, 14))
    refused = megamem(*train, "--from", straight)
    assert refused.code == 2
    assert "holds a run that started from" in refused.output


@in_turn(1)
def test_moments_can_be_reset_and_then_make_another_run(
    straight: Path, staged_file: Path, tmp_path: Path, megamem: Megamem
) -> None:
    """The first step's loss is that of the same weights; what it makes of them is another thing, also after a stop."""
    path = continued(staged_file, tmp_path / "continued.yaml", "long", optimizer_state="reset")
    start = straight / "checkpoints" / "step_00000010"
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    train = ("train", path, "--nproc", 2, "--from", start, "--run-dir")
    assert megamem(*train, whole).code == 0
    stop = partial(with_callback, EndOfRank(12, "after", signal.SIGKILL), 0)
    assert megamem(*train, stopped, "checkpoint.every_steps=1", before=stop).code == 1
    assert megamem(*train, stopped).code == 0
    before, after = ([row["loss"] for row in steps(folder)] for folder in (straight, whole))
    assert after[0] == before[10]
    assert after[1] != before[11]
    assert steps(stopped) == steps(whole)
    assert_same_tensors(checkpoint(stopped, 14), checkpoint(whole, 14))


def test_a_run_without_stages_goes_on_from_another_one(
    straight: Path, staged_file: Path, tmp_path: Path, megamem: Megamem
) -> None:
    """The run takes over weights and counters, and trains for as many steps as it says."""
    config = yaml.safe_load(staged_file.read_text())
    del config["stages"]
    path = tmp_path / "plain.yaml"
    path.write_text(yaml.safe_dump(config))
    run = tmp_path / "run"
    train = ("train", path, "--from", straight, "--run-dir", run, "train.num_steps=2", "data.seed=5")
    result = megamem(*train)
    assert result.code == 0, result.output
    assert [row["step"] for row in steps(run)] == [15, 16]
    assert [row["consumed_tokens"] for row in steps(run)] == [3584, 3840]
    other = megamem(*train[:-3], tmp_path / "other", "model.hidden_size=64")
    assert other.code == 4
    assert "is of another model: model.hidden_size: 32 -> 64" in " ".join(other.output.split())


@in_turn(1)
def test_the_past_of_a_run_stays_and_its_future_may_change(
    straight: Path, staged_file: Path, tmp_path: Path, megamem: Megamem
) -> None:
    """Asked to stop at the end of a stage, it stops there, and not in the next one."""
    run = tmp_path / "run"
    train = ("train", staged_file, "--nproc", 2, "--run-dir", run)
    result = megamem(*train, before=partial(with_callback, EndOfRank(6, "ended", signal.SIGTERM), 1))
    assert result.code == 75, result.output
    assert "stopped at step 6 of 14 as asked, at the end of a stage" in " ".join(result.output.split())
    recorded = (run / "stages.yaml").read_bytes()
    edited = megamem(*train, "stages.pretrain.train.batch_ramp=null")
    assert edited.code == 2
    assert "stage pretrain of" in edited.output
    assert "is trained, and edited now: train.batch_ramp" in " ".join(edited.output.split())
    assert (run / "stages.yaml").read_bytes() == recorded
    (run / "stages.yaml").unlink()
    edited = megamem(*train, "stages.pretrain.train.batch_ramp=null")
    assert edited.code == 4
    assert (
        "has seen 40 sequences and 1,280 tokens at step 6, and with these stages it would have seen 48 and 1,536"
        in (" ".join(edited.output.split()))
    )
    result = megamem(*train, "stages.long.num_steps=2", "stages.3={name: more, num_steps: 1}")
    assert result.code == 0, result.output
    # The tables' multiplier takes the whole last stage, which is shorter now.
    assert steps(run)[:11] == steps(straight)[:11]
    assert [(row["stage"], row["consumed_samples"]) for row in steps(run)[10:]] == [
        ("long", 74), ("long", 76), ("more", 84)
    ]  # fmt: skip


def test_what_is_wrong_with_the_last_stage_is_told_before_the_first(
    staged_file: Path, tmp_path: Path, megamem: Megamem
) -> None:
    for override, code, told in (
        ("stages.long.train.global_batch_size=3", 2, "stage long: train.global_batch_size is 3"),
        ("stages.long.parallel.context=4", 2, "stage long: "),
        ("stages.long.data.datasets.0.path=/nowhere", 3, "stage long: /nowhere"),
        ("stages.long.model.hidden_size=64", 2, "stage long has another model than stage pretrain"),
        ("stages.lang.train.global_batch_size=4", 2, "there is no stage lang: the stages are pretrain, decay, long"),
    ):
        result = megamem("train", staged_file, "--nproc", 2, "--run-dir", tmp_path / "run", override)
        assert result.code == code, result.output
        assert told in " ".join(result.output.split())
    assert not (tmp_path / "run").exists()
