"""Recomputation of blocks where the lowest ones are not trained.

Legend: t tokens of a sequence on this rank, b sequences, D hidden size.
"""

from __future__ import annotations

from typing import Any

from megatron.core import tensor_parallel
from megatron.core.transformer.transformer_block import TransformerBlock
from torch import Tensor


class PartlyTrainedBlocks(TransformerBlock):
    """Megatron's blocks under full recomputation, of which the first `num_below` are in no backward pass.

    Megatron recomputes blocks in one function of autograd, which has a gradient if its input asks for one. The input
    of the lowest block in the backward pass does not, as nothing below it is trained: its weights would get no
    gradient. So it is made to ask, and the gradient that comes of it is dropped. Blocks below keep nothing and are not
    recomputed.

    Attributes:
        num_below: blocks of this chunk below the lowest one with a backward pass.
    """

    num_below: int

    def _checkpointed_forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        context: Tensor | None,
        context_mask: Tensor | None,
        rotary_pos_emb: Tensor | None,
        attention_bias: Tensor | None,
        packed_seq_params: Any,
        use_inner_quantization_context: bool,
        padding_mask: Tensor | None = None,
    ) -> Tensor:
        """See `TransformerBlock._checkpointed_forward`, [t, b, D] to [t, b, D], a block at a time."""
        assert not use_inner_quantization_context
        for number, layer in enumerate(self.layers):

            def run(
                hidden: Tensor,
                mask: Tensor | None,
                arrived: Tensor | None,
                inputs: Tensor | None,
                rotary: Tensor | None,
                layer: Any = layer,
            ) -> tuple[Tensor, Tensor | None]:
                out: tuple[Tensor, Tensor | None] = layer(
                    hidden_states=hidden,
                    attention_mask=mask,
                    context=arrived,
                    context_mask=inputs,
                    rotary_pos_emb=rotary,
                    attention_bias=attention_bias,
                    packed_seq_params=packed_seq_params,
                    padding_mask=padding_mask,
                )
                return out

            arguments = (hidden_states, attention_mask, context, context_mask, rotary_pos_emb)
            if number < self.num_below:
                hidden_states, context = run(*arguments)
            else:
                if not hidden_states.requires_grad:
                    hidden_states.requires_grad_()
                hidden_states, context = tensor_parallel.checkpoint(run, False, *arguments)
        return hidden_states
