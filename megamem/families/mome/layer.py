"""The layer of MoME.

Legend: s tokens of a sequence on this context-parallel rank and t of them on this tensor-parallel rank, b sequences, S =
s b and T = t b, D hidden size, M rows of a token, of all its addresses, K of them chosen, g key/value heads of this
tensor-parallel rank and G of all, d head dimension.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.kept_scores import kept_scores
from kernels.list_topk.naive import list_topk
from megamem.chunk.inputs import Inputs
from megamem.config.width import Width
from megamem.token_tables.layer import TokenTableLayer

from .config import MomeConfig

_EPSILON = 1e-10
"""Smallest sum of sigmoids, as in the public code."""


class MomeLayer(TokenTableLayer):
    """V_S[h] = V[h] + 2 sigmoid(W_g x[:C])[h] sum_{a in A_h} alpha_a E[w, a], A_h the K best of M logits.

    Logits are W_h x + b_h of attention's input x, or V[h] R + b with one R for all heads. Of several slots alpha is the
    sigmoid over the sum of those in A_h; of one it is the softmax over all M. Equal logits, which all are at first, are in
    the order of retrieval (`kernels/list_topk`): the first slots.
    """

    memory: MomeConfig

    def _build(self, hidden_size: int, seed: int) -> None:
        super()._build(hidden_size, seed)
        memory = self.memory
        slots, heads = memory.rows_per_token, memory.num_heads
        self.gate = self._weight(heads, memory.gate_channels)
        if memory.router_input == "hidden":
            self.router = self._weight(heads * slots, hidden_size, width=Width.INPUTS)
            self.router_bias = self._weight(heads * slots)
        else:
            self.router_of_values = self._weight(slots, memory.value_dim)
            self.router_bias = self._weight(slots)

    def logits(self, values: Tensor, hidden: Tensor) -> Tensor:
        """[T, G, M] in at least fp32, for attention's values [s, b, g, d] and its input [t, b, D]."""
        if self.memory.router_input == "value":
            logits = self.tokens_of(F.linear(values.flatten(0, 1), self.router_of_values, self.router_bias))
        else:
            logits = F.linear(hidden.flatten(0, 1), self.router, self.router_bias)
            logits = logits.unflatten(1, (self.memory.num_heads, -1))
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    def choice(self, values: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Slots [T, G, K] int64 of a token's M rows, and their weights, gates included, in the logits' precision."""
        memory, logits = self.memory, self.logits(values, hidden)
        with torch.no_grad():
            # What is kept for backward must not be a view of all positions.
            slots = list_topk(logits, memory.active_slots).contiguous()
        if memory.active_slots == 1:
            alpha = kept_scores(logits.softmax(2).unsqueeze(3), slots).squeeze(3)
        else:
            found = torch.sigmoid(kept_scores(logits.unsqueeze(3), slots).squeeze(3))
            alpha = found / (found.sum(2, keepdim=True) + _EPSILON)
        gates = 2 * torch.sigmoid(F.linear(hidden[..., : memory.gate_channels].flatten(0, 1), self.gate))
        return slots, gates.unsqueeze(2) * alpha

    def forward(self, values: Tensor, inputs: Inputs, hidden: Tensor) -> Tensor:  # type: ignore[override]
        """V_S [s, b, g, d] of attention's values [s, b, g, d] and its input `hidden` [t, b, D]."""
        added = self._added(self.rows(self.own(inputs)), values, hidden)
        return values + self.heads_of(added).view(values.shape)

    def initial_output(self, hidden: Tensor, inputs: Inputs) -> Tensor:
        """See `MemoryLayer.initial_output`: what is added to the values, [T, G d]. These choose nothing at first."""
        values = hidden.new_zeros(*hidden.shape[:2], self.memory.num_heads, self.memory.value_dim)
        return self._added(self.rows(self.alone(inputs)), values, hidden)

    def slot_weights(self, values: Tensor, inputs: Inputs, hidden: Tensor) -> Tensor:
        """See `MemoryLayer.slot_weights`: 0 of those that a head does not choose, averaged over heads."""
        slots, weights = self.choice(values, hidden)
        of_heads = weights.new_zeros(*slots.shape[:2], self.memory.rows_per_token).scatter(2, slots, weights)
        return of_heads.float().mean(1)

    def _added(self, rows: Tensor, values: Tensor, hidden: Tensor) -> Tensor:
        """[T, G d] of a token's `rows` [T, M]."""
        slots, weights = self.choice(values, hidden)
        chosen = rows.gather(1, slots.flatten(1))
        heads = torch.arange(self.memory.num_heads, dtype=torch.int32, device=rows.device)
        # Of each head a sum of its own.
        bins = heads.repeat_interleave(self.memory.active_slots).expand_as(chosen).contiguous()
        coefficients = weights.flatten(1).unsqueeze(2).to(hidden.dtype)
        added = self.lookup.read(chosen, coefficients, None, bins, self.memory.num_heads)
        self.observe(chosen, None, added)
        return added
