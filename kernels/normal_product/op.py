"""`normal_product`: its signature, and the function in PyTorch with its gradients."""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


class NormalProduct(Protocol):
    """See `kernels.normal_product.naive.normal_product`."""

    def __call__(self, x: Tensor, weight: Tensor, epsilon: float, /, centred: bool = False) -> Tensor: ...


def torch_normal_product(x: Tensor, weight: Tensor, epsilon: float, centred: bool = False) -> Tensor:
    """The function of `kernels.normal_product.naive.normal_product`.

    Backward keeps x in its own dtype, the products, and a number per token. Left to PyTorch's autograd, the formula keeps x in
    fp32, and normalised, too.
    """
    out: Tensor = _NormalProduct.apply(x, weight, epsilon, centred)
    return out


class _NormalProduct(torch.autograd.Function):
    """With c = x - m, r = (mean(c^2) + epsilon)^-1/2 and f = W c r: dW = df^T c r and, for p = W^T df,
    dx = r (p - c r <df, f> / K), less its mean where x is centred."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float, centred: bool) -> Tensor:
        wide = _wide(x, weight, centred)
        # Few outputs are scaled, and not the many columns.
        out = F.linear(wide, weight)
        squares = wide.square() if wide is x else wide.square_()
        scale = torch.rsqrt(squares.mean(-1, keepdim=True) + epsilon)
        out.mul_(scale)
        ctx.save_for_backward(x, weight, scale, out)
        ctx.centred = centred
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, weight, scale, out = ctx.saved_tensors
        wide, grad = _wide(x, weight, ctx.centred), grads[0]
        scaled, of_x, of_weight = grad * scale, None, None
        if ctx.needs_input_grad[1]:
            of_weight = scaled.flatten(0, -2).t() @ wide.flatten(0, -2)
        if ctx.needs_input_grad[0]:
            along = (grad * out).sum(-1, keepdim=True).mul_(scale.square()).div_(x.shape[-1])
            of_x = (scaled @ weight).addcmul_(wide, along, value=-1)
            of_x = (_centre(of_x) if ctx.centred else of_x).to(x.dtype)
        return of_x, of_weight, None, None


def _wide(x: Tensor, weight: Tensor, centred: bool) -> Tensor:
    """Make a copy of x - m in the dtype of W; x itself, where it is in that dtype and m is 0."""
    wide = x.to(weight.dtype)
    if not centred:
        return wide
    return wide - wide.mean(-1, keepdim=True) if wide is x else _centre(wide)


def _centre(wide: Tensor) -> Tensor:
    return wide.sub_(wide.mean(-1, keepdim=True))
