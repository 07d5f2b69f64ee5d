"""`segment_accumulate` in PyTorch, and the gradient that a table of a gather hands to autograd.

Legend: R table rows, T tokens, J rows read per token, C coefficient groups, W columns (C divides W), B blocks of entries.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.blocks import vectors_of_entries
from kernels.chunks import token_chunks


def segment_accumulate(
    accumulator: Tensor, ids: Tensor, coef: Tensor, vec: Tensor, block: Tensor | None = None
) -> None:
    """The function of `kernels.segment_accumulate.naive.segment_accumulate`; the same bits in every run on one device."""
    num_tokens, num_rows_read, num_groups = coef.shape
    width = accumulator.shape[1]
    for chunk in token_chunks(num_tokens, num_rows_read * width):
        vectors = vec[chunk] if block is None else vectors_of_entries(vec[chunk], block[chunk], width)
        vectors = vectors.to(accumulator.dtype).view(vectors.shape[0], -1, num_groups, width // num_groups)
        terms = (coef[chunk].to(accumulator.dtype).unsqueeze(3) * vectors).reshape(-1, width)
        rows = ids[chunk].reshape(-1)
        if accumulator.is_cuda:
            # index_add_ uses atomics there, whose order changes from run to run; index_put_ sorts first.
            accumulator.index_put_((rows,), terms, accumulate=True)
        else:
            accumulator.index_add_(0, rows, terms)


def table_gradient(table: Tensor, ids: Tensor, coef: Tensor, vec: Tensor, block: Tensor | None = None) -> Tensor:
    """What backward of a gather returns for its table.

    Under Megatron's DDP the gradient is added to `table.main_grad` and the result is an empty sparse tensor, which costs nothing and
    still lets the DDP hook fire; otherwise it is the dense gradient.
    """
    main_grad = getattr(table, "main_grad", None)
    if main_grad is None:
        gradient = torch.zeros_like(table)
        segment_accumulate(gradient, ids, coef, vec, block)
        return gradient
    segment_accumulate(main_grad, ids, coef, vec, block)
    table.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    return torch.sparse_coo_tensor(
        torch.empty(1, 0, dtype=torch.int64, device=table.device),
        table.new_empty(0, table.shape[1]),
        table.shape,
        check_invariants=False,
    )
