"""The record of MoME."""

from __future__ import annotations

import math

from kernels.common.device_bytes import SORTED_IN_PLACE
from megamem.config.model import ModelConfig
from megamem.families.family import Family
from megamem.initialisation.distributions import Constant, Distribution
from megamem.layers.costs import LayerCosts
from megamem.placement.sharing import LayerView

from .config import MomeConfig


def _costs(memory: MomeConfig, view: LayerView, model: ModelConfig) -> LayerCosts:
    """The gates, C G, and the routers, G M D or d M, with biases; every slot of a token is scored, and sorted.

    For backward are kept of a head the K sigmoids (of K = 1 the softmax), weights and coefficients, the sum of the former, and
    its gate; and where the slots were.
    """
    heads, slots, active = memory.num_heads, memory.rows_per_token, memory.active_slots
    gates, scores, entries = heads * memory.gate_channels, heads * slots, heads * active
    of_hidden = memory.router_input == "hidden"
    router = (scores * model.hidden_size) if of_hidden else slots * memory.value_dim
    products = scores * (model.hidden_size if of_hidden else memory.value_dim)
    return LayerCosts(
        retrieval=gates,
        projections=router + (scores if of_hidden else slots),
        key_flops=2.0 * gates,
        projection_flops=2.0 * products,
        selection_bytes=4 * scores + 8 * entries,
        # As those of linear memories.
        scored=(3 if slots <= SORTED_IN_PLACE else 15) * scores,
        kept_wide=(scores + entries if active == 1 else 2 * entries + heads) + heads,
        kept_narrow=entries + heads,
        kept_ids=entries,
        select_wide=4 * scores,
        backward_wide=2 * scores,
    )


def _distribution(name: str, memory: MomeConfig, model: ModelConfig) -> Distribution:
    """Zero, as published: at first every head adds the mean of its first K rows, and gates are 1."""
    known = ("gate", "router", "router_of_values", "router_bias")
    assert name in known, f"no initial distribution is defined for the memory's {name}"
    return Constant(0.0)


def _table_std(memory: MomeConfig, model: ModelConfig, sigma_s: float | None) -> float:
    """Deviation of the published U(-sqrt(3 / D), sqrt(3 / D)); rows here are normal."""
    return 1 / math.sqrt(model.base_hidden_size)


MOME = Family(
    config=MomeConfig,
    layer_path=f"{__package__}.layer:MomeLayer",
    costs=_costs,
    distribution=_distribution,
    table_std=_table_std,
)
