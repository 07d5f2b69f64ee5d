"""Check that the parts of a stored tensor cover each of its elements once."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from pretrain.checkpoint.store.tensors import Region, TensorInfo


def coverage_problem(info: TensorInfo, parts: Sequence[Region]) -> str | None:
    """Fault in the parts of a tensor, in words; None if they cover every element exactly once."""
    for part in parts:
        ends = [start + size for start, size in zip(part.offset, part.shape, strict=False)]
        if len(part.shape) != len(info.shape) or any(
            start < 0 or size < 0 or end > limit
            for start, size, end, limit in zip(part.offset, part.shape, ends, info.shape, strict=True)
        ):
            return f"a part of {part.shape} at {part.offset} lies outside of its shape {info.shape}"
    if _overlapping(parts):
        return "some of its elements are stored twice"
    missing = math.prod(info.shape) - sum(part.numel for part in parts)
    return f"{missing:,} of its {math.prod(info.shape):,} elements are missing" if missing else None


def _overlapping(parts: Sequence[Region]) -> bool:
    """True if two of the parts have an element in common."""
    if len(parts) < 2 or not parts[0].shape:
        return len(parts) > 1
    starts = np.array([part.offset for part in parts], np.int64)
    stops = starts + np.array([part.shape for part in parts], np.int64)
    # Along the first dimension in order, only parts that start before one ends can overlap it.
    order = np.argsort(starts[:, 0], kind="stable")
    starts, stops = starts[order], stops[order]
    for index in range(len(parts) - 1):
        end = np.searchsorted(starts[:, 0], stops[index, 0], side="left")
        rest = slice(index + 1, int(end))
        if ((starts[rest] < stops[index]) & (stops[rest] > starts[index])).all(axis=1).any():
            return True
    return False
