"""The `mlp` slot of a block that has a memory: feed-forward and memory side by side, h + FFN(n) + Mem(n) with n = Norm(h)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megamem.layers.layer import MemoryLayer


class FfnWithMemory(MegatronModule):
    """Adds a memory layer to Megatron's MLP; both read the same normalised input and the block adds their sum to the residual."""

    def __init__(
        self,
        config: TransformerConfig,
        ffn: MLPSubmodules,
        make_memory: Callable[[], MemoryLayer],
        tp_group: torch.distributed.ProcessGroup,
    ) -> None:
        """Build both.

        Args:
            config: Megatron's config of the model.
            ffn: the MLP's linears.
            make_memory: builds this block's memory layer.
            tp_group: tensor-parallel group of the MLP.
        """
        super().__init__(config=config)
        self.ffn = MLP(config, ffn, ffn_hidden_size=config.ffn_hidden_size, tp_group=tp_group)
        self.memory = make_memory()
        self.memory_enabled = True

    def forward(self, hidden: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """FFN(n) + Mem(n) for `hidden` = n [s, b, D], and the MLP's bias (None)."""
        out, bias = self.ffn(hidden)
        if self.memory_enabled:
            out = out + self.memory(hidden)
        return out, bias
