"""Bytes that a rank's device holds at the peak of a step, by part and stage, in closed formulas.

`megamem dryrun` counts the same on the real model. Bytes are those that tensors ask for: an allocator rounds them up.

Legend: T tokens of a microbatch on this rank, S = G T of its memory group, D hidden size, F feed-forward width, d head
dimension, n and g query and key/value heads, J rows read per token, V value dim, P pre-value dim, e bytes per element.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from kernels.common.ids import bytes_per_id
from megamem.block_plan import paired_in_attention
from megamem.config import ModelConfig
from megamem.families.registry import family_of
from megamem.memory_config import MemoryConfig
from parallel.layout import coefficients_per_rank, padded_size
from pretrain.config.overlap import memory_runs_beside
from pretrain.config.schema import RunConfig
from pretrain.config.updates import ADAMW, GRADIENT_BYTES, MAIN_WEIGHT_BYTES, table_gradient_bytes
from pretrain.planning.costs.attention import attention_backward, attention_kept, kept_beyond_whole_sequences
from pretrain.planning.costs.branch import kept_around_branch
from pretrain.planning.costs.experts import experts_backward, experts_kept
from pretrain.planning.costs.launches import LAUNCHES_AHEAD, launches_of
from pretrain.planning.costs.matrices import num_elements
from pretrain.planning.costs.read_rows import (
    adding_bytes,
    fetched_bytes,
    has_files,
    has_read_rows,
    kept_bytes,
    lies_in_files,
)
from pretrain.planning.costs.stages import Blocks, Division, FamilyInStage, Stage, stages_of
from pretrain.planning.costs.state import (
    dense_state,
    matrix_saving,
    saved_by_matrices,
    stored_dense,
    stored_table,
    table_state,
)
from pretrain.planning.costs.weights import local_dense, local_tables, trained_dense, trained_tables


class MemoryPart(StrEnum):
    """A part of what a rank's device holds, in the order of a report; and what it holds in host memory and in files."""

    WEIGHTS = "weights"
    TABLES = "tables"
    GRADIENTS = "gradients"
    TABLE_GRADIENTS = "table gradients"
    OPTIMIZER = "optimizer state"
    TABLE_OPTIMIZER = "optimizer state of tables"
    RESIDUAL = "residual stream and norms"
    ATTENTION = "attention"
    FEED_FORWARD = "feed-forward"
    MEMORY = "memory layers"
    EXCHANGE = "exchange"
    LOSS = "logits and loss"
    MESSAGES = "messages between stages"
    BACKWARD = "gradients of activations"
    STREAMS = "kept for one stream alone"
    OTHER = "other"
    HOST = "host memory"
    FILES = "tables in files"


STATE_PARTS = (
    MemoryPart.WEIGHTS,
    MemoryPart.TABLES,
    MemoryPart.GRADIENTS,
    MemoryPart.TABLE_GRADIENTS,
    MemoryPart.OPTIMIZER,
    MemoryPart.TABLE_OPTIMIZER,
)
"""Parts that are held from the first step to the last; the rest comes and goes within a step."""

SORT_SCRATCH = 8 + 4 + 8
"""Bytes per entry that a GPU sorts by row: positions to begin with, and the second halves of CUB's double buffers."""
ITEM_BYTES = 1 << 26
"""Bytes that a writing thread copies to the host at a time: `pretrain.checkpoint.write_plan` has the same."""
CHUNK_BYTES = 1 << 30
"""Bytes of a chunk of the buffer of an asynchronous save: `pretrain.checkpoint.staging` has the same."""
WINDOW_ELEMENTS = 1 << 22
"""Elements that pass through the host at a time: `pretrain.engine.value_offload` has the same."""


