"""The public codes' names and layouts, translated into ours: UltraMemV2's release (OLMo) and Meta's (lingua).

The translation only renames, stacks, reorders, splits and reshapes, so it serves parameters, gradients and optimizer moments alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from megamem.config import MemoryConfig, ModelConfig
from megamem.sharing import plan_sharing

_MODEL = {
    "wte.weight": "embedding.word_embeddings.weight",
    "ln_f.weight": "decoder.final_layernorm.weight",
    "ff_out.weight": "output_layer.weight",
}
_BLOCK = {
    "attn_norm.weight": "input_layernorm.weight",
    "att_proj.weight": "self_attention.linear_qkv.weight",
    "q_norm.weight": "self_attention.q_layernorm.weight",
    "k_norm.weight": "self_attention.k_layernorm.weight",
    "attn_out.weight": "self_attention.linear_proj.weight",
    "ff_norm.weight": "pre_mlp_layernorm.weight",
    "ff_proj.weight": "linear_fc1.weight",
    "ff_out.weight": "linear_fc2.weight",
}
_ULTRAMEM = {
    "query_proj.weight": "query_proj",
    "query_norm.weight": "query_norm",
    "keys": "keys",
    "keys_norm.weight": "keys_norm",
    "values_proj.weight": "value_proj",
    "tucker_core_u": "u",
    "tucker_core_v": "v",
    "shuffle_index": "permutation",
}
# Of the memory layers in UltraMemV2's release.
_MEMORY: dict[str, dict[str, str]] = {
    "ultramem_v2": {**_ULTRAMEM, "pre_values_proj.weight": "pre_value_proj"},
    "ultramem": _ULTRAMEM,
    "memory_plus": {
        "query_proj.weight": "query_proj",
        "query_norm.weight": "query_norm",
        "keys": "keys",
        "values_proj.weight": "value_proj",
        "swilu_projection.weight": "silu_gate",
    },
}
# Parameters that the release has and does not use: its Memory+ normalises the keys, and drops the result.
_UNUSED: dict[str, tuple[str, ...]] = {"memory_plus": ("keys_norm.weight",)}
_TABLES = {"values_for_look_up": "values", "pre_values_for_look_up": "pre_values"}

# Of the memory layers in Meta's release.
_META_QUERY = {
    "query_proj.query_mlps.0.weight": "query_proj",
    "query_proj.query_mlps.0.bias": "query_bias",
    "keys": "keys",
}
_META_VALUES = {
    "value_proj.weight": "value_proj",
    "value_proj.bias": "value_bias",
    "gating.weight": "output_gate",
    "gating.bias": "output_gate_bias",
}
_META_MEMORY: dict[str, dict[str, str]] = {
    "pkm": {**_META_QUERY, **_META_VALUES},
    "memory_plus": {
        **_META_QUERY,
        **_META_VALUES,
        "swilu_projection.weight": "silu_gate",
        "swilu_projection.bias": "silu_gate_bias",
    },
    "peer": _META_QUERY,
}
_META_TABLES: dict[str, dict[str, str]] = {
    "pkm": {"values.weight": "values"},
    "memory_plus": {"values.weight": "values"},
    "peer": {"values_u.weight": "pre_values", "values_v.weight": "values"},
}


def from_released(tensors: Mapping[str, Tensor], model: ModelConfig) -> dict[str, Tensor]:
    """Tensors of UltraMemV2's release (which also has UltraMem and Memory+) under our global names and in our layouts.

    Args:
        tensors: by released name (`transformer.blocks.0.att_proj.weight`), all of a model or any part of it.
        model: the same model's config.

    Raises:
        ValueError: if a name is not one of the release's.
    """
    result: dict[str, Tensor] = {}
    cores: dict[int, dict[int, Tensor]] = {}
    kind = model.memory.kind if model.memory is not None else "none"
    parts_of_memory = _MEMORY.get(kind, {})
    for name, tensor in tensors.items():
        match name.removeprefix("transformer.").split("."):
            case ["mem_blocks", layer, "tucker_core", core]:
                cores.setdefault(int(layer), {})[int(core)] = tensor
            case ["mem_blocks", layer, *part] if (ours := parts_of_memory.get(".".join(part))) is not None:
                # u and v carry two dimensions of size 1 there.
                squeezed = tensor.flatten(0, 1).squeeze(1) if ours in ("u", "v") else tensor
                result[f"{memory_name(int(layer), model)}.{ours}"] = squeezed
            case ["mem_blocks", _, *part] if ".".join(part) in _UNUSED.get(kind, ()):
                continue
            case ["mem_blocks", layer, table] if table in _TABLES and model.memory is not None:
                bank = plan_sharing(model.memory, model.num_memory_layers).views[int(layer)].bank
                result[f"banks.{bank}.{_TABLES[table]}"] = tensor
            case ["full_memory_layer", table] if table in _TABLES:
                result.update(_split_table(_TABLES[table], tensor, model))
            case ["blocks", layer, *part] if (ours := _BLOCK.get(".".join(part))) is not None:
                result[f"decoder.layers.{layer}.{_in_mlp_slot(ours, int(layer), model)}"] = _reorder(
                    ours, tensor, model
                )
            case part if (ours := _MODEL.get(".".join(part))) is not None:
                result[ours] = tensor
            case _:
                raise ValueError(f"{name} is not a parameter of a released UltraMemV2 model with memory of kind {kind}")
    for index, of_layer in cores.items():
        result[f"{memory_name(index, model)}.cores"] = torch.stack([of_layer[c] for c in sorted(of_layer)])
    return result


def from_meta(tensors: Mapping[str, Tensor], model: ModelConfig) -> dict[str, Tensor]:
    """Memory layers of Meta's release (PKM, Memory+, PEER) under our global names and in our layouts.

    Args:
        tensors: by released name, `layers.<block>.feed_forward.<parameter>`; the memory stands in place of a block's feed-forward. A table
            that layers share may appear under any or all of them.
        model: the same model's config.

    Raises:
        ValueError: if a name is not that of a parameter of a memory layer.
    """
    memory = model.memory
    if memory is None or memory.kind not in _META_MEMORY:
        raise ValueError(f"Meta's release has memory of the kinds {', '.join(_META_MEMORY)}")
    plan = plan_sharing(memory, model.num_memory_layers)
    layer_at = {span.read: layer for layer, span in enumerate(model.memory_spans)}
    result: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        match name.split(".", 3):
            case ["layers", block, "feed_forward", part] if block.isdecimal() and int(block) in layer_at:
                layer = layer_at[int(block)]
            case _:
                raise ValueError(f"{name} is not a parameter of a memory layer of Meta's release")
        if (table := _META_TABLES[memory.kind].get(part)) is not None:
            result[f"banks.{plan.views[layer].bank}.{table}"] = tensor
        elif (ours := _META_MEMORY[memory.kind].get(part)) is not None:
            result[f"{memory_name(layer, model)}.{ours}"] = (
                _unflatten_keys(tensor, memory) if ours == "keys" else tensor
            )
        else:
            raise ValueError(f"{name} is not a parameter of a memory layer of kind {memory.kind} in Meta's release")
    return result


def memory_name(layer: int, model: ModelConfig) -> str:
    """The global name of a memory layer, which stands in the block that it reads at."""
    return f"decoder.layers.{model.memory_spans[layer].read}.mlp.memory"


def _unflatten_keys(tensor: Tensor, memory: MemoryConfig) -> Tensor:
    """Keys are [2 H N, d] in Meta's release."""
    return tensor.view(memory.num_heads, 2, -1, memory.key_dim)


