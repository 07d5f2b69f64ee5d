"""Frequencies of RoPE for sequences longer than those trained on.

Legend: d width of a head; a frequency f_i = theta^(-2i/d), i = 0 .. d/2 - 1, in radians per position.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megamem.attention.rotary_config import RotaryScalingConfig


def scaled_frequencies(frequencies: Tensor, scaling: RotaryScalingConfig, base: float) -> Tensor:
    """Frequencies [d/2] as `scaling` has them, of those without [d/2] fp32, which `base` (theta) made."""
    match scaling.kind:
        case "linear":
            return frequencies / scaling.factor
        case "ntk":
            width = 2 * len(frequencies)
            steps = torch.arange(0, width, 2, dtype=frequencies.dtype, device=frequencies.device)
            return 1.0 / ntk_base(scaling.factor, base, width) ** (steps / width)
        case "yarn":
            divided = _yarn_ramp(frequencies, scaling, base)
        case "llama3":
            turns = scaling.original_length * frequencies / (2 * math.pi)
            low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
            divided = 1.0 - ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return frequencies / scaling.factor * divided + frequencies * (1.0 - divided)


def rotary_angles(frequencies: Tensor, positions: Tensor) -> Tensor:
    """Rotary angles of queries and keys, [s, b, 1, d] in radians, of positions [b, s] and frequencies [d/2]."""
    angles = positions.t().to(frequencies.dtype).unsqueeze(-1) * frequencies
    return torch.cat((angles, angles), -1).unsqueeze(2)


def rotary_turns(angles: Tensor) -> Tensor:
    """Cosines and sines [s, b, 2, d] fp32 of rotary angles [s, b, 1, d], once for all blocks; see
    `kernels.rotated_heads.naive`."""
    return torch.cat((angles.cos(), angles.sin()), 2)


def ntk_base(factor: float, base: float, width: int) -> float:
    """The theta that divides the lowest of d/2 frequencies by `factor`."""
    return float(base * factor ** (width / (width - 2)))


def _yarn_ramp(frequencies: Tensor, scaling: RotaryScalingConfig, base: float) -> Tensor:
    """Share of each frequency that is divided, from 0 to 1: linear in its number, between whole numbers (YaRN, section
    3.2; the ends are rounded as in its code).
    """
    width = 2 * len(frequencies)

    def number(turns: float) -> float:
        """i of the frequency that turns so often over the original length."""
        return width * math.log(scaling.original_length / (turns * 2 * math.pi)) / (2 * math.log(base))

    first = max(math.floor(number(scaling.beta_fast)), 0)
    last = min(math.ceil(number(scaling.beta_slow)), width - 1)
    # A step where both ends are one number.
    distance = last - first or 0.001
    numbers = torch.arange(len(frequencies), dtype=frequencies.dtype, device=frequencies.device)
    return ((numbers - first) / distance).clamp(0.0, 1.0)
