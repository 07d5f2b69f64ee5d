"""Value and pre-value tables, and the lookup that memory layers call.

Legend: T tokens of this rank, J rows read per token (heads x K), C scores per row (Tucker cores), V value dim, P pre-value dim,
B virtual blocks.
"""

from __future__ import annotations

from typing import Any, Literal, Protocol

import torch
import torch.nn.functional as F
from megatron.core.dist_checkpointing.mapping import ShardedStateDict, ShardedTensor
from torch import Tensor, nn

from kernels.select import Kernels
from megamem.config import MemoryConfig
from megamem.sharing import BankSpec


class TableLookup(Protocol):
    """What a memory layer needs of a bank; a layer does not know whether other ranks hold a part of it."""

    def read(
        self,
        rows: Tensor,
        scores: Tensor,
        pre_input: Tensor | None,
        block: Tensor | None = None,
        num_blocks: int = 1,
    ) -> Tensor:
        """The weighted values, Eq. 15 before the value projection, summed per virtual block (Eq. 9).

        out[t, b V + c V/C + d] = sum_{j: block[t, j] = b} scores[t, j, c] p[t, j] values[rows[t, j], c V/C + d]
        with p[t, j] = act(<pre_values[rows[t, j]], pre_input[t]>)

        Args:
            rows: [T, J], int64 rows of the bank.
            scores: [T, J, C].
            pre_input: [T, P], or None if there are no pre-values (then p = 1).
            block: [T, J], int64 in [0, B), the sum that each entry belongs to; None: all belong to one.
            num_blocks: B; 1 without `block`.

        Returns:
            [T, B V].
        """
        ...


class Bank(nn.Module):
    """The tables of one bank, whole on every rank of its pipeline stage.

    Both parameters carry `allreduce = False`: Megatron then keeps their gradients in buffers of their own and reduces them over all
    ranks of the stage (tensor, context and data), because under sequence parallelism every one of them has seen other tokens. The same
    buffers split their optimizer state over all those ranks.
    """

    values: nn.Parameter
    pre_values: nn.Parameter | None

    def __init__(
        self,
        spec: BankSpec,
        memory: MemoryConfig,
        kernels: Kernels,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        replica_rank: int,
    ) -> None:
        """Allocate the tables; `megamem.initialisation` fills them.

        Args:
            spec: size and readers.
            memory: widths and activation.
            kernels: the two gathers.
            dtype: of the tables.
            device: where they live.
            replica_rank: this rank among those that hold a copy; only rank 0 writes it into checkpoints.
        """
        super().__init__()
        self.spec = spec
        self.kernels = kernels
        self.activation: Literal["none", "gelu"] = memory.pre_activation
        self.replica_rank = replica_rank
        self.values = self._table(spec.num_rows, memory.value_dim, dtype, device)
        self.pre_values = self._table(spec.num_rows, memory.pre_dim, dtype, device) if memory.pre_dim else None

    @staticmethod
    def _table(num_rows: int, width: int, dtype: torch.dtype, device: torch.device | str) -> nn.Parameter:
        table = nn.Parameter(torch.empty(num_rows, width, dtype=dtype, device=device))
        table.allreduce = False  # type: ignore[attr-defined]
        return table

    def read(
        self,
        rows: Tensor,
        scores: Tensor,
        pre_input: Tensor | None,
        block: Tensor | None = None,
        num_blocks: int = 1,
    ) -> Tensor:
        """See `TableLookup.read`."""
        if self.pre_values is None:
            coef = scores
        else:
            assert pre_input is not None
            products = self.kernels.gather_dot(self.pre_values, rows, pre_input)
            if self.activation == "gelu":
                products = F.gelu(products)
            coef = scores * products.unsqueeze(2)
        return self.kernels.gather_sum(self.values, rows, coef, block, num_blocks)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: Any = None
    ) -> ShardedStateDict:
        """Checkpoint entries under layout-free names: `banks.<bank>.values`, `banks.<bank>.pre_values`."""
        return {
            f"{prefix}{name}": ShardedTensor.from_rank_offsets(
                f"{prefix}{name}",
                table,
                *sharded_offsets,
                prepend_axis_num=len(sharded_offsets),
                replica_id=(0, 0, self.replica_rank),
            )
            for name, table in self.named_parameters(recurse=False)
        }
