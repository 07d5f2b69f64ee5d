"""Rows of a bank that belong to a token.

Legend: s tokens of a sequence on this rank, b sequences, T = s b, A addresses of a token, M slots of an address.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megamem.chunk.inputs import Inputs
from megamem.token_tables.config import TokenTableConfig


def rows_of_addresses(addresses: Tensor, slots: int) -> Tensor:
    """[T, A M] int64 rows v M .. v M + M - 1 for each of the addresses v [A, ...] of T tokens."""
    # Flat first: of one sequence the transposed batch has a stride that the exchange cannot pack by bytes.
    rows = addresses.flatten(1).unsqueeze(2) * slots + torch.arange(slots, device=addresses.device)
    return rows.transpose(0, 1).flatten(1).contiguous()


def rows_of_inputs(inputs: Inputs, memory: TokenTableConfig, first_address: int) -> Tensor:
    """[T, A M] int64 rows that the tokens of `inputs` [s, b] read.

    Args:
        first_address: place of the family's addresses in `inputs` (`MemoryLayer.first_address`).
    """
    if memory.address is None:
        addresses = inputs.token_ids.unsqueeze(0)
    else:
        addresses = inputs.addresses_of(first_address, memory.address.num_addresses)
    return rows_of_addresses(addresses, memory.slots_per_address)
