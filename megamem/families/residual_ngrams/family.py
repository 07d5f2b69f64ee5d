"""The record of n-grams in the residual stream."""

from __future__ import annotations

from megamem.config.model import ModelConfig
from megamem.families.family import Family
from megamem.initialisation.distributions import Constant, Distribution
from megamem.layers.costs import LayerCosts
from megamem.placement.sharing import LayerView

from .config import ResidualNgramsConfig

_FIRST_WEIGHT = 0.1
"""Modded-nanogpt's, in pull 201."""


def _costs(memory: ResidualNgramsConfig, view: LayerView, model: ModelConfig) -> LayerCosts:
    """The gain alone: backward needs the sum of rows, which all layers share."""
    return LayerCosts(retrieval=1)


def _shared_kept(memory: ResidualNgramsConfig, width: int, element_bytes: int) -> int:
    """The sum, and signs of 8 bits, where rows are not summed as they are read."""
    return (element_bytes + memory.rows_per_token) * memory.value_dim if memory.has_signs else 0


def _distribution(name: str, memory: ResidualNgramsConfig, model: ModelConfig) -> Distribution:
    assert name == "gain", f"no initial distribution is defined for the memory's {name}"
    return Constant(_FIRST_WEIGHT)


def _table_std(memory: ResidualNgramsConfig, model: ModelConfig, sigma_s: float | None) -> float:
    """Zero, as published: the model begins as one without a memory, and rows learn first."""
    return 0.0


RESIDUAL_NGRAMS = Family(
    config=ResidualNgramsConfig,
    layer_path=f"{__package__}.layer:ResidualNgramsLayer",
    costs=_costs,
    distribution=_distribution,
    table_std=_table_std,
    shared_read_path=f"{__package__}.layer:SummedRows",
    shared_kept=_shared_kept,
)
