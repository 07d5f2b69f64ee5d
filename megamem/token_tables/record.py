"""Costs and initial weights of the families that mix value embeddings."""

from __future__ import annotations

import math

from megamem.config.model import ModelConfig
from megamem.initialisation.distributions import Constant, Distribution
from megamem.layers.costs import LayerCosts
from megamem.placement.sharing import LayerView
from megamem.token_tables.config import MixedValuesConfig


def mixed_values_costs(memory: MixedValuesConfig, view: LayerView, model: ModelConfig) -> LayerCosts:
    """The gates, D n (M + 1), or D n M without one for the standard path.

    Backward needs the sigmoids, the gates, those of the slots once more as the lookup takes them, and what the standard
    path's are multiplied with.
    """
    width = model.hidden_size
    weights = width * memory.num_gate_heads * memory.num_gates
    kept = memory.num_gate_heads * (2 * memory.num_gates + memory.rows_per_token)
    return LayerCosts(
        projections=weights,
        projection_flops=2.0 * weights,
        kept_narrow=kept + (memory.value_dim if memory.gated_standard_path else 0),
    )


def mixed_values_distribution(name: str, memory: MixedValuesConfig, model: ModelConfig) -> Distribution:
    """All gates are 1 at first, as the paper has it: W_G = 0."""
    assert name == "gate_proj", f"no initial distribution is defined for the memory's {name}"
    return Constant(0.0)


def mixed_values_table_std(memory: MixedValuesConfig, model: ModelConfig, sigma_s: float | None) -> float:
    """So that a token's M rows together are as large as attention's own value, or latent: normalised ones are 1.

    The paper leaves it open. The gates are 1 at first and nothing divides by M: at the values' own scale,
    `linear_std` sqrt(D) for an input of mean square 1, a bank of 16 slots would outweigh the value it is added to by 4.
    """
    has_norm = model.latent_attention is not None and model.qk_norm
    own = 1.0 if has_norm else model.linear_std * math.sqrt(model.hidden_size)
    return own / math.sqrt(memory.rows_per_token)
