"""Signs of a row's columns: patterns of +1 and -1, of which a second hash of an n-gram chooses one.

Two n-grams of one row then read two vectors that share no more than chance (modded-nanogpt, pulls 299 and 360).
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.common.hashing import mix

_KEY = 0x7369676E73
"""Start of the stream that signs are bits of: every model has the same."""


def sign_patterns(num_patterns: int, width: int, device: torch.device) -> Tensor:
    """[num_patterns, width] int8 of +1 and -1."""
    bits = mix(torch.arange(num_patterns * width, device=device), _KEY) & 1
    return (1 - 2 * bits).to(torch.int8).view(num_patterns, width)
