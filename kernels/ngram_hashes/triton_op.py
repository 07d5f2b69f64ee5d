"""`ngram_hashes` in Triton: a program has some tokens and one group, whose window and hash stay in registers.

Launches are custom ops of PyTorch; nothing waits for the device.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.common.launch import on_device_of
from kernels.common.ops import custom_op
from kernels.ngram_hashes.op import SCHEMA, empty_result, stretches_of


@triton.jit(do_not_specialize=["missing_row"])
def ngram_hashes_kernel(
    extended,
    positions,
    multipliers,
    moduli,
    offsets,
    orders,
    missing_id,
    boundary_id,
    out,
    num_tokens,
    num_sequences,
    length,
    stride_s,
    stride_b,
    missing_row,
    num_heads,
    MAX_ORDER: tl.constexpr,
    STRETCHES: tl.constexpr,
    IS_XOR: tl.constexpr,
    CUT: tl.constexpr,
    HAS_MISSING: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """out[g K + k] of TOKENS tokens, flat over [s, b], as in `naive.ngram_hashes`. The grid is (tiles of tokens, G)."""
    # Tokens are counted in 32 bits, of which a quotient is no call; offsets have 64.
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    present = token < num_tokens
    row = token // num_sequences
    stretch = row // length
    token, row = token.to(tl.int64), row.to(tl.int64)
    group = tl.program_id(1).to(tl.int64)
    place = tl.load(positions + row * stride_s + (token - row * num_sequences) * stride_b, mask=present, other=0)
    order = tl.load(orders + group)
    hidden = tl.load(missing_id)
    # A halo of MAX_ORDER - 1 ids before every stretch.
    at = token + (MAX_ORDER - 1) * num_sequences
    if STRETCHES > 1:
        at += stretch.to(tl.int64) * (MAX_ORDER - 1) * num_sequences
    ids = tl.load(extended + at, mask=present, other=0)
    hashed = ids * tl.load(multipliers + group * MAX_ORDER)
    seen = present
    for lag in tl.static_range(1, MAX_ORDER):
        ids = tl.load(extended + at - lag * num_sequences, mask=present, other=0)
        seen = seen & (place >= lag)
        if CUT:
            seen = seen & (ids != tl.load(boundary_id))
        # Zero behind an n-gram's own tokens: that leaves sums and xor as they are.
        factor = tl.load(multipliers + group * MAX_ORDER + lag, mask=lag < order, other=0)
        product = tl.where(seen, ids, hidden) * factor
        hashed = hashed ^ product if IS_XOR else hashed + product
    # Floor modulo: -1 - h of a negative h leaves n - 1 less its remainder.
    is_negative = hashed < 0
    h = tl.where(is_negative, -1 - hashed, hashed).to(tl.uint64)
    is_cut = place < order - 1
    for k in range(num_heads):
        head = group * num_heads + k
        n = tl.load(moduli + head).to(tl.uint64)
        # With 2^64 / n - e, e in [0, 1], a product's upper half is the quotient of a number below 2^63, or one less.
        reciprocal = tl.full([], 0xFFFFFFFFFFFFFFFF, tl.uint64) // n
        rest = h - tl.umulhi(h, reciprocal + tl.zeros([TOKENS], tl.uint64)) * n
        rest = tl.where(rest >= n, rest - n, rest)
        rest = tl.where(is_negative, n - 1 - rest, rest).to(tl.int64)
        if HAS_MISSING:
            rest = tl.where(is_cut, tl.cast(missing_row, tl.int64), rest)
        tl.store(out + head * num_tokens + token, rest + tl.load(offsets + head), mask=present)


_TOKENS = 512


@custom_op("triton_ngram_hashes", empty_result, schema=SCHEMA)
def ngram_hashes(
    extended: Tensor,
    positions: Tensor,
    multipliers: Tensor,
    moduli: Tensor,
    offsets: Tensor,
    orders: Tensor,
    missing_id: Tensor,
    boundary_id: Tensor,
    operation: str,
    cut_at_boundary: bool,
    missing_row: int | None,
) -> Tensor:
    """The function of `kernels.ngram_hashes.naive.ngram_hashes`."""
    out = empty_result(extended, positions, multipliers, moduli)
    numbers = [each.contiguous() for each in (multipliers, moduli, offsets, orders)]
    (num_groups, max_order), num_stretches = multipliers.shape, stretches_of(extended, positions, multipliers.shape[1])
    if out.numel():
        num_tokens, num_sequences = positions.numel(), positions.shape[1]
        assert num_tokens <= 2**31 - _TOKENS, num_tokens
        with on_device_of(out):
            ngram_hashes_kernel[(-(-num_tokens // _TOKENS), num_groups)](
                *(extended.contiguous(), positions, *numbers, missing_id, boundary_id, out),
                *(num_tokens, num_sequences, len(positions) // num_stretches, *positions.stride()),
                *(0 if missing_row is None else missing_row, moduli.shape[1], max_order, num_stretches),
                *(operation == "xor", cut_at_boundary, missing_row is not None, _TOKENS),
                num_warps=4,
            )
    return out
