"""Banks whose columns are split over the ranks of a memory group.

Legend: G ranks of the group, T tokens of this rank, S tokens of all of them, J rows read per token, C scores per row, n
coefficients per row and rank, V value dim, P pre-value dim, B bins (sums per token).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor, nn

from kernels.select import Kernels
from megamem.bank import Bank, Columns, weighted
from megamem.memory_config import MemoryConfig
from megamem.parameters import ONLY_COPY, Copy
from megamem.sharing import BankSpec
from megamem.token_tables.fetched import RowFetch
from parallel.exchange import Exchange, join_columns, split_columns, spread_coefficients, sum_over_ranks
from parallel.packed_rows import RowFormat

FetchRows: TypeAlias = Callable[[BankSpec, Columns, torch.dtype, torch.device], RowFetch]
"""Make a substitute for a bank's tables, given the bank, this rank's columns, their dtype, and the rows' device."""


def make_bank(
    spec: BankSpec,
    memory: MemoryConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    copy: Copy,
    kernels: Kernels,
    groups: ProcessGroupCollection,
    fetch_rows: FetchRows | None = None,
) -> Bank:
    """A bank as this layout holds it: whole in a memory group of one rank, else this rank's columns of it.

    In `groups`, `ep` is the memory group, and `expt_dp` the ranks that hold the same columns. With `fetch_rows` rows
    come from elsewhere when they are read. See `Bank`.
    """
    columns = Columns(groups.ep.rank(), groups.ep.size())
    fetched = None if fetch_rows is None else fetch_rows(spec, columns, dtype, device)
    options: dict[str, Any] = {
        "dtype": dtype,
        "device": device,
        "replica_rank": groups.expt_dp.rank(),
        "copy": copy,
        "fetched": fetched,
    }
    if columns.num_parts == 1:
        return Bank(spec, memory, kernels, **options)
    return ShardedBank(spec, memory, kernels, **options, group=groups.ep)


def announce_tokens(banks: Iterable[nn.Module], counts: tuple[int, ...] | None) -> None:
    """Say how many tokens each rank of the memory group brings to the next lookups of these banks.

    Args:
        banks: whole ones ask nobody, and need no number.
        counts: tokens by rank of the group; None: on every rank as many as on the one that reads, as in training.
    """
    for bank in banks:
        if isinstance(bank, ShardedBank):
            bank.token_counts = counts


class ShardedBank(Bank):
    """Columns r V / G to (r + 1) V / G - 1 of the values, and as many of every other table, on rank r of G.

    Every rank of the group must take part in every lookup. Each rank's columns serve the tokens of all ranks, so there
    is nothing to balance. The ranks may be tensor-, context- and data-parallel ones of a stage: with sequence
    parallelism all of them have other tokens.
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
        group: dist.ProcessGroup,
        copy: Copy = ONLY_COPY,
        fetched: RowFetch | None = None,
    ) -> None:
        """Allocate this rank's columns; see `Bank`. The size of `group` divides the widths of the tables."""
        columns = Columns(group.rank(), group.size())
        super().__init__(
            spec,
            memory,
            kernels,
            dtype=dtype,
            device=device,
            replica_rank=replica_rank,
            columns=columns,
            copy=copy,
            fetched=fetched,
        )
        self.group = group
        self.token_counts: tuple[int, ...] | None = None

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
        """See `TableLookup.read`. Collective over the memory group."""
        counts = self.token_counts or (rows.shape[0],) * self.columns.num_parts
        assert counts[self.columns.part] == rows.shape[0], f"{rows.shape[0]} tokens, but announced were {counts}"
        exchange = Exchange(self.group, counts)
        gathered = GatheredRows(exchange, RowFormat(self.spec.num_rows, num_bins), rows, bins)
        coef = scores
        if pre_input is not None:
            share = split_columns(pre_input, exchange)
            products = self.kernels.gather_dot(self.get_parameter(pre_values), gathered.rows, share).squeeze(2)
            # The activation needs the whole product: it is applied where the token is.
            coef = weighted(scores, sum_over_ranks(products, exchange), self.activation)
        coef = spread_coefficients(coef, exchange)
        share = self.weighted_sum(values, gathered.rows, coef, gathered.bins, num_bins)
        out = join_columns(share, exchange, num_bins)
        if out.requires_grad:
            gathered.empty_until_backward(out)
        return out

    def read_heads(self, rows: Tensor, scores: Tensor, tensor_group: dist.ProcessGroup | None) -> Tensor:
        """See `TableLookup.read_heads`.

        Where the memory group is the tensor-parallel group, a rank's columns are those of its heads, and its rows are
        known to it: only the scores travel.
        """
        # Both groups are consecutive ranks, so that equal sizes make them the same.
        if tensor_group is None or tensor_group.size() != self.group.size():
            return super().read_heads(rows, scores, tensor_group)
        exchange = Exchange(self.group, (scores.shape[0],) * self.columns.num_parts)
        return self.weighted_sum("values", rows, spread_coefficients(scores, exchange), None, 1)


class GatheredRows:
    """The rows that all ranks of the group read: gathered once, and kept for backward as they were sent.

    Unpacked they take 8 bytes per id, and as many for the bins: more than all else that backward needs. So between
    the passes the tensors that the kernels keep stand without storage.

    Attributes:
        rows: [S, J] int64.
        bins: [S, J] int64; None if there is one.
    """

    def __init__(self, exchange: Exchange, form: RowFormat, rows: Tensor, bins: Tensor | None) -> None:
        """Gather rows, and bins if there are any, [T, J] int64 each. Collective."""
        self._form, self._num_rows_read = form, rows.shape[1]
        self._ids_by_rank = [count * rows.shape[1] for count in exchange.counts]
        self._sizes = [form.num_bytes(num_ids) for num_ids in self._ids_by_rank]
        self._packed = exchange.gather(form.pack(rows, bins), self._sizes)
        self.rows, self.bins = self._unpack()

    def empty_until_backward(self, out: Tensor) -> None:
        """Give up the storage of the unpacked ids until the backward pass of what was made of them, before all else of it.

        Then autograd alone has them, and frees them with the nodes that keep them. A hook's objects live as long as
        the graph, which in a pipeline outlasts its backward pass by a forward pass: so the hook goes once it has run.
        """
        for ids in (self.rows, self.bins):
            if ids is not None:
                ids.untyped_storage().resize_(0)

        def refill(_: Tensor) -> None:
            self._refill()
            hook.remove()

        hook = out.register_hook(refill)

    def _refill(self) -> None:
        """Unpack the ids again, into the tensors that were emptied."""
        for ids, again in zip((self.rows, self.bins), self._unpack(), strict=True):
            if ids is not None and again is not None:
                ids.untyped_storage().resize_(again.numel() * again.element_size())
                # Autograd sees no change in a tensor that it keeps: the ids are the same.
                ids.data.copy_(again)

    def _unpack(self) -> tuple[Tensor, Tensor | None]:
        # Equal in training.
        if len(set(self._ids_by_rank)) == 1:
            ids = self._form.unpack(self._packed, self._ids_by_rank[0])
        else:
            parts = zip(self._packed.split(self._sizes), self._ids_by_rank, strict=True)
            ids = torch.cat([self._form.unpack(part, num_ids) for part, num_ids in parts])
        return self._form.rows_and_bins(ids.view(-1, self._num_rows_read))
