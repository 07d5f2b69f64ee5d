"""Initial weights: their distributions, and the drawing (UltraMemV2, section 3.5 and appendix 6).

A parameter's distribution is a function of its global name, and its numbers are a function of (seed, global name,
position) alone: the checkpoint's own sharded names and offsets say which shard of which tensor a rank holds, so
initialising is loading from a generator.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from torch import nn

from megamem.banks.bank import Bank
from megamem.config.memory import MemoryConfig
from megamem.config.model import ModelConfig
from megamem.config.width import Width
from megamem.families.registry import family_of
from megamem.initialisation.distributions import Constant, Distribution, Normal
from megamem.initialisation.random_fill import fill
from megamem.layers.layer import MemoryLayer
from megamem.parameters.shards import walk_shards
from megamem.placement.block_plan import starts_at_zero
from megamem.residual_streams.initial import distribution as streams_distribution
from megamem.residual_streams.site import StreamSite


def initialise(chunks: Sequence[nn.Module], model: ModelConfig, *, seed: int) -> None:
    """Fill every parameter of this rank's model chunks (not wrapped in DDP), and what its memory layers calibrate."""
    for chunk in chunks:
        for _, shard in walk_shards(chunk.sharded_state_dict()):  # type: ignore[operator]
            distribution = distribution_of(shard.key, model)
            if distribution is not None:
                _draw(shard, distribution, seed)
        for module in chunk.modules():
            if isinstance(module, StreamSite):
                module.set_initial()
        _initialise_memory(chunk, model, seed)


def distribution_of(name: str, model: ModelConfig) -> Distribution | None:
    """Distribution of the parameter with this global name; None for buffers, tables and what layers calibrate."""
    std = model.linear_std
    to_residual = std / math.sqrt(2 * model.num_layers)
    match name.split("."):
        case [*_, "word_embeddings", "weight"] | ["output_layer", "weight"]:
            return Normal(model.narrow_std)
        case [*_, "linear_qkv" | "linear_fc1" | "router", "weight"]:
            return Normal(std)
        case [*_, "linear_q_proj" | "linear_q_down_proj" | "linear_kv_down_proj", "weight"]:
            return Normal(std)
        case [*_, "linear_q_up_proj" | "linear_kv_up_proj", "weight"]:
            # Of latents, whose width is given.
            return Normal(model.narrow_std)
        case ["multi_token", "layers", _, "projection", "weight"]:
            return Normal(std)
        case [*_, "linear_proj" | "linear_fc2", "weight"]:
            return Normal(to_residual)
        case [*_, "final_layernorm", "weight"]:
            return Constant(model.width_rules.gain(Width.LOGITS))
        case [*_, "self_attention", "q_layernorm", "weight"]:
            return Constant(model.width_rules.gain(Width.HEADS))
        case [
            *_,
            "input_layernorm" | "pre_mlp_layernorm" | "embedding_norm" | "hidden_norm" | "k_layernorm" | "kv_layernorm",
            "weight",
        ]:
            return Constant(1.0)
        case [*_, "input_layernorm" | "linear_qkv", "bias"]:
            return Constant(0.0)
        case ["decoder", "layers", _, *_, "memory", own_name]:
            memory = _memory_called(name.rpartition(".")[0], model)
            return family_of(memory).distribution(own_name, memory, model)
        case ["decoder", "layers", _, "attention_streams" | "ffn_streams", own_name]:
            assert model.residual_streams is not None
            return streams_distribution(own_name, model.residual_streams, model, is_end=False)
        case ["decoder", "streams_end", own_name]:
            assert model.residual_streams is not None
            return streams_distribution(own_name, model.residual_streams, model, is_end=True)
        case ["shared_read", own_name] if (together := model.memory_read_once) is not None:
            return family_of(together).distribution(own_name, together, model)
        case ["banks", _, _]:
            return None
    raise AssertionError(f"no initial distribution is defined for the parameter {name}")


def _draw(shard: ShardedTensor, distribution: Distribution, seed: int) -> None:
    skip = shard.prepend_axis_num
    global_shape, offset = shard.global_shape[skip:], shard.global_offset[skip:]
    fill(shard.data, distribution, seed=seed, name=shard.key, global_shape=global_shape, offset=offset)


def _memory_called(name: str, model: ModelConfig) -> MemoryConfig:
    (memory,) = (layer.memory for layer in model.memory_layers if layer.name == name)
    return memory


def _initialise_memory(chunk: nn.Module, model: ModelConfig, seed: int) -> None:
    """Draw tables, and set what layers calibrate."""
    sigma_s_of_bank: dict[int, list[float]] = {}
    for layer in (m for m in chunk.modules() if isinstance(m, MemoryLayer)):
        calibration = layer.calibrate(seed)
        if calibration is not None:
            sigma_s_of_bank.setdefault(layer.view.bank, []).append(calibration.sigma_s)
    for bank in (m for m in chunk.modules() if isinstance(m, Bank)):
        std = table_std(model, model.family_of_bank(bank.spec.index), sigma_s_of_bank.get(bank.spec.index, []))
        for entry in bank.sharded_state_dict(prefix=f"banks.{bank.spec.index}.").values():
            _draw(entry, Normal(std), seed)


def table_std(model: ModelConfig, memory: MemoryConfig, sigma_s: Sequence[float]) -> float:
    """Standard deviation of a bank's tables, given sigma_s of the layers that calibrate theirs (else empty)."""
    if starts_at_zero(model):
        return 0.0
    root_mean_square = float(torch.tensor(sigma_s, dtype=torch.float64).square().mean().sqrt()) if sigma_s else None
    return family_of(memory).table_std(memory, model, root_mean_square)
