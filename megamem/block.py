"""A block with a memory: what fills its `mlp` slot, and how an output that joins later gets there.

Legend: s sequence length and b sequences of this rank, D hidden size, n outputs on their way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor, nn

from megamem.layers.layer import MemoryLayer
from megamem.side_stream import SideStream


class FfnWithMemory(MegatronModule):
    """The `mlp` slot of a block that has a memory, h + FFN(n) + Mem(n) with n = Norm(h) in the usual case.

    Without a feed-forward (`position: instead`) it is h + Mem(n). In a skipping block the slot is the feed-forward alone, and
    `SkipInsertionLayer` asks `read` for the memory's output.
    """

    def __init__(
        self,
        config: TransformerConfig,
        make_ffn: Callable[..., nn.Module] | None,
        make_memory: Callable[[], MemoryLayer],
        *,
        skips: bool,
        side_stream: SideStream,
    ) -> None:
        """Build both.

        Args:
            config: Megatron's config of the model.
            make_ffn: builds the feed-forward, dense or a mixture of experts, given `config`; None: the memory stands in its place.
            make_memory: builds this block's memory layer.
            skips: the memory's output joins the residual stream after a later block.
            side_stream: where the memory runs beside the feed-forward.
        """
        super().__init__(config=config)
        assert make_ffn is not None or not skips
        self.ffn = make_ffn(config=config) if make_ffn is not None else None
        self.memory = make_memory()
        self.skips, self.side_stream = skips, side_stream
        self.memory_enabled = True

    def set_layer_number(self, layer_number: int) -> None:
        """Megatron's blocks tell it to mixtures of experts."""
        if isinstance(self.ffn, MoELayer):
            self.ffn.set_layer_number(layer_number)

    def forward(self, hidden: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """What the block adds to its residual stream for `hidden` = n [s, b, D], and the feed-forward's bias (None)."""
        if self.ffn is None:
            return self.read(hidden), None
        if not self.memory_enabled or self.skips:
            out, bias = self.ffn(hidden)
            return out, bias
        from_memory = self.side_stream.start(self.memory, hidden)
        out, bias = self.ffn(hidden)
        return out + from_memory(), bias

    def read(self, hidden: Tensor) -> Tensor:
        """Mem(n) for `hidden` = n [s, b, D]; zeros while the memory is switched off."""
        out: Tensor = self.memory(hidden) if self.memory_enabled else torch.zeros_like(hidden)
        return out


class SkipInsertionLayer(TransformerLayer):
    """A block at which a skipping memory reads, or after which one adds (UltraMem, section 3.2).

    Outputs that have not joined yet travel from block to block in Megatron's `context`, the second tensor that a block takes and returns
    (cross-attention's keys and values, of which these models have none), stacked to [n, s, b, D]. So they are arguments and results
    of whatever recomputes a block, belong to one microbatch each, and are kept in no module. Blocks between pass them on untouched.
    All of them have joined at the end of a model chunk.

    The release keeps one pending output only, and loses the earlier of two overlapping spans; here both are added.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: TransformerLayerSubmodules,
        joins: tuple[bool, ...],
        reads: bool,
        **megatron: Any,
    ) -> None:
        """Build the block.

        Args:
            config: Megatron's config of the model.
            submodules: as of any block; the `mlp` slot of one that reads is a skipping `FfnWithMemory`.
            joins: for each output that arrives, whether it is added after this block.
            reads: whether a memory of this block sends an output on.
            megatron: what Megatron hands to every block.
        """
        super().__init__(config, submodules, **megatron)
        self.joins, self.reads = joins, reads

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """The block's output [s, b, D] with what joins here, and the outputs still on their way."""
        kwargs.pop("dynamic_inference_decode_only", None)
        hidden, context = self._forward_attention(*args, **kwargs)
        normal = self._forward_pre_mlp_layernorm(hidden)
        out = self._forward_post_mlp(self.mlp(normal, padding_mask=kwargs.get("padding_mask")), hidden)
        arrived = () if context is None else context.unbind(0)
        waiting = []
        for output, joins in zip(arrived, self.joins, strict=True):
            if joins:
                out = out + output
            else:
                waiting.append(output)
        if self.reads:
            waiting.append(self.mlp.read(normal))
        return out, torch.stack(waiting) if waiting else None
