"""Bytes that a step adds at its peak to what a rank holds from the first step to the last."""

from __future__ import annotations

from collections.abc import Mapping

from pretrain.config.overlap import memory_runs_beside
from pretrain.config.schema import RunConfig
from pretrain.planning.bytes.block_kept import (
    block_kept,
    core_kept,
    gradients_under_way,
    loss_bytes,
    norm_bytes,
    one_with_memory,
    operands_of_joined,
    reads_kept,
)
from pretrain.planning.bytes.block_passing import Passing, block_passing
from pretrain.planning.bytes.kept_streams import kept_streams
from pretrain.planning.bytes.launches import LAUNCHES_AHEAD, launches_of
from pretrain.planning.bytes.memory_parts import MemoryPart, merged, total
from pretrain.planning.bytes.row_bytes import adding_bytes, fetched_bytes, has_read_rows
from pretrain.planning.counts.branch import kept_around_branch
from pretrain.planning.counts.pipeline_stages import Division, Stage
from pretrain.planning.counts.residual_streams import end_kept, received_bytes, state_bytes, streams_bytes


def in_flight(config: RunConfig, rank: int, division: Division) -> int:
    """Forward passes of chunks whose backward pass has not begun, at most: those of Megatron's 1F1B schedules."""
    pipeline, virtual = config.parallel.pipeline, config.parallel.virtual_pipeline
    if virtual == 1:
        return min(division.num_microbatches, pipeline - rank)
    return min(division.num_microbatches * virtual, 2 * (pipeline - rank - 1) + (virtual - 1) * pipeline + 1)


def activations(
    config: RunConfig, stage: Stage, rank: int, division: Division, *, on_gpu: bool
) -> dict[MemoryPart, float]:
    """Bytes that passes in flight keep, and the larger of one block's backward pass and the loss, by part.

    Args:
        on_gpu: True if memories and gradients of tables can have streams of their own, and the loss kernels of its own.
    """
    beside = on_gpu and memory_runs_beside(config)
    model, train = config.model, config.train
    tokens, element = division.rank_tokens, train.element_bytes
    flights = in_flight(config, rank, division)
    # Blocks below what is trained keep nothing.
    blocks_in_flight = flights * stage.backward.num / config.parallel.virtual_pipeline
    kept = block_kept(config, stage, stage.backward, stage.trained_blocks, tokens)
    # One trained block, if any is trained.
    one = stage.trained_blocks if stage.trained_blocks.num else stage.backward
    of_one = one_with_memory(config, stage, block_kept(config, stage, one, stage.trained_blocks, tokens), one, tokens)
    under_way = gradients_under_way(config, stage, tokens) if beside else {}
    passing = block_passing(config, stage, tokens, of_one, under_way)
    waiting: dict[MemoryPart, float] = {}
    block = of_one
    if not stage.backward.num:
        # The forward pass of one block.
        passing, block = Passing(), block_kept(config, stage, stage.blocks, stage.blocks, tokens)
    elif train.recompute == "full":
        # Every block keeps its input; a whole block only while its backward pass runs, at most one with a memory.
        arrivals = stage.backward.arrivals / max(1, stage.backward.num) * model.hidden_size * element
        waiting = {MemoryPart.RESIDUAL: blocks_in_flight * tokens * (state_bytes(model, element) + arrivals)}
        reads = reads_kept(config, stage, stage.backward, tokens)
        waiting = merged(waiting, {part: blocks_in_flight * num for part, num in reads.items()})
        block = merged(block, {part: -num for part, num in reads.items()})
        if model.moe is not None:
            # Megatron's dispatchers keep the graphs of their last pass, and those the gradients of the blocks' inputs.
            left = (stage.backward.num - 1) * tokens * model.hidden_size * element
            block = merged(block, {MemoryPart.BACKWARD: left})
    else:
        waiting, block = {part: blocks_in_flight * num for part, num in kept.items()}, {}
        if train.recompute == "selective":
            # One core's forward pass again, with its outputs, for its backward pass.
            outputs = tokens * model.num_attention_heads * model.attention_head_dim * element
            block = {MemoryPart.ATTENTION: core_kept(config, tokens) + outputs}
        again = kept_streams(config, stage).at_once * tokens * streams_bytes(model, element)
        block = merged(block, {MemoryPart.RESIDUAL: float(again)})
    num_receiving = sum(not chunk.has_embedding for chunk in stage.chunks)
    received = flights * num_receiving / len(stage.chunks) * tokens * received_bytes(model, element)
    waiting = merged(waiting, {MemoryPart.RESIDUAL: received})
    waiting = merged(waiting, {MemoryPart.LOSS: kept_around_branch(config, stage.branch_blocks, tokens)})
    at_loss: dict[MemoryPart, float] = {}
    if stage.has_loss:
        of_end = end_kept(model, element, keeps_streams=train.recompute_streams is None)
        at_loss = {
            MemoryPart.RESIDUAL: tokens * (norm_bytes(element, trained=stage.trains_all) * model.hidden_size + of_end),
            MemoryPart.LOSS: loss_bytes(config, stage, division.loss_tokens, on_gpu=on_gpu),
        }
        if division.num_microbatches > 1:
            at_loss = merged(at_loss, under_way)
    of_backbone = merged(block, passing.residual, passing.of_backbone)
    of_memory = merged(block, passing.residual, passing.of_memory)
    parts = merged(waiting, max(of_backbone, of_memory, at_loss, key=total))
    of_common_stream = total(parts)
    if beside:
        of_common_stream = _backbones(waiting) + max(_backbones(of_backbone), _backbones(at_loss))
        memory = _memorys(waiting) + _memorys(block) + passing.on_memory_stream
        pools = of_common_stream + memory + passing.on_gradient_stream
        parts[MemoryPart.STREAMS] = pools - total(parts) + _returning(config, stage, tokens, division.num_microbatches)
    if has_read_rows(config):
        # Rows are added up when the activations are gone, in what the common stream had of them, but for lookups of the last
        # pass that are joined.
        adding = adding_bytes(config, stage, division) + operands_of_joined(config, stage, tokens)
        more = max(0.0, adding - of_common_stream)
        parts = merged(parts, {MemoryPart.TABLE_GRADIENTS: more})
    parts = merged(parts, {MemoryPart.MEMORY: fetched_bytes(config, stage, division)})
    if stage.has_embedding:
        parts = merged(parts, {MemoryPart.RESIDUAL: tokens * model.hidden_size * element})
    if config.parallel.pipeline > 1:
        parts = merged(parts, {MemoryPart.MESSAGES: tokens * state_bytes(model, element)})
    return parts


def _memorys(parts: Mapping[MemoryPart, float]) -> float:
    """Bytes that the memory's stream has allocated, of what backward needs."""
    return sum(parts.get(part, 0.0) for part in (MemoryPart.MEMORY, MemoryPart.EXCHANGE))


def _backbones(parts: Mapping[MemoryPart, float]) -> float:
    """Bytes that the common stream has allocated, of what backward needs."""
    return total(parts) - _memorys(parts)


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
