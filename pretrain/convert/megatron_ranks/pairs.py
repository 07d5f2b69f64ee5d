"""Where the elements of our tensors are in Megatron-LM's rank files.

Legend: D hidden size, H query heads, G query groups, d width of a head, F width of a feed-forward, V rows of the padded
vocabulary, E experts; T and t tensor ranks and one of them.

Both sides use Megatron's modules, so names and orders agree but for these: ranks hold the t-th of T parts of the rows
or the columns of a matrix; [gate; up] are two such matrices; blocks and experts are counted from the rank's first; and
Transformer Engine keeps a norm with the matrix behind it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from megamem.config import ModelConfig
from parallel.pipeline_layout import ModelChunk
from pretrain.checkpoint.store.tensors import Pair, Region
from pretrain.convert.megatron_ranks.layout import RankFile, RankLayout

Split: TypeAlias = Literal["none", "rows", "halves", "columns"]
EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"


@dataclass(frozen=True)
class Weight:
    """One of our tensors, as one rank's module has it.

    Attributes:
        ours: its global name.
        local: its name in the rank's model.
        shape: the global one.
        split: over tensor ranks: none, by rows, by the rows of each of two halves, or by columns.
    """

    ours: str
    local: str
    shape: tuple[int, ...]
    split: Split = "none"


def weights_of(
    model: ModelConfig, vocabulary: int, layout: RankLayout, chunk: ModelChunk, file: RankFile
) -> Iterator[Weight]:
    """The weights of a model chunk in one rank's file, in the order of its modules.

    Args:
        model: its config.
        vocabulary: rows of the embedding, padding included.
        layout: of the files.
        chunk: what the chunk holds.
        file: the rank.
    """
    table = (vocabulary, model.hidden_size)
    if chunk.has_embedding:
        yield Weight(EMBEDDING, EMBEDDING, table, "rows")
    for number, layer in enumerate(chunk.layers):
        for weight in _block(model, layout, file):
            ours, local = f"decoder.layers.{layer}.{weight.ours}", f"decoder.layers.{number}.{weight.local}"
            yield replace(weight, ours=ours, local=local)
    if chunk.has_loss:
        norm = "decoder.final_layernorm.weight"
        yield Weight(norm, norm, (model.hidden_size,))
        if not model.tied_embeddings:
            yield Weight(OUTPUT, OUTPUT, table, "rows")
        elif not chunk.has_embedding:
            # The last stage computes with a copy of its own.
            yield Weight(EMBEDDING, OUTPUT, table, "rows")


def _block(model: ModelConfig, layout: RankLayout, file: RankFile) -> Iterator[Weight]:
    """The weights of any block, by their names within it."""
    width, head = model.hidden_size, model.attention_head_dim
    heads, groups = model.num_attention_heads, model.query_groups
    fused = layout.implementation == "transformer_engine"
    norm, qkv = "input_layernorm.weight", "self_attention.linear_qkv"
    yield Weight(norm, f"{qkv}.layer_norm_weight" if fused else norm, (width,))
    yield _same("self_attention.linear_proj.weight", (width, heads * head), "columns")
    # Rows are ordered by query group, so that a rank's groups are adjacent.
    yield _same(f"{qkv}.weight", ((heads + 2 * groups) * head, width), "rows")
    if model.qk_norm:
        yield _same("self_attention.q_layernorm.weight", (head,))
        yield _same("self_attention.k_layernorm.weight", (head,))
    norm = "pre_mlp_layernorm.weight"
    if model.moe is None:
        yield Weight(norm, "mlp.linear_fc1.layer_norm_weight" if fused else norm, (width,))
        yield from _feed_forward("mlp.", "mlp.", "weight", width, model.ffn_hidden_size)
        return
    yield _same(norm, (width,))
    yield _same("mlp.router.weight", (model.moe.num_experts, width))
    per_rank = model.moe.num_experts // layout.expert
    for number in range(per_rank):
        ours = f"mlp.experts.{file.expert * per_rank + number}."
        local, weight = f"mlp.experts.local_experts.{number}.", "weight"
        if layout.grouped_experts:
            local, weight = "mlp.experts.", f"weight{number}"
        yield from _feed_forward(ours, local, weight, width, model.moe.expert_ffn_hidden_size)


def _same(name: str, shape: tuple[int, ...], split: Split = "none") -> Weight:
    return Weight(name, name, shape, split)


def _feed_forward(ours: str, local: str, weight: str, width: int, inner: int) -> Iterator[Weight]:
    yield Weight(f"{ours}linear_fc1.weight", f"{local}linear_fc1.{weight}", (2 * inner, width), "halves")
    yield Weight(f"{ours}linear_fc2.weight", f"{local}linear_fc2.{weight}", (width, inner), "columns")


def rank_pairs(model: ModelConfig, vocabulary: int, layout: RankLayout) -> list[Pair]:
    """All elements of all files: `theirs` are named `<folder>/<model key>/<name>`.

    What several ranks hold comes once for each of them, the first rank's first.

    Args:
        model: its config.
        vocabulary: rows of the embedding, padding included.
        layout: of the files.

    Raises:
        ConfigError: the model cannot be divided so, or has a memory.
    """
    layout.check(model, vocabulary)
    return [
        pair
        for file in layout.files
        for key, chunk in layout.chunks(model, file).items()
        for weight in weights_of(model, vocabulary, layout, chunk, file)
        for pair in _shares(weight, f"{layout.folder(file)}/{key}/{weight.local}", layout.tensor, file.tensor)
    ]


def _shares(weight: Weight, theirs: str, parts: int, index: int) -> Iterator[Pair]:
    """What one of T tensor ranks holds of a weight."""
    rows, *columns = weight.shape
    rest = (0,) * len(columns)
    match weight.split:
        case "none":
            yield Pair(Region(weight.ours, (0, *rest), weight.shape), Region(theirs, (0, *rest), weight.shape))
        case "rows":
            shape = (rows // parts, *columns)
            yield Pair(Region(weight.ours, (index * shape[0], *rest), shape), Region(theirs, (0, *rest), shape))
        case "halves":
            shape = (rows // 2 // parts, *columns)
            for half in range(2):
                start = half * (rows // 2) + index * shape[0]
                yield Pair(Region(weight.ours, (start, *rest), shape), Region(theirs, (half * shape[0], *rest), shape))
        case "columns":
            shape = (rows, columns[0] // parts)
            yield Pair(Region(weight.ours, (0, index * shape[1]), shape), Region(theirs, (0, 0), shape))


def extra_states(model: ModelConfig, layout: RankLayout, chunk: ModelChunk) -> Iterator[str]:
    """Names under which the modules of a chunk expect state that theirs here do not have; None stands for it."""
    engine = layout.implementation == "transformer_engine"
    linears = ["self_attention.linear_proj", "self_attention.linear_qkv"]
    norms = [f"self_attention.{name}_layernorm" for name in ("q", "k") if model.qk_norm]
    if model.moe is None:
        linears += ["mlp.linear_fc1", "mlp.linear_fc2"]
    else:
        norms.append("pre_mlp_layernorm")
        experts = [f"local_experts.{number}." for number in range(model.moe.num_experts // layout.expert)]
        for expert in [""] if layout.grouped_experts else experts:
            linears += [f"mlp.experts.{expert}linear_fc1", f"mlp.experts.{expert}linear_fc2"]
    modules = [*linears, *norms, "self_attention.core_attention"] if engine else linears
    for number in range(len(chunk.layers)):
        for module in modules:
            yield f"decoder.layers.{number}.{module}._extra_state"
    if chunk.has_loss:
        if engine:
            yield "decoder.final_layernorm._extra_state"
        yield "output_layer._extra_state"