@dataclass(frozen=True)
class StageBytes:
    """Bytes of one rank of a stage.

    Attributes:
        by_part: bytes on the device at the peak of a step.
        host_tables: bytes in host memory: tables' optimizer state if it is there, and its staging memory.
        save: bytes in host memory that a save takes: the buffer of asynchronous ones, or that of the writing threads.
        files: bytes of tables, and their state, in files.
    """

    by_part: dict[MemoryPart, float]
    host_tables: float
    save: float
    files: float = 0.0

    @property
    def host(self) -> float:
        """Bytes that a rank takes of its node's memory, while it saves."""
        return self.host_tables + self.save

    @property
    def total(self) -> float:
        return sum(self.by_part.values())

    @property
    def held(self) -> float:
        """Bytes on the device between steps."""
        return sum(self.by_part[part] for part in STATE_PARTS)

    @property
    def activations(self) -> float:
        """Bytes that a step adds at its peak."""
        return self.total - self.held


def stage_bytes(config: RunConfig, num_ranks: int, *, on_gpu: bool = True) -> tuple[StageBytes, ...]:
    """Bytes of a rank of every stage, first to last. The formulas of activations are for bf16.

    Args:
        on_gpu: whether the device has streams, each with memory of its own.
    """
    division = Division.of(config, num_ranks)
    save = _save_bytes(config, checkpoint_bytes(config) / num_ranks)
    return tuple(
        StageBytes(
            _at_peak(config, stage, rank, division, beside=on_gpu and memory_runs_beside(config)),
            _host(config, stage, division, on_gpu=on_gpu),
            save,
            _in_files(config, stage),
        )
        for rank, stage in enumerate(stages_of(config))
    )


def _at_peak(
    config: RunConfig, stage: Stage, rank: int, division: Division, *, beside: bool
) -> dict[MemoryPart, float]:
    held, activations = _held(config, stage, division), _activations(config, stage, rank, division, beside=beside)
    return _sum(held, activations)


def _save_bytes(config: RunConfig, written: float) -> float:
    """Host memory for a save of the `written` bytes of a rank: of all, or of an item per writing thread."""
    if config.checkpoint.asynchronous:
        return page_locked(written)
    return config.checkpoint.writer_threads * ITEM_BYTES


def page_locked(num_bytes: float) -> float:
    """Bytes that a staging buffer takes for so many: whole chunks, and a last one rounded up to a power of two."""
    whole, rest = divmod(num_bytes, CHUNK_BYTES)
    return float(whole * CHUNK_BYTES + (1 << (math.ceil(rest) - 1).bit_length() if rest else 0))


def checkpoint_bytes(config: RunConfig) -> float:
    """Bytes of a checkpoint."""
    stages = stages_of(config)
    tables = sum(stage.table_elements for stage in stages)
    dense = sum(stage.expert_weights + stage.split_weights + stage.whole_weights for stage in stages)
    return dense * stored_dense(config) + tables * stored_table(config) - saved_by_matrices(config)


def _held(config: RunConfig, stage: Stage, division: Division) -> dict[MemoryPart, float]:
    """Bytes per weight: e; where it is trained, also 4 of gradient, or a table's 2, and optimizer state, split over replicas. Gradients of
    rows that were read count here, as a step's last backward pass finds them, though they are gone between steps."""
    element = config.train.element_bytes
    dense, tables = local_dense(config, stage), local_tables(config, stage)
    dense_trained, tables_trained = trained_dense(config, stage), trained_tables(config, stage)
    matrices, layout = stage.trained.matrices, config.parallel
    of_matrices = num_elements(matrices.split) / layout.tensor + num_elements(matrices.whole)
    own, own_tables = dense_trained / (division.replicas * layout.context), tables_trained / division.table_replicas
    # The rank with the fullest share: as few matrices as ranges of the flattened weights can have.
    saved = matrix_saving(config) * max(0.0, own - (dense_trained - of_matrices))
    of_experts = num_elements(matrices.experts) / layout.memory
    saved_tables = matrix_saving(config) * max(0.0, own_tables - (tables_trained - of_experts))
    on_device = stage.trained.experts * dense_state(config) / division.table_replicas
    owners = 1 if has_read_rows(config) else division.table_replicas
    for family in stage.families:
        if lies_in_files(config, family.memory):
            tables -= family.table_elements / layout.memory
        elif config.optimizer.value_offload == "none":
            on_device += stage.trained_elements(family.memory) * table_state(config, family.memory) / owners
    return {
        MemoryPart.WEIGHTS: dense * element,
        MemoryPart.TABLES: tables * element,
        MemoryPart.GRADIENTS: dense_trained * GRADIENT_BYTES,
        MemoryPart.TABLE_GRADIENTS: _table_gradients(config, stage, division, tables_trained),
        MemoryPart.OPTIMIZER: own * dense_state(config) - saved,
        MemoryPart.TABLE_OPTIMIZER: on_device / layout.memory - saved_tables,
    }


