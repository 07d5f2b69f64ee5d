"""Bytes that a rank of every stage sends in one optimizer step, by the axis of the group, in closed formulas.

`megamem dryrun` counts the same at the calls themselves. Sums over a group are counted as rings send them.

Legend: m microbatches.
"""

from __future__ import annotations

from dataclasses import dataclass

from lab.bench.mean_traffic import lookup_bytes
from pretrain.config.schema import RunConfig
from pretrain.config.updates import GRADIENT_BYTES, ROW_WISE, table_gradient_bytes, table_update
from pretrain.planning.bytes.row_bytes import (
    chooses_by_step,
    has_files,
    has_read_rows,
    most_rows_of_families,
    replica_bytes,
)
from pretrain.planning.bytes.weights import reduced_tables, trained_dense
from pretrain.planning.counts.experts import dispatched_bytes
from pretrain.planning.counts.pipeline_stages import Division, Stage, stages_of
from pretrain.planning.counts.residual_streams import state_bytes
from pretrain.planning.seconds.tensor_traffic import tensor_bytes
from pretrain.planning.seconds.traffic import context_bytes, copies_bytes, halo_bytes
from pretrain.planning.seconds.update_seconds import pieces_of_experts, pieces_of_matrices

_ROW_SUM = _SCORE = 4


@dataclass(frozen=True)
class StageSent:
    """Bytes that one rank of a stage sends per step.

    Attributes:
        memory: bytes of lookups, of the next step's ids for tables in files, and of tokens that go to experts.
        context: bytes of attention across cut sequences, and of what else looks back across their cuts.
        tensor: bytes of tensor parallelism in forward and backward, and of what looks back across its cuts.
        halo: bytes of what looks back across the cuts of both.
        messages: hidden states, or streams with what travels with them, and their gradients, to neighbouring stages.
        tables: reductions of gradients and gathers of weights, of tables and experts, rows that replicas have read, and sums
            per row over columns.
        dense: reductions of gradients and gathers of weights, of all else.
        matrices: pieces of hidden matrices that Muon updates, on the average over the ranks of the stage.
        copies: sums over the stages of banks that each holds a copy of.
    """

    memory: float
    context: float
    tensor: float
    messages: float
    tables: float
    dense: float
    matrices: float
    copies: float
    halo: float


def stages_sent(config: RunConfig, num_ranks: int) -> tuple[StageSent, ...]:
    """Bytes that a rank of every stage sends per step, first stage to last."""
    division = Division.of(config, num_ranks)
    return tuple(_sent(config, stage, division) for stage in stages_of(config))


def _sent(config: RunConfig, stage: Stage, division: Division) -> StageSent:
    layout, element, m = config.parallel, config.train.element_bytes, division.num_microbatches
    message = division.rank_tokens * state_bytes(config.model, element)
    # A chunk hands its outputs to the next one and its gradients to the one before, if that has a backward pass.
    crossings = len(stage.chunks) - stage.has_loss + stage.gradients_sent if layout.pipeline > 1 else 0
    width = GRADIENT_BYTES + element
    saved = (GRADIENT_BYTES - table_gradient_bytes(config.optimizer)) * stage.trained.table_elements / layout.memory

    # The group in which hidden states look back: that of the one axis that cuts sequences, or that of both.
    halo = halo_bytes(config, stage)
    along = "tensor" if layout.context == 1 else "context" if layout.tensor == 1 else "halo"

    def ring(num_bytes: float, size: int) -> float:
        return num_bytes * (size - 1) / size

    return StageSent(
        memory=m * (lookup_bytes(config, stage, division) + dispatched_bytes(config, stage, division))
        + ids_ahead_bytes(config, division)
        + _ranked_bytes(config, stage, division),
        context=m * (context_bytes(config, stage) + halo.ids + halo.hidden * (along == "context")),
        tensor=m * (tensor_bytes(config, stage, division) + halo.hidden * (along == "tensor"))
        + _tensor_sums(config, stage, division),
        halo=m * halo.hidden * (along == "halo"),
        messages=m * crossings * message,
        tables=ring(width * reduced_tables(config, stage) - saved, division.table_replicas)
        + replica_bytes(config, stage, division)
        + _row_sums(config, stage, division),
        dense=ring(width * trained_dense(config, stage), division.replicas * layout.context),
        matrices=pieces_of_matrices(config, stage, division) + pieces_of_experts(config, stage, division),
        copies=copies_bytes(config, stage, division),
    )


def ids_ahead_bytes(config: RunConfig, division: Division) -> float:
    """Bytes that a rank sends per step so that all of its stage know the next one's tokens, where tables lie in files: ids and
    positions, in 4 bytes each, of its share of the samples."""
    if not has_files(config):
        return 0.0
    size, train = division.stage_ranks, config.train
    return (size - 1) * -(-train.global_batch_size // size) * train.sequence_length * 2 * 4


def _ranked_bytes(config: RunConfig, stage: Stage, division: Division) -> float:
    """Bytes that a rank sends so that the ranks that have parts of a table's rows rank them together: scores of rows."""
    layout = config.parallel
    if layout.memory_rows == 1 or not has_read_rows(config) or not chooses_by_step(config):
        return 0.0
    of_all = most_rows_of_families(config, stage, division, num_replicas=division.table_replicas)
    return (layout.memory - 1) * _SCORE * sum(rows for _, rows in of_all)


def _row_sums(config: RunConfig, stage: Stage, division: Division) -> float:
    """Bytes of the sums per row that ranks with other columns of the same rows add up, for the rows that each owns.

    Without those that replicas send each other where a range ends within a row: one number per replica.
    """
    columns = config.parallel.memory_columns
    if table_update(config.optimizer) is not ROW_WISE:
        return 0.0
    if has_read_rows(config):
        # Each replica updates the rows of all.
        of_all = most_rows_of_families(config, stage, division, num_replicas=division.table_replicas)
        rows = sum(len(memory.tables) * rows for memory, rows in of_all)
    else:
        of_banks = sum(len(bank.memory.tables) * bank.num_rows for bank in stage.trained_banks)
        rows = of_banks / config.parallel.memory_rows / division.table_replicas
    sums = _ROW_SUM * rows
    return 2 * (columns - 1) / columns * sums


def _tensor_sums(config: RunConfig, stage: Stage, division: Division) -> float:
    """Gradients of weights that all tensor-parallel ranks hold, and three sums over the vocabulary per token and loss."""
    size = config.parallel.tensor
    num_losses = stage.has_loss * (1 + stage.branch_blocks)
    of_loss = 3 * 4 * division.loss_tokens * division.num_microbatches * num_losses
    return 2 * (size - 1) / size * (GRADIENT_BYTES * stage.trained.whole + of_loss)
