"""A block with a memory: what fills the slots of Megatron's layer, and how an output that joins later gets there.

Legend: t tokens of a sequence on this rank between tensor-parallel regions, b sequences, D hidden size, m outputs on
their way.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor, nn

from megamem.backbone.parts import Parts, Site
from megamem.inputs import Inputs
from megamem.placement.block_plan import PLAIN
from megamem.side_stream import SideStream


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


def edit_ffn(block: TransformerLayerSubmodules, site: Site, parts: Parts) -> None:
    """Put the memory beside the feed-forward, or in its place."""
    around = {"make_ffn": parts.make_ffn, "site": site, "side_stream": parts.side_stream}
    block.mlp = ModuleSpec(module=FfnWithMemory, params=around)
    if site.plan.num_norms < 2:
        block.pre_mlp_layernorm = IdentityOp


class FfnWithMemory(MegatronModule, MemorySite):
    """The `mlp` slot of a block that has a memory, h + FFN(n) + Mem(n) with n = Norm(h) in the usual case.

    Without a feed-forward it is Mem(n) alone. Where the output joins after a later block it is the feed-forward alone,
    and `MemoryBlock` asks `read` for the memory's output.
    """

    def __init__(
        self,
        config: TransformerConfig,
        make_ffn: Callable[..., nn.Module],
        site: Site,
        side_stream: SideStream,
        **_megatron: Any,
    ) -> None:
        """
        Args:
            _megatron: the layer's groups and name, which later versions of the engine hand to every feed-forward.
        """
        super().__init__(config=config)
        self.ffn = make_ffn(config=config) if site.plan.has_ffn else None
        self.memory = site.make_memory()
        self.joins_later, self.side_stream = site.span.is_skip, side_stream

    def set_layer_number(self, layer_number: int) -> None:
        """Megatron's blocks tell it to mixtures of experts."""
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


class MemoryBlock(TransformerLayer):
    """A block that has a memory, or after which the output of a skipping one joins (UltraMem, section 3.2).

    Outputs that have not joined yet travel from block to block in Megatron's `context`, stacked to [m, t, b, D], so
    they are arguments and results of whatever recomputes a block (see `megamem.inputs`). Blocks between pass them on
    untouched. All of them have joined at the end of a model chunk. Where memories of several blocks read with one
    stream (`PlacementConfig.query_group`), the first of them sends its n [t, b, D] the same way.

    The release keeps one pending output only, and loses the earlier of two overlapping spans; here both are added.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: TransformerLayerSubmodules,
        sites: tuple[Site, ...],
        joins: tuple[bool, ...],
        **megatron: Any,
    ) -> None:
        """
        Args:
            sites: this block's memories. Where a chunk's memories read together, what arrives is what they have read,
                which all blocks pass on.
            joins: flags of the outputs that arrive: True for one that is added after this block.
        """
        super().__init__(config, submodules, **megatron)
        assert not self.recompute_mlp
        self.plan, self.joins = sites[0].plan if sites else PLAIN, joins
        assert not (self.plan.reads_once and joins)

    def forward(
        self,
        hidden_states: Tensor,
        *,
        context: Tensor | None,
        context_mask: Tensor | None,
        padding_mask: Tensor | None = None,
        dynamic_inference_decode_only: bool | None = None,
        **megatron: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """The block's output [t, b, D] with what joins here, and the outputs still on their way.

        Args:
            hidden_states: [t, b, D].
            context: outputs on their way [m, t, b, D]; None if m is 0. For a family that reads once: `Inputs.read`; among
                blocks that read with one stream: `Inputs.query`.
            context_mask: the microbatch as `megamem.inputs.pack` packs it; None where no memory asks for it.
        """
        assert self.plan.queried is None or context is not None
        inputs = Inputs(
            context_mask,
            read=context if self.plan.reads_once else None,
            query=None if self.plan.queried is None else context,
        )
        if self.plan.has_memory_in_attention:
            megatron["attention_bias"] = inputs
        hidden, _ = self._forward_attention(hidden_states, **megatron)
        normal = self._forward_pre_mlp_layernorm(hidden)
        if not isinstance(self.mlp, FfnWithMemory):
            return self._with_arrivals(self._forward_post_mlp(self.mlp(normal), hidden), context, ())
        if self.config.sequence_parallel:
            inputs = inputs.share(self.tp_group)
        stream = hidden if self.plan.adds_attention else hidden_states
        out = self._forward_post_mlp(self.mlp(normal, inputs), stream)
        if self.plan.lends_query:
            return out, normal
        if self.plan.reads_once or self.plan.queried is not None:
            return out, context
        leaving = (self.mlp.read(normal, inputs),) if self.mlp.joins_later else ()
        return self._with_arrivals(out, context, leaving)

    def _with_arrivals(
        self, out: Tensor, context: Tensor | None, leaving: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor | None]:
        """`out` and what joins it, and those that go on together with this block's own."""
        if not self.joins and not leaving:
            return out, context
        waiting = []
        for output, joins in zip(() if context is None else context.unbind(0), self.joins, strict=True):
            if joins:
                out = out + output
            else:
                waiting.append(output)
        waiting.extend(leaving)
        return out, torch.stack(waiting) if waiting else None
