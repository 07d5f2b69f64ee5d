"""Bytes that backward of a block needs of its forward pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from kernels.common.ids import bytes_per_id
from megamem.config.memory import MemoryConfig
from megamem.config.model import ModelConfig
from megamem.families.registry import family_of
from megamem.placement.block_plan import paired_in_attention
from parallel.layout import coefficients_per_rank, padded_size
from pretrain.config.schema import RunConfig
from pretrain.planning.bytes.kept_streams import kept_streams
from pretrain.planning.bytes.memory_parts import MemoryPart, merged, total
from pretrain.planning.bytes.row_bytes import vectors_are_joined
from pretrain.planning.counts.attention import attention_kept, kept_beyond_whole_sequences
from pretrain.planning.counts.experts import experts_kept
from pretrain.planning.counts.pipeline_stages import Blocks, FamilyInStage, Stage
from pretrain.planning.counts.residual_streams import sites_kept, streams_bytes


def block_kept(
    config: RunConfig, stage: Stage, blocks: Blocks, trained: Blocks, tokens: int
) -> dict[MemoryPart, float]:
    """Bytes that backward of one block needs of its forward pass, by part: the mean over some blocks of a stage.

    A weight that is not trained needs no input: a norm not its normalised values nor the linear behind it what it is
    given, and a feed-forward not the product that goes into its output projection.

    Args:
        blocks: blocks that the mean is over.
        trained: trained ones among these blocks.
    """
    model, element = config.model, config.train.element_bytes
    share = 1 / max(1, blocks.num)
    core = 0.0 if config.train.recompute == "selective" else core_kept(config, tokens)
    norms = trained.norms * norm_bytes(element) + (blocks.norms - trained.norms) * norm_bytes(element, trained=False)
    ffns = trained.ffns * _ffn_kept(model, tokens, element)
    ffns += (blocks.ffns - trained.ffns) * _ffn_kept(model, tokens, element, trained=False)
    of_sites = sites_kept(model, element) + kept_streams(config, stage).per_block * streams_bytes(model, element)
    parts = {
        MemoryPart.RESIDUAL: float(share * norms * tokens * model.hidden_size + tokens * of_sites),
        MemoryPart.ATTENTION: tokens * attention_kept(model, element) + core,
        MemoryPart.FEED_FORWARD: share * ffns,
    }
    if not stage.families or not blocks.memories:
        return parts
    of_memories = (_memories_kept(config, family, tokens) for family in stage.families)
    return {**parts, **_mean_over(stage, blocks, of_memories)}


def one_with_memory(
    config: RunConfig, stage: Stage, kept: dict[MemoryPart, float], blocks: Blocks, tokens: int
) -> dict[MemoryPart, float]:
    """Bytes of one block that has a memory, of the family that keeps the most, or of both where a block has both; from the
    mean over all blocks, of which some have none."""
    if len(stage.families) > 1:
        layers = [
            {part: num / family.layers for part, num in _memories_kept(config, family, tokens).items()}
            for family in stage.families
        ]
        most = merged(*layers) if paired_in_attention(config.model) else max(layers, key=total)
        return kept | (most if blocks.memories else {})
    per_block = min(1.0, blocks.memories / max(1, blocks.num)) or 1.0
    return kept | {part: kept[part] / per_block for part in (MemoryPart.MEMORY, MemoryPart.EXCHANGE) if part in kept}


def has_loss_in_chunks(config: RunConfig, tokens: int) -> bool:
    """True if a microbatch of so many tokens has too many for logits of all at once."""
    limit = config.train.loss_chunk_tokens
    return limit is not None and tokens > limit


def loss_bytes(config: RunConfig, stage: Stage, tokens: int, *, on_gpu: bool) -> float:
    """Logits of as many tokens as have them at a time, for this rank's part of the vocabulary, in bf16 once more in fp32.

    In chunks the kernels of a GPU widen nothing, and beside them are a chunk's hidden states, their gradients, and the
    gradient of the projection.
    """
    model, element, in_chunks = config.model, config.train.element_bytes, has_loss_in_chunks(config, tokens)
    vocabulary = padded_size(model.vocab_size or 0, model.vocab_size_multiple) / config.parallel.tensor
    at_a_time = (config.train.loss_chunk_tokens or tokens) if in_chunks else tokens
    if not (in_chunks and on_gpu):
        return at_a_time * vocabulary * (6 if config.train.precision == "bf16" else 4)
    return element * (at_a_time * vocabulary + model.hidden_size * (2 * at_a_time + stage.trains_all * vocabulary))


def gradients_under_way(config: RunConfig, stage: Stage, tokens: int) -> dict[MemoryPart, float]:
    """Bytes that the last lookup's table gradients hold beside the rest of backward, on a stream of their own
    (`kernels.common.gradient_stream`); of two families the larger one's.

    They are ids, and bins; their order, rows and 8 bytes of positions; coefficients, the gradients of products, and
    vectors, of which parts of rows have as many times more.
    """
    if not stage.backward.memories:
        return {}
    found = [_gradients_under_way(config, family, tokens) for family in stage.families if family.backward_lookups]
    return max(found, key=total, default={})


def operands_of_joined(config: RunConfig, stage: Stage, tokens: int) -> float:
    """Bytes that a microbatch's lookups leave for gradients of tables, of families whose lookups are added up as one: ids,
    coefficients and vectors."""
    return sum(
        len(family.backward_lookups) * _gradients_under_way(config, family, tokens)[MemoryPart.EXCHANGE]
        for family in stage.families
        if vectors_are_joined(family.memory.lookup)
    )


def _gradients_under_way(config: RunConfig, family: FamilyInStage, tokens: int) -> dict[MemoryPart, float]:
    memory, group, element = family.memory, config.parallel.memory, config.train.element_bytes
    lookup, has_products = memory.lookup, memory.width("pre_values") > 0
    entries, per_id = group * tokens * lookup.rows, id_bytes(config, memory, max(family.lookups))
    coefficients = (coefficients_per_rank(lookup.scores, config.parallel.memory_columns) + has_products) * element
    widths = lookup.bins * memory.width("values") + memory.width("pre_values")
    vectors = config.parallel.memory_rows * tokens * widths * element
    return {
        MemoryPart.EXCHANGE: float(entries * (per_id * (1 + (lookup.bins > 1)) + coefficients) + vectors),
        MemoryPart.MEMORY: float(entries * (per_id + 8)),
    }


def _memories_kept(config: RunConfig, family: FamilyInStage, tokens: int) -> dict[MemoryPart, float]:
    """Bytes that backward of all memory layers of a family needs of their forward pass."""
    own, element = family.costs, config.train.element_bytes
    per_token = 4 * own.kept_wide + element * own.kept_narrow + 8 * own.kept_ids
    of_layers = tokens * per_token + own.kept_keys * element
    return merged({MemoryPart.MEMORY: float(of_layers)}, _lookups_kept(config, family, tokens))


def _lookups_kept(config: RunConfig, family: FamilyInStage, tokens: int) -> dict[MemoryPart, float]:
    """Bytes that backward of all lookups of a family needs of their forward pass, with what a chunk's layers make of one
    together."""
    memory, of_lookups = family.memory, Counter(family.lookups).items()
    shared = family_of(memory).shared_kept(memory, config.model.hidden_size, config.train.element_bytes)
    return {
        MemoryPart.MEMORY: float(len(family.lookups) * tokens * shared),
        MemoryPart.EXCHANGE: sum(n * _lookup_kept(config, memory, rows, tokens) for rows, n in of_lookups),
    }


def reads_kept(config: RunConfig, stage: Stage, blocks: Blocks, tokens: int) -> dict[MemoryPart, float]:
    """Bytes that backward needs of what a chunk's layers read together before its first block, which no block makes again:
    the mean over some blocks of a stage."""
    if not blocks.memories:
        return {}
    together = (family for family in stage.families if family.memory.reads_once)
    return _mean_over(stage, blocks, (_lookups_kept(config, family, tokens) for family in together))


def _mean_over(
    stage: Stage, blocks: Blocks, of_families: Iterable[Mapping[MemoryPart, float]]
) -> dict[MemoryPart, float]:
    """Mean over some blocks, by the share of the stage's memories that are in these, of bytes of families in all of it."""
    share = 1 / max(1, blocks.num) * (blocks.memories / stage.blocks.memories)
    return {part: share * num_bytes for part, num_bytes in merged(*of_families).items()}


