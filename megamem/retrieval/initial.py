"""Initial weights of layers that retrieve (UltraMemV2, section 3.5 and appendix 6; the constants of the releases), and
the variances of feed-forward and memory outputs that they come to, in closed form.

The paper's figures 0.4, 0.16, 0.064, 0.2 and 0.08 are a, a^2, a^3, a / 2 and a^2 / 2 of a = h std^2, the variance of a
linear's output for inputs of mean square 1, which is 0.4 for linears of std sqrt(2 / 5h).

Legend: h hidden size, L blocks, K retrieved, H heads, P pre-value dim, V value dim.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from megamem.config.model import ModelConfig
from megamem.initialisation.distributions import Constant, Distribution, Normal, Uniform, symmetric
from megamem.placement.block_plan import starts_at_zero
from megamem.retrieval.config import ProductKeyConfig, TuckerConfig

_RELEASED_TABLE_STD = 0.02

# Trapezoidal rule for means over N(0, 1). Its error falls exponentially with the step for smooth integrands: both
# figures leave 1e-15.
_QUADRATURE_LIMIT = 10.0
_QUADRATURE_STEP = 0.02


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
            return Normal(_narrowed(memory.key_dim**-0.5, model) if released else model.linear_std)
        case "keys":
            # Keys are normalised when read, so this sets nothing but how far one optimizer step turns them.
            return Normal(memory.key_dim**-0.5)
        case "cores":
            return Uniform(1.0)
        case "value_proj":
            return Normal((memory.num_value_projections * memory.value_dim) ** -0.5 if released else model.narrow_std)
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
    # Of the model that the search of muP trains, where there is one.
    width = model.base_hidden_size
    match name:
        case "query_proj":
            return symmetric(_narrowed(math.sqrt(6 / (width + memory.num_queries * memory.key_dim)), model))
        case "keys":
            return symmetric((2 * memory.key_dim) ** -0.5)
        case "query_norm":
            return Constant(1.0)
        case "value_proj":
            return Normal(width**-0.5)
        case "output_gate":
            return Normal(_narrowed(width**-0.5, model))
        case "query_bias" | "output_gate_bias":
            return symmetric(width**-0.5)
        case "value_bias":
            return Constant(0.0) if starts_at_zero(model) else symmetric(memory.value_dim**-0.5)
    raise AssertionError(f"no initial distribution is defined for the memory's {name}")


def product_key_table_std(memory: ProductKeyConfig, model: ModelConfig, sigma_s: float | None) -> float:
    """1 / sqrt(V), of vectors of the stream in the model that the search of muP trains."""
    if memory.has_value_projection:
        return memory.value_dim**-0.5
    return float(model.base_hidden_size**-0.5)


def _narrowed(std: float, model: ModelConfig) -> float:
    """Deviation of weights whose inputs are as wide as the model, given theirs in the model that the search of muP trains."""
    return std / math.sqrt(model.width_rules.ratio)


def linear_output_variance(model: ModelConfig) -> float:
    """a = h std^2: variance of a linear's output for inputs of mean square 1."""
    return model.hidden_size * model.linear_std**2


def paper_ffn_variance(model: ModelConfig) -> float:
    """Eq. 25: 0.064 k_inner / 2L, from the paper's estimate 0.16 of the inner variance.

    k_inner h is the true inner width (the release's mlp_hidden_size is that of up and gate together). A mixture of
    experts is taken as a dense feed-forward of the width that one token passes, although its router weighs the experts
    down.
    """
    return _ffn_variance(model, linear_output_variance(model) ** 2)


def swiglu_ffn_variance(model: ModelConfig) -> float:
    """Variance of the output of the SwiGLU as it is initialised.

    Gate g and up projection are independent with variance a, so the inner variance is a E[silu(g)^2], g ~ N(0, a), by
    quadrature. For a = 0.4 this is 0.049: the paper puts Var[silu(g)] at a, as if the activation passed its input, and
    silu halves it and more.
    """
    a = linear_output_variance(model)
    return _ffn_variance(model, a * normal_mean(lambda g: _silu(g) ** 2, a))


def _ffn_variance(model: ModelConfig, inner_variance: float) -> float:
    """Variance of a sum of inner_width products with weights of variance std^2 / 2L."""
    return model.active_ffn_width * model.linear_std**2 / (2 * model.num_layers) * inner_variance


