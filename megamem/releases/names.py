"""The public codes' names and layouts, translated into ours: UltraMemV2's release (OLMo) and Meta's (lingua).

Those of memory layers are their families'. The translation only renames, stacks, reorders, splits and reshapes, so it
serves parameters, gradients and optimizer moments alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from megamem.config.model import ModelConfig
from megamem.families.registry import FAMILIES, family_of
from megamem.releases.release import META_RELEASE, ULTRAMEMV2_RELEASE, ReleasedNames

MODEL_NAMES = {
    "wte.weight": "embedding.word_embeddings.weight",
    "ln_f.weight": "decoder.final_layernorm.weight",
    "ff_out.weight": "output_layer.weight",
}
BLOCK_NAMES = {
    "attn_norm.weight": "input_layernorm.weight",
    "att_proj.weight": "self_attention.linear_qkv.weight",
    "q_norm.weight": "self_attention.q_layernorm.weight",
    "k_norm.weight": "self_attention.k_layernorm.weight",
    "attn_out.weight": "self_attention.linear_proj.weight",
    "ff_norm.weight": "pre_mlp_layernorm.weight",
    "ff_proj.weight": "linear_fc1.weight",
    "ff_out.weight": "linear_fc2.weight",
}


def from_released(tensors: Mapping[str, Tensor], model: ModelConfig) -> dict[str, Tensor]:
    """Tensors of UltraMemV2's release (which also has UltraMem and Memory+) under our global names and in our layouts.

    Args:
        tensors: tensors by released name (`transformer.blocks.0.att_proj.weight`), all of a model or any part of it.
        model: config of the same model.

    Raises:
        ValueError: a name is not one of the release's.
    """
    result: dict[str, Tensor] = {}
    stacks: dict[str, dict[int, Tensor]] = {}
    names = names_of(model, ULTRAMEMV2_RELEASE)
    for name, tensor in tensors.items():
        match name.removeprefix("transformer.").split("."):
            case ["mem_blocks", layer, part, number] if part in names.stacked:
                stack = stacks.setdefault(f"{model.memory_name(int(layer))}.{names.stacked[part]}", {})
                stack[int(number)] = tensor
            case ["mem_blocks", layer, *part] if found := _of_memory(names, int(layer), ".".join(part), tensor, model):
                result.update(found)
            case ["mem_blocks", _, *part] if ".".join(part) in names.unused:
                continue
            case ["full_memory_layer", table] if table in names.tables:
                result.update(_split_table(names.tables[table], tensor, model))
            case ["blocks", layer, *part] if (ours := BLOCK_NAMES.get(".".join(part))) is not None:
                result[f"decoder.layers.{layer}.{_in_mlp_slot(ours, int(layer), model)}"] = _reorder(
                    ours, tensor, model
                )
            case part if (ours := MODEL_NAMES.get(".".join(part))) is not None:
                result[ours] = tensor
            case _:
                kind = model.memory.kind if model.memory is not None else "none"
                raise ValueError(f"{name} is not a parameter of a released UltraMemV2 model with memory of kind {kind}")
    for name, numbered in stacks.items():
        result[name] = torch.stack([numbered[number] for number in sorted(numbered)])
    return result


def from_meta(tensors: Mapping[str, Tensor], model: ModelConfig) -> dict[str, Tensor]:
    """Memory layers of Meta's release (PKM, Memory+, PEER) under our global names and in our layouts.

    Args:
        tensors: tensors by released name, `layers.<block>.feed_forward.<parameter>`; the memory stands in place of a
            block's feed-forward. A table that layers share may appear under any or all of them.
        model: config of the same model.

    Raises:
        ValueError: a name is not that of a parameter of a memory layer.
    """
    memory = model.memory
    if memory is None or META_RELEASE not in family_of(memory).released:
        kinds = [kind for kind, family in FAMILIES.items() if META_RELEASE in family.released]
        raise ValueError(f"Meta's release has memory of the kinds {', '.join(kinds)}")
    names = names_of(model, META_RELEASE)
    layer_at = {span.read: layer for layer, span in enumerate(model.memory_spans)}
    result: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        match name.split(".", 3):
            case ["layers", block, "feed_forward", part] if block.isdecimal() and int(block) in layer_at:
                layer = layer_at[int(block)]
            case _:
                raise ValueError(f"{name} is not a parameter of a memory layer of Meta's release")
        found = _of_memory(names, layer, part, tensor, model)
        if not found:
            raise ValueError(f"{name} is not a parameter of a memory layer of kind {memory.kind} in Meta's release")
        result.update(found)
    return result


def names_of(model: ModelConfig, release: str) -> ReleasedNames:
    """The names of the model's memory in a release; none where it is not in there."""
    released = family_of(model.memory).released if model.memory is not None else {}
    return released.get(release, ReleasedNames({}, {}))


def _of_memory(names: ReleasedNames, layer: int, part: str, tensor: Tensor, model: ModelConfig) -> dict[str, Tensor]:
    """A released tensor of a memory layer, in our layout, by the name of its table or parameter; nothing if unknown."""
    assert model.memory is not None
    if table := names.tables.get(part):
        return {f"banks.{model.memory_plan.views[layer].bank}.{table}": tensor}
    if ours := names.parameters.get(part):
        return {f"{model.memory_name(layer)}.{ours}": names.convert(ours, tensor, model.memory)}
    return {}


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
    """The release has one table for all layers (UltraMem one each), in their order; ours are split into banks."""
    banks = model.memory_plan.banks
    for bank, rows in zip(banks, tensor.split([bank.num_rows for bank in banks]), strict=True):
        yield f"banks.{bank.index}.{name}", rows