def _table_gradients(config: RunConfig, stage: Stage, division: Division, trained: float) -> float:
    """Bytes of the gradients of tables and experts, of which a rank has `trained` elements."""
    experts = stage.trained.experts / config.parallel.memory
    if not has_read_rows(config):
        return experts * GRADIENT_BYTES + (trained - experts) * table_gradient_bytes(config.optimizer)
    kept = gradients_under_way(config, stage, division.rank_tokens).get(MemoryPart.EXCHANGE, 0.0)
    return experts * GRADIENT_BYTES + kept_bytes(stage, division, kept)


def _in_files(config: RunConfig, stage: Stage) -> float:
    return sum(
        family.table_elements
        * (config.train.element_bytes + table_state(config, family.memory))
        / config.parallel.memory
        for family in stage.families
        if lies_in_files(config, family.memory)
    )


def _host(config: RunConfig, stage: Stage, division: Division, *, on_gpu: bool) -> float:
    """Main weights and moments of the tables that a rank steps, and two windows of gradients and weights; or, of tables in
    files, rows on their way to a GPU and back."""
    if has_files(config):
        return fetched_bytes(config, stage, division) if on_gpu else 0.0
    if config.optimizer.value_offload == "none":
        return 0.0
    owned = stage.trained.table_elements / config.parallel.memory / division.table_replicas
    window = 2 * min(owned, WINDOW_ELEMENTS) * (GRADIENT_BYTES + config.train.element_bytes)
    return (MAIN_WEIGHT_BYTES + ADAMW.element_bytes(MAIN_WEIGHT_BYTES)) * owned + window


def in_flight(config: RunConfig, rank: int, division: Division) -> int:
    """Forward passes of chunks whose backward pass has not begun, at most: those of Megatron's 1F1B schedules."""
    pipeline, virtual = config.parallel.pipeline, config.parallel.virtual_pipeline
    if virtual == 1:
        return min(division.num_microbatches, pipeline - rank)
    return min(division.num_microbatches * virtual, 2 * (pipeline - rank - 1) + (virtual - 1) * pipeline + 1)