def target_variance(model: ModelConfig, memory: TuckerConfig) -> float:
    """The target of a memory's output variance: the feed-forward's, as the paper estimates it or (`matched`) as it is.

    L counts all blocks, whichever of them have a memory, because the feed-forward's output projections are scaled by
    it.
    """
    return swiglu_ffn_variance(model) if memory.initialisation == "matched" else paper_ffn_variance(model)


def memory_variance(
    model: ModelConfig,
    memory: TuckerConfig,
    *,
    sigma_v: float,
    score_square: float,
    pre_input_variance: float | None = None,
    value_proj_variance: float | None = None,
) -> float:
    """Eq. 22: a memory's output variance, a E[s^2] E[act(p)^2] sigma_V^2 K H V / h with p ~ N(0, a sigma_V^2 P).

    Without activation E[act(p)^2] = a sigma_V^2 P, which is the paper's case; without pre-values it is 1. Implicit
    value expansion changes nothing: each value passes one projection, whichever. It holds for values that are drawn
    independently of each other: tokens that retrieve the same row, or a row twice, do not change the mean square.

    Args:
        model: h and the linears' std.
        memory: K, H, P, V and the activation.
        sigma_v: standard deviation of values and pre-values.
        score_square: E[s^2] of the retrieved scores: 1 + sigma_s^2 where their mean is 1.
        pre_input_variance: variance of the projected input; None: a.
        value_proj_variance: variance of the value projection's weights; None: std^2, in the model that the search of
            muP trains.
    """
    pre_input_variance = linear_output_variance(model) if pre_input_variance is None else pre_input_variance
    value_proj_variance = model.narrow_std**2 if value_proj_variance is None else value_proj_variance
    product = 1.0
    if pre_dim := memory.pre_value_dim:
        variance = pre_input_variance * sigma_v**2 * pre_dim
        product = normal_mean(lambda p: _gelu(p) ** 2, variance) if memory.pre_value_activation == "gelu" else variance
    retrieved = memory.top_k * memory.num_heads * memory.value_dim
    return value_proj_variance * retrieved * score_square * sigma_v**2 * product


def sigma_values(model: ModelConfig, memory: TuckerConfig, sigma_s: float) -> float:
    """sigma_V, the tables' standard deviation that gives memory and feed-forward one output variance (Eq. 26).

    sigma_V^4 = 0.2 k_inner h / (K H (1 + sigma_s^2) P V L) for `paper` with pre-values; for `matched` the same times
    0.049 / 0.16. Without pre-values their product falls out of Eq. 22, which leaves sigma_V^2 = 0.08 k_inner h / (K H
    (1 + sigma_s^2) V L). With an activation of the products there is no closed form, and Eq. 22 is inverted by
    bisection.

    Args:
        model: h, L and the inner width.
        memory: K, H, P, V, the activation, and `initialisation`.
        sigma_s: standard deviation of the retrieved scores over their mean.
    """
    target = target_variance(model, memory)

    def variance(sigma_v: float) -> float:
        return memory_variance(model, memory, sigma_v=sigma_v, score_square=1 + sigma_s**2)

    if memory.pre_value_activation != "none":
        return _root(lambda log_sigma: variance(math.exp(log_sigma)) - target)
    # The variance is a power of sigma_V.
    return float((target / variance(1.0)) ** (0.25 if memory.pre_value_dim else 0.5))


def normal_mean(function: Callable[[float], float], variance: float) -> float:
    """E[function(x)] for x ~ N(0, variance)."""
    steps = round(_QUADRATURE_LIMIT / _QUADRATURE_STEP)
    nodes = [index * _QUADRATURE_STEP for index in range(-steps, steps + 1)]
    weights = [math.exp(-0.5 * z * z) for z in nodes]
    std = math.sqrt(variance)
    return math.fsum(w * function(std * z) for w, z in zip(weights, nodes, strict=True)) / math.fsum(weights)


def _silu(x: float) -> float:
    return x / (1 + math.exp(-x))


def _gelu(x: float) -> float:
    return 0.5 * x * (1 + math.erf(x / math.sqrt(2)))


def _root(increasing: Callable[[float], float]) -> float:
    """exp of the root of an increasing function of the logarithm, between e^-20 and e^5."""
    low, high = -20.0, 5.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if increasing(middle) < 0 else (low, middle)
    return math.exp((low + high) / 2)
