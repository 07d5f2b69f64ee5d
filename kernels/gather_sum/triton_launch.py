"""`gather_sum` in Triton, as a custom op of PyTorch: nothing waits for the device."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.common.checks import check_contiguous
from kernels.common.launch import on_device_of, sum_dtype
from kernels.common.tiles import gather_tile
from kernels.gather_sum.op import empty_result
from kernels.gather_sum.triton_kernel import gather_sum_kernel


@torch.library.custom_op("megamem::triton_gather_sum", mutates_args=())
def gather_sum(table: Tensor, ids: Tensor, coef: Tensor, bins: Tensor | None = None, num_bins: int = 1) -> Tensor:
    """The function of `kernels.gather_sum.naive.gather_sum`, without gradients."""
    check_contiguous(table)
    tokens, reads, groups = coef.shape
    width = table.shape[1]
    out = empty_result(table, ids, coef, bins, num_bins)
    if out.numel() == 0:
        return out
    tile = gather_tile(width // groups, reads, tokens * groups * num_bins)
    ids, coef = ids.contiguous(), coef.contiguous()
    with on_device_of(table):
        gather_sum_kernel[(tokens, num_bins * groups * tile.column_tiles(width // groups))](
            table,
            ids,
            coef,
            ids if bins is None else bins.contiguous(),
            out,
            reads,
            C=groups,
            W=width,
            B=num_bins,
            ENTRIES=tile.entries,
            COLUMNS=tile.columns,
            SUM=sum_dtype(table),
            num_warps=tile.num_warps,
        )
    return out


gather_sum.register_fake(empty_result)
