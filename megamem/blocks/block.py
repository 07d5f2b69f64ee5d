"""One block of a model, and the state that blocks hand to each other.

    h' = h + Attn(Norm(h)),    h'' = h' + FFN(Norm(h'))

with a memory before attention, inside it, beside the feed-forward or in its place. Attention, norms and feed-forward are
Megatron's modules, or ours in their slots.

Legend: t tokens of a sequence on this rank between tensor-parallel regions, b sequences, D hidden size.
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
from megamem.inputs import Inputs
from megamem.placement.block_plan import BlockPlan


@dataclass(frozen=True)
class BlockState:
    """State that blocks of a chunk hand to each other.

    Attributes:
        hidden: [t, b, D], the residual stream.
        query: [t, b, D], the normalised stream that memories of later blocks read with (`PlacementConfig.query_group`);
            None without such.
        waiting: outputs [t, b, D] of memories that join after a later block (UltraMem, section 3.2), in the order of
            their reads. All have joined at the end of a chunk.
    """

    hidden: Tensor
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
    ) -> None:
        """Build it with unset weights.

        Args:
            layer_number: number of the block in the model, from 1.
            joins: flags of the outputs that wait before it: True for one that is added after it.
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

    def forward(self, state: BlockState, inputs: Inputs) -> BlockState:
        """The state behind the block, with outputs that join here."""
        own = inputs.share(self.tp_group) if self.config.sequence_parallel and self.plan.memories else inputs
        stream = state.hidden if self.entry is None else self.entry(state.hidden, own)
        attended = self._attended(stream, inputs)
        hidden = stream + attended if self._adds_to_attention else attended
        if self.mlp is None:
            return replace(state, hidden=hidden)
        if self.plan.adds_attention:
            stream = hidden
        normal = self.pre_mlp_layernorm(hidden)
        if self.plan.queried is not None:
            assert state.query is not None
            own = replace(own, query=state.query)
        out = stream + self._updated(normal, own)
        waiting = []
        for output, joins in zip(state.waiting, self.joins, strict=True):
            if joins:
                out = out + output
            else:
                waiting.append(output)
        if isinstance(self.mlp, FfnWithMemory) and self.mlp.joins_later:
            waiting.append(self.mlp.read(normal, own))
        return BlockState(out, normal if self.plan.lends_query else state.query, tuple(waiting))

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
