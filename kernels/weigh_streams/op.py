"""`weigh_streams`: its signature, and the function in PyTorch with its gradients."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels.common.ops import needs_gradient
from kernels.common.slices import by_token, slices_on_cpu


class WeighStreams(Protocol):
    """See `kernels.weigh_streams.naive.weigh_streams`."""

    def __call__(self, streams: Tensor, weights: Tensor, /) -> Tensor: ...


def empty_result(streams: Tensor, weights: Tensor) -> Tensor:
    """The result, not filled yet; also the op's fake for `torch.compile`."""
    return streams.new_empty(*streams.shape[:-2], streams.shape[-1])


def torch_weigh_streams(streams: Tensor, weights: Tensor) -> Tensor:
    """The function of `kernels.weigh_streams.naive.weigh_streams`.

    Backward keeps streams in their own dtype. Left to PyTorch's autograd, the formula keeps a copy of them in fp32.
    """
    if not needs_gradient(streams, weights):
        return _weighed(streams, weights)
    out: Tensor = _WeighStreams.apply(streams, weights)
    return out


def _weighed(streams: Tensor, weights: Tensor) -> Tensor:
    result, wide = empty_result(streams, weights), torch.promote_types(streams.dtype, torch.float32)
    x, w, to = by_token(streams, 2), by_token(weights, 1), by_token(result, 1)
    for part in slices_on_cpu(x, 2 * x.shape[1] * x.shape[2]):
        to[part] = (w[part].to(wide).unsqueeze(-2) @ x[part].to(wide)).squeeze(-2)
    return result


class _WeighStreams(torch.autograd.Function):
    """dX_i = w_i du and dw_i = <X_i, du>."""

    @staticmethod
    def forward(ctx: Any, streams: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(streams, weights)
        return _weighed(streams, weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        streams, weights = ctx.saved_tensors
        of_streams, of_weights = (
            torch.empty_like(each, memory_format=torch.contiguous_format) if wants else None
            for each, wants in zip((streams, weights), ctx.needs_input_grad, strict=True)
        )
        x, w, grad = by_token(streams, 2), by_token(weights, 1), by_token(grads[0], 1)
        of_x = None if of_streams is None else by_token(of_streams, 2)
        of_w = None if of_weights is None else by_token(of_weights, 1)
        wide = torch.promote_types(streams.dtype, torch.float32)
        for part in slices_on_cpu(x, 2 * x.shape[1] * x.shape[2]):
            g = grad[part].to(wide)
            if of_x is not None:
                of_x[part] = w[part].to(wide).unsqueeze(-1) * g.unsqueeze(-2)
            if of_w is not None:
                of_w[part] = (x[part].to(wide) @ g.unsqueeze(-1)).squeeze(-1)
        return of_streams, of_weights
