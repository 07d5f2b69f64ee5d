"""`segment_accumulate` in PyTorch.

Legend: T tokens, J rows read per token, C column groups, W columns (C divides W), B bins.
"""

from __future__ import annotations

from torch import Tensor

from kernels.common.bins import vectors_of_entries
from kernels.common.chunks import token_chunks


def segment_accumulate(accumulator: Tensor, ids: Tensor, coef: Tensor, vec: Tensor, bins: Tensor | None = None) -> None:
    """The function of `kernels.segment_accumulate.naive.segment_accumulate`, with its bits on the CPU."""
    num_tokens, num_rows_read, num_groups = coef.shape
    width = accumulator.shape[1]
    for chunk in token_chunks(num_tokens, num_rows_read * width):
        vectors = vec[chunk] if bins is None else vectors_of_entries(vec[chunk], bins[chunk], width)
        vectors = vectors.to(accumulator.dtype).view(vectors.shape[0], -1, num_groups, width // num_groups)
        terms = (coef[chunk].to(accumulator.dtype).unsqueeze(3) * vectors).reshape(-1, width)
        rows = ids[chunk].reshape(-1)
        if accumulator.is_cuda:
            # index_add_ uses atomics there, whose order changes from run to run; index_put_ sorts first.
            accumulator.index_put_((rows,), terms, accumulate=True)
        else:
            accumulator.index_add_(0, rows, terms)
