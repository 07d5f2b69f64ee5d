"""Engram's layers as modules of public codes: DeepSeek's demonstration, which TinyEngram adds to Qwen3, DeepSeek V4.1,
and Qwen's PLE in transformers.

Each has as many keys, norms and convolutions as the model has residual streams, as a layer here does, in a layout of
its own. Legend: n residual streams, D hidden size, E columns of what a token reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from megamem.config.model import ModelConfig
from megamem.placement.placed import PlacedMemory
from megamem.releases.release import ReleasedModule, ReleasedPart

from .config import EngramConfig
from .hashing import multipliers_of

if TYPE_CHECKING:
    from torch import Tensor


def released_module(layer: PlacedMemory, model: ModelConfig) -> ReleasedModule:
    """See `Family.released_module`: in the code that has the memory's rules, biases and convolution.

    Raises:
        ValueError: modules of all codes have other parts.
    """
    memory, streams = layer.memory, model.num_streams or 1
    assert isinstance(memory, EngramConfig)
    match memory.rules, memory.projection_biases, memory.conv_kernel > 0:
        case "engram", True, True:
            return _of_demonstration(layer, memory, streams, model.hidden_size)
        case "engram", False, False:
            return _of_v4_1(layer, memory, streams, model.hidden_size)
        case "ple", False, True:
            return _of_ple(layer, memory, streams, model.hidden_size)
    fitting = (
        "biases and a convolution, or neither"
        if memory.rules == "engram"
        else "a convolution (conv_kernel above 0) and no biases"
    )
    raise ValueError(
        f"model.memory.projection_biases is {memory.projection_biases} and conv_kernel is {memory.conv_kernel}, and "
        f"modules of the public codes of rules: {memory.rules} have {fitting}: convert it to another format"
    )


def _of_demonstration(layer: PlacedMemory, memory: EngramConfig, streams: int, width: int) -> ReleasedModule:
    """Tensors of each stream are apart. Multipliers and the map of token ids are in no checkpoint there; tables are not
    padded."""
    matrix, vector = (width, memory.memory_width), (width,)

    def of_each(name: str, shape: tuple[int, ...]) -> tuple[ReleasedPart, ...]:
        return tuple(ReleasedPart(name.format(stream), shape) for stream in range(streams))

    rows, starts = _heads(layer, memory)
    return ReleasedModule(
        names=(f"engram_layers.{layer.span.read}", f"layers.{layer.span.read}.engram"),
        table="multi_head_embedding.embedding",
        table_rows=sum(rows),
        parts={
            "key_bias": of_each("key_projs.{}.bias", vector),
            "value_bias": (ReleasedPart("value_proj.bias", vector),),
            "key_proj": of_each("key_projs.{}.weight", matrix),
            "value_proj": (ReleasedPart("value_proj.weight", matrix),),
            "key_gain": of_each("norm1.{}.weight", vector),
            "query_gain": of_each("norm2.{}.weight", vector),
            "conv_gain": of_each("short_conv.norms.{}.weight", vector),
            "conv": (_taps("short_conv.conv.weight", memory, streams * width),),
        },
        stated={"multi_head_embedding.offsets": starts},
        implied=lambda: _constants(layer, memory),
    )


def _of_v4_1(layer: PlacedMemory, memory: EngramConfig, streams: int, width: int) -> ReleasedModule:
    """One matrix, [(n + 1) D, E], has the keys of all streams, then the values. Multipliers, the map and tables are as
    in the demonstration."""
    wide, columns = streams * width, memory.memory_width
    rows, _ = _heads(layer, memory)
    return ReleasedModule(
        names=(f"layers.{layer.span.read}.engram",),
        table="embed",
        table_rows=sum(rows),
        parts={
            "key_proj": (ReleasedPart("wkv.weight", (wide, columns)),),
            "value_proj": (ReleasedPart("wkv.weight", (width, columns), first=wide),),
            "key_gain": (ReleasedPart("k_weight", (wide,), there=(streams, width)),),
            "query_gain": (ReleasedPart("q_weight", (wide,), there=(streams, width)),),
        },
        stated={},
        implied=lambda: _constants(layer, memory),
    )


def _of_ple(layer: PlacedMemory, memory: EngramConfig, streams: int, width: int) -> ReleasedModule:
    """Tensors are as here, but gains are what is more than 1."""
    wide, columns = streams * width, memory.memory_width
    rows, starts = _heads(layer, memory)
    return ReleasedModule(
        names=(f"layers.{layer.span.read}.ple",),
        table="ple_embedding.ngram_embedding",
        table_rows=layer.view.num_bank_rows,
        parts={
            "multipliers": (ReleasedPart("ple_embedding.layer_multipliers", (memory.max_order,)),),
            "key_proj": (ReleasedPart("key_proj.weight", (wide, columns)),),
            "value_proj": (ReleasedPart("value_proj.weight", (width, columns)),),
            "key_gain": (ReleasedPart("norm_key.weight", (wide,), less=1.0),),
            "query_gain": (ReleasedPart("norm_query.weight", (wide,), less=1.0),),
            "conv_gain": (ReleasedPart("norm_conv.weight", (wide,), less=1.0),),
            "conv": (_taps("conv1d.weight", memory, wide),),
        },
        stated={"ple_embedding.ngram_heads_vocab_sizes": rows, "ple_embedding.ngram_heads_offsets": starts},
    )


def _taps(name: str, memory: EngramConfig, channels: int) -> ReleasedPart:
    """Taps of all streams, as the weight of a convolution of each channel by itself."""
    return ReleasedPart(name, (channels, memory.conv_kernel), there=(channels, 1, memory.conv_kernel))


def _heads(layer: PlacedMemory, memory: EngramConfig) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Rows of the heads, and where these begin."""
    rows = memory.sizes(layer.number + 1)[-1]
    return rows, tuple(sum(rows[:head]) for head in range(len(rows)))


def _constants(layer: PlacedMemory, memory: EngramConfig) -> Mapping[str, Tensor]:
    """Multipliers, and the map of token ids, by our name.

    Raises:
        ValueError: nothing says how many token ids there are, or the map cannot be read.
    """
    import torch

    from .token_map import read_token_map

    if memory.vocab_size is None:
        raise ValueError("model.vocab_size is left to the tokenizer, and multipliers depend on it: set it")
    num_ids, block = memory.num_hashed_ids, layer.span.read
    drawn = multipliers_of(memory.rules, memory.max_order, num_ids, memory.hash_seed, layer.number, block)
    found = {"multipliers": torch.tensor(drawn)}
    if memory.token_map is not None:
        assert memory.compressed_vocab_size is not None
        found["token_map"] = read_token_map(Path(memory.token_map), memory.vocab_size, memory.compressed_vocab_size)
    return found
