"""Operations of PyTorch, as a mode below autograd sees them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_aten = torch.ops.aten
ROOM = {_aten.empty, _aten.new_empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty_strided}
"""Operations that make room and write nothing."""


def tensors_in(value: Any) -> list[Tensor]:
    """All tensors of an operation's arguments or results, in their order: PyTorch's schemas nest sequences alone, which
    take a tenth of the time of its trees.
    """
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [tensor for each in value for tensor in tensors_in(each)]
    return []
