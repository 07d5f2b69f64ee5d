"""`gather_dot` in PyTorch: batched products, in slices of tokens whose rows stay in cache.

Legend: T tokens, J rows read per token, C column groups, W columns (C divides W), B bins.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.common.bins import vectors_of_entries
from kernels.common.slices import token_slices


def gather_dot(table: Tensor, ids: Tensor, x: Tensor, num_groups: int = 1, bins: Tensor | None = None) -> Tensor:
    """The function of `kernels.gather_dot.naive.gather_dot`, without gradients."""
    num_tokens, num_rows_read = ids.shape
    per_group = (num_groups, table.shape[1] // num_groups)
    out = x.new_empty(num_tokens, num_rows_read, num_groups)
    for tokens in token_slices(num_tokens, num_rows_read * table.shape[1]):
        rows = table[ids[tokens]].view(-1, num_rows_read, *per_group)
        if bins is None:
            vectors = x[tokens].reshape(rows.shape[0], 1, *per_group)
            out[tokens] = (rows.transpose(1, 2) @ vectors.permute(0, 2, 3, 1)).squeeze(-1).transpose(1, 2)
        else:
            vectors = vectors_of_entries(x[tokens], bins[tokens], table.shape[1]).view(rows.shape)
            # In bf16 every product would be rounded before it is added.
            out[tokens] = (rows * vectors.to(torch.promote_types(vectors.dtype, torch.float32))).sum(-1)
    return out
