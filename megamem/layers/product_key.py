"""Product-key retrieval, and the memory layers with it (PKM, Memory+, PEER; UltraMemV2, Eq. 3-5).

Legend: T tokens of this rank, D hidden size, H heads, N keys per side, d key dim, M rows (and columns) kept by the first
stage, K retrieved, V value dim.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels.kept_scores import kept_scores
from kernels.product_topk.op import ProductTopk, torch_product_topk
from megamem.config.width import Width
from megamem.layers.key_products import key_products
from megamem.layers.retrieval import RetrievalLayer, Retrieved
from megamem.retrieval.config import ProductKeyConfig


def retrieve(
    row_scores: Tensor, column_scores: Tensor, *, row_top_k: int, top_k: int, select: ProductTopk = torch_product_topk
) -> Retrieved:
    """Top-K of the sums of a row and a column score, softmaxed within a head.

    The K best sums lie among the K best rows and columns, so with M = K the selection is exact; a smaller M is an
    approximation that the releases do not have. Gradients flow through the scores of the kept entries only.

    Args:
        row_scores: [T, H, N].
        column_scores: [T, H, N].
        row_top_k: M.
        top_k: K <= M^2.
        select: the selection, which also settles what comes first among equal scores.
    """
    num_keys = row_scores.shape[2]
    with torch.no_grad():
        stage_ids, entries = select(row_scores, column_scores, row_top_k, top_k)
        rows, columns = entries.unbind(0)
    sums = kept_scores(row_scores.unsqueeze(3), rows) + kept_scores(column_scores.unsqueeze(3), columns)
    return Retrieved(
        rows * num_keys + columns, sums.softmax(2), stage_ids, lambda: torch.stack((row_scores, column_scores))
    )


class ProductKeyLayer(RetrievalLayer):
    """Product-key retrieval with softmax weights, and an optional projection of the summed values.

    As released there is no shuffle: entry i N + j is row i N + j of the table. Every head has its own queries. Two
    releases disagree on the rest, so it is configured: UltraMemV2's public code normalises the queries and has no
    biases, Meta's has biases and no norm. Neither normalises the keys (the former computes it and drops the result).
    """

    memory: ProductKeyConfig

    def _build(self, hidden_size: int, seed: int) -> None:
        memory = self.memory
        self.query_proj = self._matrix(memory.num_queries * memory.key_dim, hidden_size, Width.INPUTS)
        self.query_bias = self._bias(memory.num_queries * memory.key_dim)
        self.query_norm = self._weight(memory.key_dim) if memory.query_norm else None
        self.keys = self._weight(memory.num_heads, 2, self.num_keys, memory.key_dim)
        self.value_proj = None
        if memory.has_value_projection:
            self.value_proj = self._matrix(hidden_size, memory.value_dim, Width.OUTPUTS)
        self.value_bias = self._bias(hidden_size) if memory.has_value_projection else None
        self.output_gate = self._weight(1, hidden_size, width=Width.INPUTS) if memory.has_output_gate else None
        self.output_gate_bias = self._bias(1) if memory.has_output_gate else None

    def _bias(self, size: int) -> nn.Parameter | None:
        return self._weight(size) if self.memory.biases else None

    def retrieve(self, x: Tensor) -> Retrieved:
        """See `RetrievalLayer.retrieve`; the scores are softmaxed within a head."""
        row_scores, column_scores = self.key_scores(x)
        return retrieve(
            row_scores,
            column_scores,
            row_top_k=self.memory.row_top_k,
            top_k=self.memory.top_k,
            select=self.kernels.product_topk,
        )

    def key_scores(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Row and column scores, [T, H, N] each, of the tokens `x` [T, D]: the products of Eq. 3, keys as they are."""
        heads, key_dim = self.memory.num_heads, self.memory.key_dim
        queries = F.linear(x, self.query_proj, self.query_bias).view(x.shape[0], 2 * heads, key_dim)
        if self.query_norm is not None:
            queries = self.kernels.rms_norm(queries, self.query_norm, self.epsilon)
        # One product per (head, side): [2H, T, d] x [2H, d, N].
        products = key_products(queries.transpose(0, 1), self.keys.flatten(0, 1).transpose(1, 2))
        products = products.to(torch.promote_types(products.dtype, torch.float32))
        rows, columns = products.view(heads, 2, x.shape[0], self.num_keys).permute(1, 2, 0, 3).unbind(0)
        return rows, columns

    def locate(self, entries: Tensor) -> tuple[Tensor, Tensor | None]:
        """Moved to where the layer's window starts, and wrapped around the bank."""
        return (entries + self.view.first_row) % self.view.num_bank_rows, None

    def project(self, values: Tensor, x: Tensor) -> Tensor:
        """The value projection, if there is one, times the scalar gate of the token, if there is one."""
        out = values if self.value_proj is None else F.linear(values, self.value_proj, self.value_bias)
        if self.output_gate is not None:
            out = out * torch.sigmoid(F.linear(x, self.output_gate, self.output_gate_bias))
        return out
