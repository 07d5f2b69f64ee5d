"""TIDE's layers, and what they share.

Legend: t tokens of a sequence on this rank, b sequences, T = t b, D hidden size, K tables.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

from megamem.bank import TableLookup
from megamem.inputs import Inputs
from megamem.layers.layer import MemoryLayer
from megamem.layers.shared_read import SharedRead
from megamem.token_tables.rows import rows_of_tokens
from megamem.width_config import Width

from .config import TideConfig


class TideRead(SharedRead):
    """M_k = RMSNorm(E_k[w]) for every token w, once per forward pass of a chunk (Eq. 3.3 and 3.4)."""

    memory: TideConfig

    def _build(self, hidden_size: int) -> None:
        if self.memory.row_gain:
            self.gain = self._weight(self.memory.num_tables, hidden_size)

    def forward(self, inputs: Inputs) -> Tensor:
        """[t, b, K, D] for the tokens of `inputs` [t, b]."""
        normal = read_normalised(
            self.lookup, inputs.token_ids, self.memory.num_tables, self.epsilon, self.config.params_dtype
        )
        return (normal * self.gain if self.memory.row_gain else normal).to(self.config.params_dtype)


def read_normalised(
    lookup: TableLookup, token_ids: Tensor, num_tables: int, epsilon: float, dtype: torch.dtype
) -> Tensor:
    """RMSNorm(E_k[w]) without a gain, [t, b, K, D] in at least fp32, for token ids [t, b] and rows of `dtype`."""
    rows = rows_of_tokens(token_ids, num_tables)
    # A sum of its own for each row.
    bins = torch.arange(num_tables, dtype=torch.int32, device=rows.device).expand_as(rows).contiguous()
    ones = torch.ones(*rows.shape, 1, dtype=dtype, device=rows.device)
    read = lookup.read(rows, ones, None, bins, num_tables)
    # The width in full: there may be no token to infer it from.
    read = read.view(*token_ids.shape, num_tables, read.shape[1] // num_tables)
    wide = read.to(torch.promote_types(read.dtype, torch.float32))
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)


class TideLayer(MemoryLayer):
    """sum_k alpha_k M_k with alpha = softmax(W_r n) over K + 1 places, the last of which adds nothing (Eq. 3.5, 3.6)."""

    memory: TideConfig

    def _build(self, hidden_size: int, seed: int) -> None:
        self.router = self._weight(self.memory.num_tables + 1, hidden_size, width=Width.INPUTS)

    @classmethod
    def rows_read(cls, layers: Sequence[Self], token_ids: Tensor, positions: Tensor) -> Mapping[int, Tensor]:
        """See `MemoryLayer.rows_read`."""
        return {layer.view.bank: rows_of_tokens(token_ids, layer.memory.rows_per_token) for layer in layers}

    def forward(self, hidden: Tensor, inputs: Inputs) -> Tensor:
        """See `MemoryLayer.forward`."""
        weights = self.weights(hidden)
        out = torch.matmul(weights[..., None, :-1], inputs.shared).squeeze(-2)
        if self.usage is not None:
            rows = rows_of_tokens(inputs.token_ids, self.memory.num_tables)
            self.observe(rows, None, out.flatten(0, 1), router=weights.flatten(0, 1))
        return out

    def weights(self, hidden: Tensor) -> Tensor:
        """alpha [t, b, K + 1] for `hidden` [t, b, D]."""
        logits = F.linear(hidden, self.router)
        return torch.softmax(logits, -1, dtype=torch.promote_types(logits.dtype, torch.float32)).to(hidden.dtype)

    def slot_weights(self, hidden: Tensor, inputs: Inputs) -> Tensor:
        """See `MemoryLayer.slot_weights`."""
        return self.weights(hidden).flatten(0, 1)

    def initial_output(self, hidden: Tensor, inputs: Inputs) -> Tensor:
        """See `MemoryLayer.initial_output`."""
        shared = read_normalised(self.lookup, inputs.token_ids, self.memory.num_tables, self.epsilon, hidden.dtype)
        return self(hidden, Inputs(inputs.packed, shared))
