"""Signatures of the ops on tables, and what their autograd shares: the gradients of tables.

The signatures stand together because the backward pass of a gather calls the other two ops.

Legend: T tokens, J rows read per token, C column groups, W columns (C divides W), B bins.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from kernels.common.ids import bytes_per_id
from kernels.common.joined_lookups import Lookup
from kernels.common.main_grad import MainGradient
from kernels.common.rounding import Rounding
from kernels.common.table_gradient import gradient_of


class GatherDot(Protocol):
    """See `kernels.gather_dot.naive.gather_dot`. Tables are contiguous; sums are in fp32 (fp64 for fp64 tables)."""

    def __call__(
        self, table: Tensor, ids: Tensor, x: Tensor, /, num_groups: int = 1, bins: Tensor | None = None
    ) -> Tensor: ...


class GatherSum(Protocol):
    """See `kernels.gather_sum.naive.gather_sum`. Tables are contiguous; sums are in fp32 (fp64 for fp64 tables)."""

    def __call__(
        self, table: Tensor, ids: Tensor, coef: Tensor, /, bins: Tensor | None = None, num_bins: int = 1
    ) -> Tensor: ...


class SegmentAccumulate(Protocol):
    """See `kernels.segment_accumulate.naive`. Accumulators are contiguous; every run gives the same bits."""

    def __call__(
        self,
        accumulator: Tensor,
        ids: Tensor,
        coef: Tensor,
        vec: Tensor,
        /,
        bins: Tensor | None = None,
        rounding: Rounding | None = None,
    ) -> None: ...


def row_dtype(num_rows: int) -> torch.dtype:
    """Dtype of ids below `num_rows`: 32 bits where they do."""
    return torch.int32 if bytes_per_id(num_rows) == 4 else torch.int64


def check_contiguous(rows: Tensor) -> None:
    """Raises ValueError for a table that is not contiguous."""
    if not rows.is_contiguous():
        raise ValueError(f"the table's strides are {rows.stride()}: the memory kernels need contiguous rows")


def apply_gather(gather: type[torch.autograd.Function], *arguments: Any) -> Tensor:
    """`gather.apply(*arguments)`, which `torch.compile` does not trace if a table carries a gradient of its own.

    Backward then writes to an attribute of a parameter, and returns a sparse tensor: neither can be traced. With
    `fullgraph=True` that is an error, which says so.
    """
    if torch.compiler.is_compiling() and any(isinstance(a, Tensor) and _keeps_gradient(a) for a in arguments):
        out: Tensor = _apply_untraced(gather, *arguments)
    else:
        out = gather.apply(*arguments)
    return out


def _keeps_gradient(table: Tensor) -> bool:
    return hasattr(table, "main_grad") or gradient_of(table) is not None


@torch.compiler.disable(
    reason="backward of a gather adds to the main_grad of its table, which cannot be traced: "
    "compile without fullgraph=True"
)
def _apply_untraced(gather: type[torch.autograd.Function], *arguments: Any) -> Tensor:
    out: Tensor = gather.apply(*arguments)
    return out


def table_gradient(
    table: Tensor, ids: Tensor, coef: Tensor, vec: Tensor, bins: Tensor | None = None, *, accumulate: SegmentAccumulate
) -> Tensor | None:
    """Gradient that backward of a gather returns for its table.

    A table's own gradient takes the lookup (`kernels.common.table_gradient`); so does `table.main_grad`, Megatron's, of a table
    without one. Otherwise the result is the dense gradient.

    Args:
        table: [rows, W], the parameter.
        ids, coef, vec, bins: arguments of `kernels.segment_accumulate.naive.segment_accumulate`.
        accumulate: the implementation.
    """
    # As numbers: with its history, a coefficient that waits would keep the graph of its microbatch.
    lookup = Lookup(accumulate, ids, coef.detach(), vec.detach(), bins)
    own = gradient_of(table)
    if own is not None:
        return own.add(lookup)
    if getattr(table, "main_grad", None) is not None:
        return MainGradient(table).add(lookup)
    # Added up in fp32 at least, and rounded once.
    gradient = torch.zeros_like(table, dtype=torch.promote_types(table.dtype, torch.float32))
    lookup.add_to(gradient)
    return gradient.to(table.dtype)
