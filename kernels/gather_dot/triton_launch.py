"""`gather_dot` in Triton, as a custom op of PyTorch: nothing waits for the device."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.common.checks import check_contiguous
from kernels.common.launch import on_device_of, sum_dtype
from kernels.common.tiles import gather_tile
from kernels.gather_dot.op import empty_result
from kernels.gather_dot.triton_kernel import gather_dot_kernel


@torch.library.custom_op("megamem::triton_gather_dot", mutates_args=())
def gather_dot(table: Tensor, ids: Tensor, x: Tensor, num_groups: int = 1, bins: Tensor | None = None) -> Tensor:
    """The function of `kernels.gather_dot.naive.gather_dot`, without gradients."""
    check_contiguous(table)
    tokens, reads = ids.shape
    width = table.shape[1]
    out = empty_result(table, ids, x, num_groups)
    if out.numel() == 0:
        return out
    tile = gather_tile(width // num_groups, reads, tokens * num_groups)
    ids, x = ids.contiguous(), x.contiguous()
    with on_device_of(table):
        gather_dot_kernel[(tokens, -(-reads // tile.entries), num_groups)](
            table,
            ids,
            x,
            ids if bins is None else bins.contiguous(),
            out,
            reads,
            C=num_groups,
            W=width,
            B=1 if bins is None else x.shape[1] // width,
            ENTRIES=tile.entries,
            COLUMNS=tile.columns,
            SUM=sum_dtype(table),
            num_warps=tile.num_warps,
        )
    return out


gather_dot.register_fake(empty_result)
