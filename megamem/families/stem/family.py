"""The record of STEM."""

from __future__ import annotations

import math

from megamem.config.model import ModelConfig
from megamem.families.family import Family
from megamem.initialisation.distributions import Distribution, Normal
from megamem.layers.costs import LayerCosts
from megamem.placement.sharing import LayerView

from .config import StemConfig


def _costs(memory: StemConfig, view: LayerView, model: ModelConfig) -> LayerCosts:
    """The gate's and the down-projection, 2 F D.

    Backward needs gates and rows side by side, and their product, which is as large as what is read and is counted as
    that: the rows themselves are gone. When it is gone, too, its gradient and those of gates and rows are there.
    """
    width = model.hidden_size
    weights = 2 * memory.value_dim * width
    return LayerCosts(
        projections=weights,
        projection_flops=2.0 * weights,
        kept_narrow=2 * memory.value_dim,
        # Three of F in 16 bits.
        backward_wide=3 * memory.value_dim // 2,
        matrices=((memory.value_dim, width), (width, memory.value_dim)),
    )


def _distribution(name: str, memory: StemConfig, model: ModelConfig) -> Distribution:
    """As those of the feed-forward whose place it takes."""
    match name:
        case "gate_proj":
            return Normal(model.linear_std)
        case "down_proj":
            return Normal(model.linear_std / math.sqrt(2 * model.num_layers))
    raise AssertionError(f"no initial distribution is defined for the memory's {name}")


def _table_std(memory: StemConfig, model: ModelConfig, sigma_s: float | None) -> float:
    """Xavier's for a table of these rows and columns, sqrt(2 / (rows + F)), as in the released code.

    Rows are then far smaller than what an up-projection would give, `linear_std` sqrt(D), and so is the block's first
    output. With muP F is that of the base.

    Raises:
        ValueError: the number of rows is left to a tokenizer.
    """
    if not memory.num_rows:
        raise ValueError(
            "model.vocab_size is null, but the initial tables of kind stem depend on the number of token ids: set it, or "
            "model.memory.vocab_size"
        )
    return math.sqrt(2 / (memory.num_rows + memory.value_dim / model.width_rules.ratio))


STEM = Family(
    config=StemConfig,
    layer_path=f"{__package__}.layer:StemLayer",
    costs=_costs,
    distribution=_distribution,
    table_std=_table_std,
)
