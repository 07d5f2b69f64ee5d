"""Several residual streams: sites, which read one input from all streams and write into all, and the end, which makes one.

A site is one attention or one feed-forward. Of streams X its branch F is given u, and its output is written with `post` and
`mix`:

    u = sum_i pre_i X_i,    y = F(u),    X'_j = post_j y + sum_i mix_ij X_i

Everything is computed in at least fp32, and rounded to the streams' dtype once. Maps are no linear layers: engines split
those, and compute them in the model's dtype.

Legend: b sequences, s tokens of each, n streams, D hidden size, r low rank, K columns, M outputs. i is the stream that is
read, j the one that is written.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .configuration_megamem import MegamemConfig
from .memory_megamem import rms_normalise


class StreamRead(NamedTuple):
    """Input of a site's branch, and the weights with which its output is written.

    Attributes:
        update: u [b, s, D], the branch's input.
        post: [b, s, n]; None: there is one stream, to which the output is added.
        mix: [b, s, n, n], the stream read and the stream written; None: streams stay apart.
        carried: [b, s, n], weights with which the next site reads; None: it finds its own.
    """

    update: Tensor
    post: Tensor | None = None
    mix: Tensor | None = None
    carried: Tensor | None = None


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype in which maps are computed: fp32, or that of the streams if it has more digits."""
    return torch.promote_types(dtype, torch.float32)


def started(hidden: Tensor, settings: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
    """Streams [b, s, n, D] that are copies of the embedding [b, s, D], and the weights with which the first site reads: the
    first stream alone."""
    streams = hidden.unsqueeze(2).repeat(1, 1, settings["count"], 1)
    if settings["kind"] != "single_pass":
        return streams, None
    carried = torch.zeros(streams.shape[:3], dtype=wide_dtype(hidden.dtype), device=hidden.device)
    carried[..., 0] = 1
    return streams, carried


def written(streams: Tensor, out: Tensor, read: StreamRead) -> Tensor:
    """X'_j = post_j y + sum_i mix_ij X_i for a branch's output y [b, s, D]; of one stream X + y."""
    if read.post is None:
        return streams + out
    wide = streams.to(wide_dtype(streams.dtype))
    stayed = wide if read.mix is None else read.mix.transpose(-1, -2) @ wide
    return (stayed + read.post.unsqueeze(-1) * out.to(wide.dtype).unsqueeze(-2)).to(streams.dtype)


def joined(streams: Tensor, out: Tensor, read: StreamRead) -> Tensor:
    """X_j + post_j y, for an output y [b, s, D] of the site that comes after its streams are written."""
    return written(streams, out, read._replace(mix=None))


def weighed(streams: Tensor, weights: Tensor) -> Tensor:
    """u = sum_i w_i X_i, [b, s, D], of streams [b, s, n, D] and weights [b, s, n]."""
    wide = streams.to(wide_dtype(streams.dtype))
    return (weights.to(wide.dtype).unsqueeze(-2) @ wide).squeeze(-2).to(streams.dtype)


def normal_product(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """W (x / sqrt(mean(x^2) + epsilon)), [..., M], of x [..., K] and W [M, K], in the dtype of W."""
    wide = x.to(weight.dtype)
    # Few outputs are scaled, and not the many columns.
    return F.linear(wide, weight) * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)


def sinkhorn(logits: Tensor, iterations: int, epsilon: float) -> Tensor:
    """A matrix per token that is nearly doubly stochastic, of logits [..., n, n]: softmax over columns, then sums of columns
    and of rows are divided out in turn, columns last."""
    mix = logits.softmax(-1) + epsilon
    mix = mix / (mix.sum(-2, keepdim=True) + epsilon)
    for _ in range(iterations - 1):
        mix = mix / (mix.sum(-1, keepdim=True) + epsilon)
        mix = mix / (mix.sum(-2, keepdim=True) + epsilon)
    return mix


class OneStream:
    """Site of a model with one residual stream: its branch reads the stream, and adds to it."""

    def __call__(self, streams: Tensor, carried: Tensor | None) -> StreamRead:
        """See `MegamemStreams`, of one stream [b, s, D]."""
        return StreamRead(streams)


class MegamemStreams(nn.Module):
    """Maps of a site, or of the end, with weights of the names and shapes that the configuration has.

    A site's `forward` makes a `StreamRead` of streams [b, s, n, D] and the weights that the site before carries; the end's
    one stream [b, s, D] of the same.
    """

    def __init__(self, config: MegamemConfig, part: str) -> None:
        """
        Args:
            part: "site" or "end".
        """
        super().__init__()
        self.settings: dict[str, Any] = config.residual_streams
        self.epsilon: float = self.settings["norm_epsilon"]
        for name, shape in self.settings[f"{part}_weights"].items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape)))


