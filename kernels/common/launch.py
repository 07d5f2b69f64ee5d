"""Launches of the Triton kernels: their device and their sums' dtype. Importing this imports Triton."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
import triton.language as tl
from torch import Tensor


def sum_dtype(rows: Tensor) -> tl.dtype:
    """The dtype of sums of such rows."""
    return tl.float64 if rows.dtype == torch.float64 else tl.float32


def on_device_of(rows: Tensor) -> AbstractContextManager[object]:
    """Triton launches on the current device."""
    return torch.cuda.device(rows.device) if rows.is_cuda else nullcontext()
