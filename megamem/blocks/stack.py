"""The loop over the blocks of a model chunk.

Legend: t tokens of a sequence on this rank between tensor-parallel regions, b sequences, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from megatron.core import tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.dist_checkpointing.utils import replace_prefix_for_sharding
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import sharded_state_dict_default
from torch import Tensor, nn

from megamem.blocks.block import Block, BlockState
from megamem.inputs import Inputs


class BlockStack(MegatronModule):
    """The blocks of a chunk, and the model's last norm behind the last of them.

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
        final_layernorm: Callable[..., nn.Module] | None,
        groups: ProcessGroupCollection,
    ) -> None:
        """
        Args:
            final_layernorm: makes the last norm; None in a chunk that is not the last one.
        """
        super().__init__(config=config)
        self.tp_group, self.first_recomputed = groups.tp, 0
        self.layers = nn.ModuleList(blocks)
        self.final_layernorm = (
            None
            if final_layernorm is None
            else final_layernorm(config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon)
        )

    def forward(self, hidden: Tensor, inputs: Inputs) -> Tensor:
        """The stream [t, b, D] behind the blocks, normed behind the model's last, of the one before them [t, b, D]."""
        state = BlockState(hidden)
        recomputes = self.training and self.config.recompute_granularity == "full"
        for index, block in enumerate(self.layers):
            assert isinstance(block, Block)
            if recomputes and index >= self.first_recomputed:
                state = _recomputed(block, state, inputs)
            else:
                state = block(state, inputs)
        assert not state.waiting
        hidden = state.hidden
        if self.final_layernorm is not None:
            hidden = self.final_layernorm(hidden)
        elif not len(self.layers):
            # Megatron's schedules tell what a chunk was given from what it returns.
            hidden = hidden.clone()
        return hidden

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
        if self.final_layernorm is not None:
            entries.update(
                sharded_state_dict_default(
                    self.final_layernorm, f"{prefix}final_layernorm.", sharded_offsets, metadata, tp_group=self.tp_group
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
        query: Tensor | None,
        packed: Tensor | None,
        read: Tensor | None,
        turns: Tensor | None,
        bounds: Tensor | None,
        *waiting: Tensor,
    ) -> tuple[Tensor | None, ...]:
        of_microbatch = replace(inputs, packed=packed, read=read, turns=turns, document_bounds=bounds)
        out: BlockState = block(BlockState(hidden, query, waiting), of_microbatch)
        return out.hidden, out.query, *out.waiting

    hidden = state.hidden
    if not hidden.requires_grad:
        # Weights of the lowest trained block get gradients if its input asks for one, which is dropped.
        hidden.requires_grad_()
    out = tensor_parallel.checkpoint(
        run,
        False,
        hidden,
        state.query,
        inputs.packed,
        inputs.read,
        inputs.turns,
        inputs.document_bounds,
        *state.waiting,
    )
    hidden, query, *waiting = out
    return BlockState(hidden, query, tuple(waiting))
