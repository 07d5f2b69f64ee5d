"""Settings of the choice of the next token."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pretrain.errors import ConfigError


@dataclass(frozen=True)
class Sampling:
    """Settings of the choice of the next token.

    Attributes:
        temperature: divides the logits; 0 takes the likeliest token.
        top_p: sample from the likeliest tokens that together have this probability (of `top_k`, if that is set).
        seed: seed of the sampling, in [0, 2^63).
        top_k: sample from so many likeliest tokens; None: from all.

    Raises:
        ConfigError: a setting is out of its range.
    """

    temperature: float = 0.8
    top_p: float = 0.95
    seed: int = 1
    top_k: int | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ConfigError(
                f"the temperature is {self.temperature}: use 0 for the likeliest token, or a positive number"
            )
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top-p is {self.top_p}: use a probability above 0 and at most 1")
        if self.top_k is not None and self.top_k < 1:
            raise ConfigError(f"top-k is {self.top_k}: sample from at least one token")
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"the seed of the sampling is {self.seed}: use a number from 0 to 2^63 - 1")
