"""Tables whose gradients are the rows that a step read (`optimizer.table_gradients: rows`).

Megatron's DDP does not know of them: it would keep a dense gradient, and a copy of the weights while it makes one. Lookups
are kept until a step's last backward pass, and then added up (`kernels.common.row_gradient`), by replicas together
(`pretrain.engine.replica_rows`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor, nn

from kernels.common.row_gradient import RowGradient
from kernels.common.table_scale import TableScale
from megamem.model import MemoryGPTModel
from pretrain.config.schema import RunConfig
from pretrain.config.updates import has_bf16_gradients, keeps_rows
from pretrain.engine.replica_rows import add_up_replicas


def row_gradient_of(parameter: Tensor) -> RowGradient | None:
    """The gradient of a table of this kind; None of other parameters."""
    found: RowGradient | None = getattr(parameter, "row_gradient", None)
    return found


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
            table.row_gradient = RowGradient(*table.shape)  # type: ignore[attr-defined]
            table.scale = TableScale()  # type: ignore[attr-defined]


@torch.no_grad()
def add_up_rows(chunks: Sequence[DistributedDataParallel], num_tokens: Tensor | None) -> None:
    """Add up the gradients of a step, of which all backward passes are done. Collective over the replicas.

    Args:
        num_tokens: of the step over all ranks, which gradients are divided by.
    """
    gradients = [
        gradient for chunk in chunks for table in chunk.parameters() if (gradient := row_gradient_of(table)) is not None
    ]
    RowGradient.add_up(gradients)
    if gradients:
        add_up_replicas(gradients, chunks[0].intra_expt_dp_group)
    for gradient in gradients:
        if gradient.sums is not None and num_tokens is not None:
            gradient.sums.mul_(1.0 / num_tokens.clamp(min=1))
