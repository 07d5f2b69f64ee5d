"""`segment_accumulate` in PyTorch.

Legend: T tokens, J rows read per token, C column groups, W columns (C divides W), B bins.
"""

from __future__ import annotations

from torch import Tensor

from kernels.common.bins import vectors_of_entries
from kernels.common.slices import token_slices


def segment_accumulate(accumulator: Tensor, ids: Tensor, coef: Tensor, vec: Tensor, bins: Tensor | None = None) -> None:
    """The function of `kernels.segment_accumulate.naive.segment_accumulate`, with its bits on the CPU."""
    num_tokens, num_rows_read, num_groups = coef.shape
    width = accumulator.shape[1]
    for tokens in token_slices(num_tokens, num_rows_read * width):
        vectors = vec[tokens] if bins is None else vectors_of_entries(vec[tokens], bins[tokens], width)
        vectors = vectors.to(accumulator.dtype).view(vectors.shape[0], -1, num_groups, width // num_groups)
        terms = (coef[tokens].to(accumulator.dtype).unsqueeze(3) * vectors).reshape(-1, width)
        rows = ids[tokens].reshape(-1)
        if accumulator.is_cuda:
            # index_add_ uses atomics there, whose order changes from run to run; index_put_ sorts first.
            accumulator.index_put_((rows,), terms, accumulate=True)
        else:
            accumulator.index_add_(0, rows, terms)
