"""A block with a memory: what fills the slots of Megatron's layer, and how an output that joins later gets there.

Legend: s tokens of a sequence on this rank and t of them between tensor-parallel regions, b sequences, D hidden size, n
query heads and g key/value heads of this tensor-parallel rank, d head dimension, m outputs on their way.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import all_to_all_hp2sp
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor, nn

from megamem.inputs import Inputs
from megamem.kv_cache import CachingSelfAttention
from megamem.side_stream import SideStream
from megamem.slots import Site, Slot


class MemorySite(nn.Module):
    """The module of a block that holds its memory."""

    memory: MegatronModule
    memory_enabled: bool = True
    """Off for ablation."""

    @abstractmethod
    def serve(self, no_token: Tensor, inputs: Inputs) -> None:
        """Let the memory read for `no_token` [0, 1, D] and take part in the exchanges of those that have some."""


class FfnWithMemory(MegatronModule, MemorySite):
    """The `mlp` slot of a block that has a memory, h + FFN(n) + Mem(n) with n = Norm(h) in the usual case.

    Without a feed-forward (`Slot.INSTEAD`, inserted blocks) it is Mem(n) alone. With `Slot.SKIP` the slot is the
    feed-forward alone, and `MemoryBlock` asks `read` for the memory's output.
    """

    def __init__(
        self, config: TransformerConfig, make_ffn: Callable[..., nn.Module], site: Site, side_stream: SideStream
    ) -> None:
        super().__init__(config=config)
        self.ffn = make_ffn(config=config) if site.slot.has_ffn else None
        self.memory = site.make_memory()
        self.slot, self.side_stream = site.slot, side_stream

    def set_layer_number(self, layer_number: int) -> None:
        """Megatron's blocks tell it to mixtures of experts."""
        if isinstance(self.ffn, MoELayer):
            self.ffn.set_layer_number(layer_number)

    def forward(self, hidden: Tensor, inputs: Inputs) -> tuple[Tensor, Tensor | None]:
        """The block's update of its residual stream for `hidden` = n [t, b, D], and the feed-forward's bias (None)."""
        if self.ffn is None:
            return self.read(hidden, inputs), None
        if not self.memory_enabled or self.slot is Slot.SKIP:
            out, bias = self.ffn(hidden)
            return out, bias
        from_memory = self.side_stream.start(self.memory, hidden, inputs)
        out, bias = self.ffn(hidden)
        return out + from_memory(), bias

    def read(self, hidden: Tensor, inputs: Inputs) -> Tensor:
        """Mem(n) for `hidden` = n [t, b, D]; zeros while the memory is switched off."""
        out: Tensor = self.memory(hidden, inputs) if self.memory_enabled else torch.zeros_like(hidden)
        return out

    def serve(self, no_token: Tensor, inputs: Inputs) -> None:
        """See `MemorySite.serve`."""
        self.memory(no_token, inputs)


class AttentionWithMemory(CachingSelfAttention, MemorySite):
    """Attention whose values pass through a memory (`Slot.VALUES`), before a cache gets them.

    The inputs come as Megatron's `attention_bias`, an argument of self-attention that our cores have no use for.
    """

    def __init__(self, *args: Any, site: Site, **megatron: Any) -> None:
        super().__init__(*args, **megatron)
        self.memory = site.make_memory()
        # [g, d]
        self._values_of_token: tuple[Any, Any] = (
            self.num_query_groups_per_partition,
            self.hidden_size_per_attention_head,
        )

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None, *, attention_bias: Inputs, **megatron: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Attention, [t, b, D], of the normalised input [t, b, D], and a bias (None)."""
        # Megatron passes `key_value_states` on to what makes queries, keys and values; self-attention has none.
        out, bias = super().forward(hidden_states, attention_mask, key_value_states=attention_bias, **megatron)
        return out, bias

    def get_query_key_value_tensors(
        self, hidden_states: Tensor, key_value_states: Inputs, output_gate: bool = False, split_qkv: bool = True
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Megatron's queries [s, b, n, d], keys and values [s, b, g, d], the latter as the memory returns them."""
        assert not output_gate
        assert split_qkv
        query, key, value = super().get_query_key_value_tensors(hidden_states)
        return query, key, self.memory(value, key_value_states, hidden_states) if self.memory_enabled else value

    def serve(self, no_token: Tensor, inputs: Inputs) -> None:
        """See `MemorySite.serve`."""
        self.memory(no_token.new_empty(0, 1, *self._values_of_token), inputs, no_token)


