"""The record of n-grams in attention's values."""

from __future__ import annotations

import math

from megamem.config.model import ModelConfig
from megamem.families.family import Family
from megamem.initialisation.distributions import Constant, Distribution, Normal, Uniform
from megamem.layers.costs import LayerCosts
from megamem.placement.sharing import LayerView

from .config import ValueNgramsConfig

_GATE_BIAS = -3.0
_MOST_GATE_WEIGHT = 0.02


def _costs(memory: ValueNgramsConfig, view: LayerView, model: ModelConfig) -> LayerCosts:
    """The gate's weights, and the projection to all heads' values where there is one, E G d.

    Backward needs the rows, the gate, and their product.
    """
    columns = model.query_groups * model.attention_head_dim
    projection = columns * memory.memory_width if memory.into == "all_heads" else 0
    return LayerCosts(
        retrieval=memory.gate_channels + memory.gate_bias,
        projections=projection,
        key_flops=2.0 * memory.gate_channels,
        projection_flops=2.0 * projection,
        kept_narrow=2 * memory.memory_width + 2,
        matrices=((columns, memory.memory_width),) if projection else (),
    )


def _distribution(name: str, memory: ValueNgramsConfig, model: ModelConfig) -> Distribution:
    match name:
        case "gate":
            return Uniform(_MOST_GATE_WEIGHT)
        case "gate_bias":
            return Constant(_GATE_BIAS)
        case "up_proj":
            # Columns of length 1, which nanochat's are, too, besides standing at right angles.
            return Normal(1 / math.sqrt(model.query_groups * model.attention_head_dim))
    raise AssertionError(f"no initial distribution is defined for the memory's {name}")


def _table_std(memory: ValueNgramsConfig, model: ModelConfig, sigma_s: float | None) -> float:
    """Zero, as in both codes: the model begins as one without a memory, and rows learn first."""
    return 0.0


VALUE_NGRAMS = Family(
    config=ValueNgramsConfig,
    layer_path=f"{__package__}.layer:ValueNgramsLayer",
    costs=_costs,
    distribution=_distribution,
    table_std=_table_std,
)
