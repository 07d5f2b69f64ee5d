"""`gather_sum`: the autograd op of one implementation, and the function in PyTorch and in C++.

Legend: T tokens, J rows read per token, C column groups, W columns (C divides W), B bins.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.common import cpp
from kernels.common.ops import custom_op
from kernels.common.slices import own_rows
from kernels.common.table_scale import of_scaled
from kernels.common.tables import GatherDot, GatherSum, SegmentAccumulate, apply_gather, table_gradient


def empty_result(table: Tensor, ids: Tensor, coef: Tensor, bins: Tensor | None = None, num_bins: int = 1) -> Tensor:
    """The result, not filled yet; also the ops' fake for `torch.compile`."""
    return table.new_empty(ids.shape[0], num_bins * table.shape[1])


def differentiable(gather_sum: GatherSum, gather_dot: GatherDot, segment_accumulate: SegmentAccumulate) -> GatherSum:
    """`gather_sum` with gradients: the coefficients' by `gather_dot`, the table's by `segment_accumulate`."""

    def with_gradients(
        table: Tensor, ids: Tensor, coef: Tensor, /, bins: Tensor | None = None, num_bins: int = 1
    ) -> Tensor:
        ops = (of_scaled(gather_sum, table), of_scaled(gather_dot, table), segment_accumulate)
        return apply_gather(_GatherSum, table, ids, coef, bins, num_bins, *ops)

    return with_gradients


class _GatherSum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        table: Tensor,
        ids: Tensor,
        coef: Tensor,
        bins: Tensor | None,
        num_bins: int,
        gather_sum: GatherSum,
        gather_dot: GatherDot,
        segment_accumulate: SegmentAccumulate,
    ) -> Tensor:
        ctx.save_for_backward(table, ids, coef, bins)
        ctx.gather_dot, ctx.accumulate = gather_dot, segment_accumulate
        return gather_sum(table, ids, coef, bins, num_bins)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        table, ids, coef, bins = ctx.saved_tensors
        grad_out = grads[0].contiguous()
        grad_table = grad_coef = None
        if ctx.needs_input_grad[2]:
            grad_coef = ctx.gather_dot(table, ids, grad_out, coef.shape[2], bins)
        if ctx.needs_input_grad[0]:
            grad_table = table_gradient(table, ids, coef, grad_out, bins, accumulate=ctx.accumulate)
        return grad_table, None, grad_coef, *(None,) * 5


def torch_gather_sum(table: Tensor, ids: Tensor, coef: Tensor, bins: Tensor | None = None, num_bins: int = 1) -> Tensor:
    """The function of `kernels.gather_sum.naive.gather_sum` by bags of `embedding_bag`, without gradients.

    An entry whose row others hold reads the first one, with weight zero.
    """
    num_tokens, num_rows_read, num_groups = coef.shape
    ids, own = own_rows(ids, table.shape[0])
    coef = torch.where(own.unsqueeze(2), coef, 0)
    if bins is None:
        starts = torch.arange(num_tokens * num_groups, device=ids.device) * num_rows_read
    else:
        ids, coef, starts = _sorted_by_bin(ids, coef, bins, num_bins)
    # Column group c of row i is row i C + c of the table seen as [rows x C, W / C].
    group = torch.arange(num_groups, device=ids.device).view(1, num_groups, 1)
    group_ids = torch.add(group, ids.unsqueeze(1), alpha=num_groups).flatten()
    weights = coef.transpose(1, 2).flatten()
    columns = table.view(table.shape[0] * num_groups, -1)
    # One bag per (token, group, bin), of any length.
    out = F.embedding_bag(group_ids, columns, offsets=starts.flatten(), per_sample_weights=weights, mode="sum")
    by_group = out.view(num_tokens, num_groups, num_bins, columns.shape[1])
    return by_group.transpose(1, 2).reshape(num_tokens, num_bins * table.shape[1])


def _sorted_by_bin(ids: Tensor, coef: Tensor, bins: Tensor, num_bins: int) -> tuple[Tensor, Tensor, Tensor]:
    """A token's entries in the order of their bins, and where each bin starts.

    No shape depends on the data, so nothing waits for a device.

    Args:
        ids: [T, J].
        coef: [T, J, C].
        bins: [T, J], int32 or int64 in [0, B).
        num_bins: B.

    Returns:
        ids [T, J] and coef [T, J, C] reordered; the position [T, C, B] of each bin's first entry, counted over
        [T, C, J].
    """
    num_tokens, num_rows_read, num_groups = coef.shape
    bins, order = bins.sort(dim=1, stable=True)
    coef = coef.gather(1, order.unsqueeze(2).expand(-1, -1, num_groups))
    every = torch.arange(num_bins, device=ids.device, dtype=bins.dtype).expand(num_tokens, -1).contiguous()
    before = torch.searchsorted(bins, every)
    first = torch.arange(num_tokens * num_groups, device=ids.device) * num_rows_read
    return ids.gather(1, order), coef, before.unsqueeze(1) + first.view(num_tokens, num_groups, 1)


@custom_op("cpu_gather_sum", empty_result)
def cpu_gather_sum(table: Tensor, ids: Tensor, coef: Tensor, bins: Tensor | None = None, num_bins: int = 1) -> Tensor:
    """`gather_sum` in C++, as a custom op: `torch.compile` takes it as it is."""
    ids = cpp.ids_in(table, ids)
    types, coef = cpp.types_of(table, coef)
    bins = None if bins is None else cpp.in_32_bits(bins)
    out = empty_result(table, ids, coef, bins, num_bins)
    sizes = (*coef.shape, table.shape[1], num_bins, table.shape[0])
    cpp.call("gather_sum", "gather_sum", types, table, ids, coef, bins, out, *sizes)
    return out
