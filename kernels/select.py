"""Which implementation of the memory kernels a model uses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

from kernels.gather_dot import naive as naive_gather_dot
from kernels.gather_dot import op as gather_dot_op
from kernels.gather_sum import naive as naive_gather_sum
from kernels.gather_sum import op as gather_sum_op


class Gather(Protocol):
    """The signature of both gathers: (table, ids, coef or x), and the block of each entry where there is more than one."""

    def __call__(
        self, table: Tensor, ids: Tensor, operand: Tensor, /, block: Tensor | None = None, num_blocks: int = 1
    ) -> Tensor: ...


@dataclass(frozen=True)
class Kernels:
    """The two gathers that carry every memory layer; their signatures are those of the naive twins."""

    gather_sum: Gather
    gather_dot: Gather


def select_kernels(implementation: Literal["auto", "naive"]) -> Kernels:
    """The autograd ops (auto), or their differentiable PyTorch references (naive)."""
    if implementation == "naive":
        return Kernels(naive_gather_sum.gather_sum, naive_gather_dot.gather_dot)
    return Kernels(gather_sum_op.gather_sum, gather_dot_op.gather_dot)
