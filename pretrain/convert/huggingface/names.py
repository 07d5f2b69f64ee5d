"""Our tensors and Hugging Face's: the same numbers, cut and named otherwise.

Dense models have the names of Llama, Qwen2 and Qwen3. Memories and residual streams keep the names of their own weights. All pairs are rectangles of
equal shape, so the list goes both ways.

Legend: D hidden size, F inner width of a feed-forward, n query heads, g key/value heads, d width of a head.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from megamem.config.model import ModelConfig
from megamem.placement.block_plan import PLAIN, BlockPlan, plan_blocks
from megamem.placement.placed import PlacedMemory
from pretrain.checkpoint.store.tensors import Pair, Region, TensorInfo
from pretrain.errors import CheckpointError

_SHARED_READ = "shared_read."
# Prefixes of what memory layers share.
_OF_ALL_LAYERS = ("banks.", _SHARED_READ)


def pairs(model: ModelConfig, *, vocab_size: int, tensors: Mapping[str, TensorInfo]) -> list[Pair]:
    """Pairs of our elements and Hugging Face's: all of the model but the padding of the vocabulary.

    Args:
        model: the model.
        vocab_size: token ids before padding.
        tensors: ours, by global name: which weights a memory has and of which shape, its family alone knows. A model
            without memory needs none.

    Raises:
        CheckpointError: a memory acts where the exported model has no place for it.
    """
    hidden, plans, streams = model.hidden_size, _exported_plans(model), model.residual_streams
    found = [
        _rows("embedding.word_embeddings.weight", "model.embed_tokens.weight", vocab_size, hidden),
        *(pair for layer in range(model.num_layers) for pair in _block(model, layer, plans.get(layer, PLAIN), tensors)),
    ]
    if streams is not None:
        end = streams.end_shapes(hidden)
        found += [_whole(f"decoder.streams_end.{name}", f"model.streams_end.{name}", end[name]) for name in end]
    if streams is None or not streams.normalises:
        found.append(_whole("decoder.final_layernorm.weight", "model.norm.weight", (hidden,)))
    if not model.tied_embeddings:
        found.append(_rows("output_layer.weight", "lm_head.weight", vocab_size, hidden))
    of_all = [name for name in tensors if name.startswith(_OF_ALL_LAYERS)]
    return found + [_whole(name, f"model.{name}", tensors[name].shape) for name in of_all]


def memory_weights(model: ModelConfig, index: int, tensors: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """The own weights and buffers of a memory layer by their names in it.

    Args:
        index: number of the memory layer.
        tensors: ours, by global name.
    """
    prefix = f"{model.memory_name(index)}."
    return {name.removeprefix(prefix): info for name, info in tensors.items() if name.startswith(prefix)}


def shared_weights(tensors: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """The weights of what all memory layers read together, by their names in it; `tensors` are ours."""
    return {name.removeprefix(_SHARED_READ): info for name, info in tensors.items() if name.startswith(_SHARED_READ)}


def exported_memory(model: ModelConfig, theirs: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """The weights of memories and the banks of an exported model, under our global names.

    Args:
        theirs: all tensors, by Hugging Face's names.
    """
    inner = {name.removeprefix("model."): info for name, info in theirs.items() if name.startswith("model.")}
    found = {name: info for name, info in inner.items() if name.startswith(_OF_ALL_LAYERS)}
    for index, span in enumerate(model.memory_spans):
        prefix = f"model.layers.{span.read}.{_module_of(model, index)}."
        for name, info in theirs.items():
            if name.startswith(prefix):
                found[f"{model.memory_name(index)}.{name.removeprefix(prefix)}"] = info
    return found


def _module_of(model: ModelConfig, index: int) -> str:
    """Name of a memory layer in its exported block, which may have one of each family."""
    return _section_of(model, model.memory_layers[index]).removeprefix("model.")


def _section_of(model: ModelConfig, layer: PlacedMemory) -> str:
    """Key of the section that configures a memory layer."""
    return next(key for key, memory in model.families.items() if memory.kind == layer.memory.kind)


def _block(model: ModelConfig, layer: int, plan: BlockPlan, tensors: Mapping[str, TensorInfo]) -> Iterator[Pair]:
    ours, theirs, hidden = f"decoder.layers.{layer}.", f"model.layers.{layer}.", model.hidden_size
    streams, num_norms = model.residual_streams, plan.num_norms
    if streams is not None:
        for site in ("attention_streams", "ffn_streams"):
            for name, of_site in streams.site_shapes(hidden).items():
                yield _whole(f"{ours}{site}.{name}", f"{theirs}{site}.{name}", of_site)
        num_norms = 0 if streams.normalises else num_norms
    if num_norms > 0:
        for part in ("weight", "bias") if plan.has_layer_norm else ("weight",):
            yield _whole(f"{ours}input_layernorm.{part}", f"{theirs}input_layernorm.{part}", (hidden,))
    attention = _attention if model.latent_attention is None else _latent_attention
    yield from attention(model, f"{ours}self_attention.", f"{theirs}self_attn.")
    if plan.has_output_projection:
        shape = (hidden, model.num_attention_heads * model.attention_head_dim)
        yield _whole(f"{ours}self_attention.linear_proj.weight", f"{theirs}self_attn.o_proj.weight", shape)
    if num_norms > 1:
        yield _whole(f"{ours}pre_mlp_layernorm.weight", f"{theirs}post_attention_layernorm.weight", (hidden,))
    for index in plan.memories:
        for name, info in memory_weights(model, index, tensors).items():
            yield _whole(f"{model.memory_name(index)}.{name}", f"{theirs}{_module_of(model, index)}.{name}", info.shape)
    if plan.has_ffn:
        is_beside = any(slot.module == "mlp" for slot in plan.slots)
        yield from _feed_forward(model, f"{ours}mlp.ffn." if is_beside else f"{ours}mlp.", f"{theirs}mlp.")


def _exported_plans(model: ModelConfig) -> Mapping[int, BlockPlan]:
    """Plans of the blocks that have memories. Raises CheckpointError where the exported model has no place for one."""
    for layer in model.memory_layers:
        slot = layer.slot
        if not slot.is_exported:
            raise CheckpointError(
                f"{_section_of(model, layer)}.kind is {layer.memory.kind}, whose memories act in the slot {slot.name}, "
                "where exported models have none: keep such a model in the native format"
            )
    return plan_blocks(model)


def _attention(model: ModelConfig, ours: str, theirs: str) -> Iterator[Pair]:
    """Megatron's fused rows are, per key/value head: its queries, its key, its value."""
    hidden, width, groups = model.hidden_size, model.attention_head_dim, model.query_groups
    queries = model.num_attention_heads // groups * width
    # A bias has rows of one element.
    parts: dict[str, tuple[int, ...]] = {"weight": (hidden,), **({"bias": ()} if model.qkv_bias else {})}
    for group in range(groups):
        start = group * (queries + 2 * width)
        for side, rows, before in (("q", queries, 0), ("k", width, queries), ("v", width, queries + width)):
            for part, row in parts.items():
                yield Pair(
                    Region(f"{ours}linear_qkv.{part}", (start + before, *(0 for _ in row)), (rows, *row)),
                    Region(f"{theirs}{side}_proj.{part}", (group * rows, *(0 for _ in row)), (rows, *row)),
                )
    if model.qk_norm:
        for side in "qk":
            yield _whole(f"{ours}{side}_layernorm.weight", f"{theirs}{side}_norm.weight", (width,))


