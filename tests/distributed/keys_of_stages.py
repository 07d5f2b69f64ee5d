"""Effects of the keys of stages and batch ramps: on the rates of three steps, and on what whole runs read and write."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from keys_of_runs import RUN, Outputs
from keys_of_training import AdamW
from keys_table import Subject, Table, set_key, with_optimizer

from pretrain.checkpoint.folder import read_state, step_folder
from pretrain.config.schema import BatchRampConfig, RunConfig, StageConfig
from pretrain.errors import CheckpointError
from pretrain.run.folder import RunFolder
from pretrain.train.run import Run, open_run

SCHEDULES, STAGES = Table(), Table()


def in_stage(config: RunConfig, **fields: int) -> RunConfig:
    """The first three steps, of 4 x 8 tokens, of a run of five."""
    return replace(config, stage=StageConfig("main", **{"run_steps": 5, "run_tokens": 160, **fields}))


# Rates

COSINE = in_stage(with_optimizer(schedule="cosine", min_lr=4e-4))
OVER_FIVE = (2e-3, 1.2e-3 + 0.8e-3 * math.sqrt(0.5), 1.2e-3)


@SCHEDULES.key("optimizer.schedule_from", "run", COSINE)
def _(base: Subject, second: Subject) -> None:
    AdamW(rates=(2e-3, 1.2e-3, 4e-4)).explains(base)
    AdamW(rates=OVER_FIVE).explains(second)


@SCHEDULES.key("stage.run_steps", 3, set_key(COSINE, "optimizer.schedule_from", "run"))
def _(base: Subject, second: Subject) -> None:
    AdamW(rates=OVER_FIVE).explains(base)
    AdamW(rates=(2e-3, 1.2e-3, 4e-4)).explains(second)


TABLES_END = in_stage(with_optimizer(value_lr_multiplier=3.0, value_lr_end_multiplier=0.5))


@SCHEDULES.key("optimizer.value_lr_from", "stage", TABLES_END)
def _(base: Subject, second: Subject) -> None:
    """A fifth of the way per step of the run, a third per step of the stage."""
    AdamW(value_rates=(6e-3, 5e-3, 4e-3)).explains(base)
    AdamW(value_rates=(6e-3, 6e-3 - 5e-3 / 3, 6e-3 - 10e-3 / 3)).explains(second)


@SCHEDULES.key("stage.run_tokens", 320, TABLES_END)
def _(base: Subject, second: Subject) -> None:
    AdamW(value_rates=(6e-3, 5.5e-3, 5e-3)).explains(second)


# Runs of six steps of 4 x 8 tokens


def consumed(outputs: Outputs) -> list[int]:
    """Sequences after each step, as the metrics say."""
    rows = map(json.loads, outputs.finished[0].metrics.read_text().splitlines())
    return [row["consumed_samples"] for row in rows if "loss" in row]


RAMP = set_key(RUN, "train.micro_batch_size", 1)
RAMPED = set_key(RAMP, "train.batch_ramp", BatchRampConfig(start_size=2, increment=1, over_tokens=64))


@STAGES.key("train.batch_ramp", BatchRampConfig(start_size=2, increment=1, over_tokens=64), RAMP)
def _(base: Outputs, second: Outputs) -> None:
    """Two until half of the 64 tokens are there, three for the other half; the same sequences in the same order."""
    assert consumed(base) == [4, 8, 12, 16, 20, 24]
    assert consumed(second) == [2, 4, 7, 10, 14, 18]
    assert torch.equal(base.tokens[:18], second.tokens)


@STAGES.key("train.batch_ramp.start_size", 1, RAMPED)
def _(base: Outputs, second: Outputs) -> None:
    """A third of the 64 tokens, rounded up to whole steps, for each of three sizes."""
    assert consumed(second) == [1, 2, 3, 5, 7, 10]


@STAGES.key("train.batch_ramp.increment", 2, RAMPED)
def _(base: Outputs, second: Outputs) -> None:
    assert consumed(second) == [2, 4, 6, 8, 12, 16]


@STAGES.key("train.batch_ramp.over_tokens", 128, RAMPED)
def _(base: Outputs, second: Outputs) -> None:
    assert consumed(second) == [2, 4, 6, 8, 11, 14]


STAGED = in_stage(RUN, run_steps=6, run_tokens=192)


@STAGES.key("stage", StageConfig("main", run_steps=6, run_tokens=192), RUN)
def _(base: Outputs, second: Outputs) -> None:
    """A stage that is the whole run changes nothing but what rows say."""
    assert torch.equal(base.tokens, second.tokens)
    assert stage_names(base) == {None}


def stage_names(outputs: Outputs) -> set[str | None]:
    rows = map(json.loads, outputs.finished[0].metrics.read_text().splitlines())
    return {row.get("stage") for row in rows}


@STAGES.key("stage.name", "other", STAGED)
def _(base: Outputs, second: Outputs) -> None:
    assert (stage_names(base), stage_names(second)) == ({"main"}, {"other"})


@STAGES.key("stage.first_sample", 3, STAGED)
def _(base: Outputs, second: Outputs) -> None:
    assert torch.equal(base.tokens[3:], second.tokens[:-3])


@STAGES.key("stage.steps_before", 2, STAGED)
def _(base: Outputs, second: Outputs) -> None:
    with pytest.raises(CheckpointError, match="step 0, before stage main begins at step 2"):
        second.open()


@STAGES.key("stage.samples_before", 5, STAGED)
def _(base: Outputs, second: Outputs) -> None:
    with pytest.raises(CheckpointError, match=r"has seen 0 sequences .* would have seen 5 and 0"):
        second.open()


@STAGES.key("stage.tokens_before", 7, STAGED)
def _(base: Outputs, second: Outputs) -> None:
    with pytest.raises(CheckpointError, match=r"and 0 tokens .* would have seen 0 and 7"):
        second.open()


@STAGES.key("stage.optimizer_state", "reset", STAGED)
def _(base: Outputs, second: Outputs) -> None:
    """A stage behind the six steps of the other one has the same weights, without AdamW's moments of them."""
    kept, reset = (behind(base, outputs.config) for outputs in (base, second))
    assert (kept.state.num_updates, reset.state.num_updates) == (6, 0)
    for one, other in zip(optimizer_states(kept), optimizer_states(reset), strict=True):
        assert torch.equal(one["param"], other["param"])
        for moment in ("exp_avg", "exp_avg_sq"):
            assert one[moment].any()
            assert not other[moment].any()
        assert (float(one["step"]), float(other["step"])) == (6, 0)


def behind(first: Outputs, config: RunConfig) -> Run:
    """A second stage, opened from the last checkpoint of the first."""
    assert config.stage is not None
    stage = replace(config.stage, steps_before=6, samples_before=24, tokens_before=192)
    config = replace(config, stage=stage, train=replace(config.train, num_steps=9))
    saved = read_state(step_folder(first.finished[0].checkpoints, 6))
    folder = RunFolder(Path(f"behind_{stage.optimizer_state}").absolute())
    return open_run(config, folder, first.groups, saved)


def optimizer_states(run: Run) -> list[dict[str, torch.Tensor]]:
    """Main weight, moments and count of every parameter that has been stepped."""
    return [
        {"param": parameter.detach(), **optimizer.optimizer.state[parameter]}
        for optimizer in run.optimizer.chained_optimizers
        for group in optimizer.optimizer.param_groups
        for parameter in group["params"]
    ]
