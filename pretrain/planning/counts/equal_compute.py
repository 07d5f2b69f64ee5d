"""The feed-forward width at which a model costs what another one costs.

Every measure here is affine in the width, so that two evaluations give the answer in closed form.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from megamem.config.model import ModelConfig
from pretrain.planning.counts.formulas import count_parameters, forward_flops_per_token

Measure = Callable[[ModelConfig], float]
"""Quantity to make equal, as a function of the model."""


@dataclass(frozen=True)
class FfnWidth:
    """A feed-forward width and how far it misses the target.

    Attributes:
        width: the inner width, a multiple of what was asked for.
        exact: the width at which the target would be met.
        value: the measure at `width`.
        target: value that the measure was to have.
    """

    width: int
    exact: float
    value: float
    target: float

    @property
    def residual(self) -> float:
        """Share of the target by which the measure at `width` lies above it."""
        return self.value / self.target - 1


def flops_measure(sequence_length: int) -> Measure:
    """Forward floating-point operations per token."""
    return lambda model: forward_flops_per_token(model, sequence_length)


def active_measure(model: ModelConfig) -> float:
    """Parameters that one token uses."""
    return count_parameters(model).active


def core_measure(model: ModelConfig) -> float:
    """Parameters that one token uses, without embeddings and values: how UltraMemV2's Table 10 counts its 1B models."""
    return count_parameters(model).core


def solve_ffn_width(model: ModelConfig, measure: Measure, target: float, *, multiple: int = 64) -> FfnWidth:
    """The `ffn_hidden_size`, a multiple of `multiple`, at which `measure` comes nearest to `target`.

    Raises:
        ValueError: no width can do it.
    """
    if model.moe is not None:
        raise ValueError(
            "model.moe is set, so that there is no dense feed-forward whose width could be solved for: "
            "give model.moe=null, or make this model the one that the others are to be like"
        )
    at_one, at_two = (measure(replace(model, ffn_hidden_size=width)) for width in (1, 2))
    slope = at_two - at_one
    if slope == 0:
        raise ValueError(
            "every block has a memory in place of its feed-forward, so that no feed-forward is left whose "
            "width could be solved for"
        )
    exact = 1 + (target - at_one) / slope
    width = max(multiple, math.floor(exact / multiple + 0.5) * multiple)
    if exact < multiple / 2:
        raise ValueError(
            f"without any feed-forward the model would need {at_one - slope:,.0f} where {target:,.0f} is the target: "
            "no width makes them equal; use fewer keys, a smaller model.memory.key_dim or a smaller sharing.group"
        )
    return FfnWidth(width, exact, measure(replace(model, ffn_hidden_size=width)), target)
