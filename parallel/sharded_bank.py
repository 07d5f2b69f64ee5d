"""Banks whose columns, and rows if asked for, are split over the ranks of a memory group.

Legend: G ranks of the group, R parts of rows, T tokens of this rank, S tokens of all of them, J rows read per token, C
scores per row, n coefficients per row and rank, V value dim, P pre-value dim, B bins (sums per token).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor, nn

from kernels.select import Kernels
from megamem.banks.bank import Bank, Columns, RowsOfRank, TableHome, weighted
from megamem.config.memory import MemoryConfig
from megamem.parameters.declaration import ONLY_COPY, Copy
from megamem.placement.sharing import BankSpec
from megamem.token_tables.fetched import RowFetch
from parallel.exchange import Exchange, gather_ids, join_columns, split_columns, spread_coefficients, sum_over_ranks

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
    row_parts: int = 1,
    fetch_rows: FetchRows | None = None,
    home: TableHome | None = None,
) -> Bank:
    """A bank as this layout holds it: whole in a memory group of one rank, else this rank's part of it.

    In `groups`, `ep` is the memory group, and `expt_dp` the ranks that hold the same part. With `fetch_rows` rows
    come from elsewhere when they are read, and `home` has tables whose rows are known before they are read. See `Bank`.
    """
    home = home if memory.rows_are_known else None
    assert (fetch_rows is None and home is None) or row_parts == 1
    columns = Columns(groups.ep.rank(), groups.ep.size())
    fetched = None if fetch_rows is None else fetch_rows(spec, columns, dtype, device)
    options: dict[str, Any] = {
        "dtype": dtype,
        "device": device,
        "replica_rank": groups.expt_dp.rank(),
        "copy": copy,
        "fetched": fetched,
        "home": home if fetched is None else None,
    }
    if columns.num_parts == 1:
        return Bank(spec, memory, kernels, **options)
    return ShardedBank(spec, memory, kernels, **options, group=groups.ep, row_parts=row_parts)


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
    """One of R equal parts of the rows, and of these one of G / R parts of the columns, on each rank of G.

    Consecutive ranks have columns of the same rows. With R = 1 rank r of G holds columns r V / G to (r + 1) V / G - 1
    of the values, and as many of every other table.

    Every rank of the group must take part in every lookup. It serves the tokens of all ranks with its columns, of which
    there is nothing to balance, and of its rows. No shape depends on what is read: kernels pass over entries whose rows
    others hold. The ranks may be tensor-, context- and data-parallel ones of a stage: with
    sequence parallelism all of them have other tokens.
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
        row_parts: int = 1,
        copy: Copy = ONLY_COPY,
        fetched: RowFetch | None = None,
        home: TableHome | None = None,
    ) -> None:
        """Allocate this rank's part; see `Bank`. R divides the rows, and G / R the widths of the tables."""
        column_parts = group.size() // row_parts
        super().__init__(
            spec,
            memory,
            kernels,
            dtype=dtype,
            device=device,
            replica_rank=replica_rank,
            columns=Columns(group.rank() % column_parts, column_parts),
            rows=RowsOfRank(group.rank() // column_parts, row_parts),
            copy=copy,
            fetched=fetched,
            home=home,
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
        counts = self.token_counts or (rows.shape[0],) * self.group.size()
        assert counts[self.group.rank()] == rows.shape[0], f"{rows.shape[0]} tokens, but announced were {counts}"
        exchange = Exchange(self.group, counts, self.rows.num_parts)
        rows, bins = gather_ids(rows, bins, self.spec.num_rows, num_bins, exchange)
        if self.rows.num_parts > 1:
            # Rows of other parts are below zero or behind the last, which kernels take for rows that others hold.
            rows = rows - self.rows.part * (self.spec.num_rows // self.rows.num_parts)
        coef = scores
        if pre_input is not None:
            share = split_columns(pre_input, exchange)
            products = self.kernels.gather_dot(self.get_parameter(pre_values), rows, share).squeeze(2)
            # The activation needs the whole product: it is applied where the token is.
            coef = weighted(scores, sum_over_ranks(products, exchange), self.activation)
        coef = spread_coefficients(coef, exchange)
        share = self.weighted_sum(values, rows, coef, bins, num_bins)
        return join_columns(share, exchange, num_bins)

    def read_heads(self, rows: Tensor, scores: Tensor, tensor_group: dist.ProcessGroup | None) -> Tensor:
        """See `TableLookup.read_heads`.

        Where the memory group is the tensor-parallel group, a rank's columns are those of its heads, and its rows are
        known to it: only the scores travel.
        """
        # Both groups are consecutive ranks, so that equal sizes make them the same.
        if tensor_group is None or tensor_group.size() != self.group.size() or self.rows.num_parts > 1:
            return super().read_heads(rows, scores, tensor_group)
        exchange = Exchange(self.group, (scores.shape[0],) * self.columns.num_parts)
        rows = self.narrowed(rows)
        return self.weighted_sum("values", rows, spread_coefficients(scores, exchange), None, 1)
