"""`gather_sum` in Triton, as a custom op of PyTorch: `torch.compile` takes it as it is, and nothing waits for the device."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.common.checks import check_contiguous
from kernels.common.launch import on_device_of, sum_dtype
from kernels.common.tiles import gather_tile
from kernels.gather_sum.op import empty_result
from kernels.gather_sum.triton_kernel import gather_sum_kernel


@torch.library.custom_op(
    "megamem::triton_gather_sum",
    mutates_args=(),
    schema="(Tensor table, Tensor ids, Tensor coef, Tensor? block, int num_blocks) -> Tensor",
)
def _gather_sum(table: Tensor, ids: Tensor, coef: Tensor, block: Tensor | None, num_blocks: int) -> Tensor:
    check_contiguous(table)
    tokens, reads, groups = coef.shape
    width = table.shape[1]
    out = empty_result(table, ids, coef, block, num_blocks)
    tile = gather_tile(width // groups, reads, tokens * groups * num_blocks)
    grid = (tokens, num_blocks * groups * tile.column_blocks(width // groups))
    if out.numel() == 0:
        return out
    ids, coef = ids.contiguous(), coef.contiguous()
    with on_device_of(table):
        gather_sum_kernel[grid](
            table,
            ids,
            coef,
            ids if block is None else block.contiguous(),
            out,
            reads,
            C=groups,
            W=width,
            B=num_blocks,
            ENTRIES=tile.entries,
            COLUMNS=tile.columns,
            SUM=sum_dtype(table),
            num_warps=tile.num_warps,
        )
    return out


_gather_sum.register_fake(empty_result)


def gather_sum(table: Tensor, ids: Tensor, coef: Tensor, block: Tensor | None = None, num_blocks: int = 1) -> Tensor:
    """The function of `kernels.gather_sum.naive.gather_sum`, without gradients."""
    out: Tensor = _gather_sum(table, ids, coef, block, num_blocks)
    return out
