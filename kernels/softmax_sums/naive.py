"""Reference of `softmax_sums`: the formula in plain PyTorch, the oracle of every other implementation.

Legend: n tokens, V ids of this rank's part of the vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor


def softmax_sums(logits: Tensor, places: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Numbers of each row of logits that a cross entropy is made of.

    top[t] = max_v logits[t, v],  total[t] = sum_v exp(logits[t, v] - top[t]),  of_target[t] = logits[t, places[t]]

    A row that is -inf throughout has a total of 0, so that another rank's part of the row decides alone.

    Args:
        logits: [n, V]; handed over: their memory may be reused, and the caller must not read them again.
        places: [n] int64, the target's index in this part of the vocabulary. Any number outside of [0, V) is a target
            that another rank holds.

    Returns:
        top, total and of_target, [n] each, in fp32 (fp64 of fp64); of_target is 0 where another rank holds the target.
    """
    num_ids = logits.shape[1]
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    top = logits.amax(1)
    total = (logits - top.unsqueeze(1)).exp().sum(1).masked_fill(top == -torch.inf, 0.0)
    is_held = (places >= 0) & (places < num_ids)
    of_target = logits.gather(1, places.where(is_held, 0).unsqueeze(1)).squeeze(1)
    return top, total, of_target.where(is_held, 0.0)
