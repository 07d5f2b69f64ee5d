"""Bytes that a rank of every stage sends in one optimizer step, by the axis of the group, in closed formulas.

`megamem dryrun` counts the same at the calls themselves. Sums over a group are counted as rings send them.

Legend: B bytes of a microbatch's hidden states on this rank, m microbatches, TP tensor-parallel ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

from megamem.token_tables.config import ValuesConfig
from pretrain.config.schema import RunConfig
from pretrain.config.updates import GRADIENT_BYTES, MUON, ROW_WISE, matrix_update, table_gradient_bytes, table_update
from pretrain.planning.costs.experts import dispatched_bytes
from pretrain.planning.costs.matrices import num_elements
from pretrain.planning.costs.pipeline_stages import Blocks, Division, Stage, stages_of
from pretrain.planning.costs.residual_streams import state_bytes
from pretrain.planning.costs.row_bytes import (
    has_read_rows,
    ids_ahead_bytes,
    most_rows_of_families,
    ranked_bytes,
    replica_bytes,
)
from pretrain.planning.costs.traffic import context_bytes, copies_bytes, follows_heads, halo_bytes, lookup_bytes
from pretrain.planning.costs.weights import reduced_tables, trained_dense

_ROW_SUM = 4


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
        + ranked_bytes(config, stage, division),
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


def tensor_bytes(config: RunConfig, stage: Stage, division: Division) -> float:
    """Bytes of hidden states and latents that a rank sends to tensor-parallel ranks in one microbatch."""
    elements = _tensor_passes(config, stage) * config.model.hidden_size + _latents(config, stage)
    elements += _shared_heads(config, stage) + _mixed_values(config, stage)
    return (config.parallel.tensor - 1) * division.rank_tokens * elements * config.train.element_bytes


def _tensor_passes(config: RunConfig, stage: Stage) -> float:
    """Gathers and scatters of a microbatch's hidden states over tensor-parallel ranks: each sends (TP - 1) B.

    A pair of linears gathers its input and scatters its output: twice forward, and twice backward, which gathers the
    input again for the gradient of a weight that is trained. A block has two pairs, unless experts or a memory stand for
    the second. Heads without an output projection are exchanged, which sends 1 / TP of a scatter. Blocks below
    what is trained go forward alone.
    """

    def pairs(blocks: Blocks) -> int:
        return blocks.num + (blocks.ffns if config.model.moe is None else 0)

    def both_ways(blocks: Blocks) -> float:
        return 2 * pairs(blocks) - blocks.unprojected * (1 - 1 / config.parallel.tensor)

    passes = both_ways(stage.blocks) + (2 if config.train.recompute == "full" else 1) * both_ways(stage.backward)
    # The embedding scatters, and gathers backward; the output projection scatters backward alone.
    passes += pairs(stage.trained_blocks)
    # So do the embedded tokens and the losses of a branch.
    passes += stage.branch_blocks * (3 + 2 * stage.trains_all)
    return passes + (1 + stage.trains_all) * stage.has_embedding + (2 + stage.trains_all) * stage.has_loss


def _latents(config: RunConfig, stage: Stage) -> float:
    """Elements per token that latent attention sends to each other rank besides, forward and backward.

    Their down-projection gathers hidden states as that of queries does, and their up-projection the latents, those of
    queries too: backward scatters the gradients, and gathers again for those of weights that are trained. A column of
    latents is computed on one rank, and all columns go to the rank that has the token; rotary keys are gathered.
    """
    latent = config.model.latent_attention
    if latent is None:
        return 0.0
    of_queries = latent.query_latent_dim or 0
    exchanged = (latent.latent_dim + latent.rotary_dim + of_queries) / config.parallel.tensor + latent.rotary_dim

    def gathered(blocks: Blocks) -> int:
        of_keys_and_values = (blocks.num + blocks.split_latents) * latent.latent_dim
        return blocks.num * (config.model.hidden_size + of_queries) + of_keys_and_values

    def one_way(blocks: Blocks) -> float:
        return gathered(blocks) + blocks.num * exchanged

    backward_passes = 2 if config.train.recompute == "full" else 1
    return one_way(stage.blocks) + backward_passes * one_way(stage.backward) + gathered(stage.trained_blocks)


def _shared_heads(config: RunConfig, stage: Stage) -> float:
    """Elements per token of queries, keys and values that each rank gathers where there are fewer key/value heads than ranks,
    and whose gradients it scatters."""
    model = config.model
    if model.latent_attention is not None or config.parallel.tensor <= model.query_groups:
        return 0.0
    passes = stage.blocks.num + (2 if config.train.recompute == "full" else 1) * stage.backward.num
    return passes * model.attention_head_dim * (model.num_attention_heads + 2 * model.query_groups)


def _mixed_values(config: RunConfig, stage: Stage) -> float:
    """Elements per token that memories in attention's values send to each other rank (`ValuesConfig.handed_to_heads`).

    A rank has all heads of its own tokens, and hands each rank its heads, or all of them where ranks share one.
    """
    model, tensor = config.model, config.parallel.tensor
    if model.latent_attention is not None:
        return 0.0
    parts, elements = (1 if tensor > model.query_groups else tensor), 0.0
    for family in stage.families:
        memory = family.memory
        if isinstance(memory, ValuesConfig):
            columns = model.query_groups * model.attention_head_dim
            of_layer = memory.handed_to_heads(columns, follows_heads=follows_heads(config, memory))
            passes = len(family.lookups) + (2 if config.train.recompute == "full" else 1) * len(family.backward_lookups)
            elements += passes * (of_layer / parts + memory.handed_to_tokens * max(1, model.query_groups / tensor))
    return elements


def _tensor_sums(config: RunConfig, stage: Stage, division: Division) -> float:
    """Gradients of weights that all tensor-parallel ranks hold, and three sums over the vocabulary per token and loss."""
    size = config.parallel.tensor
    num_losses = stage.has_loss * (1 + stage.branch_blocks)
    of_loss = 3 * 4 * division.loss_tokens * division.num_microbatches * num_losses
    return 2 * (size - 1) / size * (GRADIENT_BYTES * stage.trained.whole + of_loss)
