"""Tables whose gradients are the rows that a step read (`optimizer.table_gradients: rows`).

Megatron's DDP does not know of them: it would keep a dense gradient, and a copy of the weights while it makes one. Lookups
are kept until a step's last backward pass, and then added up (`kernels.common.row_gradient`), by replicas together
(`pretrain.engine.tables.replica_rows`).

A bank that layers of several stages read has a copy on each (`megamem.parameters.declaration.mark_copy`). Its rows are those of the tokens,
which are the same on all stages: the copies have sums of the same rows in the same order, and add them up as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor, nn

from kernels.common.row_gradient import RowGradient
from kernels.common.table_gradient import give_gradient, gradient_of
from kernels.common.table_scale import TableScale, give_scale
from megamem.banks.bank import Bank
from megamem.model import MemoryGPTModel
from megamem.parameters.declaration import is_on_every_stage
from pretrain.config.schema import RunConfig
from pretrain.config.updates import has_bf16_gradients, keeps_rows
from pretrain.engine.tables.replica_rows import add_up_replicas


def row_gradient_of(parameter: Tensor) -> RowGradient | None:
    """The gradient of a table of this kind; None of other parameters."""
    found = gradient_of(parameter)
    return found if isinstance(found, RowGradient) else None


@contextmanager
def apart_from_ddp(chunk: MemoryGPTModel, config: RunConfig) -> Iterator[list[nn.Parameter]]:
    """Within the block, the tables whose gradients are not DDP's seem not to be trained. Afterwards they have such
    gradients, if theirs are rows, and a scale."""
    tables = [table for bank in chunk.own_banks for table in bank.parameters() if table.requires_grad]
    by_row = keeps_rows(config.optimizer)
    if not by_row and not has_bf16_gradients(config.optimizer):
        tables = []
    for table in tables:
        table.requires_grad_(False)
    yield tables
    for table in tables:
        table.requires_grad_(True)
        if by_row:
            give_gradient(table, RowGradient(*table.shape))
            give_scale(table, TableScale())


def count_repeats(chunks: Sequence[MemoryGPTModel]) -> None:
    """Say how often a microbatch reads the same rows of a bank of which every stage has a copy, or would have.

    Args:
        chunks: all of this rank, bare.
    """
    for chunk in chunks:
        for bank in chunk.own_banks:
            for table in bank.parameters() if bank.spec.on_every_stage else ():
                if (gradient := row_gradient_of(table)) is not None:
                    gradient.repeats = sum(_num_reads(each, bank) for each in chunks)


def _num_reads(chunk: MemoryGPTModel, bank: Bank) -> int:
    readers = [layer for layer in chunk.memory_layers if layer.view.bank == bank.spec.index]
    memory = readers[0].memory if readers else None
    return 1 if memory is not None and (memory.reads_once or memory.chooses_among_rows) else len(readers)


@torch.no_grad()
def add_up_rows(
    chunks: Sequence[DistributedDataParallel], num_tokens: Tensor | None, stages: dist.ProcessGroup
) -> None:
    """Add up the gradients of a step that updates tables, of which all backward passes are done. Collective over replicas
    and stages.

    Args:
        num_tokens: tokens of the step over all ranks. Gradients are divided by those since the last update.
        stages: ranks that hold copies of this one's banks, or other layers.
    """
    gradients = {
        table: gradient
        for chunk in chunks
        for table in chunk.parameters()
        if (gradient := row_gradient_of(table)) is not None
    }
    if not gradients:
        return
    if num_tokens is not None:
        # Of several steps an int32 might overflow, and Megatron may use its own again.
        own = num_tokens.to(torch.int64, copy=True)
        for gradient in gradients.values():
            gradient.count(own)
    if not all(gradient.is_due for gradient in gradients.values()):
        return
    RowGradient.add_up(gradients.values())
    copies = [gradient for table, gradient in gradients.items() if is_on_every_stage(table)]
    others = [gradient for table, gradient in gradients.items() if not is_on_every_stage(table)]
    # Where dense gradients are divided: before stages add them up, and after replicas have. Stages come first, while a rank
    # has the rows of one replica alone.
    _divide(copies)
    for gradient in copies:
        assert gradient.sums is not None, "a stage has read no row of its copy of a bank"
        dist.all_reduce(gradient.sums, group=stages)
    add_up_replicas(list(gradients.values()), chunks[0].intra_expt_dp_group)
    _divide(others)
    _drop_untrained(list(gradients.values()))


def _drop_untrained(gradients: Sequence[RowGradient]) -> None:
    """Set sums of rows that are not trained to zero. Collective over the ranks that have parts of the rows."""
    # Tables that the same lookups read have one choice among the same rows.
    known: dict[tuple[int, int], Tensor] = {}
    for gradient in gradients:
        if gradient.choose is None or gradient.read is None or gradient.sums is None:
            continue
        key = id(gradient.choose), id(gradient.read)
        if key not in known:
            known[key] = gradient.choose(gradient)
        gradient.sums.masked_fill_(~known[key].unsqueeze(1), 0)


def _divide(gradients: Sequence[RowGradient]) -> None:
    for gradient in gradients:
        if gradient.sums is not None and gradient.num_tokens is not None:
            gradient.sums.mul_(1.0 / gradient.num_tokens.clamp(min=1))
