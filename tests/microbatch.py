"""The tokens behind hidden states that a test made up."""

from __future__ import annotations

import torch
from torch import Tensor

from megamem.chunk.inputs import Inputs


def some_inputs(hidden: Tensor) -> Inputs:
    """Inputs to hidden states [s, b, ...], for layers that do not ask for them."""
    s, b = hidden.shape[:2]
    positions = torch.arange(s, device=hidden.device).unsqueeze(1).expand(s, b)
    return Inputs(torch.stack((positions % 7, positions)))
