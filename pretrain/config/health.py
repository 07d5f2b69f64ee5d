"""The section `health` of a run's configuration: checks while it trains, and actions on their findings."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from annotated_types import Ge, Gt
from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from megamem.config.base import Advice, Config, EffectiveWhen

_ON = EffectiveWhen(lambda c: c.action != "none", "health.spikes.action is skip or rewind")
_REWINDS = EffectiveWhen(lambda c: c.action == "rewind", "health.spikes.action is rewind")


@dataclass(frozen=True)
class SpikeConfig(Config):
    """Definition of a spike of the loss or of the gradient norm, and the action on a step that has one."""

    action: Literal["none", "skip", "rewind"] = "none"
    """none: nothing is judged; skip: the step's update is not applied; rewind: the run goes back to its newest
    checkpoint and passes over the data that it has read since then, the spike's included."""
    window_steps: Annotated[PositiveInt, Ge(2), Advice("a deviation needs at least two steps"), _ON] = 128
    """Steps before the one that is judged, whose mean and deviation it is held against; until there are so many,
    nothing is a spike."""
    loss_deviations: Annotated[PositiveFloat | None, _ON] = 6.0
    """Standard deviations above the window's mean from which a loss is a spike; null: the loss is not judged."""
    grad_norm_deviations: Annotated[PositiveFloat | None, _ON] = 6.0
    """Standard deviations above the window's mean from which a gradient norm before clipping is a spike (without the
    tables', where they have one of their own); null: the norm is not judged."""
    max_rewinds: Annotated[PositiveInt, _REWINDS] = 5
    """Times that a run goes back; at the next spike it ends with an error."""


@dataclass(frozen=True)
class SlowRankConfig(Config):
    """Ranks whose hardware computes slower than that of the others are named."""

    every_steps: NonNegativeInt = 100
    """Steps of a window, at whose end every rank times a multiplication of its own; 0: never."""
    factor: Annotated[
        PositiveFloat,
        Gt(1),
        Advice("1 is the median rank itself"),
        EffectiveWhen(lambda c: c.every_steps > 0, "health.slow_ranks.every_steps is above 0"),
    ] = 1.5
    """Times the median rank's time from which a rank is slow."""
    windows: Annotated[
        PositiveInt, EffectiveWhen(lambda c: c.every_steps > 0, "health.slow_ranks.every_steps is above 0")
    ] = 3
    """Windows in a row in which a rank must be slow to be named."""


@dataclass(frozen=True)
class HealthConfig(Config):
    """Checks while a run trains. See docs/health.md."""

    spikes: SpikeConfig = field(default_factory=SpikeConfig)
    """Spikes of the loss and of the gradient norm."""
    hang_minutes: NonNegativeFloat | None = None
    """Minutes that a step may take before its ranks write their stacks into the run's logs and end; null: half of
    parallel.timeout_minutes, after which a collective would end them without; 0: they are never ended."""
    long_phase_minutes: Annotated[
        PositiveFloat, EffectiveWhen(lambda c: c.hang_minutes != 0, "health.hang_minutes is not 0")
    ] = 60.0
    """Minutes that the first step may take, and what comes between two steps (an evaluation, a save), before the ranks
    write their stacks into the run's logs and end."""
    slow_ranks: SlowRankConfig = field(default_factory=SlowRankConfig)
    """Ranks that are slower than the others."""
    compare_replicas_every_steps: NonNegativeInt = 0
    """Steps after which weights that several ranks hold are compared bit for bit, and then before every checkpoint
    too; 0: never."""
