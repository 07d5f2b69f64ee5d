"""The tables that memory layers read, and the lookup that they call.

Legend: T tokens of this rank, J rows read per token, C scores per row (Tucker cores), V value dim, P pre-value dim,
B bins (sums per token).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.dist_checkpointing.mapping import ShardedStateDict, ShardedTensor
from megatron.core.tensor_parallel.mappings import all_to_all_sp2hp
from torch import Tensor, nn

from kernels.common.tables import row_dtype
from kernels.select import Kernels
from megamem.config.memory import MemoryConfig, Table
from megamem.parameters.declaration import ONLY_COPY, Copy, ReducedOver, declare, mark_copy
from megamem.placement.sharing import BankSpec
from megamem.token_tables.fetched import RowFetch


class MakeBank(Protocol):
    """Builds a bank of a model with the columns of its tables that belong on this rank."""

    def __call__(
        self, spec: BankSpec, memory: MemoryConfig, *, dtype: torch.dtype, device: torch.device, copy: Copy
    ) -> Bank: ...


class TableRoom(Protocol):
    """Room for a table that does not lie on the device."""

    @property
    def weights(self) -> Tensor:
        """[rows, columns] in host memory, which the table need not fit in; rows may lie apart."""
        ...

    def reader(self, table: nn.Parameter, bank: int) -> RowFetch:
        """The way to the rows of the table, once it is a parameter."""
        ...


class TableHome(Protocol):
    """Place of tables that do not lie on the device."""

    def room(self, shape: tuple[int, int], dtype: torch.dtype) -> TableRoom:
        """Room for a table."""
        ...


class TableLookup(Protocol):
    """Interface of a bank to a memory layer, which does not know whether other ranks hold some of the columns."""

    def read(
        self,
        rows: Tensor,
        scores: Tensor,
        pre_input: Tensor | None,
        bins: Tensor | None = None,
        num_bins: int = 1,
        *,
        values: str = "values",
        pre_values: str = "pre_values",
    ) -> Tensor:
        """The weighted values, Eq. 15 before the value projection, summed per bin (Eq. 9: per virtual block).

        out[t, b V + c V/C + d] = sum_{j: bins[t, j] = b} scores[t, j, c] p[t, j] values[rows[t, j], c V/C + d]
        with p[t, j] = act(<pre_values[rows[t, j]], pre_input[t]>)

        Args:
            rows: [T, J], rows of the bank, int32 or int64.
            scores: [T, J, C].
            pre_input: [T, P]; None: without pre-values, p = 1.
            bins: [T, J], int32 or int64 in [0, B), the sum that each entry belongs to; None: all belong to one.
            num_bins: B; 1 without `bins`.
            values: the name of the table that is summed.
            pre_values: the name of the table that is multiplied with `pre_input`.

        Returns:
            [T, B V].
        """
        ...

    def read_heads(self, rows: Tensor, scores: Tensor, tensor_group: dist.ProcessGroup | None) -> Tensor:
        """The weighted values of this tensor-parallel rank's heads, for the tokens of all ranks of its group.

        out[t, h V/n + d] = sum_j scores[t, j, h] values[rows[t, j], h V/n + d], for its own of n heads h

        Args:
            rows: [S, J], rows of the bank, int32 or int64, for the S tokens of all ranks of the group.
            scores: [T, J, n], for this rank's own T = S / size tokens: number `rank` of equal parts.
            tensor_group: None: this rank has all heads and tokens.

        Returns:
            [S, V / size].
        """
        ...


def weighted(scores: Tensor, products: Tensor, activation: Literal["none", "gelu"]) -> Tensor:
    """Coefficients of the values: scores [T, J, C] times the activated products [T, J] of the pre-values."""
    return scores * (F.gelu(products) if activation == "gelu" else products).unsqueeze(2)


@dataclass(frozen=True)
class Columns:
    """The columns of each table that a rank holds: part number `part` of `num_parts` equal ones."""

    part: int = 0
    num_parts: int = 1


@dataclass(frozen=True)
class RowsOfRank:
    """The rows of each table that a rank holds: part number `part` of `num_parts` equal ones."""

    part: int = 0
    num_parts: int = 1


class Bank(nn.Module):
    """The tables of one bank, with all their rows and columns on every rank of its pipeline stage.

    Every table is reduced over the stage: Megatron then keeps their gradients in buffers of their own and reduces them
    over all ranks of the stage (tensor, context and data), because under sequence parallelism every one of them has
    seen other tokens. The same buffers split their optimizer state over all those ranks.
    """

    def __init__(
        self,
        spec: BankSpec,
        memory: MemoryConfig,
        kernels: Kernels,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        replica_rank: int,
        columns: Columns = Columns(),
        rows: RowsOfRank = RowsOfRank(),
        copy: Copy = ONLY_COPY,
        fetched: RowFetch | None = None,
        home: TableHome | None = None,
    ) -> None:
        """Allocate the tables; `megamem.initialisation` fills them.

        Args:
            memory: config that names the tables, their widths and the activation.
            kernels: the gathers.
            replica_rank: this rank among those that hold a copy; only rank 0 writes it into checkpoints.
            columns, rows: part that this rank holds; a subclass that holds less than all of them knows how to read.
            copy: place of this copy among the stages' copies.
            fetched: instead of tables, for a bank that is only read.
            home: memory that holds the bank's one table; None: the device's.
        """
        super().__init__()
        self.spec, self.fetched = spec, fetched
        self.kernels = kernels
        self.activation = memory.lookup.activation
        self.replica_rank, self.columns, self.rows, self.copy = replica_rank, columns, rows, copy
        for table in memory.tables if fetched is None else ():
            setattr(self, table.name, self._table(table, dtype, device, home))

    def _table(
        self, table: Table, dtype: torch.dtype, device: torch.device | str, home: TableHome | None
    ) -> nn.Parameter:
        assert table.width % self.columns.num_parts == self.spec.num_rows % self.rows.num_parts == 0
        shape = (self.spec.num_rows // self.rows.num_parts, table.width // self.columns.num_parts)
        room = None if home is None else home.room(shape, dtype)
        parameter = nn.Parameter(torch.empty(shape, dtype=dtype, device=device) if room is None else room.weights)
        declare(parameter, table.group, reduced_over=ReducedOver.STAGE)
        mark_copy(parameter, self.copy)
        if room is not None:
            assert self.fetched is None, "a bank in files has one table"
            self.fetched = room.reader(parameter, self.spec.index)
        return parameter

    def read(
        self,
        rows: Tensor,
        scores: Tensor,
        pre_input: Tensor | None,
        bins: Tensor | None = None,
        num_bins: int = 1,
        *,
        values: str = "values",
        pre_values: str = "pre_values",
    ) -> Tensor:
        """See `TableLookup.read`."""
        rows, bins = self.narrowed(rows), None if bins is None else bins.to(torch.int32)
        coef = scores
        if pre_input is not None:
            products = self.kernels.gather_dot(self.get_parameter(pre_values), rows, pre_input).squeeze(2)
            coef = weighted(scores, products, self.activation)
        return self.weighted_sum(values, rows, coef, bins, num_bins)

    def narrowed(self, rows: Tensor) -> Tensor:
        """Rows in as many bits as the bank needs. All kernels get this one tensor, which keeps the order of its entries."""
        return rows.to(row_dtype(self.spec.num_rows))

    def weighted_sum(self, name: str, rows: Tensor, coef: Tensor, bins: Tensor | None, num_bins: int) -> Tensor:
        """`Kernels.gather_sum` of a table's columns on this rank, resident or fetched."""
        table, ids = (self.get_parameter(name), rows) if self.fetched is None else self.fetched.table(rows)
        return self.kernels.gather_sum(table, ids, coef, bins, num_bins)

    def announce(self, token_ids: Tensor) -> None:
        """Say which tokens are about to be read: rows that are not resident begin to come."""
        if self.fetched is not None:
            self.fetched.announce(token_ids)

    def read_heads(self, rows: Tensor, scores: Tensor, tensor_group: dist.ProcessGroup | None) -> Tensor:
        """See `TableLookup.read_heads`. Collective over the tensor-parallel group."""
        if tensor_group is None or tensor_group.size() == 1:
            return self.read(rows, scores, None)
        own = rows.chunk(tensor_group.size())[tensor_group.rank()]
        heads: Tensor = all_to_all_sp2hp(self.read(own, scores, None), tensor_group)
        return heads

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: Any = None
    ) -> ShardedStateDict:
        """Checkpoint entries under layout-free names, `banks.<bank>.<table>`: plain rectangles."""
        axis = len(sharded_offsets)
        return {
            f"{prefix}{name}": ShardedTensor.from_rank_offsets(
                f"{prefix}{name}",
                table,
                *sharded_offsets,
                (axis, self.rows.part, self.rows.num_parts),
                (axis + 1, self.columns.part, self.columns.num_parts),
                prepend_axis_num=axis,
                replica_id=(self.copy.index, 0, self.replica_rank),
            )
            for name, table in self.named_parameters(recurse=False)
        }
