"""Reference of `swiglu`: the formula, and autograd's gradient; the oracle of every other implementation."""

from __future__ import annotations

import torch
from torch import Tensor


def swiglu(gate_and_up: Tensor) -> Tensor:
    """out[.., f] = silu(gate[.., f]) up[.., f].

    Args:
        gate_and_up: [.., 2 F], the gates before the ups, in memory without gaps.

    Returns:
        [.., F], in the dtype of `gate_and_up`.
    """
    gate, up = gate_and_up.chunk(2, dim=-1)
    return gate * torch.sigmoid(gate) * up