def core_kept(config: RunConfig, tokens: int) -> float:
    """Bytes that the core of one block's attention keeps beyond its inputs and outputs: `selective` drops them."""
    return float(tokens * 4 * config.model.num_attention_heads + kept_beyond_whole_sequences(config))


def _lookup_kept(config: RunConfig, memory: MemoryConfig, bank_rows: int, tokens: int) -> float:
    """Ids and bins (of all ranks of the group), coefficients, projected inputs, products and sums of one lookup.

    With parts of rows, as many projected inputs are here as parts.
    Without pre-values on whole tables the coefficients are the scores, which are the layer's own.
    """
    group, element = config.parallel.memory, config.train.element_bytes
    lookup, pre_width = memory.lookup, memory.width("pre_values")
    reads = tokens * lookup.rows
    sums = tokens * lookup.bins * memory.width("values") * element
    row_parts = config.parallel.memory_rows
    coefficients = group * reads * coefficients_per_rank(lookup.scores, config.parallel.memory_columns) * element
    ids = group * reads * id_bytes(config, memory, bank_rows) * (1 if lookup.bins == 1 else 2)
    if group == 1 and not pre_width:
        coefficients = 0
    # Products before their activation and after it.
    products = reads * element * (1 if lookup.activation == "none" else 2) if pre_width else 0
    return ids + coefficients + row_parts * tokens * pre_width * element + products + sums


def id_bytes(config: RunConfig, memory: MemoryConfig, bank_rows: int) -> int:
    """Bytes of an id, and of a bin, as a lookup keeps them."""
    bins = memory.lookup.bins if config.parallel.memory > 1 else 1
    return bytes_per_id(bank_rows * bins)


def _ffn_kept(model: ModelConfig, tokens: int, element: int, *, trained: bool = True) -> float:
    """Bytes that one feed-forward keeps: gate and up, and their product where it is trained."""
    if model.moe is not None:
        return experts_kept(model, model.moe, tokens, element)
    return (2.0 + trained) * tokens * model.ffn_hidden_size * element


def norm_bytes(element: int, *, trained: bool = True) -> int:
    """Bytes per element that a norm keeps: the input, and the output where the weights that it feeds are trained."""
    return (1 + trained) * element
