"""The config of several residual streams, and the shapes of their parameters. Imports no torch.

Legend: n streams, D hidden size, r low rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge
from pydantic import PositiveFloat, PositiveInt

from megamem.config.base import Advice, Config, EffectiveWhen

Shapes = Mapping[str, tuple[int, ...]]
"""Shapes of a module's parameters by their own names."""

_IS_SINKHORN = EffectiveWhen(lambda c: c.kind in ("mhc", "single_pass"), "kind is mhc or single_pass")


@dataclass(frozen=True)
class ResidualStreamsConfig(Config):
    """Several residual streams in the place of one: each site, attention or a feed-forward, reads one input from all
    streams, and writes its output into all of them."""

    count: Annotated[int, Ge(1), Advice("a model has one stream or more")] = 4
    """n: residual streams. Each begins as the embedding."""
    kind: Literal["mhc", "single_pass", "gated", "plain"] = "mhc"
    """mhc: manifold-constrained hyper-connections (arXiv 2512.24880) as DeepSeek V4 has them: streams are mixed by
    doubly stochastic matrices. single_pass: those of DeepSeek V4.1: a site reads with the weights that the site before
    it found. gated: Qwen's gated residual: a gate per channel, and streams are not mixed. plain: hyper-connections (arXiv
    2409.19606)."""
    iterations: Annotated[PositiveInt, _IS_SINKHORN] = 20
    """T: Sinkhorn steps; each divides by the sums of rows, then of columns."""
    epsilon: Annotated[PositiveFloat, _IS_SINKHORN] = 1e-6
    """Added to the weights of reads, and in Sinkhorn steps to the softmax and to every sum."""
    norm_epsilon: Annotated[
        PositiveFloat | None, EffectiveWhen(lambda c: c.kind != "plain" or c.dynamic, "dynamic is true")
    ] = None
    """Added to the mean square in the norms of streams before the maps; null: model.norm_epsilon."""
    rank: Annotated[PositiveInt, EffectiveWhen(lambda c: c.kind == "gated", "kind is gated")] = 320
    """r: width between the two matrices of a gate."""
    dynamic: Annotated[bool, EffectiveWhen(lambda c: c.kind == "plain", "kind is plain")] = True
    """True: weights of reads and writes follow the streams. False: they are parameters alone, static hyper-connections."""

    @property
    def normalises(self) -> bool:
        """True if sites read what is normalised: their branches have no norm of their own, and the model no last one."""
        return self.kind == "gated"

    @property
    def carries_read(self) -> bool:
        """True if a site reads with the weights of the site before it, which travel with the streams."""
        return self.kind == "single_pass"

    def site_shapes(self, hidden_size: int) -> Shapes:
        """Shapes of a site's parameters."""
        n, width = self.count, self.count * hidden_size
        match self.kind:
            case "mhc" | "single_pass":
                return {"fn": (n * n + 2 * n, width), "base": (n * n + 2 * n,), "scale": (3,)}
            case "gated":
                return {**self._gate_shapes(width), "inject": (n, width)}
            case "plain":
                static: Shapes = {"static_alpha": (n, n + 1), "static_beta": (n,)}
                return {**static, **self._dynamic_shapes(hidden_size)} if self.dynamic else static

    def end_shapes(self, hidden_size: int) -> Shapes:
        """Shapes of the parameters that make one stream of all at the end."""
        width = self.count * hidden_size
        match self.kind:
            case "mhc":
                return {"fn": (self.count, width), "base": (self.count,), "scale": (1,)}
            case "gated":
                return self._gate_shapes(width)
            case "single_pass" | "plain":
                return {}

    def message_bytes(self, hidden_size: int, element_bytes: int) -> int:
        """Bytes per token of what blocks hand to each other, and stages in a message: all streams, and the weights that travel
        with them in at least fp32.

        Args:
            element_bytes: bytes of an element of the streams.
        """
        carried = max(4, element_bytes) if self.carries_read else 0
        return self.count * (element_bytes * hidden_size + carried)

    def _gate_shapes(self, width: int) -> Shapes:
        return {"norm": (width,), "down": (self.rank, width), "up": (width, self.rank)}

    def _dynamic_shapes(self, hidden_size: int) -> Shapes:
        return {
            "norm_gain": (hidden_size,),
            "norm_bias": (hidden_size,),
            "alpha_map": (self.count + 1, hidden_size),
            "beta_map": (1, hidden_size),
            "alpha_scale": (1,),
            "beta_scale": (1,),
        }

    def num_site_parameters(self, hidden_size: int) -> int:
        """Number of a site's parameters; a block has two sites."""
        return sum(map(math.prod, self.site_shapes(hidden_size).values()))

    def num_end_parameters(self, hidden_size: int) -> int:
        """Number of the parameters at the end of the model."""
        return sum(map(math.prod, self.end_shapes(hidden_size).values()))
