"""Stochastic rounding to bf16 in Triton kernels: the function of `rounding.py`, to the bit. Importing this imports
Triton."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _mix(x):
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def round_stochastically(values, key, row, column):
    """bf16 neighbours of fp32 `values`, by a key of 64 bits, and rows and columns of the whole table that broadcast."""
    key, row = key.to(tl.uint64), row.to(tl.uint64)
    number = (row >> 32).to(tl.uint32) * 0x9E3779B9 ^ row.to(tl.uint32)
    of_row = _mix(_mix(number ^ (key >> 32).to(tl.uint32)) + key.to(tl.uint32))
    random = _mix(of_row ^ (column.to(tl.uint32) * 0x9E3779B9)) >> 16
    bits = values.to(tl.uint32, bitcast=True)
    random = tl.where((bits & 0x7F800000) == 0x7F800000, 0, random)
    return ((bits + random) >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
