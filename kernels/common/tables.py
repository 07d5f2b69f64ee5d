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
from kernels.common.main_grad import WaitingLookups, add_to_main_grad
from kernels.common.rounding import Rounding
from kernels.common.row_gradient import RowGradient


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
    return hasattr(table, "main_grad") or hasattr(table, "row_gradient")


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

    Under Megatron's DDP the gradient is added to `table.main_grad`, and the result is an empty sparse tensor: it costs
    nothing, and DDP's hook still fires. Lookups may wait for the last one of a backward pass (`table.waiting_lookups`). Rows
    of a bf16 gradient are rounded stochastically (`table.roundings`). It may be added on a stream of its own
    (`table.gradient_stream`), which whoever reads it waits for. Where the table has a `row_gradient`, that keeps the lookup,
    and autograd gets nothing. Otherwise it is the dense gradient.

    Args:
        table: [rows, W], the parameter.
        ids, coef, vec, bins: arguments of `kernels.segment_accumulate.naive.segment_accumulate`.
        accumulate: the implementation.
    """
    # As numbers: with its history, a coefficient that waits would keep the graph of its microbatch.
    lookup = Lookup(accumulate, ids, coef.detach(), vec.detach(), bins)
    rows: RowGradient | None = getattr(table, "row_gradient", None)
    if rows is not None:
        rows.add(lookup)
        return None
    if getattr(table, "main_grad", None) is None:
        # Added up in fp32 at least, and rounded once.
        gradient = torch.zeros_like(table, dtype=torch.promote_types(table.dtype, torch.float32))
        lookup.add_to(gradient)
        return gradient.to(table.dtype)
    waiting: WaitingLookups | None = getattr(table, "waiting_lookups", None)
    if waiting is None:
        add_to_main_grad(table, lookup)
    else:
        waiting.append(lookup)
    table.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    return torch.sparse_coo_tensor(
        torch.empty(1, 0, dtype=torch.int64, device=table.device),
        table.new_empty(0, table.shape[1]),
        table.shape,
        check_invariants=False,
    )
