"""`normal_product` in Triton: a pass over x each way, and one over what it leaves.

Forward, a program has some tokens and a part of their columns; backward it has some columns and a part of the tokens, and
adds up the gradient of their maps. Parts are added up in their order, so that every run has the same bits. Launches are custom
ops of PyTorch; nothing waits for the device.

Products are made by tensor cores, in fp32: see README.md.

Legend: T tokens, K columns, M outputs, S splits.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels.common.launch import on_device_of
from kernels.common.ops import custom_op, needs_gradient
from kernels.common.tiles import MAX_PRODUCT_OUTPUTS, ProductTile, product_gradients_tile, product_splits, product_tile
from kernels.normal_product.op import torch_normal_product

_TOKENS = 64
"""Tokens of a program of the kernels that read nothing of x."""


@triton.jit
def _parts(number):
    """First 11 digits of numbers in fp32, which are all that tensor cores read, and the other 13."""
    first = (number.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
    return first, number - first


@triton.jit
def _product(a, a_rest, b, b_rest, A_HAS_REST: tl.constexpr, B_HAS_REST: tl.constexpr):
    """Product (a + a_rest) (b + b_rest) of matrices in parts, without that of both rests.

    The sum begins at 0, and not at what it is added to: tensor cores cut off what they add up, and do not round it.
    """
    product = tl.zeros([a.shape[0], b.shape[1]], tl.float32)
    if B_HAS_REST:
        product = tl.dot(a, b_rest, product, input_precision="tf32")
    if A_HAS_REST:
        product = tl.dot(a_rest, b, product, input_precision="tf32")
    return tl.dot(a, b, product, input_precision="tf32")


@triton.jit(do_not_specialize=["num_tokens"])
def normal_product_kernel(
    x,
    weight,
    products,
    squares,
    totals,
    means,
    num_tokens,
    K: tl.constexpr,
    M: tl.constexpr,
    SIDE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PART: tl.constexpr,
    CENTRED: tl.constexpr,
    NARROW: tl.constexpr,
):
    """Products [S, T, M] and squares [S, T] of every split of the columns. The grid is (tiles of ROWS tokens, S).

    Where x is centred they are those of x less a number near its mean, which is left in `means`: nothing of their sums cancels.

    Args:
        totals: [S, T], sums of x less that number; None: x is not centred.
        means: [T]; None: likewise.
    """
    token, split = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1).to(tl.int64)
    present, own = token < num_tokens, x + token.to(tl.int64)[:, None] * K
    lane, output = tl.arange(0, COLUMNS), tl.arange(0, SIDE)
    sums, square_sums = tl.zeros([ROWS, SIDE], tl.float32), tl.zeros([ROWS, COLUMNS], tl.float32)
    if CENTRED:
        first = tl.load(own + lane[None, :], mask=present[:, None] & (lane < K)[None, :], other=0).to(tl.float32)
        shift = tl.sum(first, 1) / min(COLUMNS, K)
        total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, PART, COLUMNS):
        column = tl.program_id(1) * PART + start + lane
        there = column < K
        whole = present[:, None] & there[None, :]
        values = tl.load(own + column[None, :], mask=whole, other=0).to(tl.float32)
        if CENTRED:
            values = tl.where(whole, values - shift[:, None], 0)
            total += values
        square_sums += values * values
        at = weight + output[:, None] * K + column[None, :]
        maps, maps_rest = _parts(tl.trans(tl.load(at, mask=(output < M)[:, None] & there[None, :], other=0)))
        if NARROW:
            sums += _product(values, values, maps, maps_rest, False, True)
        else:
            digits, digits_rest = _parts(values)
            sums += _product(digits, digits_rest, maps, maps_rest, True, True)
    of_token = split * num_tokens + token
    mask = present[:, None] & (output < M)[None, :]
    tl.store(products + of_token[:, None] * M + output[None, :], sums, mask=mask)
    tl.store(squares + of_token, tl.sum(square_sums, 1), mask=present)
    if CENTRED:
        tl.store(totals + of_token, tl.sum(total, 1), mask=present)
        tl.store(means + token, shift, mask=present & (split == 0))


@triton.jit(do_not_specialize=["num_tokens", "num_splits"])
def normal_product_finish_kernel(
    products,
    squares,
    totals,
    means,
    out,
    scales,
    num_tokens,
    num_splits,
    epsilon,
    K: tl.constexpr,
    M: tl.constexpr,
    SIDE: tl.constexpr,
    ROWS: tl.constexpr,
    CENTRED: tl.constexpr,
):
    """Sums over splits, the scales [T] and the products with them. The grid is (tiles of ROWS tokens,).

    Args:
        means: [T], what `normal_product_kernel` left there, to which the distance from the mean is added.
    """
    token, output = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, SIDE)
    present = token < num_tokens
    mask = present[:, None] & (output < M)[None, :]
    place = token.to(tl.int64)[:, None] * M + output[None, :]
    sums, square, total = tl.zeros([ROWS, SIDE], tl.float32), tl.zeros([ROWS], tl.float32), tl.zeros([ROWS], tl.float32)
    for split in range(num_splits):
        first = num_tokens.to(tl.int64) * split
        sums += tl.load(products + first * M + place, mask=mask, other=0)
        square += tl.load(squares + first + token, mask=present, other=0)
        if CENTRED:
            total += tl.load(totals + first + token, mask=present, other=0)
    square /= K
    if CENTRED:
        total /= K
        square -= total * total
        tl.store(means + token, tl.load(means + token, mask=present, other=0) + total, mask=present)
    scale = 1 / tl.sqrt(square + epsilon)
    tl.store(scales + token, scale, mask=present)
    tl.store(out + place, sums * scale[:, None], mask=mask)


@triton.jit(do_not_specialize=["num_tokens"])
def normal_product_scaled_kernel(
    gradient, out, scales, scaled, along, num_tokens, K, M: tl.constexpr, SIDE: tl.constexpr, ROWS: tl.constexpr
):
    """The gradient of W (x - m), [T, M], and what of x - m is taken from that of x, [T]. The grid is (tiles of ROWS tokens,)."""
    token, output = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, SIDE)
    present = token < num_tokens
    place, mask = token.to(tl.int64)[:, None] * M + output[None, :], present[:, None] & (output < M)[None, :]
    scale = tl.load(scales + token, mask=present, other=0)
    grad = tl.load(gradient + place, mask=mask, other=0) * scale[:, None]
    tl.store(scaled + place, grad, mask=mask)
    tl.store(along + token, tl.sum(grad * tl.load(out + place, mask=mask, other=0), 1) * scale / K, mask=present)


@triton.jit(do_not_specialize=["num_tokens", "tokens_per_split"])
def normal_product_gradients_kernel(
    scaled,
    along,
    x,
    weight,
    means,
    of_x,
    of_weight,
    num_tokens,
    tokens_per_split,
    OF_X: tl.constexpr,
    OF_WEIGHT: tl.constexpr,
    K: tl.constexpr,
    M: tl.constexpr,
    SIDE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CENTRED: tl.constexpr,
    NARROW: tl.constexpr,
):
    """Gradients of x, and of W by every split of the tokens, [S, M, K]. The grid is (tiles of COLUMNS columns, S)."""
    column, output = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, SIDE)
    there, is_output = column < K, output < M
    of_maps, mask_of_maps = output[:, None] * K + column[None, :], is_output[:, None] & there[None, :]
    maps, maps_rest = _parts(tl.load(weight + of_maps, mask=mask_of_maps, other=0))
    # Columns are rows here, of which tensor cores take 64 at once.
    sums = tl.zeros([COLUMNS, SIDE], tl.float32)
    for start in range(0, tokens_per_split, ROWS):
        token = tl.program_id(1) * tokens_per_split + start + tl.arange(0, ROWS)
        present = token < num_tokens
        at, whole = token.to(tl.int64)[:, None] * K + column[None, :], present[:, None] & there[None, :]
        place, mask = token.to(tl.int64)[:, None] * M + output[None, :], present[:, None] & is_output[None, :]
        values = tl.load(x + at, mask=whole, other=0).to(tl.float32)
        of_norm = tl.load(along + token, mask=present, other=0)
        if CENTRED:
            values -= tl.load(means + token, mask=present, other=0)[:, None]
        grad, grad_rest = _parts(tl.load(scaled + place, mask=mask, other=0))
        if OF_WEIGHT:
            turned = tl.trans(values)
            if NARROW:
                sums += _product(turned, turned, grad, grad_rest, False, True)
            else:
                digits, digits_rest = _parts(turned)
                sums += _product(digits, digits_rest, grad, grad_rest, True, True)
        if OF_X:
            found = _product(grad, grad_rest, maps, maps_rest, True, True)
            found -= values * of_norm[:, None]
            tl.store(of_x + at, found.to(of_x.dtype.element_ty), mask=whole)
    if OF_WEIGHT:
        own = of_weight + tl.program_id(1).to(tl.int64) * (M * K)
        tl.store(own + tl.trans(of_maps), sums, mask=tl.trans(mask_of_maps))


@cache
def _plan(
    num_tokens: int, width: int, num_outputs: int, dtype: torch.dtype, centred: bool
) -> tuple[tuple[int, int], tuple[Any, ...], dict[str, int]]:
    """Tiles of tokens and splits of the columns, the constants of `normal_product_kernel`, and its options."""
    narrow = _is_narrow(dtype, centred)
    tile = product_tile(num_outputs, narrow=narrow)
    num_tiles, num_steps = -(-num_tokens // tile.rows), -(-width // tile.columns)
    splits = product_splits(num_tiles, num_steps)
    part = -(-num_steps // splits) * tile.columns
    return (num_tiles, splits), (width, *_sizes(tile, num_outputs), part, centred, narrow), tile.options


@cache
def _plan_of_gradients(
    num_tokens: int, width: int, num_outputs: int, dtype: torch.dtype, centred: bool
) -> tuple[tuple[int, int], int, tuple[Any, ...], dict[str, int]]:
    """Tiles of columns and splits of the tokens, tokens of a split, the constants of `normal_product_gradients_kernel`, and
    its options."""
    narrow = _is_narrow(dtype, centred)
    tile = product_gradients_tile(num_outputs, narrow=narrow)
    num_tiles, num_steps = -(-width // tile.columns), -(-num_tokens // tile.rows)
    splits = product_splits(num_tiles, num_steps)
    split_tokens = -(-num_steps // splits) * tile.rows
    return (num_tiles, splits), split_tokens, (width, *_sizes(tile, num_outputs), centred, narrow), tile.options


def _is_narrow(dtype: torch.dtype, centred: bool) -> bool:
    """True where numbers that are multiplied have no rest: those of 16 bits, as they are."""
    return dtype.itemsize == 2 and not centred


def _sizes(tile: ProductTile, num_outputs: int) -> tuple[int, ...]:
    return num_outputs, tile.side, tile.rows, tile.columns


def _empty(x: Tensor, weight: Tensor, epsilon: float, centred: bool) -> tuple[Tensor, Tensor, Tensor]:
    num_tokens = x.numel() // x.shape[-1]
    out = weight.new_empty(*x.shape[:-1], len(weight))
    return out, weight.new_empty(num_tokens), weight.new_empty(num_tokens if centred else 0)


@custom_op("triton_normal_product", _empty)
def _normal_product(x: Tensor, weight: Tensor, epsilon: float, centred: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The result, the scale of each token, and its mean where x is centred: rows of W must add up to 0 there."""
    out, scales, means = _empty(x, weight, epsilon, centred)
    (num_outputs, width), num_tokens = weight.shape, len(scales)
    if num_tokens:
        grid, constants, options = _plan(num_tokens, width, num_outputs, x.dtype, centred)
        side, splits = constants[2], grid[1]
        products, squares = weight.new_empty(splits, num_tokens, num_outputs), weight.new_empty(splits, num_tokens)
        of_mean = (torch.empty_like(squares), means) if centred else (None, None)
        with on_device_of(x):
            normal_product_kernel[grid](
                *(x.contiguous(), weight, products, squares, *of_mean, num_tokens), *constants, **options
            )
            normal_product_finish_kernel[(-(-num_tokens // _TOKENS),)](
                *(products, squares, *of_mean, out, scales, num_tokens, splits, epsilon),
                *(width, num_outputs, side, _TOKENS, centred),
            )
    return out, scales, means


def _empty_gradients(
    gradient: Tensor,
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    scales: Tensor,
    means: Tensor,
    of_x: bool,
    of_weight: bool,
    centred: bool,
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape if of_x else 0), weight.new_empty(weight.shape if of_weight else 0)


@custom_op("triton_normal_product_gradients", _empty_gradients)
def _gradients(
    gradient: Tensor,
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    scales: Tensor,
    means: Tensor,
    of_x: bool,
    of_weight: bool,
    centred: bool,
) -> tuple[Tensor, Tensor]:
    """Gradients of x and of the weight; what is not asked for is empty."""
    result, of_maps = _empty_gradients(gradient, x, weight, out, scales, means, of_x, of_weight, centred)
    (num_outputs, width), num_tokens = weight.shape, len(scales)
    grid, split_tokens, constants, options = _plan_of_gradients(num_tokens, width, num_outputs, x.dtype, centred)
    scaled, along, side = weight.new_empty(num_tokens, num_outputs), torch.empty_like(scales), constants[2]
    parts = weight.new_empty(grid[1], *weight.shape) if of_weight and grid[1] > 1 else of_maps
    with on_device_of(x):
        if num_tokens:
            normal_product_scaled_kernel[(-(-num_tokens // _TOKENS),)](
                *(gradient.contiguous(), out, scales, scaled, along, num_tokens),
                *(width, num_outputs, side, _TOKENS),
            )
        normal_product_gradients_kernel[grid](
            *(scaled, along, x.contiguous(), weight, means if centred else None, result, parts),
            *(num_tokens, split_tokens, of_x, of_weight, *constants),
            **options,
        )
    return result, of_maps if parts is of_maps else parts.sum(0)


def _maps(weight: Tensor, centred: bool) -> Tensor:
    """W, or, where x is centred, its rows less their means: they have the same products with x - m, and the same gradients.

    Nothing of m is left in their products with x less any number, nor is there a mean to take away from W^T df.
    """
    weight = weight.contiguous()
    return weight - weight.mean(-1, keepdim=True) if centred else weight


class _NormalProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float, centred: bool) -> Tensor:
        maps = _maps(weight, centred)
        out, scales, means = _normal_product(x, maps, epsilon, centred)
        ctx.save_for_backward(x, maps, out, scales, means)
        ctx.centred = centred
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        of_x, of_weight = ctx.needs_input_grad[:2]
        x, maps, out, scales, means = ctx.saved_tensors
        found = _gradients(grads[0], x, maps, out, scales, means, of_x, of_weight, ctx.centred)
        return found[0] if of_x else None, found[1] if of_weight else None, None, None


def normal_product(x: Tensor, weight: Tensor, epsilon: float, centred: bool = False) -> Tensor:
    """The function of `kernels.normal_product.naive.normal_product`; fp64, and more outputs than a program holds, are
    PyTorch's."""
    if x.dtype == torch.float64 or len(weight) > MAX_PRODUCT_OUTPUTS:
        return torch_normal_product(x, weight, epsilon, centred)
    if not needs_gradient(x, weight):
        return _normal_product(x, _maps(weight, centred), epsilon, centred)[0]
    out: Tensor = _NormalProduct.apply(x, weight, epsilon, centred)
    return out
