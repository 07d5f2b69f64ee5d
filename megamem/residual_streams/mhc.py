"""Manifold-constrained hyper-connections (arXiv 2512.24880) as DeepSeek V4 has them, and V4.1's single pass.

With m = rho fn vec X and rho = (mean(vec X^2) + epsilon)^-1/2, whose rows are n of pre, n of post and n^2 of comb:
pre = sigmoid(l) + eps, post = 2 sigmoid(l) and mix = Sinkhorn(l), `kernels.doubly_stochastic`, for l = scale m +
base. The paper's H_res is mix transposed. DeepSeek V4 casts post and mix to the streams' dtype before it mixes; here,
as in V4.1, X' is rounded once.

Legend: t tokens of a sequence on this rank, b sequences, n streams, D hidden size.
"""

from __future__ import annotations

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from kernels.select import Kernels

from .config import ResidualStreamsConfig
from .operations import wide_dtype
from .site import Read, StreamsEnd, StreamSite


class MhcSite(StreamSite):
    """Site that finds weights for reading, writing and mixing with one product.

    Attributes:
        fn: [n^2 + 2 n, n D].
        base: [n^2 + 2 n].
        scale: [3], factors of pre, post and comb.
    """

    def __init__(
        self, config: TransformerConfig, settings: ResidualStreamsConfig, kernels: Kernels, site_number: int
    ) -> None:
        super().__init__(config, settings, kernels, site_number)
        self.fn, self.base, self.scale = self._map("fn"), self._vector("base"), self._vector("scale")

    def forward(self, streams: Tensor, carried: Tensor | None) -> Read:
        """See `StreamSite.read`."""
        pre, post, mix = self.maps(streams)
        if not self.settings.carries_read:
            return Read(self.kernels.weigh_streams(streams, pre), post, mix, None)
        assert carried is not None
        return Read(self.kernels.weigh_streams(streams, carried), post, mix, pre)

    def maps(self, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Weights pre [t, b, n], post [t, b, n] and mix [t, b, n, n], in at least fp32."""
        n, epsilon, wide = self.settings.count, self.settings.epsilon, wide_dtype(streams.dtype)
        sizes = (n, n, n * n)
        products = self.kernels.normal_product(streams.flatten(2), self.fn.to(wide), self.epsilon).split(sizes, -1)
        bases, scales = self.base.to(wide).split(sizes), self.scale.to(wide)
        pre, post, comb = (torch.addcmul(bases[k], products[k], scales[k]) for k in range(3))
        mix = self.kernels.doubly_stochastic(comb.unflatten(-1, (n, n)), self.settings.iterations, epsilon)
        return torch.sigmoid(pre) + epsilon, 2 * torch.sigmoid(post), mix


class MhcEnd(StreamsEnd):
    """Weighted sum of the streams, with weights of its own maps: sum_i (sigmoid(scale m_i + base_i) + eps) X_i.

    Attributes:
        fn: [n, n D].
        base: [n].
        scale: [1].
    """

    def __init__(self, config: TransformerConfig, settings: ResidualStreamsConfig, kernels: Kernels) -> None:
        super().__init__(config, settings, kernels)
        self.fn, self.base, self.scale = self._map("fn"), self._vector("base"), self._vector("scale")

    def forward(self, streams: Tensor, carried: Tensor | None) -> Tensor:
        """See `StreamsEnd.forward`."""
        return self.kernels.weigh_streams(streams, self.weights(streams))

    def weights(self, streams: Tensor) -> Tensor:
        """Weights [t, b, n] of the streams, in at least fp32."""
        wide = wide_dtype(streams.dtype)
        products = self.kernels.normal_product(streams.flatten(2), self.fn.to(wide), self.epsilon)
        logits = torch.addcmul(self.base.to(wide), products, self.scale.to(wide))
        return torch.sigmoid(logits) + self.settings.epsilon


class SinglePassEnd(StreamsEnd):
    """Sum of the streams with the weights that the last feed-forward's site found; no parameters."""

    def forward(self, streams: Tensor, carried: Tensor | None) -> Tensor:
        """See `StreamsEnd.forward`."""
        assert carried is not None
        return self.kernels.weigh_streams(streams, carried)
