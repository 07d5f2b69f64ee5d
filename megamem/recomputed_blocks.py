"""Recomputation of blocks where the lowest ones are not trained.

Legend: t tokens of a sequence on this rank, b sequences, D hidden size.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

from megatron.core import tensor_parallel
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor


def recompute_above(blocks: TransformerBlock, num_below: int) -> None:
    """Recompute each block in backward, but the first `num_below` of a chunk, which are in no backward pass.

    Megatron recomputes blocks in one function of autograd, which has a gradient if its input asks for one. The input
    of the lowest block in the backward pass does not, as nothing below it is trained: its weights would get no
    gradient. So it is made to ask, and the gradient that comes of it is dropped. Blocks below keep nothing and are not
    recomputed.
    """
    # The blocks' own recomputation makes no such difference.
    blocks.config = copy.copy(blocks.config)
    blocks.config.recompute_granularity = None
    for layer in blocks.layers[num_below:]:
        layer.forward = partial(_recomputed, layer, layer.forward)


def _recomputed(
    layer: TransformerLayer,
    forward: Any,
    hidden_states: Tensor,
    *,
    attention_mask: Tensor | None,
    context: Tensor | None,
    context_mask: Tensor | None,
    rotary_pos_emb: Tensor | None,
    **others: Any,
) -> tuple[Tensor, Tensor | None]:
    """The layer's `forward`, [t, b, D] to [t, b, D], of which backward keeps the inputs alone."""

    def run(
        hidden: Tensor, mask: Tensor | None, arrived: Tensor | None, inputs: Tensor | None, rotary: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        out: tuple[Tensor, Tensor | None] = forward(
            hidden_states=hidden,
            attention_mask=mask,
            context=arrived,
            context_mask=inputs,
            rotary_pos_emb=rotary,
            **others,
        )
        return out

    arguments = (hidden_states, attention_mask, context, context_mask, rotary_pos_emb)
    if not layer.training:
        return run(*arguments)
    if not hidden_states.requires_grad:
        hidden_states.requires_grad_()
    out: tuple[Tensor, Tensor | None] = tensor_parallel.checkpoint(run, False, *arguments)
    return out
