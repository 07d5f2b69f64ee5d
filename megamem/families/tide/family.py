"""The record of TIDE."""

from __future__ import annotations

from megamem.config.model import ModelConfig
from megamem.families.family import Family
from megamem.initialisation.distributions import Constant, Distribution, Normal
from megamem.layers.costs import LayerCosts
from megamem.placement.sharing import LayerView

from .config import TideConfig


def _costs(memory: TideConfig, view: LayerView, model: ModelConfig) -> LayerCosts:
    """The router, D (K + 1), and the weighted sum of K rows."""
    width = model.hidden_size
    router = width * (memory.rows_per_token + 1)
    return LayerCosts(projections=router, projection_flops=2.0 * (router + memory.rows_per_token * width))


def _shared_parameters(memory: TideConfig, width: int) -> int:
    """The gains, K D."""
    return memory.rows_per_token * width if memory.row_gain else 0


def _shared_kept(memory: TideConfig, width: int, element_bytes: int) -> int:
    """The normalised rows, K D."""
    return element_bytes * memory.rows_per_token * width


def _distribution(name: str, memory: TideConfig, model: ModelConfig) -> Distribution:
    match name:
        case "router":
            # As that of a mixture of experts: almost even at first.
            return Normal(model.linear_std)
        case "gain":
            return Constant(1.0)
    raise AssertionError(f"no initial distribution is defined for the memory's {name}")


def _table_std(memory: TideConfig, model: ModelConfig, sigma_s: float | None) -> float:
    """Standard deviation of the embedding. It says only how far the optimizer turns a row: rows are normalised."""
    return model.narrow_std


TIDE = Family(
    config=TideConfig,
    layer_path=f"{__package__}.layer:TideLayer",
    costs=_costs,
    distribution=_distribution,
    table_std=_table_std,
    shared_read_path=f"{__package__}.layer:TideRead",
    shared_parameters=_shared_parameters,
    shared_kept=_shared_kept,
)