def _activations(
    config: RunConfig, stage: Stage, rank: int, division: Division, *, beside: bool
) -> dict[MemoryPart, float]:
    """Bytes that passes in flight keep, and the larger of one block's backward pass and the loss, by part.

    Args:
        beside: whether memories and gradients of tables have streams of their own.
    """
    model, train = config.model, config.train
    tokens, element = division.rank_tokens, train.element_bytes
    flights = in_flight(config, rank, division)
    # Blocks below what is trained keep nothing.
    blocks_in_flight = flights * stage.backward.num / config.parallel.virtual_pipeline
    kept = block_kept(config, stage, stage.backward, stage.trained_blocks, tokens)
    # One trained block, if any is trained.
    one = stage.trained_blocks if stage.trained_blocks.num else stage.backward
    of_one = _with_memory(config, stage, block_kept(config, stage, one, stage.trained_blocks, tokens), one, tokens)
    under_way = gradients_under_way(config, stage, tokens) if beside else {}
    passing = block_passing(config, stage, tokens, of_one, under_way)
    waiting: dict[MemoryPart, float] = {}
    block = of_one
    if not stage.backward.num:
        # The forward pass of one block.
        passing, block = Passing(), block_kept(config, stage, stage.blocks, stage.blocks, tokens)
    elif train.recompute == "full":
        # Every block keeps its input; a whole block only while its backward pass runs, at most one with a memory.
        inputs = blocks_in_flight * (1 + stage.backward.arrivals / max(1, stage.backward.num))
        waiting = {MemoryPart.RESIDUAL: inputs * tokens * model.hidden_size * element}
        if model.moe is not None:
            # Megatron's dispatchers keep the graphs of their last pass, and those the gradients of the blocks' inputs.
            left = (stage.backward.num - 1) * tokens * model.hidden_size * element
            block = _sum(block, {MemoryPart.BACKWARD: left})
    else:
        waiting, block = {part: blocks_in_flight * num for part, num in kept.items()}, {}
        if train.recompute == "selective":
            # One core's forward pass again, with its outputs, for its backward pass.
            outputs = tokens * model.num_attention_heads * model.attention_head_dim * element
            block = {MemoryPart.ATTENTION: _core_kept(config, tokens) + outputs}
    waiting = _sum(waiting, {MemoryPart.LOSS: kept_around_branch(config, stage.branch_blocks, tokens)})
    at_loss: dict[MemoryPart, float] = {}
    if stage.has_loss:
        at_loss = {
            MemoryPart.RESIDUAL: _norm_bytes(element, trained=stage.trains_all) * tokens * model.hidden_size,
            MemoryPart.LOSS: loss_bytes(config, division.loss_tokens),
        }
        if division.num_microbatches > 1:
            at_loss = _sum(at_loss, under_way)
    of_backbone = _sum(block, passing.residual, passing.of_backbone)
    of_memory = _sum(block, passing.residual, passing.of_memory)
    parts = _sum(waiting, max(of_backbone, of_memory, at_loss, key=_total))
    of_common_stream = _total(parts)
    if beside:
        of_common_stream = _backbones(waiting) + max(_backbones(of_backbone), _backbones(at_loss))
        memory = _memorys(waiting) + _memorys(block) + passing.on_memory_stream
        pools = of_common_stream + memory + passing.on_gradient_stream
        parts[MemoryPart.STREAMS] = pools - _total(parts) + _returning(config, stage, tokens, division.num_microbatches)
    if has_read_rows(config):
        # Rows are added up when the activations are gone, in what the common stream had of them.
        more = max(0.0, adding_bytes(config, stage, division) - of_common_stream)
        parts = _sum(parts, {MemoryPart.TABLE_GRADIENTS: more})
    parts = _sum(parts, {MemoryPart.MEMORY: fetched_bytes(config, stage, division)})
    if stage.has_embedding:
        parts = _sum(parts, {MemoryPart.RESIDUAL: tokens * model.hidden_size * element})
    if config.parallel.pipeline > 1:
        parts = _sum(parts, {MemoryPart.MESSAGES: tokens * model.hidden_size * element})
    return parts


def _memorys(parts: Mapping[MemoryPart, float]) -> float:
    """Bytes that the memory's stream has allocated, of what backward needs."""
    return sum(parts.get(part, 0.0) for part in (MemoryPart.MEMORY, MemoryPart.EXCHANGE))


def _backbones(parts: Mapping[MemoryPart, float]) -> float:
    """Bytes that the common stream has allocated, of what backward needs."""
    return _total(parts) - _memorys(parts)


def _returning(config: RunConfig, stage: Stage, tokens: int, num_microbatches: int) -> float:
    """Bytes that one stream has freed and another has used, as far as the host does not yet know that it is done.

    Where passes are in flight, those are the memories' outputs when backward begins. Blocks that keep nothing free a
    memory's input and output in each forward pass, and in backward the gradients of both, and of its weights.
    """
    blocks = stage.backward if stage.backward.num else stage.blocks
    forward, backward = (launches_of(config, stage, blocks, way) / blocks.num for way in (0, 1))
    element, hidden = config.train.element_bytes, tokens * config.model.hidden_size * config.train.element_bytes
    if not stage.backward.num:
        launches, freed = forward, 2.0 * hidden
    elif config.train.recompute == "full":
        weights = (stage.memory.retrieval + stage.memory.projections) / max(1, stage.blocks.memories)
        launches, freed = 2 * forward + backward, 6.0 * hidden + element * weights
    else:
        launches, freed = forward, 1.0 * hidden
    return blocks.beside / blocks.num * freed * min(LAUNCHES_AHEAD / launches, blocks.num * num_microbatches)


