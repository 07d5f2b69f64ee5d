"""The configuration of maximal update parametrisation, and the rules by which weights follow a model's width.

Imports no torch. `docs/width.md` derives the rules.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from pydantic import PositiveInt

from megamem.config.base import Config


@dataclass(frozen=True)
class MupConfig(Config):
    """Maximal update parametrisation (muP, arXiv 2203.03466): initial weights and learning rates that follow the model's
    width, so that rates which were searched at a small one hold."""

    base_hidden_size: PositiveInt = 128
    """Width at which weights and rates are those of a model without muP: that of the search."""
    base_head_dim: PositiveInt | None = None
    """Width of an attention head there, where a wider model has wider heads, and not more of them; null: more of them."""


class Width(Enum):
    """The sides of a parameter that are as wide as the model; or the factor of muP that a gain has taken over."""

    NEITHER = "neither"
    OUTPUTS = "outputs"
    """Vectors and embeddings of the stream, and maps from narrow activations."""
    INPUTS = "inputs"
    """Maps to narrow activations: queries of memories, routers, gates."""
    BOTH = "both"
    LOGITS = "logits"
    """Gain of the norm before the output projection, in the place of a factor 1 / m of the logits."""
    SCORES = "scores"
    """Gain before a product of two vectors of the model's width, in the place of a factor 1 / sqrt(m)."""
    HEADS = "heads"
    """Gain of attention's queries, in the place of a factor sqrt(base_head_dim / head_dim)."""


@dataclass(frozen=True)
class WidthRules:
    """Factors on initial weights and learning rates of a model that is m times as wide as the one of its search.

    Attributes:
        ratio: m.
        head_factor: sqrt(base_head_dim / head_dim).
    """

    ratio: float = 1.0
    head_factor: float = 1.0

    def gain(self, width: Width) -> float:
        """Initial value of a gain."""
        match width:
            case Width.LOGITS:
                return 1.0 / self.ratio
            case Width.SCORES:
                return 1.0 / math.sqrt(self.ratio)
            case Width.HEADS:
                return self.head_factor
        return 1.0

    def rate_factor(self, width: Width) -> float:
        """Factor of AdamW's learning rate."""
        return 1.0 / self.ratio if width in (Width.INPUTS, Width.BOTH) else self.gain(width)

    @property
    def rate_factors(self) -> tuple[float, ...]:
        """Every factor that there is, 1 first: the same on every rank, whatever parameters it has."""
        return tuple(dict.fromkeys((1.0, *(self.rate_factor(width) for width in Width))))

    def spectral_factor(self, width: Width, shape: tuple[int, int], scale: float, base_scale: float) -> float:
        """Factor of the size of Muon's update of a matrix, so that its spectral norm follows sqrt(outputs / inputs).

        Args:
            shape: outputs and inputs.
            scale: scale of the update of a matrix of this shape.
            base_scale: scale of the update of one of `base_shape`.
        """
        outputs, inputs = shape
        base_outputs, base_inputs = self.base_shape(width, shape)
        return math.sqrt(outputs / base_outputs * base_inputs / inputs) * base_scale / scale

    def base_shape(self, width: Width, shape: tuple[int, int]) -> tuple[float, float]:
        """Outputs and inputs of a matrix in the model of the search."""
        outputs, inputs = shape
        return (
            outputs / self.ratio if width in (Width.OUTPUTS, Width.BOTH) else outputs,
            inputs / self.ratio if width in (Width.INPUTS, Width.BOTH) else inputs,
        )
