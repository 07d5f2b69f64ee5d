"""Reference of `softmax_gradient`: the formula in plain PyTorch, the oracle of every other implementation.

Legend: n tokens, V ids of this rank's part of the vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor


def softmax_gradient(logits: Tensor, places: Tensor, top: Tensor, total: Tensor, scale: Tensor) -> Tensor:
    """Gradient of cross entropies by their logits.

    out[t, v] = (exp(logits[t, v] - top[t]) / total[t] - [v = places[t]]) scale[t], in fp32 (fp64 of fp64), rounded once

    Args:
        logits: [n, V]; handed over: the result may lie in their memory, and the caller must not read them again.
        places: [n] int64, as of `kernels.softmax_sums.naive.softmax_sums`.
        top: [n] fp32 (fp64), the largest logit over all ranks.
        total: [n] fp32 (fp64), the sum of exp(logit - top) over all ranks.
        scale: [n] fp32 (fp64), the gradients of the cross entropies.

    Returns:
        [n, V], in the logits' dtype.
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    is_target = torch.arange(logits.shape[1], device=logits.device) == places.unsqueeze(1)
    softmax = (wide - top.unsqueeze(1)).exp() / total.unsqueeze(1)
    return ((softmax - is_target.to(wide.dtype)) * scale.unsqueeze(1)).to(logits.dtype)
