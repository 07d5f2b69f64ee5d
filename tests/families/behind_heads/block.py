"""Attention with a memory behind its heads.

Legend: s tokens of a sequence on this rank, b sequences, n query heads of this tensor-parallel rank, d head dimension.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from megamem.backbone.parts import BlockParts, Parts, Site
from megamem.blocks.memory_sites import CoreSite
from megamem.chunk.inputs import Inputs


def edit(block: BlockParts, site: Site, parts: Parts) -> None:
    """Put the memory behind the heads."""
    attention: Any = block.self_attention
    attention.submodules.core_attention = partial(HeadsWithMemory, make_core=parts.core, site=site)


class HeadsWithMemory(CoreSite):
    """An attention core whose memory adds to its heads."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *args: Any, attention_bias: Inputs, **megatron: Any
    ) -> Tensor:
        """The heads' outputs [s, b, n d] with the memory's; `attention_bias` is the inputs."""
        heads: Tensor = self.core(query, key, value, *args, attention_bias=None, **megatron)
        if not self.memory_enabled:
            return heads
        return heads + self.memory(heads.unflatten(2, (query.shape[2], -1)), attention_bias).flatten(2)
