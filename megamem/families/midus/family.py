"""The record of MIDUS."""

from __future__ import annotations

from megamem.config.model import ModelConfig
from megamem.families.family import Family
from megamem.families.midus.config import MidusConfig
from megamem.initialisation.distributions import Constant, Distribution, Normal, symmetric
from megamem.layers.costs import LayerCosts
from megamem.placement.sharing import LayerView


def _costs(memory: MidusConfig, view: LayerView, model: ModelConfig) -> LayerCosts:
    """Keys, N D, expansions, V D, and gains and biases of normalised queries, 2 D: the heads together are as wide as
    the model.

    The candidate grid is K^2 sums per head. For backward are kept the queries by side, the scores of the kept entries,
    and what was read; where queries are normalised, also they themselves and what gains multiply.
    """
    width = model.hidden_size
    entries, keys = memory.num_heads * memory.top_k, memory.num_keys * width
    expansion = memory.value_dim * width
    norm = 2 * width if memory.query_norm == "layer" else 0
    scores = 2 * memory.num_heads * memory.num_keys
    return LayerCosts(
        retrieval=keys + norm,
        projections=expansion,
        matrices=((memory.value_dim, width // memory.num_heads),) * memory.num_heads,
        split_by_heads=0 if memory.reads_whole_tokens else keys + expansion + norm,
        key_flops=2.0 * keys,
        selection_flops=1.0 * memory.num_heads * memory.top_k**2,
        projection_flops=2.0 * expansion,
        selection_bytes=4 * scores + 8 * 4 * entries,
        scored=scores,
        candidates=entries * memory.top_k,
        compared=entries * memory.top_k,
        kept_wide=entries + norm,
        kept_narrow=width + entries,
        kept_ids=2 * entries,
        backward_wide=2 * scores,
    )


def _distribution(name: str, memory: MidusConfig, model: ModelConfig) -> Distribution:
    """Initial distributions; the paper says only that expansions are not zero, or nothing would get a gradient."""
    match name:
        case "keys":
            # As other product keys, whose queries have two halves of d / 2.
            return symmetric((model.hidden_size // memory.num_heads) ** -0.5)
        case "expansion":
            return Normal(memory.value_dim**-0.5)
        case "query_gain":
            return Constant(1.0)
        case "query_bias":
            return Constant(0.0)
    raise AssertionError(f"no initial distribution is defined for the memory's {name}")


def _table_std(memory: MidusConfig, model: ModelConfig, sigma_s: float | None) -> float:
    """Values are zero, and the block at first the identity (section 3)."""
    return 0.0


MIDUS = Family(
    config=MidusConfig,
    layer_path="megamem.families.midus.layer:MidusLayer",
    costs=_costs,
    distribution=_distribution,
    table_std=_table_std,
)
