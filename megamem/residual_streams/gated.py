"""Qwen's gated residual: sites read a gated mean of the normalised streams, which nothing mixes.

With z = RMS(X_i) (1 + norm_i), for each stream by itself: u = mean_i(sigmoid(W_up silu(W_down z / n))_i z_i), and the
output is written with 2 sigmoid(W_inject z / n). The two hidden matrices of the gate act in the streams' dtype, as in the
release and as all hidden matrices; norms, sigmoids and means are computed in at least fp32.

Legend: t tokens of a sequence on this rank, b sequences, n streams, D hidden size, r low rank.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from kernels.select import Kernels
from megamem.config.width import Width

from .config import ResidualStreamsConfig
from .operations import gated_mean, stream_norm, wide_dtype, wide_product
from .site import Read, StreamsEnd, StreamSite


class GatedSite(StreamSite):
    """Site that reads by gates of low rank, and writes by a weight per stream.

    Attributes:
        norm: [n D], gains of the norms less 1, so that they are near 0 and keep their digits.
        down: [r, n D].
        up: [n D, r].
        inject: [n, n D].
    """

    def __init__(
        self, config: TransformerConfig, settings: ResidualStreamsConfig, kernels: Kernels, site_number: int
    ) -> None:
        super().__init__(config, settings, kernels, site_number)
        self.norm, self.inject = self._vector("norm"), self._map("inject")
        self.down, self.up = self._matrix("down", Width.INPUTS), self._matrix("up", Width.OUTPUTS)

    def forward(self, streams: Tensor, carried: Tensor | None) -> Read:
        """See `StreamSite.read`."""
        normal = _normal(streams, self.norm, self.epsilon)
        update = gated_mean(normal, gate_logits(normal, self.down, self.up))
        inject = wide_product(normal.flatten(2), self.inject.to(wide_dtype(streams.dtype)))
        return Read(update, 2 * torch.sigmoid(inject / self.settings.count), None, None)


class GatedEnd(StreamsEnd):
    """One more read, which is the last hidden state: no norm follows, so its gains are those of logits (`model.mup`).

    Attributes:
        norm: [n D], gains of the norms less 1.
        down: [r, n D].
        up: [n D, r].
    """

    def __init__(self, config: TransformerConfig, settings: ResidualStreamsConfig, kernels: Kernels) -> None:
        super().__init__(config, settings, kernels)
        self.norm = self._vector("norm", Width.LOGITS)
        self.down, self.up = self._matrix("down", Width.INPUTS), self._matrix("up", Width.OUTPUTS)

    def forward(self, streams: Tensor, carried: Tensor | None) -> Tensor:
        """See `StreamsEnd.forward`."""
        normal = _normal(streams, self.norm, self.epsilon)
        return gated_mean(normal, gate_logits(normal, self.down, self.up))


def _normal(streams: Tensor, norm: Tensor, epsilon: float) -> Tensor:
    gain = 1 + norm.to(wide_dtype(streams.dtype))
    return stream_norm(streams, gain.view(streams.shape[2:]), epsilon)


def gate_logits(normal: Tensor, down: Tensor, up: Tensor) -> Tensor:
    """W_up silu(W_down z / n), [t, b, n, D], of z [t, b, n, D]; its sigmoid is the gate."""
    narrow = F.linear(normal.flatten(2), down.to(normal.dtype)) / normal.shape[2]
    return F.linear(F.silu(narrow), up.to(normal.dtype)).view(normal.shape)
