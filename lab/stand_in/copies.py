"""Copies between a GPU and its host: whether anybody waits for them."""

from __future__ import annotations

from typing import Any

import torch

_aten = torch.ops.aten


def is_non_blocking(copy: Any, args: Any, kwargs: Any) -> bool:
    """True of a copy that its caller does not wait for."""
    position = 2 if copy is _aten.copy_.default else len(args)
    return bool(args[position] if position < len(args) else kwargs.get("non_blocking"))


def becomes_pinned(copy: Any, *, non_blocking: bool, to_host: bool) -> bool:
    """True of a copy to the host whose memory PyTorch makes page-locked, and leaves to the stream: `x.to("cpu",
    non_blocking=True)` (aten/src/ATen/native/TensorConversions.cpp, 2.11 to 2.13)."""
    return copy is _aten._to_copy.default and non_blocking and to_host
