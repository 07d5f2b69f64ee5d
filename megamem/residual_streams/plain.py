"""Hyper-connections (arXiv 2409.19606), dynamic and static.

A = static_alpha + alpha_scale tanh(LN(X) W_alpha), [n, n + 1], and beta = static_beta + beta_scale tanh(LN(X) w_beta). The
first column of A reads the branch's input, and the others mix: X'_j = beta_j y + sum_i A_i(j+1) X_i. Static
hyper-connections have no second terms.

Legend: t tokens of a sequence on this rank, b sequences, n streams, D hidden size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from kernels.select import Kernels

from .config import ResidualStreamsConfig
from .operations import wide_dtype
from .site import Read, StreamsEnd, StreamSite


class PlainSite(StreamSite):
    """Site with static weights, to which maps of each stream by itself add.

    Attributes:
        static_alpha: [n, n + 1].
        static_beta: [n].
        norm_gain, norm_bias: [D], of the layer normalisation before the maps.
        alpha_map: [n + 1, D].
        beta_map: [1, D].
        alpha_scale, beta_scale: [1].
    """

    def __init__(
        self, config: TransformerConfig, settings: ResidualStreamsConfig, kernels: Kernels, site_number: int
    ) -> None:
        super().__init__(config, settings, kernels, site_number)
        self.static_alpha, self.static_beta = self._vector("static_alpha"), self._vector("static_beta")
        if settings.dynamic:
            self.norm_gain, self.norm_bias = self._vector("norm_gain"), self._vector("norm_bias")
            self.alpha_map, self.beta_map = self._map("alpha_map"), self._map("beta_map")
            self.alpha_scale, self.beta_scale = self._vector("alpha_scale"), self._vector("beta_scale")

    def forward(self, streams: Tensor, carried: Tensor | None) -> Read:
        """See `StreamSite.read`."""
        alpha, beta = self.maps(streams)
        return Read(self.kernels.weigh_streams(streams, alpha[..., 0]), beta, alpha[..., 1:], None)

    def maps(self, streams: Tensor) -> tuple[Tensor, Tensor]:
        """A [t, b, n, n + 1] and beta [t, b, n], in at least fp32."""
        wide, n = wide_dtype(streams.dtype), self.settings.count
        alpha, beta = self.static_alpha.to(wide), self.static_beta.to(wide)
        if not self.settings.dynamic:
            return alpha.expand(*streams.shape[:2], n, n + 1), beta.expand(*streams.shape[:2], n)
        both = torch.cat((self.alpha_map, self.beta_map)).to(wide)
        # Gain and bias act on the few maps, and not on the streams.
        gained = both * self.norm_gain.to(wide)
        products = self.kernels.normal_product(streams, gained, self.epsilon, centred=True)
        found = torch.tanh(products + F.linear(self.norm_bias.to(wide), both))
        return (
            torch.addcmul(alpha, found[..., :-1], self.alpha_scale.to(wide)),
            torch.addcmul(beta, found[..., -1], self.beta_scale.to(wide)),
        )

    def set_initial(self) -> None:
        """Set A to [e_(k mod n) | I] of site k: it reads one stream, and mixes none."""
        n = self.settings.count
        with torch.no_grad():
            self.static_alpha.zero_()
            self.static_alpha[self.site_number % n, 0] = 1
            self.static_alpha[:, 1:].fill_diagonal_(1)


class PlainEnd(StreamsEnd):
    """Sum of the streams; no parameters."""

    def forward(self, streams: Tensor, carried: Tensor | None) -> Tensor:
        """See `StreamsEnd.forward`."""
        return streams.sum(2, dtype=wide_dtype(streams.dtype)).to(streams.dtype)
