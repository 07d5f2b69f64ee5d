"""Memory layers with Tucker-decomposed retrieval: UltraMem and UltraMemV2 (UltraMemV2, sections 2 and 3; Eq. 6-9, 12).

Legend: T tokens of this rank, D hidden size, H heads, N keys per side, d key dim, R Tucker rank, C cores, K retrieved,
V value dim, M rows of the layer's window, e key expansion, B virtual blocks with a value projection each (e^2 or 1).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

from megamem.calibration import ScoreCalibration, calibrate_scores
from megamem.config import ModelConfig
from megamem.initial_variance import memory_variance
from megamem.layers.retrieval import RetrievalLayer
from megamem.norm import rms_normalise
from megamem.retrieval.config import TuckerConfig
from megamem.retrieval.retrieved import Retrieved
from megamem.retrieval.tucker import leading_singular_vectors, retrieve
from megamem.shuffle import KeyedShuffle, random_permutation


class TuckerLayer(RetrievalLayer):
    """Tucker-decomposed retrieval (TDQKR), a shuffle, and a value projection.

    With key expansion e the grid has e sqrt(M) keys per side, e^2 virtual blocks of M entries, and all blocks read the
    same M rows (Eq. 8). Their values are summed over all blocks (`summed`), or per block, each with its own
    projection (`projected`, Eq. 9). As released, the block of an entry comes from the shuffle and not from the key set
    (Eq. 10-11), and all blocks share their cores.
    """

    memory: TuckerConfig
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
        self.value_proj = self._weight(hidden_size, memory.num_value_projections * memory.value_dim)
        wide = torch.promote_types(self.config.params_dtype, torch.float32)
        vectors = torch.zeros(heads, rank, dtype=wide, device=self.cores.device)
        self.register_buffer("u", vectors)
        self.register_buffer("v", vectors.clone())
        self.shuffle = KeyedShuffle(keys, seed=seed, name=self.name) if memory.shuffle == "keyed" else None
        if memory.shuffle == "table":
            permutation = random_permutation(keys**2, seed=seed, name=self.name)
            self.register_buffer("permutation", permutation.to(self.cores.device))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> TuckerLayer:
        """Keep the singular vectors in fp32 when the layer is cast: they select, with a sign kept over steps."""
        u, v = self.u, self.v
        super()._apply(fn, recurse)
        self.u, self.v = u.to(self.u.device), v.to(self.v.device)
        return self

    def retrieve(self, x: Tensor) -> Retrieved:
        """See `RetrievalLayer.retrieve`."""
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
        """Row and column scores, [T, H, N, R] each, of the tokens `x` [T, D]: RMS-normalised queries and keys, Eq. 6.

        The queries are shared by the heads, as in the release, unless each has its own.
        """
        memory = self.memory
        heads, rank, keys = memory.num_heads, memory.tucker_rank, self.num_keys
        queries = F.linear(x, self.query_proj).view(x.shape[0], memory.num_queries, memory.key_dim)
        queries = rms_normalise(queries, self.query_norm, self.epsilon)
        if memory.query == "single":
            queries = queries.repeat_interleave(rank, dim=1)
        normal_keys = rms_normalise(self.keys.transpose(3, 4), self.keys_norm, self.epsilon)
        if memory.query == "per_head":
            # One product per (side, head): [2H, T, d] x [2H, d, N R].
            by_side_and_head = normal_keys.transpose(0, 1).reshape(2 * heads, keys * rank, memory.key_dim)
            products = torch.bmm(queries.transpose(0, 1), by_side_and_head.transpose(1, 2))
            products = products.to(torch.promote_types(products.dtype, torch.float32))
            rows, columns = products.view(2, heads, x.shape[0], keys, rank).transpose(1, 2).unbind(0)
            return rows, columns
        # One product per (side, rank): [2R, T, d] x [2R, d, H N].
        by_side_and_rank = normal_keys.permute(1, 3, 4, 0, 2).reshape(2 * rank, memory.key_dim, heads * keys)
        products = torch.bmm(queries.transpose(0, 1), by_side_and_rank)
        products = products.to(torch.promote_types(products.dtype, torch.float32))
        rows, columns = products.view(2, rank, x.shape[0], heads, keys).permute(0, 2, 3, 4, 1).unbind(0)
        return rows, columns

    def locate(self, entries: Tensor) -> tuple[Tensor, Tensor | None]:
        """Shuffled (Eq. 8), split into virtual block and row, moved to the window's start, wrapped around the bank."""
        view, with_blocks = self.view, self.memory.num_value_projections > 1
        if self.shuffle is not None:
            grid = (self.shuffle.num_keys, self.shuffle.round_keys)
            return self.kernels.shuffled_rows(
                entries, *grid, view.num_rows, view.first_row, view.num_bank_rows, with_blocks
            )
        if self.memory.shuffle == "table":
            entries = self.permutation[entries]
        rows = (entries % view.num_rows + view.first_row) % view.num_bank_rows
        return rows, entries // view.num_rows if with_blocks else None

    def project(self, values: Tensor, x: Tensor) -> Tensor:
        """Eq. 12, or Eq. 9 with the projections of all blocks side by side."""
        return F.linear(values, self.value_proj)

    def _measure_scores(self, seed: int) -> ScoreCalibration:
        return calibrate_scores(self.memory, self.num_keys, self.cores, seed=seed, name=self.name)

    @torch.no_grad()
    def calibrate(self, seed: int) -> ScoreCalibration | None:
        """The first singular vectors and, unless released, the gains at which the mean retrieved score is 1."""
        self.u.zero_()
        self.v.zero_()
        self.refresh([self])
        if self.memory.initialisation == "released":
            return None
        scores = self._measure_scores(seed)
        self.query_norm.fill_(scores.gain)
        self.keys_norm.fill_(scores.gain)
        return scores

    def predicted_std(
        self, model: ModelConfig, table_std: float, calibration: ScoreCalibration | None, seed: int
    ) -> float:
        """By Eq. 22 with the layer's own gains and projections, so that it covers the release's constants too."""
        scores = calibration or self._measure_scores(seed)
        # A score is a row times a column score, and each is a query times a key. Host sync: at initialisation.
        mean_score = float(self.query_norm.mean() * self.keys_norm.mean()) ** 2 / scores.gain**4
        # Host sync: at initialisation.
        value_proj_variance = float(self.value_proj.square().mean())
        return math.sqrt(
            memory_variance(
                model,
                self.memory,
                sigma_v=table_std,
                score_square=mean_score**2 * (1 + scores.sigma_s**2),
                pre_input_variance=self.pre_input_variance,
                value_proj_variance=value_proj_variance,
            )
        )

    @property
    def pre_input_variance(self) -> float:
        """Variance of what the pre-values are multiplied with, for inputs of mean square 1; 0 without pre-values."""
        return 0.0

    @classmethod
    @torch.no_grad()
    def refresh(cls, layers: Sequence[Self]) -> None:
        """The singular vectors of all layers from their cores, by one SVD."""
        cores, u, v = (
            torch.stack(tensors)
            for tensors in zip(*((layer.cores.sum(0), layer.u, layer.v) for layer in layers), strict=True)
        )
        for layer, new_u, new_v in zip(layers, *leading_singular_vectors(cores, u, v), strict=True):
            layer.u.copy_(new_u)
            layer.v.copy_(new_v)
