"""The loop over the blocks of a model chunk.

Legend: t tokens of a sequence on this rank between tensor-parallel regions, b sequences, n residual streams, D hidden
size, W columns of a message between stages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.dist_checkpointing.utils import replace_prefix_for_sharding
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import sharded_state_dict_default
from torch import Tensor, nn

from kernels.select import Kernels
from megamem.blocks.block import Block, BlockState
from megamem.chunk.inputs import Inputs
from megamem.residual_streams.config import ResidualStreamsConfig
from megamem.residual_streams.make import make_end
from megamem.residual_streams.message import as_message, from_message
from megamem.residual_streams.recomputed import RecomputedStreams
from megamem.residual_streams.site import started


class BlockStack(MegatronModule):
    """The blocks of a chunk. Several residual streams start before the model's first block and end behind its last, where
    its last norm is, too.

    Attributes:
        layers: the blocks.
        first_recomputed: index of the first of them that backward recomputes, with full recomputation: those below have
            nothing that is trained, and keep nothing.
    """

    def __init__(
        self,
        config: TransformerConfig,
        blocks: Sequence[Block],
        *,
        final_layernorm: Callable[..., nn.Module],
        groups: ProcessGroupCollection,
        streams: ResidualStreamsConfig | None,
        recompute_streams: int | None,
        kernels: Kernels,
        is_first: bool,
        is_last: bool,
    ) -> None:
        """
        Args:
            final_layernorm: makes the last norm.
            streams: settings of several residual streams; None: there is one.
            recompute_streams: blocks between which backward mixes streams again; None: it keeps those of every site.
            kernels: kernels of what is done to the streams.
            is_first: the model begins with this chunk.
            is_last: the model ends with it.
        """
        super().__init__(config=config)
        self.streams, self.is_first, self.is_last = streams, is_first, is_last
        self.recompute_streams, self._mix_streams = recompute_streams, kernels.mix_streams
        self.tp_group, self.first_recomputed = groups.tp, 0
        self.layers = nn.ModuleList(blocks)
        self.streams_end = make_end(config, streams, kernels) if is_last and streams is not None else None
        has_norm = is_last and not (streams is not None and streams.normalises)
        self.final_layernorm = (
            final_layernorm(config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon)
            if has_norm
            else None
        )

    def forward(self, hidden: Tensor, inputs: Inputs) -> Tensor:
        """The chunk's output: what the next one is given, or the normed stream [t, b, D] behind the last.

        Args:
            hidden: the embedding [t, b, D], or the output of the chunk before, which is the stream [t, b, D] or a message of
                several streams [t, b, W].
        """
        state = self._entered(hidden)
        recomputes = self.training and self.config.recompute_granularity == "full"
        recomputed = None
        if self.recompute_streams is not None and torch.is_grad_enabled():
            recomputed = RecomputedStreams(self._mix_streams, self.recompute_streams)
        for index, block in enumerate(self.layers):
            assert isinstance(block, Block)
            if recomputes and index >= self.first_recomputed:
                state = _recomputed(block, state, inputs)
            else:
                state = block(state, inputs, recomputed)
        assert not state.waiting
        return self._left(state, recomputed)

    def _entered(self, hidden: Tensor) -> BlockState:
        """The state before the chunk's first block."""
        if self.streams is None:
            return BlockState(hidden)
        return BlockState(*(started if self.is_first else from_message)(hidden, self.streams))

    def _left(self, state: BlockState, recomputed: RecomputedStreams | None) -> Tensor:
        """The chunk's output of the state behind its last block."""
        hidden = state.hidden
        if not self.is_last:
            if self.streams is not None:
                return as_message(hidden, state.carried)
            # Megatron's schedules tell what a chunk was given from what it returns.
            return hidden if len(self.layers) else hidden.clone()
        if self.streams_end is not None:
            given = hidden, state.carried
            hidden = self.streams_end(*given) if recomputed is None else recomputed.read(self.streams_end, *given)
        return hidden if self.final_layernorm is None else self.final_layernorm(hidden)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> ShardedStateDict:
        """Entries `<prefix>layers.<number of the block in the model, from 0>.<parameter>`, and those of the last norm."""
        entries: ShardedStateDict = {}
        for index, block in enumerate(self.layers):
            assert isinstance(block, Block)
            of_block = block.sharded_state_dict(f"{prefix}layers.{index}.", sharded_offsets, metadata)
            replace_prefix_for_sharding(
                of_block, f"{prefix}layers.{index}.", f"{prefix}layers.{block.layer_number - 1}."
            )
            entries.update(of_block)
        for name, module in (("streams_end", self.streams_end), ("final_layernorm", self.final_layernorm)):
            if module is not None:
                entries.update(
                    sharded_state_dict_default(
                        module, f"{prefix}{name}.", sharded_offsets, metadata, tp_group=self.tp_group
                    )
                )
        return entries


def _recomputed(block: Block, state: BlockState, inputs: Inputs) -> BlockState:
    """The state behind a block of which backward keeps the state before it alone.

    Nothing is kept on a module, and every tensor is an argument: under 1F1B the forward pass of another microbatch runs
    before a block is recomputed, and what a joint read has made (`Inputs.read`) has a gradient, too.
    """

    def run(
        hidden: Tensor,
        carried: Tensor | None,
        query: Tensor | None,
        packed: Tensor | None,
        read: Tensor | None,
        turns: Tensor | None,
        bounds: Tensor | None,
        *waiting: Tensor,
    ) -> tuple[Tensor | None, ...]:
        of_microbatch = replace(inputs, packed=packed, read=read, turns=turns, document_bounds=bounds)
        out: BlockState = block(BlockState(hidden, carried, query, waiting), of_microbatch)
        return out.hidden, out.carried, out.query, *out.waiting

    hidden = state.hidden
    if not hidden.requires_grad:
        # Weights of the lowest trained block get gradients if its input asks for one, which is dropped.
        hidden.requires_grad_()
    out = tensor_parallel.checkpoint(
        run,
        False,
        hidden,
        state.carried,
        state.query,
        inputs.packed,
        inputs.read,
        inputs.turns,
        inputs.document_bounds,
        *state.waiting,
    )
    hidden, carried, query, *waiting = out
    return BlockState(hidden, carried, query, tuple(waiting))
