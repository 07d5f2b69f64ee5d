"""`gather_dot`: the autograd op of one implementation, and the function in PyTorch and in C++.

Legend: T tokens, J rows read per token, C column groups, W columns (C divides W), B bins.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels.common import cpp
from kernels.common.ops import custom_op
from kernels.common.slices import own_rows, token_slices, vectors_of_entries
from kernels.common.table_scale import of_scaled
from kernels.common.tables import GatherDot, GatherSum, SegmentAccumulate, apply_gather, table_gradient


def empty_result(table: Tensor, ids: Tensor, x: Tensor, num_groups: int = 1, bins: Tensor | None = None) -> Tensor:
    """The result, not filled yet; also the ops' fake for `torch.compile`."""
    return x.new_empty(*ids.shape, num_groups)


def differentiable(gather_dot: GatherDot, gather_sum: GatherSum, segment_accumulate: SegmentAccumulate) -> GatherDot:
    """`gather_dot` with gradients: x's by `gather_sum`, the table's by `segment_accumulate`."""

    def with_gradients(
        table: Tensor, ids: Tensor, x: Tensor, /, num_groups: int = 1, bins: Tensor | None = None
    ) -> Tensor:
        ops = (of_scaled(gather_dot, table), of_scaled(gather_sum, table), segment_accumulate)
        return apply_gather(_GatherDot, table, ids, x, num_groups, bins, *ops)

    return with_gradients


class _GatherDot(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        table: Tensor,
        ids: Tensor,
        x: Tensor,
        num_groups: int,
        bins: Tensor | None,
        gather_dot: GatherDot,
        gather_sum: GatherSum,
        segment_accumulate: SegmentAccumulate,
    ) -> Tensor:
        ctx.save_for_backward(table, ids, x, bins)
        ctx.gather_sum, ctx.accumulate = gather_sum, segment_accumulate
        return gather_dot(table, ids, x, num_groups, bins)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        table, ids, x, bins = ctx.saved_tensors
        coef = grads[0].contiguous()
        grad_table = grad_x = None
        if ctx.needs_input_grad[2]:
            num_bins = 1 if bins is None else x.shape[1] // table.shape[1]
            grad_x = ctx.gather_sum(table, ids, coef, bins, num_bins)
        if ctx.needs_input_grad[0]:
            grad_table = table_gradient(table, ids, coef, x, bins, accumulate=ctx.accumulate)
        return grad_table, None, grad_x, *(None,) * 5


def torch_gather_dot(table: Tensor, ids: Tensor, x: Tensor, num_groups: int = 1, bins: Tensor | None = None) -> Tensor:
    """The function of `kernels.gather_dot.naive.gather_dot` by batched products, without gradients."""
    num_tokens, num_rows_read = ids.shape
    per_group = (num_groups, table.shape[1] // num_groups)
    out = x.new_empty(num_tokens, num_rows_read, num_groups)
    ids, own = own_rows(ids, table.shape[0])
    for tokens in token_slices(num_tokens, num_rows_read * table.shape[1]):
        rows = table[ids[tokens]].view(-1, num_rows_read, *per_group)
        if bins is None:
            vectors = x[tokens].reshape(rows.shape[0], 1, *per_group)
            out[tokens] = (rows.transpose(1, 2) @ vectors.permute(0, 2, 3, 1)).squeeze(-1).transpose(1, 2)
        else:
            vectors = vectors_of_entries(x[tokens], bins[tokens], table.shape[1]).view(rows.shape)
            # In bf16 every product would be rounded before it is added.
            out[tokens] = (rows * vectors.to(torch.promote_types(vectors.dtype, torch.float32))).sum(-1)
    return out.masked_fill_(~own.unsqueeze(2), 0)


@custom_op("cpu_gather_dot", empty_result)
def cpu_gather_dot(table: Tensor, ids: Tensor, x: Tensor, num_groups: int = 1, bins: Tensor | None = None) -> Tensor:
    """`gather_dot` in C++, as a custom op: `torch.compile` takes it as it is."""
    ids = cpp.ids_in(table, ids)
    dtype, width = x.dtype, table.shape[1]
    types, x = cpp.types_of(table, x)
    bins = None if bins is None else cpp.in_32_bits(bins)
    out = empty_result(table, ids, x, num_groups)
    sizes = (*ids.shape, num_groups, width, x.shape[1] // width, table.shape[0])
    cpp.call("gather_dot", "gather_dot", types, table, ids, x, bins, out, *sizes)
    return out.to(dtype)
