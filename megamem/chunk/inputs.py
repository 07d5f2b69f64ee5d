"""Inputs of a microbatch besides its hidden states, which every block of a model chunk is given.

A chunk with a memory that asks for tokens (`MemoryConfig.reads_tokens`) reads the microbatch from its own loader, so no
message between stages grows. Nothing is kept on a module: under 1F1B the forward pass of another microbatch runs before a
block is recomputed.

Legend: s tokens of a sequence on this rank (of a context-parallel group), b sequences, t tokens of one tensor-parallel
rank.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from megamem.attention.kv_cache import KeyValueCache


@dataclass(frozen=True)
class Inputs:
    """Everything that blocks are told of a microbatch.

    Attributes:
        packed: [2 + A, s, b] int64, token ids and positions as `pack` makes it; None where no memory reads tokens.
        query: [t, b, D], the normalised stream of an earlier block, which the memory reads with; None: its own block's.
        read: [t, b, ...], what the layers of a chunk have read together (`megamem.layers.shared_read`), of this
            tensor-parallel rank's tokens; None where each reads by itself.
        cache: cache of a text that is being generated, for attention and for layers that look back; None in training.
        turns: cosines and sines of RoPE (`megamem.attention.rotary.rotary_turns`), or its angles where Megatron turns heads;
            None without RoPE.
        document_bounds: [documents + 1] int64 in host memory, of the documents in whole sequences; None: every sequence
            is one.
    """

    packed: Tensor | None
    read: Tensor | None = None
    query: Tensor | None = None
    cache: KeyValueCache | None = None
    turns: Tensor | None = None
    document_bounds: Tensor | None = None

    @property
    def shared(self) -> Tensor:
        """[t, b, ...], see `read`."""
        assert self.read is not None, "a layer asks for what its family does not read together"
        return self.read

    @property
    def token_ids(self) -> Tensor:
        """[s, b] int64."""
        return self._read(0)

    @property
    def positions(self) -> Tensor:
        """[s, b] int64, the places in their sequences."""
        return self._read(1)

    def addresses_of(self, first: int, num: int) -> Tensor:
        """[num, s, b] int64, the addresses from number `first` on of those that the chunk's layers have made of the tokens
        (`MemoryLayer.addresses`)."""
        assert self.packed is not None, "a layer asks for tokens whose config does not say `reads_tokens = True`"
        return self.packed[_NUM_OWN + first : _NUM_OWN + first + num]

    def with_addresses(self, addresses: Tensor) -> Inputs:
        """Inputs with addresses [A, s, b] behind those that are there."""
        assert self.packed is not None
        return replace(self, packed=torch.cat((self.packed, addresses)))

    def _read(self, index: int) -> Tensor:
        assert self.packed is not None, "a layer asks for tokens whose config does not say `reads_tokens = True`"
        return self.packed[index]

    def share(self, group: dist.ProcessGroup) -> Inputs:
        """[t, b]: those of this rank's tokens between the tensor-parallel regions, under sequence parallelism."""
        return self if self.packed is None else replace(self, packed=self.packed.chunk(group.size(), 1)[group.rank()])

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """See `Tensor.record_stream`."""
        for tensor in (self.packed, self.read, self.query):
            if tensor is not None:
                tensor.record_stream(stream)


_NUM_OWN = 2
"""Token ids and positions come first in what `pack` makes."""


def pack(token_ids: Tensor, positions: Tensor) -> Tensor:
    """The one tensor [2, s, b] that carries `token_ids` and `positions` [b, s] through a chunk.

    Behind them a family may put A rows of [s, b] that it computes of them once for all its layers
    (`MemoryLayer.addresses`).
    """
    return torch.stack((token_ids, positions)).transpose(1, 2)
