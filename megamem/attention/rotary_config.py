"""Scaling of rotary positions, for sequences longer than those that a model was trained on."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge
from pydantic import PositiveFloat, PositiveInt

from megamem.config.base import Advice, Config, EffectiveWhen

_Yarn = EffectiveWhen(lambda c: c.kind == "yarn", "rotary_scaling.kind is yarn")
_Llama3 = EffectiveWhen(lambda c: c.kind == "llama3", "rotary_scaling.kind is llama3")


@dataclass(frozen=True)
class RotaryScalingConfig(Config):
    """Lower frequencies of RoPE, for sequences `factor` times as long as before. The formulas are transformers'."""

    kind: Literal["linear", "ntk", "yarn", "llama3"] = "yarn"
    """linear: all frequencies divided by factor. ntk: theta raised so that the lowest is, and the highest stays. yarn,
    llama3: divided where they turn few times over original_length, kept where they turn often, in between for the others."""
    factor: Annotated[float, Ge(1), Advice("sequences are to become that many times as long")] = 8.0
    """Factor by which the length of sequences grows."""
    original_length: Annotated[
        PositiveInt, EffectiveWhen(lambda c: c.kind in ("yarn", "llama3"), "rotary_scaling.kind is yarn or llama3")
    ] = 8192
    """Tokens per sequence that the model was trained on before."""
    beta_fast: Annotated[PositiveFloat, _Yarn] = 32.0
    """Turns over original_length from which a frequency is kept, up to the rounding of its number."""
    beta_slow: Annotated[PositiveFloat, _Yarn] = 1.0
    """Turns over original_length up to which a frequency is divided, up to the rounding of its number."""
    attention_factor: Annotated[PositiveFloat | None, _Yarn] = None
    """Factor of turned queries and keys, whose scores therefore grow by its square; null: 0.1 ln(factor) + 1."""
    low_frequency_factor: Annotated[PositiveFloat, _Llama3] = 1.0
    """Turns over original_length below which a frequency is divided."""
    high_frequency_factor: Annotated[PositiveFloat, _Llama3] = 4.0
    """Turns over original_length above which a frequency is kept."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for kind, low, high in (
            ("yarn", "beta_slow", "beta_fast"),
            ("llama3", "low_frequency_factor", "high_frequency_factor"),
        ):
            if self.kind == kind and getattr(self, low) >= getattr(self, high):
                raise ValueError(
                    f"model.rotary_scaling.{low} is {getattr(self, low)}, and must be below {high} = "
                    f"{getattr(self, high)}: frequencies between them are interpolated"
                )

    @property
    def score_factor(self) -> float:
        """Factor of attention scores, besides 1 / sqrt(width of a head)."""
        if self.kind != "yarn":
            return 1.0
        factor = self.attention_factor
        return (0.1 * math.log(self.factor) + 1.0 if factor is None else factor) ** 2
