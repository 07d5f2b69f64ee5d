"""The layer of a linear memory.

Legend: T tokens of this rank, D hidden size, H heads, N rows, d key dim, K retrieved.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.kept_scores import kept_scores
from kernels.list_topk.naive import list_topk
from megamem.chunk.inputs import Inputs
from megamem.config.width import Width
from megamem.families.linear_memory.config import LinearConfig
from megamem.layers.layer import MemoryLayer


class LinearLayer(MemoryLayer):
    """Mem(n) = sum over heads h and the K best rows j of w_hj values[j], w_h the softmax of the K products q_h k_hj.

    MIDUS, Eq. 8 and 9, for heads with queries and keys of their own. Neither is normalised or scaled.
    """

    memory: LinearConfig

    def _build(self, hidden_size: int, seed: int) -> None:
        memory = self.memory
        self.query_proj = self._matrix(memory.num_heads * memory.key_dim, hidden_size, Width.INPUTS)
        self.keys = self._weight(memory.num_heads, memory.num_rows, memory.key_dim)

    def retrieve(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Rows and weights [T, H, K] of the tokens `x` [T, D]; weights are fp32 (fp64 for fp64 inputs)."""
        memory = self.memory
        queries = F.linear(x, self.query_proj).view(x.shape[0], memory.num_heads, memory.key_dim)
        # One product per head: [H, T, d] x [H, d, N].
        products = torch.bmm(queries.transpose(0, 1), self.keys.transpose(1, 2)).transpose(0, 1)
        products = products.to(torch.promote_types(products.dtype, torch.float32))
        with torch.no_grad():
            # A stable sort, as PyTorch's operations on devices; there is no fused kernel for scores of whole lists. What
            # is kept for backward must not be a view of all positions.
            rows = list_topk(products, memory.top_k).contiguous()
        return rows, kept_scores(products.unsqueeze(3), rows).squeeze(3).softmax(2)

    def forward(self, hidden: Tensor, inputs: Inputs) -> Tensor:
        """See `MemoryLayer.forward`; what is retrieved depends on the hidden states alone."""
        x = hidden.flatten(0, 1)
        rows, weights = self.retrieve(x)
        out = self.lookup.read(rows.flatten(1), weights.flatten(1).unsqueeze(2).to(x.dtype), None)
        self.observe(rows.flatten(1), weights.unsqueeze(3), out)
        return out.view_as(hidden)
