"""Engram's layers as modules of public codes: DeepSeek's demonstration, which TinyEngram adds to Qwen3, and Qwen's PLE in
transformers.

Both give a module as many key projections, norms and convolutions as the model has residual streams. One of one stream
computes what a layer here does, and has its elements.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from megamem.placement.placed import PlacedMemory
from megamem.releases import ReleasedModule, ReleasedPart

from .config import EngramConfig
from .hashing import multipliers_of

if TYPE_CHECKING:
    from torch import Tensor


def released_module(layer: PlacedMemory, width: int) -> ReleasedModule:
    """See `Family.released_module`: in the code whose rules the memory follows.

    Raises:
        ValueError: modules of that code have other parts.
    """
    memory = layer.memory
    assert isinstance(memory, EngramConfig)
    biases = memory.rules == "engram"
    if memory.projection_biases != biases:
        raise ValueError(
            f"model.memory.projection_biases is {memory.projection_biases}, and modules of the public code of rules: "
            f"{memory.rules} have {'biases' if biases else 'none'}: convert it to another format"
        )
    if not memory.conv_kernel:
        raise ValueError(
            "model.memory.conv_kernel is 0, and modules of the public codes have a convolution: convert it to another format"
        )
    return _of_demonstration(layer, memory, width) if biases else _of_ple(layer, memory, width)


def _of_demonstration(layer: PlacedMemory, memory: EngramConfig, width: int) -> ReleasedModule:
    """Multipliers and the map of token ids are in no checkpoint there; tables are not padded."""
    parts = {
        "key_bias": ReleasedPart("key_projs.0.bias", (width,)),
        "value_bias": ReleasedPart("value_proj.bias", (width,)),
    }
    names = ("key_projs.0", "norm1.0", "norm2.0", "short_conv.norms.0", "short_conv.conv")
    rows, starts = _heads(layer, memory)
    return ReleasedModule(
        names=(f"engram_layers.{layer.span.read}", f"layers.{layer.span.read}.engram"),
        table="multi_head_embedding.embedding",
        table_rows=sum(rows),
        parts=parts | _parts(memory, width, names),
        stated={"multi_head_embedding.offsets": starts},
        implied=lambda: _constants(layer, memory),
    )


def _of_ple(layer: PlacedMemory, memory: EngramConfig, width: int) -> ReleasedModule:
    """Gains are what is more than 1."""
    names = ("key_proj", "norm_key", "norm_query", "norm_conv", "conv1d")
    multipliers = ReleasedPart("ple_embedding.layer_multipliers", (memory.max_order,))
    rows, starts = _heads(layer, memory)
    return ReleasedModule(
        names=(f"layers.{layer.span.read}.ple",),
        table="ple_embedding.ngram_embedding",
        table_rows=layer.view.num_bank_rows,
        parts={"multipliers": multipliers, **_parts(memory, width, names, gains_less=1.0)},
        stated={"ple_embedding.ngram_heads_vocab_sizes": rows, "ple_embedding.ngram_heads_offsets": starts},
    )


def _parts(
    memory: EngramConfig, width: int, names: tuple[str, ...], *, gains_less: float = 0.0
) -> dict[str, ReleasedPart]:
    """Projections, gains and taps, by our name."""
    key, key_norm, query_norm, conv_norm, conv = names
    matrix, vector = (width, memory.memory_width), (width,)
    return {
        "key_proj": ReleasedPart(f"{key}.weight", matrix),
        "value_proj": ReleasedPart("value_proj.weight", matrix),
        "key_gain": ReleasedPart(f"{key_norm}.weight", vector, less=gains_less),
        "query_gain": ReleasedPart(f"{query_norm}.weight", vector, less=gains_less),
        "conv_gain": ReleasedPart(f"{conv_norm}.weight", vector, less=gains_less),
        "conv": ReleasedPart(f"{conv}.weight", (width, memory.conv_kernel), there=(width, 1, memory.conv_kernel)),
    }


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
