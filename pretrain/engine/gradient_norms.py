"""Norms of gradients: sums of squares in fp64, and clipping by them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class GradientNorms:
    """Norms over all ranks, before clipping.

    Attributes:
        main: norm of all parameters, or of all but the tables if these have a norm of their own.
        tables: norm of values and pre-values together, or None if they are in `main`.
    """

    main: float
    tables: float | None

    @property
    def are_finite(self) -> bool:
        return math.isfinite(self.main) and (self.tables is None or math.isfinite(self.tables))


NORM_PART_ELEMENTS = 1 << 18
"""Elements of a gradient whose squares are summed at once on a CPU: 2 MB in fp64, which its cache holds."""


def sums_of_squares(gradients: Sequence[Tensor]) -> list[Tensor]:
    """Sum of squares of each gradient, [] fp64, contiguous and of any size; without an fp64 copy of a large one.

    On a GPU few kernels read all of them. (One norm after the other takes 16 times as long, by launches and copies.)
    """
    sums: dict[int, Tensor] = {}
    # Of several dtypes together PyTorch would take one tensor at a time.
    on_gpu: dict[torch.dtype, list[int]] = {}
    for place, gradient in enumerate(gradients):
        if gradient.is_cuda:
            on_gpu.setdefault(gradient.dtype, []).append(place)
        else:
            sums[place] = _sum_of_squares(gradient)
    for places in on_gpu.values():
        norms = torch._foreach_norm([gradients[place] for place in places], 2, torch.float64)
        sums |= zip(places, torch._foreach_mul(norms, norms), strict=True)
    return [sums[place] for place in range(len(gradients))]


def _sum_of_squares(gradient: Tensor) -> Tensor:
    """Sum of squares, [] fp64, in parts: PyTorch makes an fp64 copy of its input, twice the size of the largest shard of
    a table. All parts are copied to one place. With a copy for each, and a small result behind it, the next copy would
    not fit where the last one was, and the heap would grow by 8 bytes per element.
    """
    flat = gradient.view(-1)
    parts = flat.split(NORM_PART_ELEMENTS)
    copy = torch.empty(len(parts[0]), dtype=torch.float64)
    norms = torch.empty(len(parts), dtype=torch.float64)
    for part, norm in zip(parts, norms, strict=True):
        torch.linalg.vector_norm(copy[: len(part)].copy_(part), out=norm)
    return norms.square_().sum()


def sum_in_any_order(squares: Sequence[Tensor]) -> Tensor:
    """Sum of [] fp64 numbers, to the same bit whatever their order; there may be none."""
    zero = torch.zeros((), dtype=torch.float64, device=torch.cuda.current_device())
    return torch.stack([zero, *squares]).sort().values.sum()


def scale_to(gradients: list[Tensor], norm: float, max_norm: float) -> None:
    """Scale gradients of a norm in place so that it is `max_norm` at most; 0: any."""
    # As Megatron has it, with an offset that keeps the quotient finite.
    coefficient = max_norm / (norm + 1e-6)
    if max_norm > 0 and coefficient < 1 and gradients:
        torch._foreach_mul_(gradients, coefficient)
