"""Rows of a bank that belong to a token."""

from __future__ import annotations

import torch
from torch import Tensor


def rows_of_tokens(token_ids: Tensor, rows_per_token: int) -> Tensor:
    """[T, M] int64 rows v M .. v M + M - 1 for each of T token ids v, of any shape."""
    # Flat first: of one sequence the transposed batch has a stride that the exchange cannot pack by bytes.
    return token_ids.flatten().unsqueeze(1) * rows_per_token + torch.arange(rows_per_token, device=token_ids.device)
