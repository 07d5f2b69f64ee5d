"""`row_squares` in Triton: a program has some rows, and their partial sums in registers.

Launches are custom ops of PyTorch; nothing waits for the device.

Legend: N rows, W columns.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.common.launch import on_device_of
from kernels.common.ops import custom_op
from kernels.common.tables import check_contiguous
from kernels.row_squares.op import NUM_SUMS, empty_result


@triton.jit(do_not_specialize=["num_rows"])
def row_squares_kernel(
    gradient, squares, num_rows, W: tl.constexpr, ROWS: tl.constexpr, SUMS: tl.constexpr, FOLDS: tl.constexpr
):
    """The grid is (tiles of ROWS rows,)."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    present = row < num_rows
    of_sum = tl.arange(0, SUMS)[None, :]
    sums = tl.zeros([ROWS, SUMS], tl.float32)
    for first in tl.static_range(0, W, SUMS):
        columns = first + of_sum
        term = tl.load(gradient + row[:, None] * W + columns, mask=present[:, None] & (columns < W), other=0)
        sums += term.to(tl.float32) * term.to(tl.float32)
    for fold in tl.static_range(FOLDS):
        halves = tl.reshape(sums, [ROWS, 2, SUMS >> (fold + 1)])
        lower, upper = tl.split(tl.permute(halves, (0, 2, 1)))
        sums = lower + upper
    tl.store(squares + row, tl.reshape(sums, [ROWS]), mask=present)


_ROWS = 32


@custom_op("triton_row_squares", empty_result)
def _row_squares(gradient: Tensor) -> Tensor:
    num_rows, width = gradient.shape
    squares = empty_result(gradient)
    if num_rows:
        with on_device_of(gradient):
            row_squares_kernel[(-(-num_rows // _ROWS),)](
                *(gradient, squares, num_rows, width, _ROWS, NUM_SUMS, NUM_SUMS.bit_length() - 1),
                num_warps=4,
                # A fused product and sum would round once.
                enable_fp_fusion=False,
            )
    return squares


def row_squares(gradient: Tensor) -> Tensor:
    """The function of `kernels.row_squares.naive.row_squares`.

    Raises:
        ValueError: the gradient has strides.
    """
    check_contiguous(gradient)
    squares: Tensor = _row_squares(gradient)
    return squares
