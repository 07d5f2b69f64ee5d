"""The UltraMemV2 memory layer (UltraMemV2, section 3; Eq. 6-7, 12, 15).

Legend: s sequence length and b sequences of this rank, T = s b tokens, D hidden size, H heads, N keys per side, d key dim, R Tucker rank,
C cores, K retrieved, V value dim, P pre-value dim.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from megamem.bank import TableLookup
from megamem.config import MemoryConfig
from megamem.norm import rms_normalise
from megamem.placement import parameter_device
from megamem.retrieval.tucker import Retrieved, leading_singular_vectors, retrieve
from megamem.sharing import LayerView
from megamem.shuffle import KeyedShuffle, random_permutation


class UltraMemV2Layer(MegatronModule):
    """Retrieves K values per token and head and projects their weighted sum back to the residual stream.

    The weights are replicated over tensor-parallel ranks, each of which sees its own share of the sequence; they are tagged
    `sequence_parallel`, so that Megatron sums their gradients. The tables belong to the model and are reached through `lookup`.
    """

    u: Tensor
    v: Tensor
    permutation: Tensor

    def __init__(
        self,
        config: TransformerConfig,
        memory: MemoryConfig,
        view: LayerView,
        lookup: TableLookup,
        *,
        num_bank_rows: int,
        name: str,
        seed: int,
    ) -> None:
        """Allocate the weights; `megamem.initialisation` fills them.

        Args:
            config: Megatron's config of the model.
            memory: this layer's config.
            view: the window of the bank that this layer sees.
            lookup: the bank; kept outside of the module tree, because it belongs to the model.
            num_bank_rows: rows of the bank, at which the window wraps around.
            name: the layer's global name, which keys its shuffle.
            seed: the run's seed.
        """
        super().__init__(config=config)
        self.name = name
        self.memory, self.view, self.lookup, self.num_bank_rows = memory, view, lookup, num_bank_rows
        self.epsilon = config.layernorm_epsilon
        heads, rank, keys = memory.num_heads, memory.tucker_rank, view.num_keys
        self.query_proj = self._weight(memory.num_queries * memory.key_dim, config.hidden_size)
        self.keys = self._weight(heads, 2, keys, memory.key_dim, rank)
        self.query_norm = self._weight(memory.key_dim)
        self.keys_norm = self._weight(memory.key_dim)
        self.cores = self._weight(memory.num_cores, heads, rank, rank)
        self.value_proj = self._weight(config.hidden_size, memory.value_dim)
        self.pre_value_proj = self._weight(memory.pre_value_dim, config.hidden_size) if memory.pre_value_dim else None
        wide = torch.float64 if config.params_dtype == torch.float64 else torch.float32
        vectors = torch.zeros(heads, rank, dtype=wide, device=self.cores.device)
        self.register_buffer("u", vectors)
        self.register_buffer("v", vectors.clone())
        self.shuffle = KeyedShuffle(keys, seed=seed, name=name) if memory.shuffle == "keyed" else None
        if memory.shuffle == "table":
            permutation = random_permutation(view.num_rows, seed=seed, name=name)
            self.register_buffer("permutation", permutation.to(self.cores.device))

    def _weight(self, *shape: int) -> nn.Parameter:
        weight = nn.Parameter(torch.empty(*shape, dtype=self.config.params_dtype, device=parameter_device(self.config)))
        weight.sequence_parallel = self.config.sequence_parallel  # type: ignore[attr-defined]
        return weight

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> UltraMemV2Layer:
        """Move and cast as any module does, but keep the singular vectors in fp32: they select, and their sign is compared over steps."""
        u, v = self.u, self.v
        super()._apply(fn, recurse)
        self.u, self.v = u.to(self.u.device), v.to(self.v.device)
        return self

    def forward(self, hidden: Tensor) -> Tensor:
        """The memory's contribution to the residual stream.

        Args:
            hidden: [s, b, D], the normalised input of the block's feed-forward.

        Returns:
            [s, b, D].
        """
        x = hidden.flatten(0, 1)
        retrieved = self.retrieve(x)
        pre_input = F.linear(x, self.pre_value_proj) if self.pre_value_proj is not None else None
        rows = self.table_rows(retrieved.slots).flatten(1)
        values = self.lookup.read(rows, retrieved.scores.flatten(1, 2).to(x.dtype), pre_input)
        return F.linear(values, self.value_proj).view_as(hidden)

    def retrieve(self, x: Tensor) -> Retrieved:
        """Slots and scores of the tokens `x` [T, D]; scores are fp32 (fp64 for fp64 inputs)."""
        row_scores, column_scores = self.key_scores(x)
        wide = row_scores.dtype
        return retrieve(
            row_scores,
            column_scores,
            self.cores.to(wide),
            self.u.to(wide),
            self.v.to(wide),
            row_top_k=self.memory.row_top_k,
            top_k=self.memory.top_k,
        )

    def key_scores(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Row and column scores of the tokens `x` [T, D], each [T, H, N, R]: queries and keys RMS-normalised, then Eq. 6.

        The queries are shared by the heads, as in the release.
        """
        memory = self.memory
        heads, rank, keys = memory.num_heads, memory.tucker_rank, self.view.num_keys
        queries = F.linear(x, self.query_proj).view(x.shape[0], memory.num_queries, memory.key_dim)
        queries = rms_normalise(queries, self.query_norm, self.epsilon)
        if memory.query == "single":
            queries = queries.repeat_interleave(rank, dim=1)
        normal_keys = rms_normalise(self.keys.transpose(3, 4), self.keys_norm, self.epsilon)
        # One product per (side, rank): [2R, T, d] x [2R, d, H N].
        by_side_and_rank = normal_keys.permute(1, 3, 4, 0, 2).reshape(2 * rank, memory.key_dim, heads * keys)
        products = torch.bmm(queries.transpose(0, 1), by_side_and_rank)
        if products.dtype != torch.float64:
            products = products.float()
        rows, columns = products.view(2, rank, x.shape[0], heads, keys).permute(0, 2, 3, 4, 1).unbind(0)
        return rows, columns

    def table_rows(self, slots: Tensor) -> Tensor:
        """Rows of the bank behind the slots of the grid (Eq. 8): shuffled, moved to the layer's window, wrapped around."""
        if self.shuffle is not None:
            slots = self.shuffle(slots)
        elif self.memory.shuffle == "table":
            slots = self.permutation[slots]
        return (slots + self.view.first_row) % self.num_bank_rows

    @torch.no_grad()
    def update_singular_vectors(self) -> None:
        """Refresh u and v from the cores; called once per optimizer step, before its first microbatch, and never at evaluation."""
        u, v = leading_singular_vectors(self.cores.sum(0), self.u, self.v)
        self.u.copy_(u)
        self.v.copy_(v)
