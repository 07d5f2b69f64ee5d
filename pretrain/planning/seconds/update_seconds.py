"""Seconds of what comes after the last backward pass: reductions and gathers that nothing hides, and the update."""

from __future__ import annotations

from pretrain.config.schema import RunConfig
from pretrain.config.updates import (
    GRADIENT_BYTES,
    MUON,
    ROW_WISE,
    matrix_update,
    orthogonalisation_flops,
    table_gradient_bytes,
    table_update,
)
from pretrain.planning.bytes.row_bytes import has_read_rows, replica_bytes, updated_elements
from pretrain.planning.bytes.weights import reduced_tables, trained_dense, trained_tables
from pretrain.planning.counts.matrices import num_elements
from pretrain.planning.counts.pipeline_stages import Division, Stage
from pretrain.planning.seconds.hardware import Hardware
from pretrain.planning.seconds.reductions import Weights, exposed, ring_s
from pretrain.planning.seconds.time_parts import TimePart
from pretrain.planning.seconds.traffic import copies_bytes

_ADAM_BYTES = 28
"""AdamW on fp32: weight, gradient and two moments are read, weight and moments are written."""
_PER_UPDATED_ROW = 190
"""Updates by row: what the operations move that make a row's factor. The dry run of a GPU counts the same."""


def seconds_after_backward(
    config: RunConfig, stage: Stage, division: Division, hardware: Hardware, microbatch_s: float
) -> dict[TimePart, float]:
    """Reductions and gathers that the last backward and the next forward pass do not hide, and the update."""
    layout, element = config.parallel, config.train.element_bytes
    # Backward is two of the three to four passes of a microbatch, forward one.
    passes = 4 if config.train.recompute == "full" else 3
    waits = exposed(config, stage, division, hardware, microbatch_s / passes, microbatch_s * (passes - 1) / passes)
    kinds = ((TimePart.MEMORY_REDUCTION, Weights.TABLES), (TimePart.REDUCTION, Weights.DENSE))
    parts = {part: waits.reduce_s[kind] + waits.gather_s[kind] for part, kind in kinds}
    # After all else stages add up the gradients of banks that each has a copy of, and replicas the rows that they have read.
    for sent, size, stride in (
        (copies_bytes(config, stage, division), layout.pipeline, division.stage_ranks),
        (replica_bytes(config, stage, division), division.table_replicas, layout.memory),
    ):
        # What a ring of this size sends is (size - 1) / size of it.
        seconds = ring_s(sent * size / max(1, size - 1), size, stride, hardware)
        parts[TimePart.MEMORY_REDUCTION] += seconds / config.optimizer.tables_every
    for part, weights, replicas in (
        (TimePart.MEMORY_UPDATE, trained_tables(config, stage), division.table_replicas),
        (TimePart.UPDATE, trained_dense(config, stage), division.replicas * layout.context),
    ):
        owned, tables = weights / replicas, stage.trained.table_elements / layout.memory / replicas
        if part == TimePart.MEMORY_UPDATE and has_read_rows(config):
            # Of the rows that were read alone, on each replica.
            tables = updated_elements(config, stage, division)
            weights = reduced_tables(config, stage) + tables
            owned = reduced_tables(config, stage) / replicas + tables
        on_host = part == TimePart.MEMORY_UPDATE and config.optimizer.value_offload == "cpu"
        # AdamW moves 28 bytes, and the weight is rounded from one of 4.
        updated = (28 + 4 + element) * owned
        if part == TimePart.MEMORY_UPDATE and table_update(config.optimizer) is ROW_WISE:
            updated += (table_step_bytes(config) - 32 - element) * tables
        gradient = table_gradient_bytes(config.optimizer) if part == TimePart.MEMORY_UPDATE else GRADIENT_BYTES
        # Zeroing writes the gradient, and the number of targets divides it in place; then it is read for its norm, and
        # clipped in place.
        moved = 3 * gradient * (weights + owned) + (0 if on_host else updated)
        updates = config.optimizer.tables_every if part == TimePart.MEMORY_UPDATE else 1
        parts[part] = moved / hardware.stream_bytes_per_s / updates
        parts[part] += _orthogonalisation_s(
            config, stage, division, hardware, of_experts=part == TimePart.MEMORY_UPDATE
        )
        if on_host:
            # docs/memory-parallel.md: the copies either way, or the host's own traffic, whichever takes longer.
            copied = (4 + element) * owned / (hardware.host_link_gb_per_s * 1e9)
            parts[part] += max(copied, 40 * owned / (hardware.host_memory_gb_per_s * 1e9))
    return parts


