"""Blocks of MIDUS: attention whose heads, or what is made of them, a memory reads.

Legend: s tokens of a sequence on this rank and t of them between tensor-parallel regions, b sequences, D hidden size, n
query heads of this tensor-parallel rank, d head dimension.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import all_to_all_hp2sp
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megamem.backbone.parts import BlockParts, Parts, Site
from megamem.blocks.memory_sites import CoreSite
from megamem.blocks.slot_edits import edit_ffn
from megamem.chunk.inputs import Inputs


def edit_heads(block: BlockParts, site: Site, parts: Parts) -> None:
    """Put the memory behind the heads, in place of all that would follow."""
    attention: Any = block.self_attention
    attention.submodules.core_attention = partial(CoreWithMemory, make_core=parts.core, site=site)
    attention.submodules.linear_proj = HeadsToTokens
    block.mlp, block.adds_to_attention = None, False


def edit_stream_and_heads(block: BlockParts, site: Site, parts: Parts) -> None:
    """Put the memory in place of the feed-forward, and heads as they are before it."""
    edit_ffn(block, site, parts)
    attention: Any = block.self_attention
    attention.submodules.linear_proj = HeadsToTokens


def edit_projected(block: BlockParts, site: Site, parts: Parts) -> None:
    """Put the memory in place of the feed-forward, and attention's output alone before it."""
    edit_ffn(block, site, parts)
    block.adds_to_attention = False


class CoreWithMemory(CoreSite):
    """An attention core with a memory behind its heads, which is all that leaves it (`BEHIND_HEADS`).

    With `train.recompute: selective` it is recomputed with the core; the inputs are then in the closure that Megatron
    recomputes, one per call.
    """

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *args: Any, attention_bias: Inputs, **megatron: Any
    ) -> Tensor:
        """The memory's output for the heads', [s, b, n d]; `attention_bias` is the inputs."""
        heads: Tensor = self.core(query, key, value, *args, attention_bias=None, **megatron)
        if not self.memory_enabled:
            return torch.zeros_like(heads)
        out: Tensor = self.memory(heads.unflatten(2, (query.shape[2], -1)), attention_bias).flatten(2)
        return out


class HeadsToTokens(MegatronModule):
    """Instead of an output projection: the heads of all tensor-parallel ranks for the tokens of this one."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: TransformerConfig,
        tp_group: torch.distributed.ProcessGroup,
        **megatron: Any,
    ) -> None:
        super().__init__(config=config)
        # n d of all ranks together is D.
        assert input_size == output_size
        self.group = tp_group

    def forward(self, heads: Tensor) -> tuple[Tensor, None]:
        """From [s, b, n d] to [t, b, D], and no bias. Collective."""
        if self.group.size() == 1:
            return heads, None
        return all_to_all_hp2sp(heads, self.group).unflatten(0, (-1, heads.shape[1])), None
