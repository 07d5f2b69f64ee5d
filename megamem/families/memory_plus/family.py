"""The record of the Memory+ family."""

from __future__ import annotations

from megamem.config.model import ModelConfig
from megamem.families.family import Family
from megamem.families.memory_plus.config import MemoryPlusConfig
from megamem.initialisation.distributions import Distribution, Normal, symmetric
from megamem.layers.costs import LayerCosts
from megamem.placement.sharing import LayerView
from megamem.releases.release import META_RELEASE, ULTRAMEMV2_RELEASE, ReleasedNames
from megamem.retrieval.costs import product_key_costs
from megamem.retrieval.initial import product_key_distribution, product_key_table_std
from megamem.retrieval.released import META_QUERY, META_VALUES, ULTRAMEMV2_TABLES, meta_names

_ULTRAMEMV2 = ReleasedNames(
    {
        "query_proj.weight": "query_proj",
        "query_norm.weight": "query_norm",
        "keys": "keys",
        "values_proj.weight": "value_proj",
        "swilu_projection.weight": "silu_gate",
    },
    ULTRAMEMV2_TABLES,
    # The release normalises the keys, and drops the result.
    unused=("keys_norm.weight",),
    tables_in="model",
)
_META = meta_names(
    {**META_QUERY, **META_VALUES, "swilu_projection.weight": "silu_gate", "swilu_projection.bias": "silu_gate_bias"},
    {"values.weight": "values"},
)


def _costs(memory: MemoryPlusConfig, view: LayerView, model: ModelConfig) -> LayerCosts:
    """Product keys and the silu gate's V D weights; backward needs the gate before and after, and its product."""
    width = model.hidden_size
    gate = width * memory.value_dim
    biases = memory.value_dim if memory.biases else 0
    return product_key_costs(memory, view, model) + LayerCosts(
        projections=gate + biases,
        projection_flops=2.0 * gate,
        kept_narrow=3 * memory.value_dim,
        matrices=((memory.value_dim, width),),
    )


def _distribution(name: str, memory: MemoryPlusConfig, model: ModelConfig) -> Distribution:
    match name:
        case "silu_gate":
            return Normal(model.hidden_size**-0.5)
        case "silu_gate_bias":
            return symmetric(model.base_hidden_size**-0.5)
    return product_key_distribution(name, memory, model)


MEMORY_PLUS = Family(
    config=MemoryPlusConfig,
    layer_path="megamem.families.memory_plus.layer:MemoryPlusLayer",
    costs=_costs,
    distribution=_distribution,
    table_std=product_key_table_std,
    released={ULTRAMEMV2_RELEASE: _ULTRAMEMV2, META_RELEASE: _META},
)
