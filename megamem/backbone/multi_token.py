"""Prediction of tokens beyond the next one (DeepSeek-V3, arXiv 2412.19437, section 2.2): a branch behind the last block.

With E the embedding, O the output projection and h^0_i the normed output of the last block at token i, for n = 1 .. depth

    x_i = W_n [Norm(E t_{i+n}); Norm(h^{n-1}_i)],    h^n_i = Norm(Block_n(x_i)),    p(t_{i+n+1}) = Softmax(O h^n_i).

The blocks are those of the model, without a memory. Megatron's module for this rolls the tokens in the middle of the model,
by messages between the ranks that share a sequence; here they are shifted before sequences are cut.

Legend: t tokens of a sequence on this rank, s on its context-parallel rank, b sequences, D hidden size, V ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import reduce_scatter_to_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from megamem.backbone.chunked_loss import ChunkedLoss
from megamem.backbone.parts import Parts
from megamem.blocks.block import Block, BlockState
from megamem.chunk.inputs import Inputs
from megamem.config.model import MultiTokenConfig
from megamem.config.width import Width
from megamem.layers.losses import inject
from megamem.parameters.declaration import Matrices, ReducedOver, declare, parameter_device
from megamem.placement.block_plan import PLAIN


def tokens_ahead(labels: Tensor, loss_mask: Tensor, positions: Tensor, depth: int) -> dict[str, Tensor]:
    """The labels n = 1 .. depth tokens further on, [b, s] each by a name, of whole sequences [b, s].

    A label that does not count is there as its complement, -1 - id: by the mask, or as the sequence or the document ends
    before it (then of id 0). A document that begins in between starts its positions anew.
    """
    found = {}
    for n in range(1, depth + 1):
        ahead = torch.full_like(labels, -1)
        goes_on = positions[:, n:] == positions[:, :-n] + n
        label = labels[:, n:].where(goes_on, 0)
        ahead[:, :-n] = label.where(goes_on & (loss_mask[:, n:] != 0), ~label)
        found[_name(n)] = ahead
    return found


def stacked(batch: dict[str, Tensor], depth: int) -> Tensor:
    """[1 + depth, b, s] of a batch: the labels, and those of `tokens_ahead`."""
    return torch.stack([batch["labels"], *(batch[_name(n)] for n in range(1, depth + 1))])


def _ids(labels: Tensor) -> Tensor:
    """Ids of labels, whether they count or not."""
    return labels.where(labels >= 0, ~labels)


def _name(n: int) -> str:
    return f"labels_ahead_{n}"


class MultiTokenPrediction(MegatronModule):
    """The branch, in the chunk with the loss.

    Attributes:
        sums: [depth, 2] fp64: nats and targets of each depth since `begin_step`, of this rank.
    """

    sums: Tensor

    def __init__(
        self,
        config: TransformerConfig,
        settings: MultiTokenConfig,
        parts: Parts,
        loss: ChunkedLoss,
        groups: ProcessGroupCollection,
        *,
        blocks_before: int,
    ) -> None:
        """Build it with unset weights.

        Args:
            blocks_before: blocks of the model, from which those of the branch are numbered on.
        """
        super().__init__(config)
        self._weight, self._loss, self._group = settings.loss_weight / settings.depth, loss, groups.tp
        self.layers = nn.ModuleList(
            _Depth(config, parts, groups, layer_number=blocks_before + n) for n in range(1, settings.depth + 1)
        )
        self.sums = torch.zeros(len(self.layers), 2, dtype=torch.float64, device=parameter_device(self.config))

    def begin_step(self) -> None:
        """Start the sums anew, in their place, which graphs know."""
        self.sums.zero_()

    def forward(
        self,
        hidden: Tensor,
        labels: Tensor,
        embedding: Tensor,
        output: Tensor,
        inputs: Inputs,
    ) -> Tensor:
        """The normed hidden states [t, b, D] themselves, whose backward adds the gradients of the branch's losses.

        Those are summed over tokens, as the loss of the next token is, and weighted by loss_weight / depth.

        Args:
            labels: [1 + depth, b, s] int64, see `stacked`.
            embedding, output: [V, D], this rank's rows.
        """
        state, out = hidden, hidden
        for n, layer in enumerate(self.layers):
            # Where there is no token nothing counts, and only such places attend to it.
            state = layer(state, self._embedded(_ids(labels[n]), embedding), inputs)
            counts = labels[n + 1] >= 0
            nats = (self._loss(state, output, _ids(labels[n + 1])) * counts).sum()
            self.sums[n] += torch.stack((nats.detach().double(), counts.sum().double()))
            out = inject(out, nats, self._weight)
        return out

    def _embedded(self, tokens: Tensor, embedding: Tensor) -> Tensor:
        """[t, b, D] of ids [b, s], of which each tensor-parallel rank knows a part, and takes a part."""
        size = self._group.size()
        if size == 1:
            return self._rows(embedding, tokens.t())
        ids = tokens.t() - self._group.rank() * len(embedding)
        elsewhere = (ids < 0) | (ids >= len(embedding))
        rows = self._rows(embedding, ids.masked_fill(elsewhere, 0)).masked_fill(elsewhere.unsqueeze(-1), 0.0)
        part: Tensor = reduce_scatter_to_sequence_parallel_region(rows, group=self._group)
        return part

    def _rows(self, table: Tensor, ids: Tensor) -> Tensor:
        # As Megatron has it: the gradient of an index is summed in a fixed order.
        return table[ids] if self.config.deterministic_mode else F.embedding(ids, table)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> ShardedStateDict:
        """Entries `<prefix>layers.<n - 1>.<parameter>`."""
        entries: ShardedStateDict = {}
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, _Depth)
            entries.update(layer.sharded_state_dict(f"{prefix}layers.{index}.", sharded_offsets, metadata))
        return entries


class _Depth(MegatronModule):
    """One depth: from h^{n-1} and the embedded token to h^n."""

    def __init__(
        self,
        config: TransformerConfig,
        parts: Parts,
        groups: ProcessGroupCollection,
        *,
        layer_number: int,
    ) -> None:
        super().__init__(config)
        norm = partial(parts.norm, config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon)
        self.embedding_norm, self.hidden_norm = norm(), norm()
        self.projection = _Projection(config)
        self.block = Block(config, parts.block(), layer_number=layer_number, plan=PLAIN, joins=(), groups=groups)
        self.final_layernorm = norm()

    def forward(self, hidden: Tensor, token: Tensor, inputs: Inputs) -> Tensor:
        """[t, b, D] of [t, b, D] each; with full recomputation backward keeps those alone."""
        if self.config.recompute_granularity == "full":
            recomputed: Tensor = tensor_parallel.checkpoint(
                self._run, False, hidden, token, inputs.turns, inputs.document_bounds
            )
            return recomputed
        return self._run(hidden, token, inputs.turns, inputs.document_bounds)

    def _run(self, hidden: Tensor, token: Tensor, turns: Tensor | None, document_bounds: Tensor | None) -> Tensor:
        x = self.projection(torch.cat((self.embedding_norm(token), self.hidden_norm(hidden)), -1))
        out = self.block(BlockState(x), Inputs(None, turns=turns, document_bounds=document_bounds))
        normed: Tensor = self.final_layernorm(out.hidden)
        return normed


class _Projection(nn.Module):
    """W_n [D, 2 D], which all tensor-parallel ranks hold, each for its own tokens."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        size, device = (config.hidden_size, 2 * config.hidden_size), parameter_device(config)
        self.weight = nn.Parameter(torch.empty(size, dtype=config.params_dtype, device=device))
        declare(self.weight, "backbone", reduced_over=ReducedOver.TOKENS, matrices=Matrices(), width=Width.BOTH)

    def forward(self, both: Tensor) -> Tensor:
        return F.linear(both, self.weight)


def losses_ahead(sums: Sequence[float]) -> dict[int, float]:
    """Nats per target by depth, of the flat sums over all ranks; of depths that had one."""
    pairs = zip(sums[::2], sums[1::2], strict=True)
    return {n: nats / targets for n, (nats, targets) in enumerate(pairs, start=1) if targets}
