"""The layer of n-grams in attention's values.

Legend: s tokens of a sequence on this context-parallel rank and t of them on this tensor-parallel rank, b sequences, T =
t b, D hidden size, A addresses of a token, V columns of a row, E = A V, g key/value heads of this tensor-parallel rank and G
of all, d head dimension.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megamem.chunk.inputs import Inputs
from megamem.config.width import Width
from megamem.token_tables.signed_rows import SignedRowsLayer

from .config import ValueNgramsConfig


class ValueNgramsLayer(SignedRowsLayer):
    """V_S = V + W_up (g e), or V_S[h] = V[h] + g e for one head h, with the gate g = sigmoid(<w, x[:C]> / C + b) of
    attention's input x and the rows e of the token's n-grams, side by side.

    Published in github.com/karpathy/nanochat/pull/854 (all heads) and github.com/KellerJordan/modded-nanogpt/pull/366 (one
    head, with the bias).
    """

    memory: ValueNgramsConfig

    def _build(self, hidden_size: int, seed: int) -> None:
        super()._build(hidden_size, seed)
        memory, groups, head_dim = self.memory, self.config.num_query_groups, self.config.kv_channels
        assert groups is not None
        assert head_dim is not None
        self.head_dim, self.num_heads = head_dim, groups
        self.gate = self._weight(1, memory.gate_channels)
        self.gate_bias = self._weight(1) if memory.gate_bias else None
        self.up_proj = None
        if memory.into == "all_heads":
            self.up_proj = self._matrix(groups * head_dim, memory.memory_width, Width.OUTPUTS)

    def gates(self, hidden: Tensor) -> Tensor:
        """g [T, 1] for `hidden` [t, b, D]."""
        channels = self.memory.gate_channels
        logits = F.linear(hidden[..., :channels].flatten(0, 1), self.gate) / channels
        return torch.sigmoid(logits if self.gate_bias is None else logits + self.gate_bias)

    def forward(self, values: Tensor, inputs: Inputs, hidden: Tensor) -> Tensor:  # type: ignore[override]
        """V_S [s, b, g, d] of attention's values [s, b, g, d] and its input `hidden` [t, b, D]."""
        added = self._added(self.own(inputs), hidden)
        return values + self.heads_of(added).view(values.shape)

    def initial_output(self, hidden: Tensor, inputs: Inputs) -> Tensor:
        """See `MemoryLayer.initial_output`: what is added to the values, [T, G d]."""
        return self._added(self.alone(inputs), hidden)

    def slot_weights(self, values: Tensor, inputs: Inputs, hidden: Tensor) -> Tensor:
        """See `MemoryLayer.slot_weights`: the gate."""
        return self.gates(hidden).float()

    def _added(self, inputs: Inputs, hidden: Tensor) -> Tensor:
        """[T, G d] of `inputs` and `hidden` [t, b, D], of the same tokens."""
        rows = self.rows(inputs)
        gated = self.gates(hidden) * self.read_signed(rows, inputs, hidden.dtype).flatten(1)
        if self.up_proj is not None:
            added = F.linear(gated, self.up_proj)
        else:
            head = self.view.bank_of_family % self.num_heads
            added = F.pad(gated, (head * self.head_dim, (self.num_heads - 1 - head) * self.head_dim))
        self.observe(rows, None, added)
        return added