def loss_bytes(config: RunConfig, tokens: int) -> float:
    """Logits of a chunk of tokens, in bf16 and in fp32 (in fp32: once), for this rank's part of the vocabulary."""
    model, limit = config.model, config.train.loss_chunk_tokens
    vocabulary = padded_size(model.vocab_size or 0, model.vocab_size_multiple) / config.parallel.tensor
    at_a_time = tokens if limit is None else min(tokens, limit)
    return at_a_time * vocabulary * (6 if config.train.precision == "bf16" else 4)


def block_kept(
    config: RunConfig, stage: Stage, blocks: Blocks, trained: Blocks, tokens: int
) -> dict[MemoryPart, float]:
    """Bytes that backward of one block needs of its forward pass, by part: the mean over some blocks of a stage.

    A weight that is not trained needs no input: a norm not its normalised values nor the linear behind it what it is
    given, and a feed-forward not the product that goes into its output projection.

    Args:
        blocks: the mean over which it is.
        trained: those of them that are trained.
    """
    model, element = config.model, config.train.element_bytes
    share = 1 / max(1, blocks.num)
    core = 0.0 if config.train.recompute == "selective" else _core_kept(config, tokens)
    norms = trained.norms * _norm_bytes(element) + (blocks.norms - trained.norms) * _norm_bytes(element, trained=False)
    ffns = trained.ffns * _ffn_kept(model, tokens, element)
    ffns += (blocks.ffns - trained.ffns) * _ffn_kept(model, tokens, element, trained=False)
    parts = {
        MemoryPart.RESIDUAL: float(share * norms * tokens * model.hidden_size),
        MemoryPart.ATTENTION: tokens * attention_kept(model, element) + core,
        MemoryPart.FEED_FORWARD: share * ffns,
    }
    if not stage.families or not blocks.memories:
        return parts
    # The share of the stage's memories that are in these blocks.
    share *= blocks.memories / stage.blocks.memories
    of_memories = _sum(*(_memories_kept(config, family, tokens) for family in stage.families))
    return {**parts, **{part: share * num for part, num in of_memories.items()}}


def _memories_kept(config: RunConfig, family: FamilyInStage, tokens: int) -> dict[MemoryPart, float]:
    """Bytes that backward of all memory layers of a family needs of their forward pass."""
    own, memory, element = family.costs, family.memory, config.train.element_bytes
    per_token = 4 * own.kept_wide + element * own.kept_narrow + 8 * own.kept_ids
    shared = family_of(memory).shared_kept_wide(memory, config.model.hidden_size)
    of_lookups = Counter(family.lookups).items()
    return {
        MemoryPart.MEMORY: tokens * per_token + own.kept_keys * element + len(family.lookups) * tokens * 4 * shared,
        MemoryPart.EXCHANGE: sum(n * _lookup_kept(config, memory, rows, tokens) for rows, n in of_lookups),
    }


def _with_memory(
    config: RunConfig, stage: Stage, kept: dict[MemoryPart, float], blocks: Blocks, tokens: int
) -> dict[MemoryPart, float]:
    """Bytes of one block that has a memory, of the family that keeps the most, or of both where a block has both; from the
    mean over all blocks, of which some have none."""
    if len(stage.families) > 1:
        layers = [
            {part: num / family.layers for part, num in _memories_kept(config, family, tokens).items()}
            for family in stage.families
        ]
        most = _sum(*layers) if paired_in_attention(config.model) else max(layers, key=_total)
        return kept | (most if blocks.memories else {})
    per_block = min(1.0, blocks.memories / max(1, blocks.num)) or 1.0
    return kept | {part: kept[part] / per_block for part in (MemoryPart.MEMORY, MemoryPart.EXCHANGE) if part in kept}


def _core_kept(config: RunConfig, tokens: int) -> float:
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
    ids = group * reads * _id_bytes(config, memory, bank_rows) * (1 if lookup.bins == 1 else 2)
    if group == 1 and not pre_width:
        coefficients = 0
    # Products before their activation and after it.
    products = reads * element * (1 if lookup.activation == "none" else 2) if pre_width else 0
    return ids + coefficients + row_parts * tokens * pre_width * element + products + sums


def _id_bytes(config: RunConfig, memory: MemoryConfig, bank_rows: int) -> int:
    """Bytes of an id, and of a bin, as a lookup keeps them."""
    bins = memory.lookup.bins if config.parallel.memory > 1 else 1
    return bytes_per_id(bank_rows * bins)


