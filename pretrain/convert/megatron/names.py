"""Our tensors, and those of a plain GPTModel of Megatron-core's: the same numbers, stacked and named otherwise.

Megatron stacks the blocks' weights, [L, ...], or saves them block by block (`non_homogeneous_layers`). The norm before
a linear layer is named as a part of that, as Transformer Engine has it, whatever layers the model had. A block's experts,
grouped or one after the other, are one tensor, [E, ...], or saved one by one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from megamem.config.model import ModelConfig
from pretrain.checkpoint.store.tensors import Pair, Region, TensorInfo
from pretrain.errors import CheckpointError

_BLOCKS = "decoder.layers."
_NORMS = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}
_EXPERTS = "mlp.experts.experts."
_QKV, _QKV_BIAS = "self_attention.linear_qkv.weight", "self_attention.linear_qkv.bias"


def pairs(model: ModelConfig, *, vocab_size: int, tensors: Mapping[str, TensorInfo]) -> list[Pair]:
    """Pairs of our elements and Megatron's: all of a model without memory but the vocabulary's padding.

    Args:
        vocab_size: token ids before padding.
        tensors: theirs, by name.

    Raises:
        CheckpointError: the tensors are of another number of blocks.
    """
    hidden = model.hidden_size
    found = [
        _same("embedding.word_embeddings.weight", (vocab_size, hidden)),
        _same("decoder.final_layernorm.weight", (hidden,)),
    ]
    if not model.tied_embeddings:
        found.append(_same("output_layer.weight", (vocab_size, hidden)))
    stacked = tensors.get(f"{_BLOCKS}{_QKV}")
    depth = (
        stacked.shape[0]
        if stacked is not None and stacked.shape
        else sum(name.startswith(_BLOCKS) and name.endswith(f".{_QKV}") for name in tensors)
    )
    if depth != model.num_layers:
        raise CheckpointError(
            f"model.num_layers is {model.num_layers}, and the checkpoint holds the attention of {depth} blocks: name the "
            "configuration of its model"
        )
    for layer in range(depth):
        found.extend(_block(model, layer, tensors, is_stacked=stacked is not None))
    return found


def _block(model: ModelConfig, layer: int, tensors: Mapping[str, TensorInfo], *, is_stacked: bool) -> Iterator[Pair]:
    hidden, width = model.hidden_size, model.attention_head_dim
    heads, groups = model.num_attention_heads, model.query_groups
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        _QKV: ((heads + 2 * groups) * width, hidden),
        "self_attention.linear_proj.weight": (hidden, heads * width),
        "pre_mlp_layernorm.weight": (hidden,),
    }
    if model.qkv_bias:
        shapes[_QKV_BIAS] = ((heads + 2 * groups) * width,)
    if model.qk_norm:
        shapes |= {f"self_attention.{side}_layernorm.weight": (width,) for side in "qk"}
    if model.moe is None:
        shapes |= _swiglu("mlp.", hidden, model.ffn_hidden_size)
    else:
        shapes["mlp.router.weight"] = (model.moe.num_experts, hidden)
    prefix = _BLOCKS if is_stacked else f"{_BLOCKS}{layer}."
    at = (layer,) if is_stacked else ()

    def linear(name: str, shape: tuple[int, ...], theirs: str, at: tuple[int, ...]) -> Iterator[Pair]:
        """A tensor of ours, and theirs at an index of its first dimensions."""
        ours = Region(f"{_BLOCKS}{layer}.{name}", (0,) * len(shape), shape)

        def there(name: str, shape: tuple[int, ...]) -> Region:
            return Region(f"{prefix}{name}", (*at, *(0,) * len(shape)), (*(1,) * len(at), *shape))

        if f"{prefix}{theirs}_w" in tensors:
            # Each half alone (`singleton_local_shards`).
            half = (shape[0] // 2, *shape[1:])
            for number, end in enumerate("wv"):
                yield Pair(ours.shifted((number * half[0], 0), half), there(f"{theirs}_{end}", half))
        else:
            yield Pair(ours, there(theirs, shape))

    for name, shape in shapes.items():
        known = _NORMS.get(name, name)
        # Older versions name the norms of local layers by themselves.
        yield from linear(name, shape, known if f"{prefix}{known}" in tensors else name, at)
    if model.moe is None:
        return
    for expert in range(model.moe.num_experts):
        is_apart = f"{prefix}{_EXPERTS}{expert}.linear_fc2.weight" in tensors
        theirs, index = (f"{_EXPERTS}{expert}.", at) if is_apart else (_EXPERTS, (*at, expert))
        for name, shape in _swiglu("", hidden, model.moe.expert_ffn_hidden_size).items():
            yield from linear(f"mlp.experts.{expert}.{name}", shape, theirs + name, index)


def _swiglu(prefix: str, hidden: int, width: int) -> dict[str, tuple[int, ...]]:
    """Shapes of a feed-forward's linear layers, the first of which is [gate; up]."""
    return {f"{prefix}linear_fc1.weight": (2 * width, hidden), f"{prefix}linear_fc2.weight": (hidden, width)}


def _same(name: str, shape: tuple[int, ...]) -> Pair:
    region = Region(name, (0,) * len(shape), shape)
    return Pair(region, region)