class CoreWithMemory(MegatronModule, MemorySite):
    """An attention core with a memory behind its heads (`Slot.HEADS`, `Slot.BLOCK`).

    With `train.recompute: selective` it is recomputed with the core; the inputs are then in the closure that Megatron
    recomputes, one per call.
    """

    def __init__(
        self, config: TransformerConfig, *, make_core: Callable[..., nn.Module], site: Site, **megatron: Any
    ) -> None:
        super().__init__(config=config)
        self.core = make_core(config=config, **megatron)
        self.memory, self.slot = site.make_memory(), site.slot
        heads = config.num_attention_heads // config.tensor_model_parallel_size
        self._shape_of_token = (heads, config.kv_channels)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *args: Any, attention_bias: Inputs, **megatron: Any
    ) -> Tensor:
        """The heads' outputs [s, b, n d] with the memory's, or the memory's alone; `attention_bias` is the inputs."""
        out: Tensor = self.core(query, key, value, *args, attention_bias=None, **megatron)
        if not self.memory_enabled:
            return torch.zeros_like(out) if self.slot is Slot.BLOCK else out
        from_memory: Tensor = self.memory(out.unflatten(2, (query.shape[2], -1)), attention_bias).flatten(2)
        return from_memory if self.slot is Slot.BLOCK else out + from_memory

    def serve(self, no_token: Tensor, inputs: Inputs) -> None:
        """See `MemorySite.serve`."""
        self.memory(no_token.new_empty(0, 1, *self._shape_of_token), inputs)


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


def without_stream(training: bool, fused: bool) -> Callable[..., Tensor]:
    """Instead of Megatron's sum of a block's residual stream and its attention's output: the latter alone."""

    def output(output_and_bias: tuple[Tensor, None], stream: Tensor, dropout: float) -> Tensor:
        return output_and_bias[0]

    return output


class MemoryBlock(TransformerLayer):
    """A block that has a memory, or after which the output of a skipping one joins (UltraMem, section 3.2).

    Outputs that have not joined yet travel from block to block in Megatron's `context`, stacked to [m, t, b, D], so
    they are arguments and results of whatever recomputes a block (see `megamem.inputs`). Blocks between pass them on
    untouched. All of them have joined at the end of a model chunk.

    The release keeps one pending output only, and loses the earlier of two overlapping spans; here both are added.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: TransformerLayerSubmodules,
        slot: Slot | None,
        joins: tuple[bool, ...],
        reads_once: bool,
        **megatron: Any,
    ) -> None:
        """
        Args:
            slot: where this block's memory acts; None: it has none.
            joins: for each output that arrives, whether it is added after this block.
            reads_once: whether what arrives is what the chunk's memories read together, which all blocks pass on.
        """
        super().__init__(config, submodules, **megatron)
        assert not self.recompute_mlp
        assert not (reads_once and joins)
        self.slot, self.joins, self.reads_once = slot, joins, reads_once

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
            context: outputs on their way [m, t, b, D]; None if m is 0. For a family that reads once: `Inputs.read`.
            context_mask: the microbatch as `megamem.inputs.pack` packs it; None where no memory asks for it.
        """
        inputs = Inputs(context_mask, context if self.reads_once else None)
        if self.slot in (Slot.VALUES, Slot.LATENTS, Slot.HEADS, Slot.BLOCK):
            megatron["attention_bias"] = inputs
        hidden, _ = self._forward_attention(hidden_states, **megatron)
        normal = self._forward_pre_mlp_layernorm(hidden)
        if not isinstance(self.mlp, FfnWithMemory):
            return self._with_arrivals(self._forward_post_mlp(self.mlp(normal), hidden), context, ())
        if self.config.sequence_parallel:
            inputs = inputs.share(self.tp_group)
        # An inserted block adds what its memory reads, and not what its attention says.
        stream = hidden_states if self.slot is not None and self.slot.is_inserted else hidden
        out = self._forward_post_mlp(self.mlp(normal, inputs), stream)
        if self.reads_once:
            return out, context
        leaving = (self.mlp.read(normal, inputs),) if self.slot is Slot.SKIP else ()
        return self._with_arrivals(out, context, leaving)

    def _with_arrivals(
        self, out: Tensor, context: Tensor | None, leaving: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor | None]:
        """`out` and what joins it, and those that go on together with this block's own."""
        waiting = []
        for output, joins in zip(() if context is None else context.unbind(0), self.joins, strict=True):
            if joins:
                out = out + output
            else:
                waiting.append(output)
        waiting.extend(leaving)
        return out, torch.stack(waiting) if waiting else None
