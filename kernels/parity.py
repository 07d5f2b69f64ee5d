"""Whether an implementation of the memory kernels computes what its twins do: outputs, every gradient, accumulation into `main_grad`, and selections.

Run by the tests on every implementation and device, and by the benchmark before it reports a figure.

Legend: R table rows, T tokens, J rows read per token, C coefficient groups, W columns, B blocks of entries. Of selections: H heads, N keys per
side, M rows (and columns) kept by the first stage, K retrieved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from kernels.gather_dot import naive as naive_dot
from kernels.gather_sum import naive as naive_sum
from kernels.pieces import Gather
from kernels.product_topk import naive as naive_product
from kernels.select import Kernels
from kernels.tucker_topk import naive as naive_tucker

_Select: TypeAlias = Callable[..., tuple[Tensor, Tensor]]

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 8e-3}
"""Largest error over the largest element of the reference, which the twins compute from the same inputs in float64."""


@dataclass(frozen=True)
class ParityShape:
    """One comparison."""

    rows: int
    tokens: int
    reads: int
    width: int
    groups: int = 1
    blocks: int = 1


PARITY_SHAPES = (
    # A shard of 24 columns; rows that are read many times.
    ParityShape(rows=7, tokens=9, reads=5, width=24),
    # Two cores; a width that is no power of two.
    ParityShape(rows=50, tokens=4, reads=33, width=96, groups=2),
    # Virtual blocks.
    ParityShape(rows=50, tokens=3, reads=18, width=40, groups=2, blocks=3),
    # One row for all: the longest run that there can be, in more than one piece.
    ParityShape(rows=1, tokens=11, reads=13, width=8),
    # One token; wider than a tile.
    ParityShape(rows=300, tokens=1, reads=40, width=1288),
    # Nothing to do.
    ParityShape(rows=5, tokens=0, reads=3, width=16),
)


@dataclass(frozen=True)
class SelectionShape:
    """One selection; with `levels` above 0 that many distinct scores per unit, so that equal ones decide."""

    tokens: int
    heads: int
    keys: int
    row_top_k: int
    top_k: int
    levels: int = 0


SELECTION_SHAPES = (
    SelectionShape(tokens=3, heads=2, keys=33, row_top_k=5, top_k=7),
    SelectionShape(tokens=2, heads=1, keys=100, row_top_k=33, top_k=80, levels=2),
    # The largest of the papers.
    SelectionShape(tokens=1, heads=1, keys=150, row_top_k=128, top_k=768, levels=8),
    SelectionShape(tokens=0, heads=1, keys=20, row_top_k=5, top_k=7),
)


def parity_problems(kernels: Kernels, device: torch.device | str, dtype: torch.dtype) -> Iterator[str]:
    """What differs from the twins, in words; nothing if all is well.

    Args:
        kernels: to look at.
        device: where to run them; the twins run on the CPU.
        dtype: of the tables.
    """
    for shape in PARITY_SHAPES:
        for name, gather, twin in (
            ("gather_sum", kernels.gather_sum, naive_sum.gather_sum),
            ("gather_dot", kernels.gather_dot, naive_dot.gather_dot),
        ):
            table, ids, block, operand, gradient = _draw(shape, name, dtype)
            actual = _outcome(gather, table, ids, block, operand, gradient, shape.blocks, device)
            reference = _outcome(
                twin, table.double(), ids, block, operand.double(), gradient.double(), shape.blocks, "cpu"
            )
            for part, expected in reference.items():
                # The table's gradient is added up in fp32, whatever the table is.
                tolerance = TOLERANCE[torch.float32 if part == "main_grad" else dtype]
                error = _relative_error(actual[part], expected)
                if not error <= tolerance:
                    yield f"{name} {shape} {dtype}: {part} is off by {error:.1e} of its largest element, more than {tolerance:.0e}"


def selection_problems(kernels: Kernels, device: torch.device | str) -> Iterator[str]:
    """Where a selection takes other slots than its twin, or in another order, in words; nothing if all is well.

    Args:
        kernels: to look at.
        device: where to run them; the twins run on the CPU. Scores are fp32.
    """
    for shape in SELECTION_SHAPES:
        g = torch.Generator().manual_seed(0)
        scores = torch.randn(2, 2, shape.tokens, shape.heads, shape.keys, generator=g)
        core, directions = torch.rand(shape.heads, 2, 2, generator=g), torch.rand(2, shape.heads, 2, generator=g)
        if shape.levels:
            scores = (scores * shape.levels).round() / shape.levels
        # With the strides that the layers give them.
        rows, columns = scores.permute(0, 2, 3, 4, 1).unbind(0)
        sizes = (shape.row_top_k, shape.top_k)
        comparisons: tuple[tuple[str, _Select, _Select, tuple[Tensor, ...]], ...] = (
            ("tucker_topk", kernels.tucker_topk, naive_tucker.tucker_topk, (rows, columns, core, *directions)),
            ("product_topk", kernels.product_topk, naive_product.product_topk, (rows[..., 0], columns[..., 0])),
        )
        for name, select, twin, operands in comparisons:
            actual = select(*(tensor.to(device) for tensor in operands), *sizes)
            for part, ours, twins in zip(("first stage", "slots"), actual, twin(*operands, *sizes), strict=True):
                if not torch.equal(ours.cpu(), twins):
                    yield f"{name} {shape}: {part} differ from the twin's"


def _draw(shape: ParityShape, name: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor]:
    """Table, ids, block, the other operand, and the gradient of the output."""
    g = torch.Generator().manual_seed(0)
    tokens, reads, wide = shape.tokens, shape.reads, shape.blocks * shape.width

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=g).to(dtype)

    ids = torch.randint(0, shape.rows, (tokens, reads), generator=g)
    block = torch.randint(0, shape.blocks, (tokens, reads), generator=g) if shape.blocks > 1 else None
    table = normal(shape.rows, shape.width)
    if name == "gather_sum":
        return table, ids, block, normal(tokens, reads, shape.groups), normal(tokens, wide)
    return table, ids, block, normal(tokens, wide), normal(tokens, reads)


def _outcome(
    gather: Gather,
    table: Tensor,
    ids: Tensor,
    block: Tensor | None,
    operand: Tensor,
    gradient: Tensor,
    num_blocks: int,
    device: torch.device | str,
) -> dict[str, Tensor]:
    """Output, gradient of the other operand, and what has been added to `main_grad`, where the table has one (the twins' has none)."""
    parameter = torch.nn.Parameter(table.to(device))
    is_twin = table.dtype == torch.float64
    if not is_twin:
        parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)  # type: ignore[attr-defined]
    leaf = operand.detach().clone().to(device).requires_grad_()
    out = gather(parameter, ids.to(device), leaf, None if block is None else block.to(device), num_blocks)
    out.backward(gradient.to(device))
    main_grad = parameter.grad if is_twin else getattr(parameter, "main_grad", None)
    assert main_grad is not None
    assert leaf.grad is not None
    return {"out": out.detach().cpu(), "operand_grad": leaf.grad.cpu(), "main_grad": main_grad.cpu()}


def _relative_error(actual: Tensor, expected: Tensor) -> float:
    if actual.shape != expected.shape:
        return float("inf")
    if not expected.numel():
        return 0.0
    return float((actual.double() - expected).abs().max() / expected.abs().max().clamp_min(1e-3))
