"""Initial weights: which distribution each parameter is drawn from, and the drawing (UltraMemV2, section 3.5 and appendix 6).

A parameter's distribution is a function of its global name, and its numbers are a function of (seed, global name, position) alone: the
checkpoint's own sharded names and offsets say which part of which tensor a rank holds, so initialising is loading from a generator.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from torch import Tensor, nn

from megamem.bank import Bank
from megamem.calibration import ScoreCalibration, calibrate_scores
from megamem.config import MemoryConfig, ModelConfig
from megamem.initial_variance import sigma_values
from megamem.layers.layer import MemoryLayer
from megamem.layers.ultramem_v2 import UltraMemV2Layer
from megamem.random_fill import fill_normal, fill_uniform
from megamem.shards import walk_shards

# The released layers' constants (`initialisation: released`, and product keys).
_RELEASED_GAIN_EXPONENT = {"ultramem_v2": -0.4, "ultramem": -0.33}
_RELEASED_TABLE_STD = 0.02


@dataclass(frozen=True)
class Normal:
    """N(0, std^2)."""

    std: float


@dataclass(frozen=True)
class Uniform:
    """U(low, high)."""

    high: float
    low: float = 0.0


@dataclass(frozen=True)
class Constant:
    """One value everywhere."""

    value: float


Distribution = Normal | Uniform | Constant


def initialise(chunks: Sequence[nn.Module], model: ModelConfig, *, seed: int) -> None:
    """Fill every parameter of this rank's model chunks, and the singular vectors of its memory layers.

    Args:
        chunks: bare model chunks (not wrapped in DDP), with `sharded_state_dict`.
        model: the model's config.
        seed: the run's seed.
    """
    for chunk in chunks:
        for _, shard in walk_shards(chunk.sharded_state_dict()):  # type: ignore[operator]
            distribution = _distribution(shard.key, model)
            if distribution is not None:
                _draw(shard, distribution, seed)
        layers = [m for m in chunk.modules() if isinstance(m, UltraMemV2Layer)]
        if model.memory is not None:
            _initialise_memory(chunk, layers, model, model.memory, seed)


def _distribution(name: str, model: ModelConfig) -> Distribution | None:
    """The distribution of the parameter with this global name; None for what `_initialise_memory` fills, and for buffers."""
    std = model.linear_std
    to_residual = std / math.sqrt(2 * model.num_layers)
    memory = model.memory
    match name.split("."):
        case [*_, "word_embeddings", "weight"] | ["output_layer", "weight"]:
            return Normal(std)
        case [*_, "linear_qkv" | "linear_fc1" | "router", "weight"]:
            return Normal(std)
        case [*_, "linear_proj" | "linear_fc2", "weight"]:
            return Normal(to_residual)
        case [
            *_,
            "input_layernorm" | "pre_mlp_layernorm" | "final_layernorm" | "q_layernorm" | "k_layernorm",
            "weight",
        ]:
            return Constant(1.0)
        case [*_, "memory", part] if memory is not None:
            return _memory_distribution(part, model, memory)
        case ["banks", _, "values" | "pre_values"]:
            return None
    raise AssertionError(f"no initial distribution is defined for the parameter {name}")


def _memory_distribution(part: str, model: ModelConfig, memory: MemoryConfig) -> Distribution | None:
    if not memory.has_tucker_cores:
        return _product_key_distribution(part, model, memory)
    released = memory.initialisation == "released"
    match part:
        case "query_proj":
            return Normal(memory.key_dim**-0.5 if released else model.linear_std)
        case "keys":
            # Keys are normalised when read, so this sets nothing but how far one optimizer step turns them.
            return Normal(memory.key_dim**-0.5)
        case "cores":
            return Uniform(1.0)
        case "value_proj":
            return Normal((memory.num_value_blocks * memory.value_dim) ** -0.5 if released else model.linear_std)
        case "pre_value_proj":
            return Normal(model.hidden_size**-0.5 if released else model.linear_std)
        case "query_norm" | "keys_norm":
            return Constant(memory.key_dim ** _RELEASED_GAIN_EXPONENT[memory.kind]) if released else None
        case "u" | "v" | "permutation":
            return None
    raise AssertionError(f"no initial distribution is defined for the memory's {part}")


def _product_key_distribution(part: str, model: ModelConfig, memory: MemoryConfig) -> Distribution:
    """The constants of both releases of product-key layers, which agree (where UltraMemV2's has V = D, the only case that it has)."""
    width = model.hidden_size
    match part:
        case "query_proj":
            return _symmetric(math.sqrt(6 / (width + memory.num_queries * memory.key_dim)))
        case "keys":
            return _symmetric((2 * memory.key_dim) ** -0.5)
        case "query_norm":
            return Constant(1.0)
        case "value_proj" | "silu_gate" | "output_gate":
            return Normal(width**-0.5)
        case "query_bias" | "silu_gate_bias" | "output_gate_bias":
            return _symmetric(width**-0.5)
        case "value_bias":
            return _symmetric(memory.value_dim**-0.5)
    raise AssertionError(f"no initial distribution is defined for the memory's {part}")


def _symmetric(bound: float) -> Uniform:
    return Uniform(low=-bound, high=bound)


def _draw(shard: ShardedTensor, distribution: Distribution, seed: int) -> None:
    data, skip = shard.data, shard.prepend_axis_num
    _fill(data, shard.key, distribution, seed, shard.global_shape[skip:], shard.global_offset[skip:])


def _fill(
    part: Tensor, name: str, distribution: Distribution, seed: int, global_shape: Sequence[int], offset: Sequence[int]
) -> None:
    where = {"seed": seed, "name": name, "global_shape": global_shape, "offset": offset}
    with torch.no_grad():
        match distribution:
            case Normal(std):
                fill_normal(part, std=std, **where)  # type: ignore[arg-type]
            case Uniform(high, low):
                fill_uniform(part, low=low, high=high, **where)  # type: ignore[arg-type]
            case Constant(value):
                part.fill_(value)


def draw_part(
    shape: Sequence[int],
    name: str,
    model: ModelConfig,
    *,
    seed: int,
    global_shape: Sequence[int],
    offset: Sequence[int],
) -> Tensor:
    """A part of a parameter of the model, fp32, as `initialise` fills it on a rank that holds this part.

    Args:
        shape: of the part.
        name: the parameter's global name.
        model: the model's config.
        seed: the run's seed.
        global_shape: of the parameter.
        offset: where the part starts in it, per dimension.
    """
    distribution = _distribution(name, model)
    assert distribution is not None, f"{name} is not drawn by itself"
    part = torch.empty(*shape)
    _fill(part, name, distribution, seed, global_shape, offset)
    return part


def _initialise_memory(
    chunk: nn.Module, layers: Sequence[UltraMemV2Layer], model: ModelConfig, memory: MemoryConfig, seed: int
) -> None:
    """Singular vectors, calibrated gains, and tables."""
    sigma_s_of_bank: dict[int, list[float]] = {}
    for layer in layers:
        calibration = _calibrate(layer, memory, seed)
        if calibration is not None:
            sigma_s_of_bank.setdefault(layer.view.bank, []).append(calibration.sigma_s)
    for bank in (m for m in chunk.modules() if isinstance(m, Bank)):
        std = table_std(model, memory, sigma_s_of_bank.get(bank.spec.index, []))
        for entry in bank.sharded_state_dict(prefix=f"banks.{bank.spec.index}.").values():
            _draw(entry, Normal(std), seed)


def draw_layer(layer: MemoryLayer, model: ModelConfig, *, seed: int, drawn: dict[str, Distribution]) -> None:
    """Fill a memory layer that is in no model as `initialise` fills the one of that name, but for calibrated gains.

    Args:
        layer: of any kind.
        model: its config.
        seed: the run's seed.
        drawn: the random numbers that the layer's parameters hold already, which are not drawn again; kept up to date.
    """
    assert model.memory is not None
    for part, parameter in layer.named_parameters():
        distribution = _memory_distribution(part, model, model.memory)
        if distribution is None or (distribution == drawn.get(part) and not isinstance(distribution, Constant)):
            continue
        _draw(ShardedTensor.from_rank_offsets(f"{layer.name}.{part}", parameter), distribution, seed)
        drawn[part] = distribution
    if isinstance(layer, UltraMemV2Layer):
        _first_singular_vectors(layer)


def table_std(model: ModelConfig, memory: MemoryConfig, sigma_s: Sequence[float]) -> float:
    """Standard deviation of the tables of a bank, given sigma_s of the layers that read it (empty where nothing is calibrated)."""
    if not memory.has_tucker_cores:
        return memory.value_dim**-0.5
    if memory.initialisation == "released":
        return _RELEASED_TABLE_STD
    return sigma_values(model, memory, _root_mean_square(sigma_s))


def _calibrate(layer: UltraMemV2Layer, memory: MemoryConfig, seed: int) -> ScoreCalibration | None:
    """Set the singular vectors and, unless they are the release's constants, the gains."""
    _first_singular_vectors(layer)
    if memory.initialisation == "released":
        return None
    calibration = calibrate_scores(memory, layer.num_keys, layer.cores, seed=seed, name=layer.name)
    set_gains(layer, calibration)
    return calibration


def _first_singular_vectors(layer: UltraMemV2Layer) -> None:
    layer.u.zero_()
    layer.v.zero_()
    layer.update_singular_vectors()


@torch.no_grad()
def set_gains(layer: UltraMemV2Layer, calibration: ScoreCalibration) -> None:
    """Give the norms of a layer's queries and keys the gain at which its mean retrieved score is 1."""
    layer.query_norm.fill_(calibration.gain)
    layer.keys_norm.fill_(calibration.gain)


def _root_mean_square(values: Sequence[float]) -> float:
    return float(Tensor.sqrt(torch.tensor(values, dtype=torch.float64).square().mean()))
