"""Launches of the Triton kernels: their device and their sums' dtype. Importing this imports Triton.

Launchers pass constants by position, where the host hands each to Triton in 0.2 us and not in 0.7, and look up what
follows from sizes and dtypes alone in a cache.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
import triton.language as tl
from torch import Tensor

_HERE = nullcontext()


def sum_dtype(rows: torch.dtype) -> tl.dtype:
    """The dtype of sums of rows of a dtype."""
    return tl.float64 if rows == torch.float64 else tl.float32


def on_device_of(rows: Tensor) -> AbstractContextManager[object]:
    """Triton launches on the current device: another one is entered."""
    if not rows.is_cuda or rows.get_device() == torch.cuda.current_device():
        return _HERE
    return torch.cuda.device(rows.device)
