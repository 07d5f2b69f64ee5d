"""TIDE's layers, and what they share.

Legend: t tokens of a sequence on this rank, b sequences, T = t b, D hidden size, K rows of a token: one of each table, for each of its
addresses.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.rms_norm.op import RmsNorm
from megamem.chunk.inputs import Inputs
from megamem.config.width import Width
from megamem.layers.read_apart import read_apart
from megamem.layers.shared_read import SharedRead
from megamem.token_tables.layer import TokenTableLayer
from megamem.token_tables.rows import rows_of_inputs

from .config import TideConfig


class TideRead(SharedRead):
    """M_k = RMSNorm(E_k[w]) for every token w, once per forward pass of a chunk (Eq. 3.3 and 3.4)."""

    memory: TideConfig

    def _build(self, hidden_size: int) -> None:
        if self.memory.row_gain:
            self.gain = self._weight(self.memory.rows_per_token, hidden_size)

    def forward(self, inputs: Inputs, first_address: int) -> Tensor:
        """[t, b, K, D] for the tokens of `inputs` [t, b]."""
        rows = rows_of_inputs(inputs, self.memory, first_address)
        read = read_apart(self.lookup, rows, self.config.params_dtype)
        gains = self.gain if self.memory.row_gain else None
        normal = normalised(read, gains, self.epsilon, self.kernels.rms_norm)
        return normal.view(*inputs.token_ids.shape, *normal.shape[1:])


def normalised(rows: Tensor, gains: Tensor | None, epsilon: float, norm: RmsNorm) -> Tensor:
    """RMSNorm(E_k[w]) of `rows` [T, K, D], times the gain of each table in `gains` [K, D]; None: gains of 1."""
    if gains is None:
        return norm(rows, rows.new_ones(rows.shape[-1]), epsilon)
    # A kernel for each table, which reads rows once and keeps them as they are; written out, they would be kept twice in fp32.
    of_tables = zip(rows.unbind(1), gains.unbind(0), strict=True)
    return torch.stack([norm(of_table, gain, epsilon) for of_table, gain in of_tables], 1)


class TideLayer(TokenTableLayer):
    """sum_k alpha_k M_k with alpha = softmax(W_r n) over K + 1 places, the last of which adds nothing (Eq. 3.5, 3.6)."""

    memory: TideConfig

    def _build(self, hidden_size: int, seed: int) -> None:
        super()._build(hidden_size, seed)
        self.router = self._weight(self.memory.rows_per_token + 1, hidden_size, width=Width.INPUTS)

    def forward(self, hidden: Tensor, inputs: Inputs) -> Tensor:
        """See `MemoryLayer.forward`."""
        weights = self.weights(hidden)
        out = torch.matmul(weights[..., None, :-1], inputs.shared).squeeze(-2)
        if self.usage is not None:
            self.observe(self.rows(inputs), None, out.flatten(0, 1), router=weights.flatten(0, 1))
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
        inputs = self.alone(inputs)
        read = read_apart(self.lookup, self.rows(inputs), hidden.dtype)
        shared = normalised(read, None, self.epsilon, self.kernels.rms_norm)
        return self(hidden, replace(inputs, read=shared.view(*inputs.token_ids.shape, *shared.shape[1:])))