def _latent_attention(model: ModelConfig, ours: str, theirs: str) -> Iterator[Pair]:
    latent, heads, width = model.latent_attention, model.num_attention_heads, model.attention_head_dim
    assert latent is not None
    narrow, of_keys = latent.latent_dim, width - latent.rotary_dim
    shapes = {
        "kv_down": (narrow + latent.rotary_dim, model.hidden_size),
        "kv_up": (heads * (of_keys + width), narrow),
        "q": (heads * width, model.hidden_size),
    }
    norms = {"kv": narrow}
    names = {name: name for name in shapes}
    if latent.query_latent_dim is not None:
        shapes |= {
            "q_down": (latent.query_latent_dim, model.hidden_size),
            "q": (heads * width, latent.query_latent_dim),
        }
        norms["q"] = latent.query_latent_dim
        names |= {"q": "q_up", "q_down": "q_down"}
    for name, shape in shapes.items():
        yield _whole(f"{ours}linear_{names[name]}_proj.weight", f"{theirs}{name}_proj.weight", shape)
    for side, columns in norms.items() if model.qk_norm else ():
        yield _whole(f"{ours}{side}_layernorm.weight", f"{theirs}{side}_norm.weight", (columns,))


def _feed_forward(model: ModelConfig, ours: str, theirs: str) -> Iterator[Pair]:
    moe, hidden = model.moe, model.hidden_size
    if moe is None:
        yield from _swiglu(ours, theirs, hidden, model.ffn_hidden_size)
        return
    yield _whole(f"{ours}router.weight", f"{theirs}gate.weight", (moe.num_experts, hidden))
    for expert in range(moe.num_experts):
        part = f"experts.{expert}."
        yield from _swiglu(ours + part, theirs + part, hidden, moe.expert_ffn_hidden_size)


def _swiglu(ours: str, theirs: str, hidden: int, width: int) -> Iterator[Pair]:
    """Megatron's first linear is [gate; up], [2 F, D]."""
    for number, part in enumerate(("gate_proj", "up_proj")):
        yield Pair(
            Region(f"{ours}linear_fc1.weight", (number * width, 0), (width, hidden)),
            Region(f"{theirs}{part}.weight", (0, 0), (width, hidden)),
        )
    yield _whole(f"{ours}linear_fc2.weight", f"{theirs}down_proj.weight", (hidden, width))


def _whole(ours: str, theirs: str, shape: tuple[int, ...]) -> Pair:
    start = (0,) * len(shape)
    return Pair(Region(ours, start, shape), Region(theirs, start, shape))


def _rows(ours: str, theirs: str, rows: int, columns: int) -> Pair:
    """The first rows of ours, which go on with padding, are all of theirs."""
    return _whole(ours, theirs, (rows, columns))
