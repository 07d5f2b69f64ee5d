"""A block whose memory adds to the residual stream before attention.

Legend: t tokens of a sequence on this rank between tensor-parallel regions, b sequences, D hidden size.
"""

from __future__ import annotations

from typing import Any, ClassVar

from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules
from torch import Tensor

from megamem.attention.kv_cache import KeyValueCache
from megamem.backbone.parts import Parts, Site
from megamem.block import MemoryBlock, MemorySite
from megamem.inputs import Inputs
from megamem.placement.slots import EMBEDDING, ENTRY


def edit(block: TransformerLayerSubmodules, site: Site, parts: Parts) -> None:
    """Leave the block's parts as they are: the memory stands before all of them, in `EntryBlock`."""


class EntryMemory(MegatronModule, MemorySite):
    """The memory at a block's entry."""

    is_at_entry: ClassVar[bool] = True

    def __init__(self, config: TransformerConfig, site: Site) -> None:
        super().__init__(config=config)
        self.memory = site.make_memory()
        self.is_embedding = site.slot == EMBEDDING

    def forward(self, hidden: Tensor, inputs: Inputs) -> Tensor:
        """h + Mem(h) for `hidden` = h [t, b, D], or Mem(h) of an input embedding h."""
        if not self.memory_enabled:
            return hidden
        out: Tensor = self.memory(hidden, inputs)
        return out if self.is_embedding else hidden + out

    def serve(self, no_token: Tensor, inputs: Inputs) -> None:
        """See `MemorySite.serve`."""
        self.memory(no_token, inputs)


class EntryBlock(MemoryBlock):
    """A block behind its memory (`ENTRY`, `EMBEDDING`)."""

    def __init__(
        self, config: TransformerConfig, submodules: TransformerLayerSubmodules, sites: tuple[Site, ...], **others: Any
    ) -> None:
        super().__init__(config, submodules, sites, **others)
        (site,) = (site for site in sites if site.slot in (ENTRY, EMBEDDING))
        self.entry = EntryMemory(config, site)

    def forward(
        self,
        hidden_states: Tensor,
        *,
        context: Tensor | None,
        context_mask: Tensor | None,
        inference_context: KeyValueCache | None = None,
        **others: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """See `MemoryBlock.forward`."""
        inputs = Inputs(context_mask, read=context if self.plan.reads_once else None, cache=inference_context)
        if self.config.sequence_parallel:
            inputs = inputs.share(self.tp_group)
        hidden_states = self.entry(hidden_states, inputs)
        return super().forward(
            hidden_states, context=context, context_mask=context_mask, inference_context=inference_context, **others
        )