def table_step_bytes(config: RunConfig) -> float:
    """Bytes that an update of tables moves per element, on the device."""
    train = config.train
    if table_update(config.optimizer) is ROW_WISE:
        banks = [(bank.num_rows, config.model.family_of_bank(bank.index)) for bank in config.model.memory_plan.banks]
        num_rows = sum(rows * len(memory.tables) for rows, memory in banks) * config.parallel.memory_columns
        elements = sum(rows * memory.row_width for rows, memory in banks)
        # The gradient is read for the sums of squares and again, with the weights, which are written: as if all rows were.
        of_element = 2 * table_gradient_bytes(config.optimizer) + 2 * train.element_bytes
        return of_element + _PER_UPDATED_ROW * num_rows / max(1, elements)
    # Next to fp32 main weights there are those of the model in bf16.
    return _ADAM_BYTES + (train.element_bytes if train.precision == "bf16" else 0)


def _orthogonalisation_s(
    config: RunConfig, stage: Stage, division: Division, hardware: Hardware, *, of_experts: bool
) -> float:
    """Seconds of the products by which Muon updates hidden matrices, and of the exchange of their pieces; 0 without it.

    The ranks that own a matrix share the matrices between them, and one is never divided: no rank is done before the
    largest is.
    """
    if matrix_update(config.optimizer) is not MUON:
        return 0.0
    matrices, layout = stage.trained.matrices, config.parallel
    if of_experts:
        # Ranks of a memory group have different ones.
        shapes, num_workers = matrices.experts, division.table_replicas * layout.memory
        sent = pieces_of_experts(config, stage, division)
    else:
        shapes, num_workers = matrices.split + matrices.whole, division.replicas * layout.context * layout.tensor
        sent = pieces_of_matrices(config, stage, division)
    flops = orthogonalisation_flops(shapes, config.optimizer)
    products = max([sum(flops) / num_workers, *flops]) / hardware.flops_per_s
    in_node = num_workers <= hardware.gpus_per_node
    return products + sent / (hardware.nvlink_bytes_per_s if in_node else hardware.network_bytes_per_s)


def pieces_of_matrices(config: RunConfig, stage: Stage, division: Division) -> float:
    """Bytes of pieces of hidden matrices, experts' left out, that a rank sends to others where Muon updates them.

    Each element goes to the rank that works on its matrix, and its update to the owner: on every tensor-parallel rank,
    of matrices that all of them hold.
    """
    if matrix_update(config.optimizer) is not MUON:
        return 0.0
    size, matrices = division.replicas * config.parallel.context * config.parallel.tensor, stage.trained.matrices
    elements = 2 * num_elements(matrices.split) + (1 + config.parallel.tensor) * num_elements(matrices.whole)
    return (size - 1) / size**2 * elements * config.train.element_bytes


def pieces_of_experts(config: RunConfig, stage: Stage, division: Division) -> float:
    """Bytes of pieces of experts' matrices that a rank sends where Muon updates them, to ranks with the same ones."""
    if matrix_update(config.optimizer) is not MUON:
        return 0.0
    size, experts = division.table_replicas, num_elements(stage.trained.matrices.experts) / config.parallel.memory
    return 2 * (size - 1) / size**2 * experts * config.train.element_bytes