def gradients_under_way(config: RunConfig, stage: Stage, tokens: int) -> dict[MemoryPart, float]:
    """Bytes that the last lookup's table gradients hold beside the rest of backward, on a stream of their own
    (`kernels.common.gradient_stream`); of two families the larger one's.

    They are ids, and bins; their order, rows and 8 bytes of positions; coefficients, the gradients of products, and
    vectors, of which parts of rows have as many times more.
    """
    if not stage.backward.memories:
        return {}
    found = [_gradients_under_way(config, family, tokens) for family in stage.families if family.backward_lookups]
    return max(found, key=_total, default={})


def _gradients_under_way(config: RunConfig, family: FamilyInStage, tokens: int) -> dict[MemoryPart, float]:
    memory, group, element = family.memory, config.parallel.memory, config.train.element_bytes
    lookup, has_products = memory.lookup, memory.width("pre_values") > 0
    entries, per_id = group * tokens * lookup.rows, _id_bytes(config, memory, max(family.lookups))
    coefficients = (coefficients_per_rank(lookup.scores, config.parallel.memory_columns) + has_products) * element
    widths = lookup.bins * memory.width("values") + memory.width("pre_values")
    vectors = config.parallel.memory_rows * tokens * widths * element
    return {
        MemoryPart.EXCHANGE: float(entries * (per_id * (1 + (lookup.bins > 1)) + coefficients) + vectors),
        MemoryPart.MEMORY: float(entries * (per_id + 8)),
    }


@dataclass(frozen=True)
class Passing:
    """Bytes that one block adds at its largest moments to what backward needs of its forward pass, by part.

    Attributes:
        residual: in all moments.
        of_backbone: in the largest of feed-forward and attention.
        of_memory: in the memory's largest.
        on_memory_stream: bytes of the largest moment of the memory's own stream.
        on_gradient_stream: the same of the stream that adds gradients of tables up.
    """

    residual: dict[MemoryPart, float] = field(default_factory=dict)
    of_backbone: dict[MemoryPart, float] = field(default_factory=dict)
    of_memory: dict[MemoryPart, float] = field(default_factory=dict)
    on_memory_stream: float = 0.0
    on_gradient_stream: float = 0.0


def block_passing(
    config: RunConfig,
    stage: Stage,
    tokens: int,
    kept: dict[MemoryPart, float],
    under_way: dict[MemoryPart, float],
) -> Passing:
    """Bytes that one block adds at its largest moments to `kept`, the bytes that backward needs of its forward pass.

    Those of the backbone: backward of the feed-forward, see `_ffn_backward`; backward of attention across ranks, when
    what the feed-forward kept is gone, see `attention_backward`. Those of the memory, in all of which the lookup before
    may still have its gradients `under_way`, but for the sort. Selection of entries: the family's figure. Read: the scores
    of all keys, and coefficients as they are cut for ranks and as they leave, or before them rows and bins in one
    number. Backward of the read: the ids' sort, their rows and 8 bytes of positions, with the sort's scratch. Backward
    of the retrieval: the gradients of the key scores, when what the lookup and the entries kept is gone.
    """
    model, element = config.model, config.train.element_bytes
    backbone: list[dict[MemoryPart, float]] = [{}]
    if stage.backward.ffns:
        trained = stage.trained_blocks.ffns > 0
        backbone.append({MemoryPart.BACKWARD: _ffn_backward(config, tokens, trained=trained)})
    if config.parallel.context > 1:
        of_ffn = kept.get(MemoryPart.FEED_FORWARD, 0.0)
        backbone.append({MemoryPart.BACKWARD: attention_backward(config, tokens), MemoryPart.FEED_FORWARD: -of_ffn})
    moments: list[dict[MemoryPart, float]] = [{}]
    on_memory_stream = on_gradient_stream = 0.0
    memory = model.memory
    if memory is not None and stage.reads_before_blocks and stage.backward.memories:
        # Gradient of a shared read: the sum so far, what one more block adds, and both; the block itself is gone.
        shared = tokens * memory.lookup.bins * memory.width("values") * element
        gone = (MemoryPart.RESIDUAL, MemoryPart.ATTENTION, MemoryPart.FEED_FORWARD)
        whole = config.train.recompute == "full"
        moments.append({MemoryPart.BACKWARD: 3.0 * shared, **{part: -kept[part] for part in gone if not whole}})
    elif stage.families and stage.backward.memories:
        for family in stage.families:
            moments += _moments(config, family, tokens, kept)
            on_gradient_stream = max(on_gradient_stream, _sort_bytes(config, family, tokens))
        operands = under_way.get(MemoryPart.EXCHANGE, 0.0)
        on_memory_stream = max(0.0, *(_total(moment) + operands for moment in moments))
        moments = [_sum(moment, under_way) for moment in moments]
        moments.append({MemoryPart.MEMORY: on_gradient_stream})
    return Passing(
        # The gradient that goes down the residual stream, and what a part adds to it.
        {MemoryPart.BACKWARD: 2.0 * tokens * model.hidden_size * element},
        max(backbone, key=_total),
        max(moments, key=_total),
        on_memory_stream,
        on_gradient_stream,
    )


