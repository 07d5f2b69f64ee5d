"""`segment_accumulate` in PyTorch and in C++, and the sort that the tables read by the same ids share.

Legend: T tokens, J rows read per token, C column groups, W columns (C divides W), B bins.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from kernels.common import cpp
from kernels.common.kept_results import kept_on
from kernels.common.ops import custom_op
from kernels.common.rounding import Rounding, round_stochastically
from kernels.common.row_gradient import distinct_rows
from kernels.common.slices import own_rows, token_slices, vectors_of_entries

Order: TypeAlias = tuple[Tensor, ...]
_ATTRIBUTE = "_megamem_row_order"
# Buckets of entries by row: enough that the pages of one bucket's rows stay in the TLB, few enough that their counters
# stay in cache.
_MAX_BUCKETS_LOG2 = 12


def shared_order(ids: Tensor, num_rows: int, sort: Callable[[Tensor, int], Order]) -> Order:
    """`sort(ids, num_rows)`, or what it returned when it was last called for this tensor.

    Values and pre-values are read by one tensor of ids, and the backward pass of each wants them sorted. The result is
    kept on that tensor, so it lives as long as the graph that needs it; a tensor written to in between is sorted again.
    `torch.compile` merges equal calls itself, so nothing is kept while it traces.

    Args:
        ids: [T, J].
        num_rows: rows of the table.
        sort: returns tensors that depend on its arguments alone.
    """
    if torch.compiler.is_compiling():
        return sort(ids, num_rows)
    return kept_on(ids, _ATTRIBUTE, (sort, num_rows, ids._version), lambda: sort(ids, num_rows))


def torch_segment_accumulate(
    accumulator: Tensor,
    ids: Tensor,
    coef: Tensor,
    vec: Tensor,
    bins: Tensor | None = None,
    rounding: Rounding | None = None,
) -> None:
    """The function of `kernels.segment_accumulate.naive.segment_accumulate`, with its bits on the CPU."""
    if rounding is not None:
        if ids.numel():
            _accumulate_rounded(accumulator, ids, coef, vec, bins, rounding)
        return
    num_tokens, num_rows_read, num_groups = coef.shape
    width = accumulator.shape[1]
    # Entries whose rows others hold add zero to the first.
    ids, own = own_rows(ids, accumulator.shape[0])
    for tokens in token_slices(num_tokens, num_rows_read * width):
        vectors = vec[tokens] if bins is None else vectors_of_entries(vec[tokens], bins[tokens], width)
        vectors = vectors.to(accumulator.dtype).view(vectors.shape[0], -1, num_groups, width // num_groups)
        terms = (coef[tokens].to(accumulator.dtype).unsqueeze(3) * vectors).reshape(-1, width)
        terms = torch.where(own[tokens].reshape(-1, 1), terms, 0)
        rows = ids[tokens].reshape(-1)
        if accumulator.is_cuda:
            # index_add_ uses atomics there, whose order changes from run to run; index_put_ sorts first.
            accumulator.index_put_((rows,), terms, accumulate=True)
        else:
            accumulator.index_add_(0, rows, terms)


def _accumulate_rounded(
    accumulator: Tensor, ids: Tensor, coef: Tensor, vec: Tensor, bins: Tensor | None, rounding: Rounding
) -> None:
    """Sums in fp32 of the rows that are read, which are then rounded."""
    read, (slots,) = distinct_rows([ids], accumulator.shape[0])
    sums = accumulator[read.rows].float()
    torch_segment_accumulate(sums, slots, coef, vec, bins)
    if read.sources is not None:
        sums = sums[read.sources]
    rounded = torch.empty_like(sums, dtype=accumulator.dtype)
    round_stochastically(sums, rounded, rounding, read.rows)
    accumulator.index_copy_(0, read.rows, rounded)


def _buckets(num_rows: int) -> tuple[int, int]:
    """The number of buckets, and the low bits that the rows of one may differ in."""
    shift = max(0, (num_rows - 1).bit_length() - _MAX_BUCKETS_LOG2)
    return ((num_rows - 1) >> shift) + 1, shift


def _empty_order(ids: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    num_buckets, _ = _buckets(num_rows)
    return ids.new_empty(ids.numel(), dtype=torch.int32), ids.new_empty(num_buckets + 1, dtype=torch.int64)


@custom_op("cpu_bucket_order", _empty_order)
def _bucket_order(ids: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    ids = cpp.in_32_bits(ids)
    num_buckets, shift = _buckets(num_rows)
    order = torch.empty(ids.numel(), dtype=torch.int32)
    starts = torch.empty(num_buckets + 1, dtype=torch.int64)
    cpp.call("segment_accumulate", "bucket_order", ids, order, starts, ids.numel(), num_buckets, shift, num_rows)
    return order, starts


@custom_op("cpu_segment_accumulate", mutates=("accumulator",))
def _accumulate_buckets(
    accumulator: Tensor,
    ids: Tensor,
    coef: Tensor,
    vec: Tensor,
    bins: Tensor | None,
    order: Tensor,
    starts: Tensor,
    rounding: list[int],
) -> None:
    ids = cpp.ids_in(accumulator, ids)
    types, vec = cpp.types_of(accumulator, vec)
    coef = coef.to(vec.dtype).contiguous()
    bins = None if bins is None else cpp.in_32_bits(bins)
    width = accumulator.shape[1]
    sizes = (starts.numel() - 1, ids.shape[1], coef.shape[2], width, vec.shape[1] // width)
    # Without a rounding a bf16 row is rounded to nearest after every entry.
    numbers = (1, *rounding) if rounding else (0, 0, 0, 0)
    operands = (accumulator, ids, coef, vec, bins, order, starts)
    cpp.call("segment_accumulate", "segment_accumulate", types, *operands, *sizes, *numbers)


def cpu_segment_accumulate(
    accumulator: Tensor,
    ids: Tensor,
    coef: Tensor,
    vec: Tensor,
    bins: Tensor | None = None,
    rounding: Rounding | None = None,
) -> None:
    """`segment_accumulate` in C++, as custom ops: `torch.compile` takes them as they are."""
    if ids.numel() == 0:
        return
    order, starts = shared_order(ids, accumulator.shape[0], _bucket_order)
    _accumulate_buckets(accumulator, ids, coef, vec, bins, order, starts, numbers_of(rounding))


def numbers_of(rounding: Rounding | None) -> list[int]:
    """A rounding as arguments of a custom op; empty for none."""
    return [] if rounding is None else [rounding.key, rounding.first_row, rounding.first_column]
