"""Bytes that a rank's device holds at the peak of a step, by part and stage, in closed formulas.

`megamem dryrun` counts the same on the real model. Bytes are those that tensors ask for: an allocator rounds them up.
"""

from __future__ import annotations

import math

from pretrain.config.schema import RunConfig
from pretrain.config.updates import ADAMW, GRADIENT_BYTES, MAIN_WEIGHT_BYTES
from pretrain.planning.bytes.activations import activations
from pretrain.planning.bytes.block_kept import gradients_under_way
from pretrain.planning.bytes.held import bytes_in_files, state_bytes
from pretrain.planning.bytes.memory_parts import MemoryPart, StageBytes, merged
from pretrain.planning.bytes.row_bytes import fetched_bytes, has_files, has_read_rows, kept_bytes
from pretrain.planning.bytes.state import saved_by_matrices, stored_dense, stored_table
from pretrain.planning.counts.pipeline_stages import Division, Stage, stages_of

ITEM_BYTES = 1 << 26
"""Bytes that a writing thread copies to the host at a time: `pretrain.checkpoint.write_plan` has the same."""
CHUNK_BYTES = 1 << 30
"""Bytes of a chunk of the buffer of an asynchronous save: `pretrain.checkpoint.staging` has the same."""
WINDOW_ELEMENTS = 1 << 22
"""Elements that pass through the host at a time: `pretrain.engine.tables.value_offload` has the same."""


def stage_bytes(config: RunConfig, num_ranks: int, *, on_gpu: bool = True) -> tuple[StageBytes, ...]:
    """Bytes of a rank of every stage, first to last. The formulas of activations are for bf16.

    Args:
        on_gpu: True if the device has streams, each with memory of its own.
    """
    division = Division.of(config, num_ranks)
    save = _save_bytes(config, checkpoint_bytes(config) / num_ranks)
    return tuple(
        StageBytes(
            merged(
                state_bytes(config, stage, division),
                _rows_kept(config, stage, division),
                activations(config, stage, rank, division, on_gpu=on_gpu),
            ),
            _host(config, stage, division, on_gpu=on_gpu),
            save,
            bytes_in_files(config, stage),
        )
        for rank, stage in enumerate(stages_of(config))
    )


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


def _rows_kept(config: RunConfig, stage: Stage, division: Division) -> dict[MemoryPart, float]:
    """Bytes of the gradients of rows that were read, as a step's last backward pass finds them."""
    if not has_read_rows(config):
        return {}
    kept = gradients_under_way(config, stage, division.rank_tokens).get(MemoryPart.EXCHANGE, 0.0)
    return {MemoryPart.TABLE_GRADIENTS: kept_bytes(stage, division, kept)}


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
