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
        rows, bins = gather_ids(rows, bins, self.spec.num_rows, num_bins, exchange)
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
        if tensor_group is None or tensor_group.size() != self.group.size():
            return super().read_heads(rows, scores, tensor_group)
        exchange = Exchange(self.group, (scores.shape[0],) * self.columns.num_parts)
        rows = self.narrowed(rows)
        return self.weighted_sum("values", rows, spread_coefficients(scores, exchange), None, 1)
