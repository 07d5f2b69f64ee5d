"""Initial weights of layers that retrieve (UltraMemV2, section 3.5 and appendix 6; the constants of the releases)."""

from __future__ import annotations

import math

from megamem.config import ModelConfig
from megamem.distributions import Constant, Distribution, Normal, Uniform, symmetric
from megamem.initial_variance import sigma_values
from megamem.retrieval.config import ProductKeyConfig, TuckerConfig

_RELEASED_TABLE_STD = 0.02


def tucker_distribution(
    name: str, memory: TuckerConfig, model: ModelConfig, *, released_gain_exponent: float
) -> Distribution | None:
    """Initial distribution of a parameter of a layer with Tucker cores.

    With `initialisation: released` the gains of queries and keys are key_dim to the power of `released_gain_exponent`;
    else they are calibrated.
    """
    released = memory.initialisation == "released"
    match name:
        case "query_proj":
            return Normal(memory.key_dim**-0.5 if released else model.linear_std)
        case "keys":
            # Keys are normalised when read, so this sets nothing but how far one optimizer step turns them.
            return Normal(memory.key_dim**-0.5)
        case "cores":
            return Uniform(1.0)
        case "value_proj":
            return Normal((memory.num_value_projections * memory.value_dim) ** -0.5 if released else model.linear_std)
        case "pre_value_proj":
            return Normal(model.hidden_size**-0.5 if released else model.linear_std)
        case "query_norm" | "keys_norm":
            return Constant(memory.key_dim**released_gain_exponent) if released else None
        case "u" | "v" | "permutation":
            return None
    raise AssertionError(f"no initial distribution is defined for the memory's {name}")


def tucker_table_std(memory: TuckerConfig, model: ModelConfig, sigma_s: float | None) -> float:
    """sigma_V of Eq. 26, or the release's constant."""
    if memory.initialisation == "released":
        return _RELEASED_TABLE_STD
    assert sigma_s is not None
    return sigma_values(model, memory, sigma_s)


def product_key_distribution(name: str, memory: ProductKeyConfig, model: ModelConfig) -> Distribution:
    """The constants of both releases, which agree (where UltraMemV2's has V = D, the only case that it has)."""
    width = model.hidden_size
    match name:
        case "query_proj":
            return symmetric(math.sqrt(6 / (width + memory.num_queries * memory.key_dim)))
        case "keys":
            return symmetric((2 * memory.key_dim) ** -0.5)
        case "query_norm":
            return Constant(1.0)
        case "value_proj" | "output_gate":
            return Normal(width**-0.5)
        case "query_bias" | "output_gate_bias":
            return symmetric(width**-0.5)
        case "value_bias":
            return Constant(0.0) if memory.starts_at_zero else symmetric(memory.value_dim**-0.5)
    raise AssertionError(f"no initial distribution is defined for the memory's {name}")


def product_key_table_std(memory: ProductKeyConfig, model: ModelConfig, sigma_s: float | None) -> float:
    """1 / sqrt(V)."""
    return memory.value_dim**-0.5
