"""Base of the layers that read rows of a token's id, or of hashes of its n-grams.

Legend: s tokens of a sequence on this context-parallel rank, b sequences, S = s b, T of them on this tensor-parallel rank, A
addresses of a token, M slots of an address.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Self

from megatron.core.tensor_parallel.mappings import (
    all_to_all_hp2sp,
    all_to_all_sp2hp,
    gather_from_sequence_parallel_region,
)
from torch import Tensor

from megamem.addresses.hashed import HashedNgrams
from megamem.chunk.halo import UNCUT, Halo
from megamem.chunk.inputs import Inputs
from megamem.layers.layer import MemoryLayer
from megamem.parameters.declaration import parameter_device
from megamem.token_tables.config import TokenTableConfig
from megamem.token_tables.rows import rows_of_addresses, rows_of_inputs


class TokenTableLayer(MemoryLayer):
    """Layer of a family whose rows the token addresses; all of a chunk share the addresses."""

    memory: TokenTableConfig

    def _build(self, hidden_size: int, seed: int) -> None:
        """See `MemoryLayer`; families allocate their weights besides."""
        address = self.memory.address
        self.hashed = (
            None if address is None else HashedNgrams(address, parameter_device(self.config), self.kernels.ngram_hashes)
        )

    @classmethod
    def addresses(cls, layers: Sequence[Self], token_ids: Tensor, positions: Tensor, halo: Halo) -> Tensor | None:
        """See `MemoryLayer.addresses`: [A, s, b]; None where ids are the addresses."""
        hashed = layers[0].hashed
        found: Tensor | None = None if hashed is None else hashed(token_ids, positions, halo)
        return found

    @classmethod
    def rows_read(cls, layers: Sequence[Self], token_ids: Tensor, positions: Tensor) -> Mapping[int, Tensor]:
        """See `MemoryLayer.rows_read`."""
        addresses = cls.addresses(layers, token_ids, positions, UNCUT)
        rows = rows_of_addresses(
            token_ids.unsqueeze(0) if addresses is None else addresses, layers[0].memory.slots_per_address
        )
        return {layer.view.bank: rows for layer in layers}

    def rows(self, inputs: Inputs) -> Tensor:
        """[T, A M] int64 rows that the tokens of `inputs` read."""
        return rows_of_inputs(inputs, self.memory, self.first_address)

    @property
    def ranks_per_head(self) -> int:
        """Tensor-parallel ranks that have the same key/value head, because there are more of them than heads."""
        groups = self.config.num_query_groups
        assert groups is not None
        return 1 if self.tensor_group is None else max(1, self.tensor_group.size() // groups)

    def heads_of(self, own: Tensor) -> Tensor:
        """[S, columns of this tensor-parallel rank's heads] for the tokens of all ranks, of all heads' columns of this rank's
        own [T, columns]."""
        if self.tensor_group is None or self.tensor_group.size() == 1:
            return own
        if self.ranks_per_head > 1:
            return self.of_shared_head(own)
        heads: Tensor = all_to_all_sp2hp(own.contiguous(), self.tensor_group)
        return heads

    def own(self, inputs: Inputs) -> Inputs:
        """Inputs of this tensor-parallel rank's share of the tokens, of those of all."""
        return inputs if self.tensor_group is None else inputs.share(self.tensor_group)

    def tokens_of(self, heads: Tensor) -> Tensor:
        """[T, all heads, columns] of this tensor-parallel rank's own tokens, for those of its heads [S, heads, columns]."""
        if self.tensor_group is None or self.tensor_group.size() == 1:
            return heads
        every: Tensor = all_to_all_hp2sp(heads.flatten(1).contiguous(), self.tensor_group)
        # Ranks that have the same head say the same of it: the first one's is taken, and has the gradient.
        return every.unflatten(1, (-1, heads.shape[2]))[:, :: self.ranks_per_head]

    def of_shared_head(self, own: Tensor) -> Tensor:
        """`heads_of` of the one head that several ranks have.

        In backward they add up its gradients.
        """
        assert self.tensor_group is not None
        every: Tensor = gather_from_sequence_parallel_region(own, group=self.tensor_group)
        heads = self.config.num_query_groups
        assert heads is not None
        return every.chunk(heads, 1)[self.tensor_group.rank() // self.ranks_per_head]
