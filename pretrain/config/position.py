"""Sequences of each step of a run, and the run's position in its data: closed functions, without torch.

`levels`, `batch_size_at`, `samples_until` and `steps_for_tokens` count steps from the first one of a stage, or of a run
without stages; the others count from the first step of the run.
"""

from __future__ import annotations

import functools
from bisect import bisect_right
from dataclasses import dataclass
from operator import attrgetter

from pretrain.config.schema import RunConfig, StageConfig, TrainConfig
from pretrain.errors import CheckpointError
from pretrain.state import RunState


@dataclass(frozen=True)
class Level:
    """Steps of one size.

    Attributes:
        first_step: first step of the level.
        samples_before: sequences of the steps before it.
        batch_size: sequences per step, over all ranks.
    """

    first_step: int
    samples_before: int
    batch_size: int


@functools.lru_cache(maxsize=64)
def levels(train: TrainConfig) -> tuple[Level, ...]:
    """The levels that a run comes through, the last one without an end. A ramp may leave some of its sizes out."""
    ramp, size, steps, samples = train.batch_ramp, train.global_batch_size, 0, 0
    found: list[Level] = []
    if ramp is not None:
        num_increments = -(-(size - ramp.start_size) // ramp.increment)
        for number in range(num_increments):
            batch_size = ramp.start_size + number * ramp.increment
            # Steps until t x num_increments >= (number + 1) x over_tokens, where t counts tokens.
            missing = (number + 1) * ramp.over_tokens - num_increments * samples * train.sequence_length
            num_steps = max(0, -(-missing // (num_increments * batch_size * train.sequence_length)))
            if num_steps:
                found.append(Level(steps, samples, batch_size))
            steps, samples = steps + num_steps, samples + num_steps * batch_size
    return (*found, Level(steps, samples, size))


def batch_size_at(train: TrainConfig, step: int) -> int:
    """Sequences of a step, over all ranks."""
    return _level_of(train, step).batch_size


def samples_until(train: TrainConfig, step: int) -> int:
    """Sequences of all steps before a step."""
    level = _level_of(train, step)
    return level.samples_before + (step - level.first_step) * level.batch_size


def steps_for_tokens(train: TrainConfig, num_tokens: int) -> int:
    """The fewest steps that see so many tokens."""
    num_samples = -(-num_tokens // train.sequence_length)
    level = [level for level in levels(train) if level.samples_before < num_samples][-1]
    return level.first_step + -(-(num_samples - level.samples_before) // level.batch_size)


def _level_of(train: TrainConfig, step: int) -> Level:
    found = levels(train)
    return found[bisect_right(found, step, key=attrgetter("first_step")) - 1]


def batch_size_of_run(train: TrainConfig, stage: StageConfig | None, step: int) -> int:
    """Sequences of a step of the run."""
    return batch_size_at(train, step - steps_before(stage))


def samples_of_run(train: TrainConfig, stage: StageConfig | None, step: int) -> int:
    """Sequences of the run before a step, by its configuration."""
    before = 0 if stage is None else stage.samples_before
    return before + samples_until(train, step - steps_before(stage))


def tokens_of_run(train: TrainConfig, stage: StageConfig | None, step: int) -> int:
    """Tokens of the run before a step, by its configuration."""
    before = 0 if stage is None else stage.tokens_before
    return before + samples_until(train, step - steps_before(stage)) * train.sequence_length


def steps_before(stage: StageConfig | None) -> int:
    """Steps of the run before the stage."""
    return 0 if stage is None else stage.steps_before


def position_in_data(config: RunConfig, state: RunState) -> int:
    """Number of the next sequence in the order of the data, behind those passed over in this stage or before.

    Sequence i depends on the data sets, the seed and the sequence length alone; neither layout nor batch enter.
    """
    stage = config.stage
    return (
        state.consumed_samples if stage is None else stage.first_sample + state.consumed_samples - stage.samples_before
    )


def samples_to_come(config: RunConfig, state: RunState) -> int:
    """Sequences from where the run stands to its last step, or that of its stage.

    By steps, not by sequences consumed: without stages, batches before the checkpoint may have had another size.
    """
    train, stage = config.train, config.stage
    if state.step >= train.num_steps:
        return 0
    return samples_of_run(train, stage, train.num_steps) - samples_of_run(train, stage, state.step)


def last_sample(config: RunConfig) -> int:
    """Number of the sequence after the last one of the run, or of its stage, if nothing is passed over."""
    stage = config.stage
    first, before = (0, 0) if stage is None else (stage.first_sample, stage.samples_before)
    return first + samples_of_run(config.train, stage, config.train.num_steps) - before


def check_position(config: RunConfig, state: RunState, checkpoint: object) -> None:
    """Refuse stages that do not lead to a checkpoint: rates, batches and data of later steps count from them.

    Raises:
        CheckpointError: the stages lead elsewhere; the message names the data that the checkpoint has seen, and that
            which it would have seen.
    """
    train, stage = config.train, config.stage
    if stage is None:
        return
    if state.step < stage.steps_before:
        raise CheckpointError(
            f"{checkpoint} is of step {state.step}, before stage {stage.name} begins at step {stage.steps_before}: "
            "choose a later one, or the configuration of its own stage"
        )
    samples = samples_of_run(train, stage, state.step) + state.num_passed_over
    expected = (samples, tokens_of_run(train, stage, state.step))
    if expected != (state.consumed_samples, state.consumed_tokens):
        raise CheckpointError(
            f"{checkpoint} has seen {state.consumed_samples:,} sequences and {state.consumed_tokens:,} tokens at step "
            f"{state.step}, and with these stages it would have seen {expected[0]:,} and {expected[1]:,}: batch, sequence "
            "length and length of what is trained already cannot change. Set them back; to change one from here on, let "
            f"the stage end at this step and add another"
        )
