"""The twin of a run with a memory that is a mixture of experts, which has as many parameters, and as many active ones.

Both are affine in the width of experts, and in their number, so that two evaluations give the answer in closed form.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from megamem.config.model import ModelConfig, MoEConfig
from pretrain.config.keys import without_ineffective
from pretrain.config.schema import RunConfig
from pretrain.planning.counts.formulas import count_parameters


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


@dataclass(frozen=True)
class ExpertsTwin:
    """A run with experts in place of memory and feed-forward.

    Attributes:
        config: the run, without the keys that have no effect in it.
        solved: experts of the run, and how far they miss.
    """

    config: RunConfig
    solved: EqualExperts


def experts_twin(config: RunConfig, *, width_multiple: int = 8) -> ExpertsTwin | None:
    """The run as a mixture of experts of as many active parameters, and about as many in all.

    None where there is no memory, or no feed-forward in whose place experts could be.

    Args:
        config: the run with the memory. The ranks that split its tables share the experts.
        width_multiple: the inner width of an expert is a multiple of this.

    Raises:
        ValueError: no mixture can do it.
    """
    if config.model.memory is None or config.model.moe is not None:
        return None
    counts, bare = count_parameters(config.model), replace(config.model, memory=None, second_memory=None)
    solved = solve_experts(
        bare,
        active=counts.active,
        total=counts.total,
        width_multiple=width_multiple,
        count_multiple=config.parallel.memory,
    )
    return ExpertsTwin(without_ineffective(replace(config, model=replace(bare, moe=solved.moe))), solved)


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