class MegamemHyperSite(MegamemStreams):
    """Manifold-constrained hyper-connections (arXiv 2512.24880): with m = fn RMS(vec X), whose rows are n of pre, n of post
    and n^2 of comb, pre = sigmoid(l) + eps, post = 2 sigmoid(l) and mix = Sinkhorn(l) for l = scale m + base.

    In a single pass a site reads with the pre that the site before found.

    Attributes:
        fn: [n^2 + 2 n, n D].
        base: [n^2 + 2 n].
        scale: [3], factors of pre, post and comb.
    """

    fn: Tensor
    base: Tensor
    scale: Tensor

    def forward(self, streams: Tensor, carried: Tensor | None) -> StreamRead:
        """See `MegamemStreams`."""
        n, epsilon, wide = self.settings["count"], self.settings["epsilon"], wide_dtype(streams.dtype)
        sizes = (n, n, n * n)
        products = normal_product(streams.flatten(2), self.fn.to(wide), self.epsilon).split(sizes, -1)
        bases, scales = self.base.to(wide).split(sizes), self.scale.to(wide)
        of_pre, of_post, of_comb = (bases[k] + products[k] * scales[k] for k in range(3))
        pre, post = torch.sigmoid(of_pre) + epsilon, 2 * torch.sigmoid(of_post)
        mix = sinkhorn(of_comb.unflatten(-1, (n, n)), self.settings["iterations"], epsilon)
        if carried is None:
            return StreamRead(weighed(streams, pre), post, mix)
        return StreamRead(weighed(streams, carried), post, mix, pre)


class MegamemHyperEnd(MegamemStreams):
    """sum_i (sigmoid(scale m_i + base_i) + eps) X_i with m = fn RMS(vec X).

    Attributes:
        fn: [n, n D].
        base: [n].
        scale: [1].
    """

    fn: Tensor
    base: Tensor
    scale: Tensor

    def forward(self, streams: Tensor, carried: Tensor | None) -> Tensor:
        """See `MegamemStreams`."""
        wide = wide_dtype(streams.dtype)
        products = normal_product(streams.flatten(2), self.fn.to(wide), self.epsilon)
        weights = torch.sigmoid(self.base.to(wide) + products * self.scale.to(wide)) + self.settings["epsilon"]
        return weighed(streams, weights)


class MegamemSinglePassEnd(MegamemStreams):
    """Sum of the streams with the weights that the last feed-forward's site found."""

    def forward(self, streams: Tensor, carried: Tensor | None) -> Tensor:
        """See `MegamemStreams`."""
        assert carried is not None
        return weighed(streams, carried)


class MegamemGate(MegamemStreams):
    """u = mean_i sigmoid(W_up silu(W_down z / n))_i z_i with z = RMS(X_i) (1 + norm_i), for each stream by itself. The two
    matrices act in the streams' dtype, as hidden matrices do.

    Attributes:
        norm: [n D], gains of the norms less 1.
        down: [r, n D].
        up: [n D, r].
    """

    norm: Tensor
    down: Tensor
    up: Tensor

    def normal(self, streams: Tensor) -> Tensor:
        """z [b, s, n, D] of X [b, s, n, D]."""
        gain = 1 + self.norm.to(wide_dtype(streams.dtype))
        return rms_normalise(streams, gain.view(streams.shape[2:]), self.epsilon)

    def mean(self, normal: Tensor) -> Tensor:
        """u [b, s, D] of z [b, s, n, D]."""
        narrow = F.linear(normal.flatten(2), self.down.to(normal.dtype)) / normal.shape[2]
        logits = F.linear(F.silu(narrow), self.up.to(normal.dtype)).view(normal.shape)
        return (torch.sigmoid(logits.to(wide_dtype(logits.dtype))) * normal).mean(-2).to(normal.dtype)