def _moments(
    config: RunConfig, family: FamilyInStage, tokens: int, kept: dict[MemoryPart, float]
) -> list[dict[MemoryPart, float]]:
    """Largest moments of a memory layer of a family: selection, read, and backward of the retrieval; see
    `block_passing`."""
    element, group, lookup = config.train.element_bytes, config.parallel.memory, family.memory.lookup
    ids, per_id = group * tokens * lookup.rows, _id_bytes(config, family.memory, max(family.lookups))
    cut = 2 * coefficients_per_rank(lookup.scores, config.parallel.memory_columns) * element
    both = per_id * (lookup.bins > 1)
    passing = max(cut, both) * ids if group > 1 else 0
    of_scores = 4 * tokens * family.costs.backward_wide / len(family.lookups)
    entries = tokens * family.costs.kept_by_entries / len(family.lookups)
    return [
        {MemoryPart.MEMORY: 4.0 * tokens * family.costs.select_wide / len(family.lookups)},
        {MemoryPart.MEMORY: of_scores / 2, MemoryPart.EXCHANGE: float(passing)},
        {
            MemoryPart.BACKWARD: of_scores,
            MemoryPart.MEMORY: -entries,
            MemoryPart.EXCHANGE: -kept[MemoryPart.EXCHANGE],
        },
    ]


def _sort_bytes(config: RunConfig, family: FamilyInStage, tokens: int) -> float:
    """Bytes of the sort of a lookup's ids, their rows and 8 bytes of positions."""
    per_id = _id_bytes(config, family.memory, max(family.lookups))
    return float((per_id + 8 + SORT_SCRATCH) * config.parallel.memory * tokens * family.memory.lookup.rows)


def _ffn_kept(model: ModelConfig, tokens: int, element: int, *, trained: bool = True) -> float:
    """Bytes that one feed-forward keeps: gate and up, and their product where it is trained."""
    if model.moe is not None:
        return experts_kept(model, model.moe, tokens, element)
    return (2.0 + trained) * tokens * model.ffn_hidden_size * element


def _ffn_backward(config: RunConfig, tokens: int, *, trained: bool) -> float:
    """Bytes of one feed-forward's gradients: of gate and up, their product, and, where it is trained, the weight."""
    model, element = config.model, config.train.element_bytes
    if model.moe is not None:
        return experts_backward(model, model.moe, tokens, element)
    width = model.ffn_hidden_size
    return element * (3.0 * tokens * width + trained * 2 * width * model.hidden_size / config.parallel.tensor)


def _norm_bytes(element: int, *, trained: bool = True) -> int:
    """Bytes per element that a norm keeps: the input, and the output where the weights that it feeds are trained."""
    return (1 + trained) * element


def _total(parts: Mapping[MemoryPart, float]) -> float:
    return sum(parts.values())


def _sum(*parts: dict[MemoryPart, float]) -> dict[MemoryPart, float]:
    found = {part for each in parts for part in each}
    return {part: sum(each.get(part, 0.0) for each in parts) for part in MemoryPart if part in found}
