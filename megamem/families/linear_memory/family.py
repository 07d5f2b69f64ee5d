"""The record of linear memories."""

from __future__ import annotations

import math

from kernels.common.device_bytes import SORTED_IN_PLACE
from megamem.config.model import ModelConfig
from megamem.families.family import Family
from megamem.families.linear_memory.config import LinearConfig
from megamem.initialisation.distributions import Distribution, symmetric
from megamem.layers.costs import LayerCosts
from megamem.placement.sharing import LayerView


def _costs(memory: LinearConfig, view: LayerView, model: ModelConfig) -> LayerCosts:
    """Queries, H d D, and keys, H d N, every one of which a token is scored against.

    For backward are kept the queries, the scores of the kept entries and what was read; backward holds the gradients of
    all scores. The selection sorts them: scores before and after, and where they were, of 8 bytes.
    """
    width = model.hidden_size
    entries, queries = memory.num_heads * memory.top_k, memory.num_heads * memory.key_dim
    weights, scores = queries * (width + memory.num_rows), memory.num_heads * memory.num_rows
    return LayerCosts(
        retrieval=weights,
        matrices=((queries, width),),
        key_flops=2.0 * weights,
        selection_bytes=4 * scores + 8 * entries,
        # A short list is sorted by the block that holds it, a long one in four passes over scores and places: in bytes,
        # three and fifteen times what a selection by digits reads.
        scored=(3 if memory.num_rows <= SORTED_IN_PLACE else 15) * scores,
        compared=entries * memory.top_k,
        kept_wide=entries,
        kept_narrow=queries + entries,
        kept_ids=2 * entries,
        select_wide=4 * scores,
        backward_wide=2 * scores,
    )


def _distribution(name: str, memory: LinearConfig, model: ModelConfig) -> Distribution:
    """As those of product keys, which have two halves of a key where this has one."""
    match name:
        case "query_proj":
            bound = math.sqrt(6 / (model.base_hidden_size + memory.num_heads * memory.key_dim))
            return symmetric(bound / math.sqrt(model.width_rules.ratio))
        case "keys":
            return symmetric(memory.key_dim**-0.5)
    raise AssertionError(f"no initial distribution is defined for the memory's {name}")


def _table_std(memory: LinearConfig, model: ModelConfig, sigma_s: float | None) -> float:
    """1 / sqrt(V), as of product keys whose values are not projected."""
    return float(model.base_hidden_size**-0.5)


LINEAR = Family(
    config=LinearConfig,
    layer_path="megamem.families.linear_memory.layer:LinearLayer",
    costs=_costs,
    distribution=_distribution,
    table_std=_table_std,
)
