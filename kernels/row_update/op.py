"""`row_update`: its signature, and the function in PyTorch and in C++. Updates have no gradient.

Legend: R rows of a table, N rows of a gradient, W columns.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from kernels.common import cpp
from kernels.common.ops import custom_op
from kernels.common.rounding import Rounding, round_stochastically
from kernels.common.slices import token_slices
from kernels.common.tables import check_contiguous
from kernels.segment_accumulate.op import numbers_of

# PyTorch launches a dozen kernels for each slice, so that they are longer on a GPU.
_SLICES_ON_GPU = 16


class RowUpdate(Protocol):
    """See `kernels.row_update.naive.row_update`. Weights and gradients are contiguous."""

    def __call__(
        self,
        weights: Tensor,
        gradient: Tensor,
        factors: Tensor,
        /,
        keep: float = 1.0,
        rounding: Rounding | None = None,
        rows: Tensor | None = None,
        numbers: Tensor | None = None,
    ) -> None: ...


SCHEMA = "(Tensor(a!) weights, Tensor gradient, Tensor factors, float keep, int[] rounding, Tensor? rows, Tensor? numbers) -> ()"
"""Schema of a custom op of PyTorch for `RowUpdate`; a rounding is passed as its numbers."""


def from_custom_op(op: Callable[..., None]) -> RowUpdate:
    """The function of a custom op."""

    def row_update(
        weights: Tensor,
        gradient: Tensor,
        factors: Tensor,
        keep: float = 1.0,
        rounding: Rounding | None = None,
        rows: Tensor | None = None,
        numbers: Tensor | None = None,
    ) -> None:
        check(weights, gradient, rounding)
        if gradient.numel():
            op(weights, gradient, factors, keep, numbers_of(rounding), rows, numbers)

    return row_update


def check(weights: Tensor, gradient: Tensor, rounding: Rounding | None) -> None:
    """Raises ValueError for operands with strides, or of types that an update does not know."""
    check_contiguous(weights)
    check_contiguous(gradient)
    known = torch.float32 if rounding is None else torch.bfloat16
    if weights.dtype != known or gradient.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(
            f"weights are {weights.dtype} and gradients {gradient.dtype}: updates by row take both in fp32 or bf16, with a "
            "rounding for weights in bf16"
        )


def torch_row_update(
    weights: Tensor,
    gradient: Tensor,
    factors: Tensor,
    keep: float = 1.0,
    rounding: Rounding | None = None,
    rows: Tensor | None = None,
    numbers: Tensor | None = None,
) -> None:
    """The function of `kernels.row_update.naive.row_update`, in slices of rows."""
    check(weights, gradient, rounding)
    num, width = gradient.shape
    may_stay = rows is not None or _in_fp32(keep) == 1
    stays = factors == 0 if may_stay else torch.zeros_like(factors, dtype=torch.bool)
    of_table = torch.arange(num, device=weights.device) if rows is None else rows
    numbers = of_table if numbers is None else numbers
    for part in token_slices(num, max(1, width // (_SLICES_ON_GPU if weights.is_cuda else 1))):
        held = weights[:num][part] if rows is None else weights[rows[part]]
        updated = gradient[part] * factors[part].unsqueeze(1)
        updated.add_(held.float() * keep)
        if rounding is not None:
            rounded = torch.empty_like(held)
            round_stochastically(updated, rounded, rounding, numbers[part])
            updated = rounded
        updated = torch.where(stays[part].unsqueeze(1), held, updated)
        if rows is None:
            weights[:num][part] = updated
        else:
            # As whole numbers, by what the bits differ: a row that stays may be one that another entry moves.
            bits = torch.int16 if rounding is not None else torch.int32
            weights.view(bits).index_add_(0, rows[part], updated.view(bits) - held.view(bits))


def _in_fp32(number: float) -> float:
    return ctypes.c_float(number).value


@custom_op("cpu_row_update", mutates=("weights",), schema=SCHEMA)
def _in_cpp(*operands: Any) -> None:
    weights, gradient, factors, keep, rounding, rows, numbers = operands
    types, gradient = cpp.types_of(weights, gradient)
    # As its bits: what is passed are addresses and whole numbers.
    (bits,) = struct.unpack("i", struct.pack("f", keep))
    tensors = (weights, gradient, factors, rows, rows if numbers is None else numbers)
    cpp.call("row_update", "row_update", types, *tensors, *gradient.shape, bits, *(rounding or (0, 0, 0)))


cpu_row_update = from_custom_op(_in_cpp)
"""`row_update` in C++, as a custom op: `torch.compile` takes it as it is."""
