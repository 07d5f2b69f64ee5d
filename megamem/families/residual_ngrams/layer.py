"""The layers of n-grams in the residual stream, and what they share.

Legend: t tokens of a sequence on this rank, b sequences, T = t b, D hidden size, A addresses of a token, V columns of a row.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from megamem.banks.bank import TableLookup
from megamem.chunk.inputs import Inputs
from megamem.layers.shared_read import SharedRead
from megamem.parameters.declaration import parameter_device
from megamem.token_tables.layer import TokenTableLayer
from megamem.token_tables.rows import rows_of_inputs
from megamem.token_tables.signed_rows import patterns_of, read_signed

from .config import ResidualNgramsConfig


class SummedRows(SharedRead):
    """b = sum_a S_a * E[r_a] over a token's addresses, rows r_a and signs S_a, once per forward pass of a chunk."""

    memory: ResidualNgramsConfig
    patterns: Tensor | None

    def _build(self, hidden_size: int) -> None:
        # Checkpoints leave out what the configuration says.
        self.register_buffer("patterns", patterns_of(self.memory, parameter_device(self.config)), persistent=False)

    def forward(self, inputs: Inputs, first_address: int) -> Tensor:
        """[t, b, V] for the tokens of `inputs` [t, b]."""
        return summed(self.lookup, inputs, self.memory, self.patterns, self.config.params_dtype, first_address)


def summed(
    lookup: TableLookup,
    inputs: Inputs,
    memory: ResidualNgramsConfig,
    patterns: Tensor | None,
    dtype: torch.dtype,
    first_address: int,
) -> Tensor:
    """b [t, b, V] for the tokens of `inputs` [t, b], of `dtype`."""
    rows = rows_of_inputs(inputs, memory, first_address)
    if patterns is None:
        ones = torch.ones(*rows.shape, 1, dtype=dtype, device=rows.device)
        found = lookup.read(rows, ones, None)
    else:
        found = read_signed(lookup, rows, inputs, memory, patterns, dtype, first_address).sum(1)
    return found.view(*inputs.token_ids.shape, found.shape[1])


class ResidualNgramsLayer(TokenTableLayer):
    """lambda b for a layer's gain lambda, in the first columns of the stream (modded-nanogpt, pulls 201 and 299)."""

    memory: ResidualNgramsConfig

    def _build(self, hidden_size: int, seed: int) -> None:
        super()._build(hidden_size, seed)
        self.gain = self._weight(1)

    def forward(self, hidden: Tensor, inputs: Inputs) -> Tensor:
        """See `MemoryLayer.forward`; one output for all streams."""
        added = self.gain * inputs.shared
        if self.usage is not None:
            self.observe(self.rows(inputs), None, added.flatten(0, 1))
        return F.pad(added, (0, hidden.shape[-1] - added.shape[-1]))

    def initial_output(self, hidden: Tensor, inputs: Inputs) -> Tensor:
        """See `MemoryLayer.initial_output`."""
        inputs = self.alone(inputs)
        patterns = patterns_of(self.memory, parameter_device(self.config))
        read = summed(self.lookup, inputs, self.memory, patterns, hidden.dtype, self.first_address)
        return self(hidden, replace(inputs, read=read))
