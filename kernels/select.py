"""Which implementation of the memory kernels a model uses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from kernels.gather_dot import naive as naive_gather_dot
from kernels.gather_dot import op as gather_dot_op
from kernels.gather_sum import naive as naive_gather_sum
from kernels.gather_sum import op as gather_sum_op


@dataclass(frozen=True)
class Kernels:
    """The two gathers that carry every memory layer; their signatures are those of the naive twins."""

    gather_sum: Callable[[Tensor, Tensor, Tensor], Tensor]
    gather_dot: Callable[[Tensor, Tensor, Tensor], Tensor]


def select_kernels(implementation: Literal["auto", "naive"]) -> Kernels:
    """The autograd ops (auto), or their differentiable PyTorch references (naive)."""
    if implementation == "naive":
        return Kernels(naive_gather_sum.gather_sum, naive_gather_dot.gather_dot)
    return Kernels(gather_sum_op.gather_sum, gather_dot_op.gather_dot)
