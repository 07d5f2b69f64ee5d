"""`gather_pair` in Triton, as custom ops of PyTorch: nothing waits for the device.

Legend: T tokens, J rows read per token, C column groups, P pre-value columns, V value columns, B bins, S splits of a
token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels.common.checks import check_contiguous
from kernels.common.launch import on_device_of, sum_dtype
from kernels.common.tiles import pair_tile, split_length, split_sum_tile
from kernels.gather_pair.operands import SCHEMA, Pair, PairGradients, PairOperands
from kernels.gather_pair.triton_kernel import gather_pair_gradients_kernel, gather_pair_kernel, sum_of_splits_kernel


@dataclass(frozen=True)
class Launch:
    """Cut of the entries of T tokens into programs."""

    split: int
    """Entries of a program."""
    num_splits: int
    """S."""
    constants: dict[str, Any]
    """Tiles and warps."""


def launch_of(tokens: int, reads: int, dot_width: int, sum_width: int) -> Launch:
    """For T tokens with J reads; widths of a column group of the first table read and of the second."""
    split = split_length(tokens, reads)
    num_splits = max(1, -(-reads // split))
    dot, sums = (pair_tile(width, split, tokens * num_splits) for width in (dot_width, sum_width))
    tiles = {
        "DOT_ENTRIES": dot.entries,
        "DOT_COLUMNS": dot.columns,
        "SUM_ENTRIES": sums.entries,
        "SUM_COLUMNS": sums.columns,
    }
    return Launch(split, num_splits, {**tiles, "num_warps": dot.num_warps})


def _empty_pair(*operands: Any) -> tuple[Tensor, Tensor]:
    """The result and the products, not filled yet; the products have the dtype of the kernel's sums."""
    o = PairOperands(*operands)
    out = o.values.new_empty(o.ids.shape[0], o.num_bins * o.values.shape[1])
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
    sums = _room_for_splits(out, launch, products.dtype)
    ids = o.ids.contiguous()
    with on_device_of(o.values):
        gather_pair_kernel[(tokens, launch.num_splits)](
            o.pre_values,
            o.values,
            ids,
            o.x.contiguous(),
            o.scores.contiguous(),
            ids if o.bins is None else o.bins.contiguous(),
            products,
            sums,
            reads,
            launch.split,
            **_constants(o, launch),
        )
    _add_splits(sums, out)
    return out, products


_forward.register_fake(_empty_pair)


def _empty_gradients(*arguments: Any) -> tuple[Tensor, ...]:
    """`PairGradients`, not filled yet; what only `segment_accumulate` reads is not rounded."""
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
    sums = _room_for_splits(made.x, launch, products.dtype)
    ids = o.ids.contiguous()
    with on_device_of(o.values):
        gather_pair_gradients_kernel[(tokens, launch.num_splits)](
            o.pre_values,
            o.values,
            ids,
            o.scores.contiguous(),
            products,
            grad_out.contiguous(),
            ids if o.bins is None else o.bins.contiguous(),
            made.scores,
            made.products,
            made.coef,
            sums,
            reads,
            launch.split,
            **_constants(o, launch),
        )
    _add_splits(sums, made.x)
    return tuple(made)


_gradients.register_fake(_empty_gradients)


gather_pair = Pair(
    lambda o: _forward(*o), lambda o, products, grad_out: PairGradients(*_gradients(*o, products, grad_out))
)
"""Products and coefficients are not rounded to the dtype of the tables."""


def _constants(o: PairOperands, launch: Launch) -> dict[str, Any]:
    return {
        "C": o.scores.shape[2],
        "P": o.pre_values.shape[1],
        "V": o.values.shape[1],
        "B": o.num_bins,
        "ACTIVATION": o.activation,
        "SUM": sum_dtype(o.values),
        **launch.constants,
    }


def _room_for_splits(out: Tensor, launch: Launch, dtype: torch.dtype) -> Tensor:
    """Destination of the kernel's sums: `out` [T, W], or with several splits scratch [T, S, W]."""
    return out if launch.num_splits == 1 else out.new_empty(out.shape[0], launch.num_splits, out.shape[1], dtype=dtype)


def _add_splits(splits: Tensor, out: Tensor) -> None:
    """Adds up the sums in scratch, if they are there."""
    if splits is out:
        return
    width = out.shape[1]
    columns, num_warps = split_sum_tile(width)
    with on_device_of(out):
        sum_of_splits_kernel[(out.shape[0], -(-width // columns))](
            splits, out, splits.shape[1], W=width, COLUMNS=columns, num_warps=num_warps
        )
