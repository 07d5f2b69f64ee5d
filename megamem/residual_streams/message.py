"""Message of streams from one pipeline stage to the next, [t, b, W], as one tensor of the streams' dtype.

It is all streams, and behind them the weights that travel with them as the bits that they are, in as many columns as these
fill. Gradients go back the same way: nothing may round a message, or add to it.

Legend: t tokens of a sequence on this rank, b sequences, n streams, D hidden size.
"""

from __future__ import annotations

from copy import copy
from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import make_viewless_tensor
from torch import Tensor
from torch.autograd.function import once_differentiable

from .config import ResidualStreamsConfig
from .operations import wide_dtype


def message_width(settings: ResidualStreamsConfig, hidden_size: int, dtype: torch.dtype) -> int:
    """W: columns of a message."""
    return settings.message_bytes(hidden_size, dtype.itemsize) // dtype.itemsize


def sized_for_messages(config: TransformerConfig, settings: ResidualStreamsConfig | None) -> TransformerConfig:
    """A copy of Megatron's config whose hidden size is that of messages; with one stream the config itself."""
    if settings is None:
        return config
    sized = copy(config)
    sized.hidden_size = message_width(settings, config.hidden_size, config.params_dtype)
    return sized


def as_message(streams: Tensor, carried: Tensor | None) -> Tensor:
    """The message [t, b, W] of streams [t, b, n, D] and of the weights that they are read with next [t, b, n]."""
    if carried is not None:
        packed: Tensor = _Pack.apply(streams, carried)
        return packed
    # Megatron frees a message that is sent, and asks that it is no view.
    message: Tensor = make_viewless_tensor(streams.flatten(2), requires_grad=streams.requires_grad, keep_graph=True)
    return message


def from_message(message: Tensor, settings: ResidualStreamsConfig) -> tuple[Tensor, Tensor | None]:
    """The streams [t, b, n, D] of a message [t, b, W], and the weights that they are read with next [t, b, n]."""
    if not settings.carries_read:
        return message.unflatten(2, (settings.count, -1)), None
    streams, carried = _Unpack.apply(message, settings.count)
    return streams, carried


def _joined(streams: Tensor, weights: Tensor) -> Tensor:
    return torch.cat((streams.flatten(2), weights.contiguous().view(streams.dtype)), 2)


def _parted(message: Tensor, count: int) -> tuple[Tensor, Tensor]:
    wide = wide_dtype(message.dtype)
    columns = count * wide.itemsize // message.dtype.itemsize
    streams, weights = message.split((message.shape[2] - columns, columns), 2)
    return streams.contiguous().unflatten(2, (count, -1)), weights.contiguous().view(wide)


class _Pack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, streams: Tensor, carried: Tensor) -> Tensor:
        ctx.count = streams.shape[2]
        return _joined(streams, carried)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        return _parted(grads[0], ctx.count)


class _Unpack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, message: Tensor, count: int) -> tuple[Tensor, Tensor]:
        return _parted(message, count)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _joined(*grads), None
