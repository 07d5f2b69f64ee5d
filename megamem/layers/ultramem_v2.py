"""The UltraMemV2 memory layer (UltraMemV2, section 3; Eq. 6-7, 12, 15).

Legend: T tokens of this rank, D hidden size, H heads, N keys per side, d key dim, R Tucker rank, C cores, K retrieved, V value dim,
P pre-value dim, M rows of the layer's window, e key expansion, B virtual blocks with a value projection each (e^2 or 1).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from megamem.layers.layer import MemoryLayer
from megamem.norm import rms_normalise
from megamem.retrieval.retrieved import Retrieved
from megamem.retrieval.tucker import leading_singular_vectors, retrieve
from megamem.shuffle import KeyedShuffle, random_permutation


class UltraMemV2Layer(MemoryLayer):
    """Tucker-decomposed retrieval (TDQKR), a shuffle, values with or without pre-values, and a value projection.

    With key expansion e the grid has e sqrt(M) keys per side, e^2 virtual blocks of M slots, and block b's slots read the same M rows
    (Eq. 8). Their values are summed over all blocks (`summed`), or per block, each with its own projection (`projected`, Eq. 9).
    As released, the block of a slot comes from the shuffle and not from the key set (Eq. 10-11), and all blocks share their cores.
    """

    cores: Tensor
    u: Tensor
    v: Tensor
    permutation: Tensor

    def _build(self, hidden_size: int, seed: int) -> None:
        memory, heads, rank, keys = self.memory, self.memory.num_heads, self.memory.tucker_rank, self.num_keys
        self.query_proj = self._weight(memory.num_queries * memory.key_dim, hidden_size)
        self.keys = self._weight(heads, 2, keys, memory.key_dim, rank)
        self.query_norm = self._weight(memory.key_dim)
        self.keys_norm = self._weight(memory.key_dim)
        self.cores = self._weight(memory.num_cores, heads, rank, rank)
        self.value_proj = self._weight(hidden_size, memory.num_value_blocks * memory.value_dim)
        self.pre_value_proj = self._weight(memory.pre_dim, hidden_size) if memory.pre_dim else None
        wide = torch.float64 if self.config.params_dtype == torch.float64 else torch.float32
        vectors = torch.zeros(heads, rank, dtype=wide, device=self.cores.device)
        self.register_buffer("u", vectors)
        self.register_buffer("v", vectors.clone())
        self.shuffle = KeyedShuffle(keys, seed=seed, name=self.name) if memory.shuffle == "keyed" else None
        if memory.shuffle == "table":
            permutation = random_permutation(keys**2, seed=seed, name=self.name)
            self.register_buffer("permutation", permutation.to(self.cores.device))

    @property
    def num_keys(self) -> int:
        """N: keys per side, e times what the layer's window has rows for."""
        return self.memory.expansion * self.view.num_keys

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> UltraMemV2Layer:
        """Move and cast as any module does, but keep the singular vectors in fp32: they select, and their sign is compared over steps."""
        u, v = self.u, self.v
        super()._apply(fn, recurse)
        self.u, self.v = u.to(self.u.device), v.to(self.v.device)
        return self

    def retrieve(self, x: Tensor) -> Retrieved:
        """See `MemoryLayer.retrieve`."""
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
            select=self.kernels.tucker_topk,
        )

    def key_scores(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Row and column scores of the tokens `x` [T, D], each [T, H, N, R]: queries and keys RMS-normalised, then Eq. 6.

        The queries are shared by the heads, as in the release.
        """
        memory = self.memory
        heads, rank, keys = memory.num_heads, memory.tucker_rank, self.num_keys
        queries = F.linear(x, self.query_proj).view(x.shape[0], memory.num_queries, memory.key_dim)
        queries = rms_normalise(queries, self.query_norm, self.epsilon)
        if memory.query_mode == "single":
            queries = queries.repeat_interleave(rank, dim=1)
        normal_keys = rms_normalise(self.keys.transpose(3, 4), self.keys_norm, self.epsilon)
        # One product per (side, rank): [2R, T, d] x [2R, d, H N].
        by_side_and_rank = normal_keys.permute(1, 3, 4, 0, 2).reshape(2 * rank, memory.key_dim, heads * keys)
        products = torch.bmm(queries.transpose(0, 1), by_side_and_rank)
        if products.dtype != torch.float64:
            products = products.float()
        rows, columns = products.view(2, rank, x.shape[0], heads, keys).permute(0, 2, 3, 4, 1).unbind(0)
        return rows, columns

    def locate(self, slots: Tensor) -> tuple[Tensor, Tensor | None]:
        """Shuffled (Eq. 8), split into block and row of the window, moved to where the window starts, wrapped around the bank."""
        if self.shuffle is not None:
            slots = self.shuffle(slots)
        elif self.memory.shuffle == "table":
            slots = self.permutation[slots]
        rows = (slots % self.view.num_rows + self.view.first_row) % self.num_bank_rows
        return rows, slots // self.view.num_rows if self.memory.num_value_blocks > 1 else None

    def pre_input(self, x: Tensor) -> Tensor | None:
        """See `MemoryLayer.pre_input`."""
        return F.linear(x, self.pre_value_proj) if self.pre_value_proj is not None else None

    def project(self, values: Tensor, x: Tensor) -> Tensor:
        """Eq. 12, or Eq. 9 with the projections of all blocks side by side."""
        return F.linear(values, self.value_proj)

    def update_singular_vectors(self) -> None:
        """Refresh u and v from the cores."""
        update_singular_vectors([self])


@torch.no_grad()
def update_singular_vectors(layers: Sequence[UltraMemV2Layer]) -> None:
    """Refresh u and v of layers of one model from their cores, by one SVD of all of them."""
    if not layers:
        return
    cores, u, v = (
        torch.stack(tensors)
        for tensors in zip(*((layer.cores.sum(0), layer.u, layer.v) for layer in layers), strict=True)
    )
    for layer, new_u, new_v in zip(layers, *leading_singular_vectors(cores, u, v), strict=True):
        layer.u.copy_(new_u)
        layer.v.copy_(new_v)
