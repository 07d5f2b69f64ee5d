"""`gather_pair` in Triton, as custom ops of PyTorch: `torch.compile` takes them as they are, and nothing waits for the device.

Legend: R table rows, T tokens, J rows read per token, C scores per row, P pre-value columns, V value columns, B blocks of entries, S parts of a
token's entries.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels.common.checks import check_contiguous
from kernels.common.launch import on_device_of, sum_dtype
from kernels.common.tiles import pair_tile, part_length, parts_tile
from kernels.gather_pair.operands import SCHEMA, Pair, PairGradients, PairOperands
from kernels.gather_pair.triton_kernel import gather_pair_gradients_kernel, gather_pair_kernel, sum_of_parts_kernel


@dataclass(frozen=True)
class Launch:
    """How the entries of T tokens are cut."""

    part: int
    """Entries of a program."""
    num_parts: int
    """S."""
    constants: dict[str, Any]
    """Tiles and warps."""


def launch_of(tokens: int, reads: int, dot_width: int, sum_width: int) -> Launch:
    """Of either kernel.

    Args:
        tokens: T.
        reads: J.
        dot_width: columns of a group of the table whose products are made.
        sum_width: columns of a group of the table whose rows are summed.
    """
    part = part_length(tokens, reads)
    num_parts = max(1, -(-reads // part))
    dot, sums = (pair_tile(width, part, tokens * num_parts) for width in (dot_width, sum_width))
    tiles = {
        "DOT_ENTRIES": dot.entries,
        "DOT_COLUMNS": dot.columns,
        "SUM_ENTRIES": sums.entries,
        "SUM_COLUMNS": sums.columns,
    }
    return Launch(part, num_parts, {**tiles, "num_warps": dot.num_warps})


def _empty_pair(*operands: Any) -> tuple[Tensor, Tensor]:
    """Room for the result and the products, and all of it that `torch.compile` wants to know; products in what rows are added up in."""
    o = PairOperands(*operands)
    out = o.values.new_empty(o.ids.shape[0], o.num_blocks * o.values.shape[1])
    return out, o.values.new_empty(o.ids.shape, dtype=torch.promote_types(o.values.dtype, torch.float32))


@torch.library.custom_op("megamem::triton_gather_pair", mutates_args=(), schema=f"({SCHEMA}) -> (Tensor, Tensor)")
def _forward(*operands: Any) -> tuple[Tensor, Tensor]:
    o = PairOperands(*operands)
    check_contiguous(o.pre_values)
    check_contiguous(o.values)
    tokens, reads, groups = o.scores.shape
    pre_width, width = o.pre_values.shape[1], o.values.shape[1]
    out, products = _empty_pair(*o)
    if out.numel() == 0:
        return out, products
    launch = launch_of(tokens, reads, pre_width, width // groups)
    sums = _parts(out, launch, products.dtype)
    ids = o.ids.contiguous()
    with on_device_of(o.values):
        gather_pair_kernel[(tokens, launch.num_parts)](
            o.pre_values,
            o.values,
            ids,
            o.x.contiguous(),
            o.scores.contiguous(),
            ids if o.block is None else o.block.contiguous(),
            products,
            sums,
            reads,
            launch.part,
            C=groups,
            P=pre_width,
            V=width,
            B=o.num_blocks,
            ACTIVATION=o.activation,
            SUM=sum_dtype(o.values),
            **launch.constants,
        )
    _add_parts(sums, out)
    return out, products


_forward.register_fake(_empty_pair)


def _empty_gradients(*arguments: Any) -> tuple[Tensor, ...]:
    """The same of `PairGradients`; what only `segment_accumulate` reads is not rounded."""
    *operands, products, _ = arguments
    o = PairOperands(*operands)
    grad_x = o.pre_values.new_empty(o.ids.shape[0], o.pre_values.shape[1])
    return (
        o.scores.new_empty(o.scores.shape),
        products.new_empty(products.shape),
        products.new_empty(o.scores.shape),
        grad_x,
    )


@torch.library.custom_op(
    "megamem::triton_gather_pair_gradients",
    mutates_args=(),
    schema=f"({SCHEMA}, Tensor products, Tensor grad_out) -> (Tensor, Tensor, Tensor, Tensor)",
)
def _gradients(*arguments: Any) -> tuple[Tensor, ...]:
    *operands, products, grad_out = arguments
    o = PairOperands(*operands)
    tokens, reads, groups = o.scores.shape
    pre_width, width = o.pre_values.shape[1], o.values.shape[1]
    made = PairGradients(*_empty_gradients(*arguments))
    if made.x.numel() == 0:
        return tuple(made)
    launch = launch_of(tokens, reads, width // groups, pre_width)
    sums = _parts(made.x, launch, products.dtype)
    ids = o.ids.contiguous()
    with on_device_of(o.values):
        gather_pair_gradients_kernel[(tokens, launch.num_parts)](
            o.pre_values,
            o.values,
            ids,
            o.scores.contiguous(),
            products,
            grad_out.contiguous(),
            ids if o.block is None else o.block.contiguous(),
            made.scores,
            made.products,
            made.coef,
            sums,
            reads,
            launch.part,
            C=groups,
            P=pre_width,
            V=width,
            B=o.num_blocks,
            ACTIVATION=o.activation,
            SUM=sum_dtype(o.values),
            **launch.constants,
        )
    _add_parts(sums, made.x)
    return tuple(made)


_gradients.register_fake(_empty_gradients)


def _gather(o: PairOperands) -> tuple[Tensor, Tensor]:
    out, products = _forward(*o)
    return out, products


def _gather_gradients(o: PairOperands, products: Tensor, grad_out: Tensor) -> PairGradients:
    return PairGradients(*_gradients(*o, products, grad_out))


gather_pair = Pair(_gather, _gather_gradients)
"""Products and coefficients are not rounded to the dtype of the tables."""


def _parts(out: Tensor, launch: Launch, dtype: torch.dtype) -> Tensor:
    """Where the kernel puts its sums: in `out` [T, W], or, where there are several to each, in scratch [T, S, W]."""
    return out if launch.num_parts == 1 else out.new_empty(out.shape[0], launch.num_parts, out.shape[1], dtype=dtype)


def _add_parts(parts: Tensor, out: Tensor) -> None:
    """Adds up the sums in scratch, if they are there."""
    if parts is out:
        return
    width = out.shape[1]
    columns, num_warps = parts_tile(width)
    with on_device_of(out):
        sum_of_parts_kernel[(out.shape[0], -(-width // columns))](
            parts, out, parts.shape[1], W=width, COLUMNS=columns, num_warps=num_warps
        )
