"""Weights, FLOPs and bytes of the attention of one block, by closed formulas.

Legend: D hidden size, n query heads, g key/value heads, d width of a head, C width of a latent, Q of one
of queries and r of a rotary key.
"""

from __future__ import annotations

from megamem.config.model import LatentAttentionConfig, ModelConfig
from megamem.placement.block_plan import BlockPlan, sum_over_blocks
from pretrain.config.context_ways import context_way, run_costs
from pretrain.config.schema import RunConfig
from pretrain.planning.counts.residual_streams import num_norms


def attention_weights(model: ModelConfig, block: BlockPlan) -> int:
    """Weights of a block's projections, which tensor-parallel ranks split: D d (2 n + 2 g), or, with latents,
    2 D d n + D (C + r) + C n (2 d - r), with (D + d n) Q for one D d n if queries have some too. Some inserted
    blocks have no output projection."""
    width, head, heads = model.hidden_size, model.attention_head_dim, model.num_attention_heads
    queries_and_outputs = width * head * heads * (1 + block.has_output_projection)
    latent = model.latent_attention
    if latent is None:
        return queries_and_outputs + 2 * width * head * model.query_groups
    if latent.query_latent_dim is not None:
        queries_and_outputs += (width + head * heads) * latent.query_latent_dim - width * head * heads
    return queries_and_outputs + width * (latent.latent_dim + latent.rotary_dim) + _up_projection(model)


def attention_gains(model: ModelConfig) -> int:
    """Gains of a block's norms of queries and keys, or of latents, which every rank has."""
    if not model.qk_norm:
        return 0
    return 2 * model.attention_head_dim if model.latent_attention is None else _latent_widths(model.latent_attention)


def attention_biases(model: ModelConfig) -> int:
    """Biases of a block's queries, keys and values, which tensor-parallel ranks split: d (n + 2 g)."""
    return model.qkv_bias * model.attention_head_dim * (model.num_attention_heads + 2 * model.query_groups)


def norm_weights(model: ModelConfig, block: BlockPlan) -> int:
    """Gains and biases of a block's norms, which every rank has."""
    return (num_norms(model, block) + block.has_layer_norm) * model.hidden_size + attention_gains(model)


def projected_twice(model: ModelConfig, block: BlockPlan) -> int:
    """Weights by which a block's latents are multiplied once more, because keys and values are made of others and one
    projection makes both: with memories that are mixed into those of values alone."""
    return _up_projection(model) if model.latent_attention is not None and block.splits_latents else 0


def attention_kept(model: ModelConfig, element: int) -> float:
    """Bytes per token that the backward pass of a block's attention needs of whole sequences, beside what its core keeps
    for itself, before ranks split heads; the mean over blocks.

    Queries, keys and values; the first two turned; the heads' outputs; and queries that are normalised, which Megatron
    copies out of the three. With latents: queries, keys and outputs of all heads, values with keys as they were projected,
    the latents (of queries too), and they after their norm.
    """
    head, heads, groups = model.attention_head_dim, model.num_attention_heads, model.query_groups
    if (latent := model.latent_attention) is not None:
        latents = _latent_widths(latent) * element * (2 if model.qk_norm else 1)
        projected = 2 * head - latent.rotary_dim
        projections = 1 + _num_split(model) / model.num_layers
        # Keys are a part of what was projected until rotary columns are joined to them.
        has_own_keys = latent.rotary_dim > 0 or projections > 1
        columns = 2 * head + projections * projected + (head if has_own_keys else 0)
        return element * heads * columns + latents
    attention = element * (heads + 2 * groups) + element * (heads + groups) + element * heads
    attention += element * heads if model.qk_norm else 0
    return attention * head


def cached_bytes_per_token(model: ModelConfig, element: int) -> int:
    """Bytes that generation keeps of a token of the text, in elements of so many bytes.

    A block's cache holds keys and values of its key/value heads, 2 g d columns. With latent attention it holds a latent
    and a rotary key, C + r; and one more latent, C, where a memory mixes those of values alone. Values and latents are
    held as they were mixed, so a memory adds nothing else.
    """
    latent = model.latent_attention
    if latent is None:
        return 2 * model.query_groups * model.attention_head_dim * model.num_layers * element
    columns = model.num_layers * (latent.latent_dim + latent.rotary_dim) + _num_split(model) * latent.latent_dim
    return columns * element


def expanded_bytes(model: ModelConfig, element: int) -> int:
    """Bytes of all heads' own values of all rows, in elements of so many bytes: N^2 n d of each table, of memories that
    expand values for every head (`MemoryConfig.expands_values`), where that is done once for generation."""
    memory = model.memory
    assert memory is not None
    return sum(bank.num_rows for bank in model.memory_plan.banks) * model.hidden_size * element


def _num_split(model: ModelConfig) -> int:
    """Blocks whose keys and values are made of latents that differ."""
    return sum_over_blocks(model, lambda block: block.splits_latents)


def _latent_widths(latent: LatentAttentionConfig) -> int:
    """C, and Q if queries have latents."""
    return latent.latent_dim + (latent.query_latent_dim or 0)


def _up_projection(model: ModelConfig) -> int:
    """Weights that make keys and values of latents, C n (2 d - r)."""
    latent = model.latent_attention
    assert latent is not None
    return latent.latent_dim * model.num_attention_heads * (2 * model.attention_head_dim - latent.rotary_dim)


def kept_beyond_whole_sequences(config: RunConfig) -> int:
    """Bytes that a block keeps for backward, per microbatch, beyond those of as many tokens in whole sequences.

    Gathered keys and values; or key/value heads that several ranks have, and the outputs once more, of other tokens,
    for the output projection.
    """
    if config.parallel.context == 1:
        return 0
    way = context_way(config)
    beyond = run_costs(config, way).kept - run_costs(config, "ring").kept
    if way != "heads":
        return beyond
    layout, train, model = config.parallel, config.train, config.model
    tokens = train.micro_batch_size * train.sequence_length // layout.context
    outputs = tokens * model.num_attention_heads * model.attention_head_dim // layout.tensor
    return beyond + outputs * train.element_bytes


def attention_backward(config: RunConfig, tokens: int) -> float:
    """Bytes that the backward pass of attention across ranks has at its peak, for a rank's tokens before ranks split
    heads.

    Gradients of outputs are in the precision of the run, those of queries, keys and values in fp32. `gather` has keys
    and values of all ranks, and their gradients in the precision of the run too. `ring` adds the fp32 gradients that
    are sent, those that arrive and their sum, two pairs on their way, and a tile's operands and gradients. `heads` has
    all in the precision of the run.
    """
    model, element, size = config.model, config.train.element_bytes, config.parallel.context
    queries = tokens * model.num_attention_heads * model.attention_head_dim
    pairs = 2 * tokens * model.query_groups * model.attention_head_dim
    match context_way(config):
        case "heads":
            return float(element * 2 * (queries + pairs))
        case "gather":
            return float((element + 4) * (queries + size * pairs))
        case "ring":
            return float(
                (element + 4) * queries + 4 * 4 * pairs + 2 * element * pairs + 2 * element * (queries + pairs)
            )
