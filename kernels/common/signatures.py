"""Signatures of the two gathers, each of which the other's backward pass calls."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


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
