"""`softmax_gradient` in Triton: a program has a row, which it reads and writes once, in place.

Launches are custom ops of PyTorch; nothing waits for the device.

Legend: n tokens, V ids of this rank's part of the vocabulary.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.common.launch import on_device_of, sum_dtype
from kernels.common.ops import custom_op
from kernels.common.tiles import logits_tile
from kernels.softmax_gradient.op import empty_result


@triton.jit
def softmax_gradient_kernel(
    logits, places, top, total, scale, V: tl.constexpr, COLUMNS: tl.constexpr, SUM: tl.constexpr
):
    """The grid is (n,)."""
    token = tl.program_id(0).to(tl.int64)
    row = logits + token * V
    place = tl.load(places + token)
    # In 32 bits, as ids are: a comparison of one instruction.
    place = tl.where((place >= 0) & (place < V), place, -1).to(tl.int32)
    high = tl.load(top + token)
    of_loss = tl.load(scale + token)
    factor = of_loss / tl.load(total + token)
    for first in range(0, V, COLUMNS):
        ids = first + tl.arange(0, COLUMNS)
        logit = tl.load(row + ids, mask=ids < V, other=0.0).to(SUM)
        gradient = tl.exp(logit - high) * factor - tl.where(ids == place, of_loss, 0.0)
        tl.store(row + ids, gradient.to(logits.dtype.element_ty), mask=ids < V)


@custom_op("triton_softmax_gradient", mutates=("logits",))
def _softmax_gradient(logits: Tensor, places: Tensor, top: Tensor, total: Tensor, scale: Tensor) -> None:
    num_tokens, num_ids = logits.shape
    if num_tokens:
        tile = logits_tile(num_ids)
        with on_device_of(logits):
            softmax_gradient_kernel[(num_tokens,)](
                logits,
                # Gradients of a sum are one number, expanded.
                *(each.contiguous() for each in (places, top, total, scale)),
                *(num_ids, tile.columns, sum_dtype(logits.dtype)),
                num_warps=tile.num_warps,
            )


def softmax_gradient(logits: Tensor, places: Tensor, top: Tensor, total: Tensor, scale: Tensor) -> Tensor:
    """The function of `kernels.softmax_gradient.naive.softmax_gradient`, in the memory of the logits."""
    assert logits.is_contiguous()
    _softmax_gradient(logits, places, top, total, scale)
    return empty_result(logits, places, top, total, scale)
