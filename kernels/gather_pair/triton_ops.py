"""The pair in Triton, as custom ops of PyTorch like those of `kernels/triton_ops.py`.

Legend: R table rows, T tokens, J rows read per token, C scores per row, P pre-value columns, V value columns, B blocks of entries, S parts of a
token's entries.

Importing this module imports Triton.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels.gather_pair.triton_kernel import gather_pair_gradients_kernel, gather_pair_kernel, sum_of_parts_kernel
from kernels.gather_pair.weighting import Activation
from kernels.pieces import check_contiguous
from kernels.tiles import pair_tile, part_length, parts_tile
from kernels.triton_ops import on_device_of, sum_dtype


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


def _empty_pair(
    pre_values: Tensor,
    values: Tensor,
    ids: Tensor,
    x: Tensor,
    scores: Tensor,
    activation: str,
    block: Tensor | None,
    num_blocks: int,
) -> tuple[Tensor, Tensor]:
    """Room for what `PairOfRows` returns, and all of it that `torch.compile` wants to know; products in what rows are added up in."""
    out = values.new_empty(ids.shape[0], num_blocks * values.shape[1])
    return out, values.new_empty(ids.shape, dtype=torch.promote_types(values.dtype, torch.float32))


@torch.library.custom_op(
    "megamem::triton_pair",
    mutates_args=(),
    schema="(Tensor pre_values, Tensor values, Tensor ids, Tensor x, Tensor scores, str activation, Tensor? block, int num_blocks) "
    "-> (Tensor, Tensor)",
)
def _pair(
    pre_values: Tensor,
    values: Tensor,
    ids: Tensor,
    x: Tensor,
    scores: Tensor,
    activation: str,
    block: Tensor | None,
    num_blocks: int,
) -> tuple[Tensor, Tensor]:
    check_contiguous(pre_values)
    check_contiguous(values)
    tokens, reads, groups = scores.shape
    pre_width, width = pre_values.shape[1], values.shape[1]
    out, products = _empty_pair(pre_values, values, ids, x, scores, activation, block, num_blocks)
    if out.numel() == 0:
        return out, products
    launch = launch_of(tokens, reads, pre_width, width // groups)
    sums = _parts(out, launch, products.dtype)
    ids = ids.contiguous()
    with on_device_of(values):
        gather_pair_kernel[(tokens, launch.num_parts)](
            pre_values,
            values,
            ids,
            x.contiguous(),
            scores.contiguous(),
            ids if block is None else block.contiguous(),
            products,
            sums,
            reads,
            launch.part,
            C=groups,
            P=pre_width,
            V=width,
            B=num_blocks,
            ACTIVATION=activation,
            SUM=sum_dtype(values),
            **launch.constants,
        )
    _add_parts(sums, out)
    return out, products


_pair.register_fake(_empty_pair)


def pair(
    pre_values: Tensor,
    values: Tensor,
    ids: Tensor,
    x: Tensor,
    scores: Tensor,
    activation: Activation,
    block: Tensor | None = None,
    num_blocks: int = 1,
) -> tuple[Tensor, Tensor]:
    """See `kernels.pieces.PairOfRows`. Products and coefficients are not rounded to the dtype of the tables."""
    out: tuple[Tensor, Tensor] = _pair(pre_values, values, ids, x, scores, activation, block, num_blocks)
    return out


def _empty_gradients(
    pre_values: Tensor,
    values: Tensor,
    ids: Tensor,
    scores: Tensor,
    products: Tensor,
    grad_out: Tensor,
    activation: str,
    block: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The same of `PairGradients`; what only `accumulate` reads is not rounded."""
    grad_x = pre_values.new_empty(ids.shape[0], pre_values.shape[1])
    return scores.new_empty(scores.shape), products.new_empty(products.shape), products.new_empty(scores.shape), grad_x


@torch.library.custom_op(
    "megamem::triton_pair_gradients",
    mutates_args=(),
    schema="(Tensor pre_values, Tensor values, Tensor ids, Tensor scores, Tensor products, Tensor grad_out, str activation, Tensor? block) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
)
def _pair_gradients(
    pre_values: Tensor,
    values: Tensor,
    ids: Tensor,
    scores: Tensor,
    products: Tensor,
    grad_out: Tensor,
    activation: str,
    block: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    tokens, reads, groups = scores.shape
    pre_width, width = pre_values.shape[1], values.shape[1]
    grad_scores, grad_products, coef, grad_x = _empty_gradients(
        pre_values, values, ids, scores, products, grad_out, activation, block
    )
    if grad_x.numel() == 0:
        return grad_scores, grad_products, coef, grad_x
    launch = launch_of(tokens, reads, width // groups, pre_width)
    sums = _parts(grad_x, launch, products.dtype)
    ids = ids.contiguous()
    with on_device_of(values):
        gather_pair_gradients_kernel[(tokens, launch.num_parts)](
            pre_values,
            values,
            ids,
            scores.contiguous(),
            products,
            grad_out.contiguous(),
            ids if block is None else block.contiguous(),
            grad_scores,
            grad_products,
            coef,
            sums,
            reads,
            launch.part,
            C=groups,
            P=pre_width,
            V=width,
            B=1 if block is None else grad_out.shape[1] // width,
            ACTIVATION=activation,
            SUM=sum_dtype(values),
            **launch.constants,
        )
    _add_parts(sums, grad_x)
    return grad_scores, grad_products, coef, grad_x


_pair_gradients.register_fake(_empty_gradients)


def pair_gradients(
    pre_values: Tensor,
    values: Tensor,
    ids: Tensor,
    scores: Tensor,
    products: Tensor,
    grad_out: Tensor,
    activation: Activation,
    block: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `kernels.pieces.PairGradients`."""
    out: tuple[Tensor, Tensor, Tensor, Tensor] = _pair_gradients(
        pre_values, values, ids, scores, products, grad_out, activation, block
    )
    return out


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
