"""`segment_accumulate`: its signature. It has no gradient: it makes those of tables (`table_gradient`)."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class SegmentAccumulate(Protocol):
    """See `kernels.segment_accumulate.naive`. Accumulators are contiguous; every run gives the same bits."""

    def __call__(
        self, accumulator: Tensor, ids: Tensor, coef: Tensor, vec: Tensor, /, bins: Tensor | None = None
    ) -> None: ...
