"""The record of n-grams in the input embedding."""

from __future__ import annotations

import math

from megamem.config.model import ModelConfig
from megamem.families.family import Family
from megamem.initialisation.distributions import Distribution, Normal
from megamem.layers.costs import LayerCosts
from megamem.placement.sharing import LayerView

from .config import NgramEmbeddingConfig


def _costs(memory: NgramEmbeddingConfig, view: LayerView, model: ModelConfig) -> LayerCosts:
    """The projection, E D; backward needs the rows."""
    projection = model.hidden_size * memory.memory_width
    return LayerCosts(
        projections=projection,
        projection_flops=2.0 * projection,
        kept_narrow=memory.memory_width,
        matrices=((model.hidden_size, memory.memory_width),),
    )


def _distribution(name: str, memory: NgramEmbeddingConfig, model: ModelConfig) -> Distribution:
    """So that a projected row is as large as an embedding: LongCat publishes no initial values."""
    assert name == "up_proj", f"no initial distribution is defined for the memory's {name}"
    return Normal(1 / math.sqrt(memory.value_dim))


def _table_std(memory: NgramEmbeddingConfig, model: ModelConfig, sigma_s: float | None) -> float:
    """Standard deviation of the embedding, beside whose rows they stand."""
    return model.narrow_std


NGRAM_EMBEDDING = Family(
    config=NgramEmbeddingConfig,
    layer_path=f"{__package__}.layer:NgramEmbeddingLayer",
    costs=_costs,
    distribution=_distribution,
    table_std=_table_std,
)
