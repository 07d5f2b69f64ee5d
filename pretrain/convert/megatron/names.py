"""Our tensors, and those of a plain GPTModel of Megatron-core's: the same numbers, stacked and named otherwise.

Megatron stacks the blocks' weights, [L, ...], or saves them block by block (`non_homogeneous_layers`). The norm before
a linear layer is named as a part of that, as Transformer Engine has it, whatever layers the model had.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from megamem.config import ModelConfig
from pretrain.checkpoint.store.tensors import Pair, Region, TensorInfo
from pretrain.errors import CheckpointError

_BLOCKS = "decoder.layers."
_NORMS = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}
_QKV, _GATED = "self_attention.linear_qkv.weight", "mlp.linear_fc1.weight"
_QKV_BIAS = "self_attention.linear_qkv.bias"


def pairs(model: ModelConfig, *, vocab_size: int, tensors: Mapping[str, TensorInfo]) -> list[Pair]:
    """Pairs of our elements and Megatron's: all of a model without memory and experts but the vocabulary's padding.

    Args:
        vocab_size: token ids before padding.
        tensors: theirs, by name.

    Raises:
        CheckpointError: they are of another number of blocks.
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
    hidden, width, ffn = model.hidden_size, model.attention_head_dim, model.ffn_hidden_size
    heads, groups = model.num_attention_heads, model.query_groups
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        _QKV: ((heads + 2 * groups) * width, hidden),
        "self_attention.linear_proj.weight": (hidden, heads * width),
        "pre_mlp_layernorm.weight": (hidden,),
        _GATED: (2 * ffn, hidden),
        "mlp.linear_fc2.weight": (hidden, ffn),
    }
    if model.qkv_bias:
        shapes[_QKV_BIAS] = ((heads + 2 * groups) * width,)
    if model.qk_norm:
        shapes |= {f"self_attention.{side}_layernorm.weight": (width,) for side in "qk"}
    prefix = _BLOCKS if is_stacked else f"{_BLOCKS}{layer}."
    at = (layer,) if is_stacked else ()

    def there(name: str, shape: tuple[int, ...]) -> Region:
        return Region(f"{prefix}{name}", (*at, *(0,) * len(shape)), (*(1,) * len(at), *shape))

    for name, shape in shapes.items():
        ours = Region(f"{_BLOCKS}{layer}.{name}", (0,) * len(shape), shape)
        if name == _GATED and f"{prefix}{name}_w" in tensors:
            # Each half alone (`singleton_local_shards`).
            for number, half in enumerate("wv"):
                yield Pair(ours.shifted((number * ffn, 0), (ffn, hidden)), there(f"{name}_{half}", (ffn, hidden)))
        else:
            known = _NORMS.get(name, name)
            # Older versions name the norms of local layers by themselves.
            yield Pair(ours, there(known if f"{prefix}{known}" in tensors else name, shape))


def _same(name: str, shape: tuple[int, ...]) -> Pair:
    region = Region(name, (0,) * len(shape), shape)
    return Pair(region, region)
