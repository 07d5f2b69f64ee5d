"""The layer of MIDUS: head-wise memory with head-wise expansion of values.

Legend: s tokens of a sequence and b sequences of this context-parallel rank, S = s b, R tensor-parallel ranks, H heads
of all of them and n = H / R of this one, d width of a head, N keys per side, K retrieved, V columns of the table.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn

from megamem.chunk.inputs import Inputs
from megamem.families.midus.config import MidusConfig
from megamem.layers.layer import MemoryLayer
from megamem.layers.product_key import retrieve
from megamem.layers.retrieval import Retrieved
from megamem.parameters.declaration import GroupName, Matrices, ReducedOver, declare, parameter_device


class MidusLayer(MemoryLayer):
    """Mem(a)[h] = (sum_k w_hk values[row_hk]) W_h for the output a_h of each head of attention (MIDUS, Eq. 3-5, 13-15).

    The output of a head is its query as it is, or normalised (`query_norm`, Table 11): its first half meets the keys of
    rows, its second half those of columns. Weights are the softmax of the K best sums. The table is one for all heads
    of the block, and what a head reads of it is brought to d columns by W_h, the head's own: H tables of N^2 d elements
    are factored into one of N^2 V and H matrices of V d.

    Keys and W_h follow their heads to the tensor-parallel ranks, each of which has all tokens. So a rank asks its bank
    for R consecutive tokens of n heads where one rank alone would ask for one token of H: on every layout a rank
    brings as many queries as it has tokens between the blocks.

    Queries that are cut from whole tokens (`query_from`, Table 11) are those of this rank's tokens between the blocks:
    every rank then holds the keys and W_h of all heads.
    """

    memory: MidusConfig

    def _build(self, hidden_size: int, seed: int) -> None:
        memory, head_dim = self.memory, hidden_size // self.memory.num_heads
        self.num_ranks = 1
        if self.tensor_group is not None and not memory.reads_whole_tokens:
            self.num_ranks = self.tensor_group.size()
        heads = memory.num_heads // self.num_ranks
        self.keys = self._by_head(heads, 2, memory.num_keys, head_dim // 2)
        # A matrix per head.
        by_head = Matrices((memory.value_dim,) * heads, by_rank=True)
        self.expansion = self._by_head(heads, memory.value_dim, head_dim, matrices=by_head)
        self.query_gain = self.query_bias = None
        if memory.query_norm == "layer":
            # Not decayed, as no gain and no bias is.
            self.query_gain = self._by_head(heads, head_dim, group="backbone_no_decay")
            self.query_bias = self._by_head(heads, head_dim, group="backbone_no_decay")
        # [n N^2, d], see `expand_values`.
        self.own_values: Tensor | None = None

    def _by_head(self, *shape: int, group: GroupName = "retrieval", matrices: Matrices | None = None) -> nn.Parameter:
        """A weight of this rank's heads."""
        device = parameter_device(self.config)
        weight = nn.Parameter(torch.empty(*shape, dtype=self.config.params_dtype, device=device))
        if self.memory.reads_whole_tokens:
            declare(weight, group, reduced_over=ReducedOver.TOKENS, matrices=matrices)
        else:
            declare(weight, group, reduced_over=ReducedOver.DATA, tensor_dim=0, matrices=matrices)
        return weight

    def _normalised(self, queries: Tensor) -> Tensor:
        """[S, n, d]: every head's LayerNorm, in at least fp32, of its queries; or these."""
        if self.query_gain is None or self.query_bias is None:
            return queries
        wide = torch.promote_types(queries.dtype, torch.float32)
        standard = F.layer_norm(queries.to(wide), queries.shape[2:], eps=self.epsilon)
        return (standard * self.query_gain.to(wide) + self.query_bias.to(wide)).to(queries.dtype)

    def retrieve(self, queries: Tensor) -> Retrieved:
        """Entries and softmaxed scores of the heads' outputs [S, n, d]; Eq. 13-15."""
        sides = self._normalised(queries).unflatten(2, (2, -1)).permute(1, 2, 0, 3).flatten(0, 1)
        # One product per (head, side): [2n, S, d/2] x [2n, d/2, N].
        products = torch.bmm(sides, self.keys.flatten(0, 1).transpose(1, 2))
        products = products.to(torch.promote_types(products.dtype, torch.float32))
        by_side = products.view(*self.keys.shape[:2], *products.shape[1:]).permute(1, 2, 0, 3)
        row_scores, column_scores = by_side.unbind(0)
        return retrieve(
            row_scores,
            column_scores,
            row_top_k=self.memory.top_k,
            top_k=self.memory.top_k,
            select=self.kernels.product_topk,
        )

    def forward(self, heads: Tensor, inputs: Inputs) -> Tensor:
        """The block's update, by heads [s, b, n, d], for the heads' outputs of the same shape; or of whole tokens,
        [t, b, D]."""
        if heads.dim() == 3:
            return self(heads.unflatten(2, (self.memory.num_heads, -1)), inputs).flatten(2)
        queries = heads.flatten(0, 1)
        found = self.retrieve(queries)
        if self.own_values is not None:
            return self._of_own_values(self.own_values, found).view(heads.shape)
        # Bins of R tokens each.
        bins = queries.shape[1] * self.num_ranks
        rows = found.entries.reshape(-1, bins * self.memory.top_k)
        scores = found.scores.reshape(-1, bins * self.memory.top_k, 1).to(heads.dtype)
        bin_of_row = (
            torch.arange(bins, dtype=torch.int32, device=rows.device)
            .repeat_interleave(self.memory.top_k)
            .expand_as(rows)
        )
        latent = self.lookup.read(rows, scores, None, bin_of_row.contiguous(), bins)
        # [n, S, V] x [n, V, d].
        out = torch.bmm(
            latent.view(*queries.shape[:2], self.memory.value_dim).transpose(0, 1), self.expansion
        ).transpose(0, 1)
        self.observe(rows, found.scores, out.reshape(-1, bins * queries.shape[2]))
        return out.reshape(heads.shape)

    @torch.no_grad()
    def expand_values(self) -> None:
        """Keep values W_h, [N^2, d] of each head, from which it then reads (section 4.2). The layer holds the whole table."""
        rows = torch.arange(self.memory.num_keys**2, device=self.expansion.device).unsqueeze(1)
        table = self.lookup.read(rows, self.expansion.new_ones(*rows.shape, 1), None)
        self.own_values = torch.matmul(table, self.expansion).flatten(0, 1)

    def _of_own_values(self, own_values: Tensor, found: Retrieved) -> Tensor:
        """[S n, d], the weighted sums of the heads' own values [n N^2, d]."""
        heads = torch.arange(found.entries.shape[1], device=own_values.device)
        rows = found.entries + (heads * self.memory.num_keys**2).unsqueeze(1)
        weights = found.scores.squeeze(3).to(own_values.dtype)
        return F.embedding_bag(rows.flatten(0, 1), own_values, mode="sum", per_sample_weights=weights.flatten(0, 1))

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[tuple[int, int, int], ...] = (), metadata: dict | None = None
    ) -> ShardedStateDict:
        """Keys and expansions are whole over the heads of all tensor-parallel ranks."""
        if self.memory.reads_whole_tokens:
            whole: ShardedStateDict = super().sharded_state_dict(prefix, sharded_offsets, metadata)
            return whole
        assert metadata is not None
        entries: ShardedStateDict = make_sharded_tensors_for_checkpoint(
            dict(self.named_parameters(recurse=False)),
            prefix,
            {name: 0 for name, _ in self.named_parameters(recurse=False)},
            sharded_offsets,
            tp_group=self.tensor_group,
            dp_cp_group=metadata["dp_cp_group"],
        )
        return entries
