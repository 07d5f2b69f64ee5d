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
    where = {
        "seed": seed,
        "name": shard.key,
        "global_shape": shard.global_shape[skip:],
        "offset": shard.global_offset[skip:],
    }
    with torch.no_grad():
        match distribution:
            case Normal(std):
                fill_normal(data, std=std, **where)
            case Uniform(high, low):
                fill_uniform(data, low=low, high=high, **where)
            case Constant(value):
                data.fill_(value)


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


def initialise_layer(layer: MemoryLayer, model: ModelConfig, *, seed: int) -> ScoreCalibration | None:
    """Fill a memory layer that is in no model, as `initialise` fills the one of that name.

    Returns:
        The calibration that its gains come from, or None where they are constants.
    """
    assert model.memory is not None
    for part, parameter in layer.named_parameters():
        distribution = _memory_distribution(part, model, model.memory)
        if distribution is not None:
            _draw(ShardedTensor.from_rank_offsets(f"{layer.name}.{part}", parameter), distribution, seed)
    return _calibrate(layer, model.memory, seed) if isinstance(layer, UltraMemV2Layer) else None


def table_std(model: ModelConfig, memory: MemoryConfig, sigma_s: Sequence[float]) -> float:
    """Standard deviation of the tables of a bank, given sigma_s of the layers that read it (empty where nothing is calibrated)."""
    if not memory.has_tucker_cores:
        return memory.value_dim**-0.5
    if memory.initialisation == "released":
        return _RELEASED_TABLE_STD
    return sigma_values(model, memory, _root_mean_square(sigma_s))


def _calibrate(layer: UltraMemV2Layer, memory: MemoryConfig, seed: int) -> ScoreCalibration | None:
    """Set the singular vectors and, unless they are the release's constants, the gains."""
    layer.u.zero_()
    layer.v.zero_()
    layer.update_singular_vectors()
    if memory.initialisation == "released":
        return None
    calibration = calibrate_scores(memory, layer.num_keys, layer.cores, seed=seed, name=layer.name)
    with torch.no_grad():
        layer.query_norm.fill_(calibration.gain)
        layer.keys_norm.fill_(calibration.gain)
    return calibration


def _root_mean_square(values: Sequence[float]) -> float:
    return float(Tensor.sqrt(torch.tensor(values, dtype=torch.float64).square().mean()))