class MegamemGatedSite(MegamemGate):
    """Site that reads by gates, and writes with 2 sigmoid(W_inject z / n); nothing mixes streams.

    Attributes:
        inject: [n, n D].
    """

    inject: Tensor

    def forward(self, streams: Tensor, carried: Tensor | None) -> StreamRead:
        """See `MegamemStreams`."""
        normal, wide = self.normal(streams), wide_dtype(streams.dtype)
        inject = F.linear(normal.flatten(2).to(wide), self.inject.to(wide))
        return StreamRead(self.mean(normal), 2 * torch.sigmoid(inject / self.settings["count"]))


class MegamemGatedEnd(MegamemGate):
    """One more read, behind which no norm follows."""

    def forward(self, streams: Tensor, carried: Tensor | None) -> Tensor:
        """See `MegamemStreams`."""
        return self.mean(self.normal(streams))


class MegamemPlainSite(MegamemStreams):
    """Hyper-connections (arXiv 2409.19606): A = static_alpha + alpha_scale tanh(LN(X) W_alpha), whose first column reads and
    whose others mix, and post = static_beta + beta_scale tanh(LN(X) w_beta). Static ones have no second terms.

    Attributes:
        static_alpha: [n, n + 1].
        static_beta: [n].
        norm_gain, norm_bias: [D], of the layer normalisation.
        alpha_map: [n + 1, D].
        beta_map: [1, D].
        alpha_scale, beta_scale: [1].
    """

    static_alpha: Tensor
    static_beta: Tensor
    norm_gain: Tensor
    norm_bias: Tensor
    alpha_map: Tensor
    beta_map: Tensor
    alpha_scale: Tensor
    beta_scale: Tensor

    def forward(self, streams: Tensor, carried: Tensor | None) -> StreamRead:
        """See `MegamemStreams`."""
        wide = wide_dtype(streams.dtype)
        alpha, beta = self.static_alpha.to(wide), self.static_beta.to(wide)
        if "alpha_map" in self.settings["site_weights"]:
            maps = torch.cat((self.alpha_map, self.beta_map)).to(wide)
            centred = streams.to(wide) - streams.to(wide).mean(-1, keepdim=True)
            # Gain and bias act on the few maps, and not on the streams.
            products = normal_product(centred, maps * self.norm_gain.to(wide), self.epsilon)
            found = torch.tanh(products + F.linear(self.norm_bias.to(wide), maps))
            alpha = alpha + found[..., :-1] * self.alpha_scale.to(wide)
            beta = beta + found[..., -1] * self.beta_scale.to(wide)
        else:
            alpha, beta = (each.expand(*streams.shape[:2], *each.shape) for each in (alpha, beta))
        return StreamRead(weighed(streams, alpha[..., 0]), beta, alpha[..., 1:])


class MegamemPlainEnd(MegamemStreams):
    """Sum of the streams."""

    def forward(self, streams: Tensor, carried: Tensor | None) -> Tensor:
        """See `MegamemStreams`."""
        return streams.sum(2, dtype=wide_dtype(streams.dtype)).to(streams.dtype)


_SITES: dict[str, type[MegamemStreams]] = {
    "mhc": MegamemHyperSite,
    "single_pass": MegamemHyperSite,
    "gated": MegamemGatedSite,
    "plain": MegamemPlainSite,
}
_ENDS: dict[str, type[MegamemStreams]] = {
    "mhc": MegamemHyperEnd,
    "single_pass": MegamemSinglePassEnd,
    "gated": MegamemGatedEnd,
    "plain": MegamemPlainEnd,
}


def make_site(config: MegamemConfig) -> MegamemStreams | OneStream:
    """A site of the configured kind."""
    return OneStream() if config.residual_streams is None else _SITES[config.residual_streams["kind"]](config, "site")


def make_end(config: MegamemConfig) -> MegamemStreams | None:
    """The end of the configured kind; None: there is one stream."""
    return None if config.residual_streams is None else _ENDS[config.residual_streams["kind"]](config, "end")
