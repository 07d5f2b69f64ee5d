"""`softmax_sums` in Triton: a program has a row, reads it once, and keeps the largest and the sum of each lane.

A lane is what one load brings, 16 bytes of neighbours, so that a new largest logit costs an exponential per lane and not
per logit. Launches are custom ops of PyTorch; nothing waits for the device.

Legend: n tokens, V ids of this rank's part of the vocabulary.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.common.launch import on_device_of, sum_dtype
from kernels.common.ops import custom_op
from kernels.common.tiles import logits_tile
from kernels.softmax_sums.op import empty_result

_LOAD_BYTES = 16


@triton.jit
def _finite(top):
    """Number to take out of logits before their exponentials: 0 where all are -inf."""
    return tl.where(top == float("-inf"), 0.0, top)


@triton.jit
def softmax_sums_kernel(
    logits,
    places,
    top,
    total,
    of_target,
    V: tl.constexpr,
    LANES: tl.constexpr,
    PER_LANE: tl.constexpr,
    SUM: tl.constexpr,
):
    """The grid is (n,)."""
    token = tl.program_id(0).to(tl.int64)
    row = logits + token * V
    columns = tl.arange(0, LANES)[:, None] * PER_LANE + tl.arange(0, PER_LANE)[None, :]
    high = tl.full([LANES], float("-inf"), SUM)
    sums = tl.zeros([LANES], SUM)
    for first in range(0, V, LANES * PER_LANE):
        ids = first + columns
        logit = tl.load(row + ids, mask=ids < V, other=float("-inf")).to(SUM)
        higher = tl.maximum(high, tl.max(logit, axis=1))
        out = _finite(higher)
        sums = sums * tl.exp(high - out) + tl.sum(tl.exp(logit - out[:, None]), axis=1)
        high = higher
    highest = tl.max(high, axis=0)
    tl.store(top + token, highest)
    tl.store(total + token, tl.sum(sums * tl.exp(high - _finite(highest)), axis=0))
    place = tl.load(places + token)
    target = tl.load(row + place, mask=(place >= 0) & (place < V), other=0.0)
    tl.store(of_target + token, target.to(SUM))


@custom_op("triton_softmax_sums", empty_result)
def softmax_sums(logits: Tensor, places: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The function of `kernels.softmax_sums.naive.softmax_sums`, which leaves its logits as they are."""
    assert logits.is_contiguous()
    num_tokens, num_ids = logits.shape
    result = empty_result(logits, places)
    if num_tokens:
        tile, per_lane = logits_tile(num_ids), _LOAD_BYTES // logits.element_size()
        with on_device_of(logits):
            softmax_sums_kernel[(num_tokens,)](
                *(logits, places.contiguous(), *result),
                *(num_ids, tile.columns // per_lane, per_lane, sum_dtype(logits.dtype)),
                num_warps=tile.num_warps,
            )
    return result
