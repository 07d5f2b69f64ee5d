"""Rows of a token's addresses, each by itself, with the signs of its columns.

Legend: T tokens, A addresses of a token, V columns of a row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megamem.addresses.signs import sign_patterns
from megamem.banks.bank import TableLookup
from megamem.chunk.inputs import Inputs
from megamem.layers.read_apart import read_apart
from megamem.parameters.declaration import parameter_device
from megamem.token_tables.config import TokenTableConfig
from megamem.token_tables.layer import TokenTableLayer


def patterns_of(memory: TokenTableConfig, device: torch.device) -> Tensor | None:
    """[patterns, V] int8 of +1 and -1; None where rows have no signs."""
    if memory.address is None or memory.address.signs == "none":
        return None
    return sign_patterns(memory.address.num_sign_patterns, memory.value_dim, device)


def signs_of_inputs(inputs: Inputs, memory: TokenTableConfig, patterns: Tensor, first_address: int) -> Tensor:
    """[T, A, V] int8 signs of the rows that the tokens of `inputs` [s, b] read; see `rows_of_inputs`."""
    assert memory.address is not None
    num = memory.address.num_addresses
    return patterns[inputs.addresses_of(first_address + num, num).flatten(1).T]


def read_signed(
    lookup: TableLookup,
    rows: Tensor,
    inputs: Inputs,
    memory: TokenTableConfig,
    patterns: Tensor | None,
    dtype: torch.dtype,
    first_address: int,
) -> Tensor:
    """[T, A, V] of `rows` [T, A], which are those of `inputs`, times their signs."""
    read = read_apart(lookup, rows, dtype)
    return read if patterns is None else read * signs_of_inputs(inputs, memory, patterns, first_address)


class SignedRowsLayer(TokenTableLayer):
    """Layer that reads the rows of a token's addresses apart, with their signs."""

    patterns: Tensor | None

    def _build(self, hidden_size: int, seed: int) -> None:
        super()._build(hidden_size, seed)
        # Checkpoints leave out what the configuration says.
        self.register_buffer("patterns", patterns_of(self.memory, parameter_device(self.config)), persistent=False)

    def read_signed(self, rows: Tensor, inputs: Inputs, dtype: torch.dtype) -> Tensor:
        """[T, A, V] of `rows` [T, A], those of the tokens of `inputs`, times their signs."""
        return read_signed(self.lookup, rows, inputs, self.memory, self.patterns, dtype, self.first_address)
