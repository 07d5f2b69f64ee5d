"""The feed-forward width, or the experts, at which a model costs what another one costs.

Every measure here is affine in the width, so that two evaluations give the answer in closed form.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from megamem.config.model import ModelConfig, MoEConfig
from pretrain.planning.costs.formulas import count_parameters, forward_flops_per_token

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


def total_measure(model: ModelConfig) -> float:
    """All parameters."""
    return count_parameters(model).total


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


@dataclass(frozen=True)
class EqualExperts:
    """A mixture of experts and how far it misses its targets.

    Attributes:
        moe: the mixture.
        active_residual: share of the target by which its active parameters lie above it.
        total_residual: share of the target by which all its parameters lie above it.
    """

    moe: MoEConfig
    active_residual: float
    total_residual: float


def solve_experts(
    model: ModelConfig,
    *,
    active: float,
    total: float,
    top_k: int = 8,
    width_multiple: int = 8,
    count_multiple: int = 1,
) -> EqualExperts:
    """Experts whose width meets the `active` parameters and whose number meets all, with `top_k` used by a token.

    The defaults of `MoEConfig` are OLMoE's, as the papers compare with; so is the number of experts per token.

    Args:
        model: its memory and its dense feed-forward do not matter.
        active: parameters that one token is to use.
        total: parameters of the model.
        top_k: experts per token.
        width_multiple: the inner width of an expert is a multiple of this.
        count_multiple: the number of experts is a multiple of this: the ranks that share them.

    Raises:
        ValueError: fewer than `top_k` experts would be left, or experts without any width.
    """

    def counts(num_experts: int, width: int) -> tuple[int, int]:
        moe = MoEConfig(num_experts=num_experts, top_k=top_k, expert_ffn_hidden_size=width)
        result = count_parameters(replace(model, memory=None, moe=moe))
        return result.active, result.total

    num_experts, width = top_k, width_multiple
    # Each depends on the other through the router alone, a row of weights per expert.
    for _ in range(3):
        slope = counts(num_experts, 2)[0] - counts(num_experts, 1)[0]
        exact_width = 1 + (active - counts(num_experts, 1)[0]) / slope
        width = max(width_multiple, math.floor(exact_width / width_multiple + 0.5) * width_multiple)
        slope = counts(top_k + 1, width)[1] - counts(top_k, width)[1]
        exact_number = top_k + (total - counts(top_k, width)[1]) / slope
        num_experts = math.floor(exact_number / count_multiple + 0.5) * count_multiple
        if num_experts < top_k or exact_width < width_multiple / 2:
            raise ValueError(
                f"no mixture of experts has {active:,.0f} active of {total:,.0f} parameters with {top_k} experts per "
                f"token: it would be {exact_number:.1f} experts of width {exact_width:.1f}; a memory of more rows, "
                "or a wider model, has one"
            )
    found = counts(num_experts, width)
    return EqualExperts(
        MoEConfig(num_experts=num_experts, top_k=top_k, expert_ffn_hidden_size=width),
        found[0] / active - 1,
        found[1] / total - 1,
    )
