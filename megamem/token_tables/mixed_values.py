"""The layer that mixes rows of the token into attention's values.

Legend: s tokens of a sequence on this context-parallel rank and t of them on this tensor-parallel rank, b sequences, S =
s b and T = t b, D hidden size, g key/value heads of this tensor-parallel rank, d head dimension, n parts of the columns of
all ranks that have gates of their own (as a rule the key/value heads), M rows per token, V columns of all ranks.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megamem.chunk.inputs import Inputs
from megamem.config.width import Width
from megamem.token_tables.config import MixedValuesConfig
from megamem.token_tables.layer import TokenTableLayer


class MixedValuesLayer(TokenTableLayer):
    """V_S[h] = g_0[h] V[h] + sum_i g_i[h] E[w, i, h], with g = 2 sigmoid(x W_G) (MoVE, Eq. 1-4 and 6).

    One gate per token, key/value head and row, of the state x that also makes queries, keys and values. Without a gate
    for the standard path g_0 is 1. The bank has a column for each of the values' columns, so grouped queries share
    mixed values, and those are what a cache of keys and values would hold.

    Each tensor-parallel rank makes the gates of its own tokens, for all heads, and needs the mixed values of all tokens
    for its own heads: `TableLookup.read_heads`. Where there are more ranks than key/value heads it has one that others
    have too, and gathers it. Latents, in latent attention, are cut into n parts and mixed the same way
    (Eq. 7), and each rank has all columns of its own tokens'.
    """

    memory: MixedValuesConfig

    def _build(self, hidden_size: int, seed: int) -> None:
        super()._build(hidden_size, seed)
        self.gate_proj = self._weight(
            self.memory.num_gate_heads * self.memory.num_gates, hidden_size, width=Width.INPUTS
        )

    def gates(self, hidden: Tensor) -> tuple[Tensor | None, Tensor]:
        """g_0 [T, n] (None: it is 1) and g_1 .. g_M as [T, M, n], for `hidden` [t, b, D]."""
        logits = F.linear(hidden.flatten(0, 1), self.gate_proj)
        gates = 2 * torch.sigmoid(logits.unflatten(1, (self.memory.num_gate_heads, -1)))
        if not self.memory.gated_standard_path:
            return None, gates.transpose(1, 2)
        return gates[:, :, 0], gates[:, :, 1:].transpose(1, 2)

    def forward(self, values: Tensor, inputs: Inputs, hidden: Tensor) -> Tensor:  # type: ignore[override]
        """The mixed values [s, b, g, d], or latents [t, b, V]; `values` are those of attention and `hidden` [t, b, D] its
        input."""
        standard, gates = self.gates(hidden)
        rows = self.rows(inputs)
        # For all heads.
        own = self.rows(self.own(inputs))
        if self.ranks_per_head > 1:
            from_rows = self.of_shared_head(self.lookup.read(own, gates.contiguous(), None)).view(values.shape)
        else:
            from_rows = self.lookup.read_heads(rows, gates.contiguous(), self.tensor_group).view(values.shape)
        self.observe(own, None, from_rows.flatten(0, 1).flatten(1))
        if standard is None:
            return values + from_rows
        standard = self.heads_of(standard)
        parts = values.flatten(2).unflatten(2, (standard.shape[1], -1))
        return (standard.view(*parts.shape[:3], 1) * parts).view(values.shape) + from_rows

    def slot_weights(self, values: Tensor, inputs: Inputs, hidden: Tensor) -> Tensor:
        """See `MemoryLayer.slot_weights`: gates, averaged over heads."""
        standard, gates = self.gates(hidden)
        means = gates.float().mean(2)
        return means if standard is None else torch.cat((standard.float().mean(1, keepdim=True), means), 1)

    def initial_output(self, hidden: Tensor, inputs: Inputs) -> Tensor:
        """See `MemoryLayer.initial_output`: what is added to the values, [T, V]."""
        return self.lookup.read(self.rows(self.alone(inputs)), self.gates(hidden)[1].contiguous(), None)
