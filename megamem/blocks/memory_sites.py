"""Modules of a block that hold a memory: before attention, behind its heads, beside the feed-forward or in its place.

Those whose memory mixes values or latents stand with attention (`megamem.token_tables.attention`).

Legend: t tokens of a sequence on this rank between tensor-parallel regions, b sequences, D hidden size.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from megamem.backbone.parts import Site
from megamem.chunk.inputs import Inputs
from megamem.chunk.side_stream import SideStream
from megamem.placement.slots import EMBEDDING


class MemorySite(nn.Module):
    """The module of a block that holds its memory."""

    memory: MegatronModule
    memory_enabled: bool = True
    """Off for ablation."""
    is_at_entry: ClassVar[bool] = False
    """True if it stands before attention; others come in the order of a block's modules."""

    @abstractmethod
    def serve(self, no_token: Tensor, inputs: Inputs) -> None:
        """Let the memory read for `no_token` [0, 1, D] and take part in the exchanges of those that have some."""


class CoreSite(MegatronModule, MemorySite):
    """An attention core with a memory behind its heads; what leaves it, a subclass's `forward` says."""

    def __init__(
        self, config: TransformerConfig, *, make_core: Callable[..., nn.Module], site: Site, **megatron: Any
    ) -> None:
        super().__init__(config=config)
        self.core = make_core(config=config, **megatron)
        self.memory = site.make_memory()
        heads = config.num_attention_heads // config.tensor_model_parallel_size
        self._shape_of_token = (heads, config.kv_channels)

    def serve(self, no_token: Tensor, inputs: Inputs) -> None:
        """See `MemorySite.serve`."""
        self.memory(no_token.new_empty(0, 1, *self._shape_of_token), inputs)


class FfnWithMemory(MegatronModule, MemorySite):
    """A feed-forward and the memory beside it, FFN(n) + Mem(n), or the memory alone.

    Where the memory's output joins after a later block it is the feed-forward alone, and the block asks `read` for the
    memory's output.
    """

    def __init__(
        self, config: TransformerConfig, make_ffn: Callable[..., nn.Module], site: Site, side_stream: SideStream
    ) -> None:
        super().__init__(config=config)
        self.ffn = make_ffn(config=config) if site.plan.has_ffn else None
        self.memory = site.make_memory()
        self.joins_later, self.side_stream = site.placed.span.is_skip, side_stream

    def set_layer_number(self, layer_number: int) -> None:
        """Blocks tell it to mixtures of experts."""
        if isinstance(self.ffn, MoELayer):
            self.ffn.set_layer_number(layer_number)

    def forward(self, hidden: Tensor, inputs: Inputs) -> tuple[Tensor, Tensor | None]:
        """The block's update of its residual stream for `hidden` = n [t, b, D], and the feed-forward's bias (None)."""
        if self.ffn is None:
            return self.read(hidden, inputs), None
        if not self.memory_enabled or self.joins_later:
            out, bias = self.ffn(hidden)
            return out, bias
        from_memory = self.side_stream.start(self.memory, _query(hidden, inputs), inputs)
        out, bias = self.ffn(hidden)
        return out + from_memory(), bias

    def read(self, hidden: Tensor, inputs: Inputs) -> Tensor:
        """Mem(n) for `hidden` = n [t, b, D]; zeros while the memory is switched off."""
        if not self.memory_enabled:
            return torch.zeros_like(hidden)
        out: Tensor = self.memory(_query(hidden, inputs), inputs)
        return out

    def serve(self, no_token: Tensor, inputs: Inputs) -> None:
        """See `MemorySite.serve`."""
        self.memory(no_token, inputs)


def _query(hidden: Tensor, inputs: Inputs) -> Tensor:
    """Input of a memory in a block with `hidden` = n [t, b, D]: that, or the n of an earlier block."""
    return hidden if inputs.query is None else inputs.query


class EntryMemory(MegatronModule, MemorySite):
    """The memory before a block's attention and its norm, which has all residual streams in view."""

    is_at_entry: ClassVar[bool] = True

    def __init__(self, config: TransformerConfig, site: Site) -> None:
        super().__init__(config=config)
        self.memory = site.make_memory()
        slot = site.placed.slot
        self.is_embedding, self.reads_streams = slot == EMBEDDING, slot.reads_streams
        # The memory's own number: None where there is one.
        self.num_streams: int | None = self.memory.num_streams

    def forward(self, hidden: Tensor, inputs: Inputs) -> Tensor:
        """h + Mem(h) for `hidden` = h [t, b, D], or Mem(h) of an input embedding h; of streams X [t, b, n, D] each by itself.

        What is one output [t, b, D] for all streams joins each of them.
        """
        if not self.memory_enabled:
            return hidden
        if self.is_embedding and self.num_streams is not None:
            # All streams are the embedding still.
            embedded: Tensor = self.memory(hidden[:, :, 0], inputs)
            return embedded.unsqueeze(2).repeat(1, 1, self.num_streams, 1)
        out: Tensor = self.memory(hidden, inputs)
        if self.is_embedding:
            return out
        return hidden + (out if out.dim() == hidden.dim() else out.unsqueeze(2))

    def serve(self, no_token: Tensor, inputs: Inputs) -> None:
        """See `MemorySite.serve`."""
        if self.num_streams is not None and self.reads_streams:
            no_token = no_token.unsqueeze(2).expand(-1, -1, self.num_streams, -1)
        self.memory(no_token, inputs)
