"""One block of a model, and the state that blocks hand to each other.

    h' = h + Attn(Norm(h)),    h'' = h' + FFN(Norm(h'))

with a memory before attention, inside it, beside the feed-forward or in its place. Attention, norms and feed-forward are
Megatron's modules, or ours in their slots. Of several residual streams (`megamem.residual_streams`) attention and
feed-forward each read one h, and write their outputs into all.

Legend: t tokens of a sequence on this rank between tensor-parallel regions, b sequences, n residual streams, D hidden
size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megamem.backbone.parts import BlockParts
from megamem.blocks.memory_sites import FfnWithMemory
from megamem.chunk.inputs import Inputs
from megamem.placement.block_plan import BlockPlan
from megamem.residual_streams.recomputed import RecomputedStreams
from megamem.residual_streams.site import OneStream, StreamSite


@dataclass(frozen=True)
class BlockState:
    """State that blocks of a chunk hand to each other.

    Attributes:
        hidden: [t, b, D], the residual stream; of several [t, b, n, D].
        carried: [t, b, n], weights with which the next site reads the streams; None where it finds its own.
        query: [t, b, D], the normalised stream that memories of later blocks read with (`PlacementConfig.query_group`);
            None without such.
        waiting: outputs [t, b, D] of memories that join after a later block (UltraMem, section 3.2), in the order of
            their reads. All have joined at the end of a chunk.
    """

    hidden: Tensor
    carried: Tensor | None = None
    query: Tensor | None = None
    waiting: tuple[Tensor, ...] = ()


class Block(MegatronModule):
    """A block, built of parts that its memories' slots have changed.

    The release of UltraMem keeps one waiting output only, and loses the earlier of two overlapping spans; here both are
    added.
    """

    def __init__(
        self,
        config: TransformerConfig,
        parts: BlockParts,
        *,
        layer_number: int,
        plan: BlockPlan,
        joins: tuple[bool, ...],
        groups: ProcessGroupCollection,
        streams: tuple[StreamSite, StreamSite] | None = None,
    ) -> None:
        """Build it with unset weights.

        Args:
            layer_number: number of the block in the model, from 1.
            joins: flags of the outputs that wait before it: True for one that is added after it.
            streams: sites of attention and of the feed-forward, of several residual streams; None: there is one.
        """
        super().__init__(config=config)
        self.tp_group, self.layer_number, self.plan, self.joins = groups.tp, layer_number, plan, joins
        norm = {"config": config, "hidden_size": config.hidden_size, "eps": config.layernorm_epsilon}
        ways = {} if config.cp_comm_type is None else {"cp_comm_type": config.cp_comm_type}
        self.input_layernorm = parts.input_layernorm(**norm)
        self.self_attention = build_module(
            parts.self_attention, config=config, layer_number=layer_number, pg_collection=groups, **ways
        )
        self.pre_mlp_layernorm = parts.pre_mlp_layernorm(**norm)
        # Megatron's modules have no types.
        self.mlp: Any = None if parts.mlp is None else parts.mlp(config=config)
        if isinstance(self.mlp, MoELayer | FfnWithMemory):
            self.mlp.set_layer_number(layer_number)
        self.entry = None if parts.entry is None else parts.entry(config=config)
        self._adds_to_attention = parts.adds_to_attention
        self.attention_streams: StreamSite | OneStream = OneStream()
        self.ffn_streams: StreamSite | OneStream = OneStream()
        if streams is not None:
            self.attention_streams, self.ffn_streams = streams

    def forward(self, state: BlockState, inputs: Inputs, recomputed: RecomputedStreams | None = None) -> BlockState:
        """The state behind the block, with outputs that join here.

        Args:
            recomputed: streams that backward mixes again; None: it keeps those of every site.
        """
        own = inputs.share(self.tp_group) if self.config.sequence_parallel and self.plan.memories else inputs
        hidden = state.hidden if self.entry is None else self.entry(state.hidden, own)
        sites = self.attention_streams, self.ffn_streams
        site, ffn_site = sites if recomputed is None else recomputed.sites(*sites)
        read = site.read(hidden, state.carried)
        attended = self._attended(read.update, inputs)
        if self.plan.adds_attention:
            hidden = site.written(hidden, attended, read)
            site = ffn_site
            read = site.read(hidden, read.carried)
            normal = self.pre_mlp_layernorm(read.update)
        else:
            normal = hidden + attended if self._adds_to_attention else attended
        if self.plan.queried is not None:
            assert state.query is not None
            own = replace(own, query=state.query)
        hidden = site.written(hidden, attended if self.mlp is None else self._updated(normal, own), read)
        waiting = []
        for output, joins in zip(state.waiting, self.joins, strict=True):
            if joins:
                hidden = site.joined(hidden, output, read)
            else:
                waiting.append(output)
        if isinstance(self.mlp, FfnWithMemory) and self.mlp.joins_later:
            waiting.append(self.mlp.read(normal, own))
        return BlockState(hidden, read.carried, normal if self.plan.lends_query else state.query, tuple(waiting))

    def _attended(self, stream: Tensor, inputs: Inputs) -> Tensor:
        """Attn(Norm(h)) [t, b, D] of the stream h [t, b, D]."""
        # Megatron's attention hands its bias to the core and to our subclasses, which have no other use for it.
        to_memory: dict[str, Any] = {"attention_bias": inputs} if self.plan.has_memory_in_attention else {}
        out, bias = self.self_attention(
            self.input_layernorm(stream),
            attention_mask=inputs.document_bounds,
            inference_context=inputs.cache,
            rotary_pos_emb=inputs.turns,
            **to_memory,
        )
        assert bias is None
        attended: Tensor = out
        return attended

    def _updated(self, normal: Tensor, inputs: Inputs) -> Tensor:
        """FFN(n) [t, b, D] of n [t, b, D], with the memory's output."""
        out, bias = self.mlp(normal, inputs) if isinstance(self.mlp, FfnWithMemory) else self.mlp(normal)
        assert bias is None
        update: Tensor = out
        return update