def _in_mlp_slot(name: str, block: int, model: ModelConfig) -> str:
    """The feed-forward is the `mlp` of a block without a memory, and stands beside the memory in the others."""
    if not name.startswith("linear_fc"):
        return name
    has_memory = any(span.read == block for span in model.memory_spans)
    return f"mlp.ffn.{name}" if has_memory else f"mlp.{name}"


def _reorder(name: str, tensor: Tensor, model: ModelConfig) -> Tensor:
    if name.endswith("linear_qkv.weight"):
        return _interleave_qkv(tensor, model)
    if name == "linear_fc1.weight":
        # Rows are [up; gate] there, [gate; up] in Megatron.
        return torch.cat(tensor.chunk(2)[::-1])
    return tensor


def _interleave_qkv(tensor: Tensor, model: ModelConfig) -> Tensor:
    """Rows [q; k; v] of all heads become, per query group, its queries, its key and its value."""
    width, groups = model.attention_head_dim, model.query_groups
    q, k, v = tensor.split([model.num_attention_heads * width, groups * width, groups * width])
    per_group = [part.view(groups, -1, tensor.shape[1]) for part in (q, k, v)]
    return torch.cat(per_group, dim=1).reshape(tensor.shape)


def _split_table(name: str, tensor: Tensor, model: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """The release has one table for all layers (UltraMem: one each), in the order of the layers; ours are split into banks."""
    assert model.memory is not None
    banks = plan_sharing(model.memory, model.num_memory_layers).banks
    for bank, rows in zip(banks, tensor.split([bank.num_rows for bank in banks]), strict=True):
        yield f"banks.{bank.index}.{name}", rows
