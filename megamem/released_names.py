"""The public UltraMemV2 code's names and layouts, translated into ours.

The translation only renames, stacks, reorders and splits, so it serves parameters, gradients and optimizer moments alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from megamem.config import ModelConfig
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
_MEMORY = {
    "query_proj.weight": "query_proj",
    "query_norm.weight": "query_norm",
    "keys": "keys",
    "keys_norm.weight": "keys_norm",
    "values_proj.weight": "value_proj",
    "pre_values_proj.weight": "pre_value_proj",
    "tucker_core_u": "u",
    "tucker_core_v": "v",
    "shuffle_index": "permutation",
}
_TABLES = {"values_for_look_up": "values", "pre_values_for_look_up": "pre_values"}


def from_released(tensors: Mapping[str, Tensor], model: ModelConfig) -> dict[str, Tensor]:
    """Tensors of the release under our global names and in our layouts.

    Args:
        tensors: by released name (`transformer.blocks.0.att_proj.weight`), all of a model or any part of it.
        model: the same model's config.

    Raises:
        ValueError: if a name is not one of the release's.
    """
    result: dict[str, Tensor] = {}
    cores: dict[str, dict[int, Tensor]] = {}
    for name, tensor in tensors.items():
        match name.removeprefix("transformer.").split("."):
            case ["mem_blocks", layer, "tucker_core", core]:
                cores.setdefault(layer, {})[int(core)] = tensor
            case ["mem_blocks", layer, *part] if (ours := _MEMORY.get(".".join(part))) is not None:
                # u and v carry two dimensions of size 1 there.
                squeezed = tensor.flatten(0, 1).squeeze(1) if ours in ("u", "v") else tensor
                result[f"decoder.layers.{layer}.mlp.memory.{ours}"] = squeezed
            case ["full_memory_layer", table] if table in _TABLES:
                result.update(_split_table(_TABLES[table], tensor, model))
            case ["blocks", layer, *part] if (ours := _BLOCK.get(".".join(part))) is not None:
                result[f"decoder.layers.{layer}.{_in_mlp_slot(ours, model)}"] = _reorder(ours, tensor, model)
            case part if (ours := _MODEL.get(".".join(part))) is not None:
                result[ours] = tensor
            case _:
                raise ValueError(f"{name} is not a parameter of a released UltraMemV2 model")
    for layer, of_layer in cores.items():
        result[f"decoder.layers.{layer}.mlp.memory.cores"] = torch.stack([of_layer[c] for c in sorted(of_layer)])
    return result


def _in_mlp_slot(name: str, model: ModelConfig) -> str:
    """The feed-forward is the `mlp` of a dense block, and stands beside the memory in the others."""
    if not name.startswith("linear_fc"):
        return name
    return f"mlp.{name}" if model.memory is None else f"mlp.ffn.{name}"


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
    """The release has one table for all layers, in the order of the layers; ours are split into banks."""
    assert model.memory is not None
    banks = plan_sharing(model.memory, model.num_layers).banks
    for bank, rows in zip(banks, tensor.split([bank.num_rows for bank in banks]), strict=True):
        yield f"banks.{bank.index}.{name}", rows
