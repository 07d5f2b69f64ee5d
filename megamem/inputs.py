"""What belongs to a microbatch besides its hidden states, on its way to every block of every pipeline stage.

A chunk that has a memory reads the microbatch from its own loader, so no message between stages grows. Inside a model
chunk two of Megatron's arguments carry it, both of which `TransformerBlock` hands to every block and
`_checkpointed_forward` saves as arguments of what it recomputes: `context_mask` the token ids and positions (`pack`),
and `context`, which a block also returns, the outputs that join in a later block (`megamem.block.MemoryBlock`). Both
belong to cross-attention, of which these models have none. Nothing is kept on a module: under 1F1B the forward pass of
another microbatch runs before a block is recomputed. Megatron's other arguments would do worse: `attention_bias` and
`packed_seq_params` reach a recomputed block through a closure, and `padding_mask` not at all where
`recompute_method: block` leaves a block alone.

Legend: s tokens of a sequence on this rank (of a context-parallel group), b sequences, t tokens of one tensor-parallel
rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Inputs:
    """The tokens behind hidden states.

    Attributes:
        token_ids: [s, b] int64.
        positions: [s, b] int64, the places in their sequences.
    """

    token_ids: Tensor
    positions: Tensor

    @classmethod
    def unpack(cls, packed: Tensor) -> Inputs:
        """What `pack` made of a microbatch."""
        return cls(packed[0], packed[1])

    @classmethod
    def of_no_token(cls, device: torch.device) -> Inputs:
        """[0, 1] each."""
        nothing = torch.empty(0, 1, dtype=torch.int64, device=device)
        return cls(nothing, nothing)

    def share(self, group: dist.ProcessGroup) -> Inputs:
        """[t, b]: those of this rank's tokens between the tensor-parallel regions, under sequence parallelism."""
        size = self.token_ids.shape[0] // group.size()
        mine = slice(group.rank() * size, (group.rank() + 1) * size)
        return Inputs(self.token_ids[mine], self.positions[mine])

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """See `Tensor.record_stream`."""
        self.token_ids.record_stream(stream)
        self.positions.record_stream(stream)


def pack(token_ids: Tensor, positions: Tensor) -> Tensor:
    """The one tensor [2, s, b] that carries `token_ids` and `positions` [b, s] through a chunk."""
    return torch.stack((token_ids, positions)).transpose(1, 2)
