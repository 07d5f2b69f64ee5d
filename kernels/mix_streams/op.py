"""`mix_streams`: its signature, and the function in PyTorch with its gradients.

Legend: T tokens, n streams, D columns. i is the stream that is read, j the one that is written.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels.common.ops import needs_gradient
from kernels.common.slices import by_token, slices_on_cpu


class MixStreams(Protocol):
    """See `kernels.mix_streams.naive.mix_streams`."""

    def __call__(self, streams: Tensor, out: Tensor, post: Tensor, mix: Tensor | None, /) -> Tensor: ...


def empty_result(streams: Tensor, out: Tensor, post: Tensor, mix: Tensor | None) -> Tensor:
    """The result, not filled yet: without gaps, whatever the strides of `streams`."""
    return torch.empty_like(streams, memory_format=torch.contiguous_format)


def torch_mix_streams(streams: Tensor, out: Tensor, post: Tensor, mix: Tensor | None) -> Tensor:
    """The function of `kernels.mix_streams.naive.mix_streams`.

    Backward keeps streams in their own dtype, and without a mix none. Left to PyTorch's autograd, the formula keeps copies of
    them in fp32.
    """
    operands = (streams, out, post) if mix is None else (streams, out, post, mix)
    if not needs_gradient(*operands):
        return _mixed(streams, out, post, mix)
    result: Tensor = _MixStreams.apply(streams, out, post, mix)
    return result


def _mixed(streams: Tensor, out: Tensor, post: Tensor, mix: Tensor | None) -> Tensor:
    result, wide = empty_result(streams, out, post, mix), torch.promote_types(streams.dtype, torch.float32)
    x, y, p = by_token(streams, 2), by_token(out, 1), by_token(post, 1)
    m, to = None if mix is None else by_token(mix, 2), by_token(result, 2)
    for part in slices_on_cpu(to, 2 * to.shape[1] * to.shape[2]):
        stayed = x[part].to(wide) if m is None else m[part].to(wide).mT @ x[part].to(wide)
        to[part] = torch.addcmul(stayed, p[part].to(wide).unsqueeze(-1), y[part].to(wide).unsqueeze(-2))
    return result


class _MixStreams(torch.autograd.Function):
    """dX_i = sum_j mix_ij G_j, dy = sum_j post_j G_j, dpost_j = <y, G_j> and dmix_ij = <X_i, G_j>, with G = dX'."""

    @staticmethod
    def forward(ctx: Any, streams: Tensor, out: Tensor, post: Tensor, mix: Tensor | None) -> Tensor:
        # Without mixing backward has no use for the streams.
        ctx.save_for_backward(None if mix is None else streams, out, post, mix)
        return _mixed(streams, out, post, mix)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        streams, out, post, mix = ctx.saved_tensors
        mixes = mix is not None
        wanted = [ctx.needs_input_grad[0] and mixes, *ctx.needs_input_grad[1:]]
        found = [
            torch.empty_like(each, memory_format=torch.contiguous_format) if wants else None
            for each, wants in zip((streams, out, post, mix), wanted, strict=True)
        ]
        of_x, of_y, of_p, of_m = (
            None if each is None else by_token(each, dims) for each, dims in zip(found, (2, 1, 1, 2), strict=True)
        )
        grad, y, p = by_token(grads[0], 2), by_token(out, 1), by_token(post, 1)
        x, m = (by_token(streams, 2), by_token(mix, 2)) if mixes else (None, None)
        wide = torch.promote_types(grads[0].dtype, torch.float32)
        for part in slices_on_cpu(grad, 2 * grad.shape[1] * grad.shape[2]):
            g = grad[part].to(wide)
            if of_x is not None and m is not None:
                of_x[part] = m[part].to(wide) @ g
            if of_y is not None:
                of_y[part] = (p[part].to(wide).unsqueeze(-2) @ g).squeeze(-2)
            if of_p is not None:
                of_p[part] = (g @ y[part].to(wide).unsqueeze(-1)).squeeze(-1)
            if of_m is not None and x is not None:
                of_m[part] = x[part].to(wide) @ g.mT
        if not mixes and ctx.needs_input_grad[0]:
            found[0] = grads[0]
        return tuple(found)
