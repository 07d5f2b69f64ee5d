"""The record of the hashed family."""

from __future__ import annotations

from megamem.config.model import ModelConfig
from megamem.families.family import Family
from megamem.initialisation.distributions import Distribution, Normal
from megamem.layers.costs import LayerCosts
from megamem.placement.sharing import LayerView

from .config import HashedConfig


def _costs(memory: HashedConfig, view: LayerView, model: ModelConfig) -> LayerCosts:
    """The projection, D V."""
    weights = model.hidden_size * memory.value_dim
    return LayerCosts(projections=weights, projection_flops=2.0 * weights)


def _distribution(name: str, memory: HashedConfig, model: ModelConfig) -> Distribution:
    assert name == "out_proj", f"no initial distribution is defined for the memory's {name}"
    return Normal(model.linear_std)


def _table_std(memory: HashedConfig, model: ModelConfig, sigma_s: float | None) -> float:
    """Standard deviation at which the sum of a token's rows has variance 1 / V per column."""
    return float((memory.value_dim * memory.num_hashes) ** -0.5)


HASHED = Family(
    config=HashedConfig,
    layer_path=f"{__package__}.layer:HashedLayer",
    costs=_costs,
    distribution=_distribution,
    table_std=_table_std,
)
