"""Joint read of a chunk's memory layers, once per forward pass, before its first block.

Legend: t tokens of a sequence on this rank, b sequences.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedStateDict, ShardedTensor
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from kernels.select import Kernels
from megamem.banks.bank import TableLookup
from megamem.chunk.inputs import Inputs
from megamem.config.memory import MemoryConfig
from megamem.parameters.declaration import Copy, ReducedOver, declare, mark_copy, parameter_device


class SharedRead(MegatronModule):
    """Makes of a chunk's tokens what all its memory layers find in `Inputs.shared`.

    Its weights belong to the bank that it reads: whoever holds a copy of the one holds a copy of the other.
    """

    def __init__(
        self,
        config: TransformerConfig,
        memory: MemoryConfig,
        lookup: TableLookup,
        *,
        kernels: Kernels,
        copy: Copy,
        tensor_group: torch.distributed.ProcessGroup,
        data_group: torch.distributed.ProcessGroup,
    ) -> None:
        """Allocate the weights; `megamem.initialisation` fills them.

        Args:
            memory: config of the layers' family.
            lookup: the bank that they share.
            kernels: kernels of norms.
            copy: place of this copy among the stages' copies.
            tensor_group: ranks that hold the weights too, and other tokens of the microbatch.
            data_group: ranks that hold the weights too, and other microbatches or slices of them.
        """
        super().__init__(config=config)
        self.memory, self.lookup, self.kernels, self.copy = memory, lookup, kernels, copy
        self.epsilon = config.layernorm_epsilon
        self._replica_id = (copy.index, tensor_group.rank(), data_group.rank())
        self._build(config.hidden_size)

    @abstractmethod
    def _build(self, hidden_size: int) -> None:
        """Allocate the family's weights, by `_weight`."""

    @abstractmethod
    def forward(self, inputs: Inputs, first_address: int) -> Tensor:
        """[t, b, ...] for the tokens of `inputs` [t, b]; `first_address` as of the family's layers (`MemoryLayer`)."""

    def _weight(self, *shape: int) -> nn.Parameter:
        weight = nn.Parameter(torch.empty(*shape, dtype=self.config.params_dtype, device=parameter_device(self.config)))
        declare(weight, "backbone_no_decay", reduced_over=ReducedOver.TOKENS)
        mark_copy(weight, self.copy)
        return weight

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: Any = None
    ) -> ShardedStateDict:
        """Checkpoint entries `shared_read.<weight>`: whole on every rank."""
        return {
            f"{prefix}{name}": ShardedTensor.from_rank_offsets(
                f"{prefix}{name}",
                weight,
                *sharded_offsets,
                prepend_axis_num=len(sharded_offsets),
                replica_id=self._replica_id,
            )
            for name, weight in self.named_parameters(recurse=False)
        }
