"""`segment_accumulate` in C++, as custom ops of PyTorch: `torch.compile` takes them as they are."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.common import cpp
from kernels.common.row_order import shared_order

# Buckets of entries by row: enough that the pages of one bucket's rows stay in the TLB, few enough that their counters
# stay in cache.
_MAX_BUCKETS_LOG2 = 12


def _buckets(num_rows: int) -> tuple[int, int]:
    """The number of buckets, and the low bits that the rows of one may differ in."""
    shift = max(0, (num_rows - 1).bit_length() - _MAX_BUCKETS_LOG2)
    return ((num_rows - 1) >> shift) + 1, shift


@torch.library.custom_op("megamem::cpu_bucket_order", mutates_args=())
def _bucket_order(ids: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    ids = ids.contiguous()
    num_buckets, shift = _buckets(num_rows)
    order = torch.empty(ids.numel(), dtype=torch.int32)
    starts = torch.empty(num_buckets + 1, dtype=torch.int64)
    cpp.call("segment_accumulate", "bucket_order", ids, order, starts, ids.numel(), num_buckets, shift)
    return order, starts


@_bucket_order.register_fake
def _(ids: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    return ids.new_empty(ids.numel(), dtype=torch.int32), ids.new_empty(_buckets(num_rows)[0] + 1)


@torch.library.custom_op("megamem::cpu_segment_accumulate", mutates_args=("accumulator",))
def _segment_accumulate(
    accumulator: Tensor, ids: Tensor, coef: Tensor, vec: Tensor, bins: Tensor | None, order: Tensor, starts: Tensor
) -> None:
    cpp.check_rows(accumulator, ids)
    types, vec = cpp.types_of(accumulator, vec)
    coef = coef.to(vec.dtype).contiguous()
    ids, bins = ids.contiguous(), None if bins is None else bins.contiguous()
    width = accumulator.shape[1]
    sizes = (starts.numel() - 1, ids.numel(), ids.shape[1], coef.shape[2], width, vec.shape[1] // width)
    cpp.call(
        "segment_accumulate", "segment_accumulate", types, accumulator, ids, coef, vec, bins, order, starts, *sizes
    )


def segment_accumulate(accumulator: Tensor, ids: Tensor, coef: Tensor, vec: Tensor, bins: Tensor | None = None) -> None:
    """The function of `kernels.segment_accumulate.naive.segment_accumulate`, with its bits."""
    if ids.numel() == 0:
        return
    order, starts = shared_order(ids, accumulator.shape[0], _bucket_order)
    _segment_accumulate(accumulator, ids, coef, vec, bins, order, starts)
