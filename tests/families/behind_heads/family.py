"""The record of the family behind attention's heads."""

from __future__ import annotations

from megamem.config.model import ModelConfig
from megamem.families.family import Family
from megamem.initialisation.distributions import Distribution
from megamem.layers.costs import LayerCosts
from megamem.placement.sharing import LayerView

from .config import BehindHeadsConfig


def _costs(memory: BehindHeadsConfig, view: LayerView, model: ModelConfig) -> LayerCosts:
    """Costs of no weights."""
    return LayerCosts()


def _distribution(name: str, memory: BehindHeadsConfig, model: ModelConfig) -> Distribution:
    raise AssertionError(f"no initial distribution is defined for the memory's {name}")


def _table_std(memory: BehindHeadsConfig, model: ModelConfig, sigma_s: float | None) -> float:
    """Standard deviation 1: what is added is as large as the heads."""
    return 1.0


BEHIND_HEADS = Family(
    config=BehindHeadsConfig,
    layer_path=f"{__package__}.layer:BehindHeadsLayer",
    costs=_costs,
    distribution=_distribution,
    table_std=_table_std,
)
