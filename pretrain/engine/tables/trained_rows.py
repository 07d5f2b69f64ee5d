"""Choice of the rows that a run trains, by how much more its text reads them than other text does (`optimizer.trained_rows`).

With c_i the reads of row i in a step and C those of all rows of its table, p_i = c_i / C, b_i of the B sequences of the
background that read it, and q_i = (r_i + 1) / (sum_j r_j + R) for the background's reads r, scores are

    tf_idf  p_i log((B + 1) / (b_i + 1))      (sparse memory finetuning, arXiv 2510.15103)
    kl      p_i log(p_i / q_i)
    reads   p_i

The first rows of each table by falling score, then by ascending number, are trained: the sums of gradients of all others become
zero, so that neither norms nor moments nor weights know of them. Reads are counted over all replicas, and whole tables are
ranked, so that every layout chooses the same rows.

Legend: N rows that a step read, R rows of a table, M of them on this rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from kernels.common.row_gradient import RowGradient
from megamem.banks.bank import Bank
from parallel.groups import ParallelGroups
from pretrain.config.optimizer import TrainedRowsConfig
from pretrain.engine.tables.read_counts import ReadCounts, ReadCountsFile
from pretrain.engine.tables.row_gradients import row_gradient_of

# A share of a number of rows that is a whole number but for rounding is that number.
_ROUNDING = 1e-9


@dataclass(frozen=True)
class RowParts:
    """Ranks that have the parts of a table's rows, in the order of the rows.

    Attributes:
        group: ranks that have parts of one table, of its rows and of its columns.
        num_columns: consecutive ranks that have other columns of the same rows.
    """

    group: dist.ProcessGroup
    num_columns: int

    @property
    def num(self) -> int:
        """Parts of the rows."""
        return self.group.size() // self.num_columns

    @property
    def own(self) -> int:
        """Number of this rank's part."""
        return self.group.rank() // self.num_columns


@dataclass(frozen=True)
class ChosenRows:
    """Rows chosen once for a run.

    Attributes:
        is_chosen: [M] bool.
    """

    is_chosen: Tensor

    def __call__(self, gradient: RowGradient) -> Tensor:
        """Tell which of the rows that were read are trained, [N] bool."""
        return self.is_chosen[_numbers(gradient)]


@dataclass(frozen=True)
class RowChoice:
    """Rows chosen anew by the reads of each step.

    Attributes:
        settings: number of rows, and their score.
        weights: [M] fp32, the part of a row's score that the background says: log((B + 1) / (b + 1)), or log q; of reads
            alone nothing.
        parts: ranks that rank the rows of the table together.
    """

    settings: TrainedRowsConfig
    weights: Tensor | None
    parts: RowParts

    @torch.no_grad()
    def __call__(self, gradient: RowGradient) -> Tensor:
        """Tell which of the rows that were read are trained, [N] bool. Collective over the ranks that have parts of the rows."""
        assert gradient.read is not None
        counts = gradient.read.counts
        assert counts is not None
        # Rows behind the last repeat the first, and have no reads of their own.
        is_read = counts > 0
        weights = None if self.weights is None else self.weights[_numbers(gradient)]
        scores = _scores(self.settings, counts, partial(self._total, counts), weights).masked_fill_(~is_read, -math.inf)
        everyone, own = self._of_all_parts(scores, varies=gradient.read.sources is None)
        order = everyone.argsort(descending=True, stable=True)
        ranks = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        num_kept = _num_kept(self.settings, (everyone > -math.inf).sum())
        return (ranks < num_kept)[own] & is_read

    def _total(self, counts: Tensor) -> Tensor:
        """Reads of all rows of the table."""
        total = counts.sum()
        if self.parts.num > 1:
            dist.all_reduce(total, group=self.parts.group)
            # Ranks with other columns of the same rows count the same.
            total = total // self.parts.num_columns
        return total

    def _of_all_parts(self, scores: Tensor, *, varies: bool) -> tuple[Tensor, slice]:
        """Scores of the whole table's rows, in their order, and the place of this rank's among them; `varies`: other ranks may
        have more of them."""
        if self.parts.num == 1:
            return scores, slice(None)
        num = len(scores)
        if varies:
            most = torch.tensor([num])
            dist.all_reduce(most, dist.ReduceOp.MAX, group=self.parts.group)
            # Host sync: none on a CPU.
            scores = torch.nn.functional.pad(scores, (0, int(most) - num), value=-math.inf)
        everyone = scores.new_empty(self.parts.group.size(), len(scores))
        dist.all_gather_into_tensor(everyone.view(-1), scores, group=self.parts.group)
        first = self.parts.own * len(scores)
        # Ranks with other columns of the same rows say the same.
        return everyone[:: self.parts.num_columns].reshape(-1), slice(first, first + num)


def choose_rows(
    settings: TrainedRowsConfig, banks: Iterable[Bank], first_rows: Mapping[nn.Parameter, int], groups: ParallelGroups
) -> None:
    """Have gradients of these banks' tables keep the rows that are trained; with neither number nor share all of them.

    Args:
        first_rows: number of the first row that this rank has of a table.

    Raises:
        ConfigError: a file of reads is missing, or of another model.
    """
    if not settings.chooses:
        return
    paths = {"background": settings.background if settings.score != "reads" else None, "text": settings.text}
    files = {
        name: ReadCountsFile(Path(path), f"optimizer.trained_rows.{name}")
        for name, path in paths.items()
        if path is not None
    }
    parts = RowParts(groups.megatron.ep, groups.table_columns.size())
    for bank in banks:
        counts = {name: file.of_bank(bank.spec.index, bank.spec.num_rows) for name, file in files.items()}
        weights = _weights(settings, counts["background"]) if "background" in counts else None
        tables = [table for table in bank.parameters() if row_gradient_of(table) is not None]
        if not tables:
            continue
        # Tables of a bank have the same rows, and one choice.
        own, device = slice(first_rows[tables[0]], first_rows[tables[0]] + len(tables[0])), tables[0].device
        choose: ChosenRows | RowChoice
        if "text" in counts:
            choose = ChosenRows(_chosen(settings, counts["text"], weights)[own].to(device))
        else:
            choose = RowChoice(settings, None if weights is None else weights[own].to(device), parts)
        for table in tables:
            gradient = row_gradient_of(table)
            assert gradient is not None
            gradient.choose = choose


def _weights(settings: TrainedRowsConfig, background: ReadCounts) -> Tensor:
    """[R] fp32, see `RowChoice`."""
    if settings.score == "kl":
        reads = background.reads.double() + 1
        return (reads / reads.sum()).log_().float()
    return (math.log(background.num_sequences + 1) - (background.sequences.double() + 1).log_()).float()


def _chosen(settings: TrainedRowsConfig, text: ReadCounts, weights: Tensor | None) -> Tensor:
    """[R] bool, the rows of a table that a run trains, by the reads of the text that it learns."""
    rows = text.reads.nonzero().squeeze(1)
    scores = _scores(settings, text.reads[rows], text.reads.sum, None if weights is None else weights[rows])
    order = scores.argsort(descending=True, stable=True)
    is_chosen = torch.zeros(len(text.reads), dtype=torch.bool)
    is_chosen[rows[order[: int(_num_kept(settings, torch.tensor(len(rows))))]]] = True
    return is_chosen


def _scores(settings: TrainedRowsConfig, counts: Tensor, total: Callable[[], Tensor], weights: Tensor | None) -> Tensor:
    """[N] fp32 scores of rows, but for a factor that all rows of a table have.

    Args:
        counts: [N] int64, reads.
        total: tells the reads of all rows of the table, where a score asks for them.
        weights: [N], see `RowChoice`.
    """
    if weights is None:
        return counts.float()
    if settings.score == "kl":
        share = counts.double() / total().clamp(min=1)
        # Rounded from fp64, so that a place in a vector does not show.
        return torch.special.xlogy(share, share).sub_(share * weights).float()
    return (counts.double() * weights).float()


def _num_kept(settings: TrainedRowsConfig, num_read: Tensor) -> Tensor | int:
    """Rows of a table that are trained, of so many that are read."""
    if settings.number is not None:
        return settings.number
    assert settings.share is not None
    return (num_read.double() * settings.share - _ROUNDING).ceil()


def _numbers(gradient: RowGradient) -> Tensor:
    """[N], numbers of the rows that were read, among this rank's rows of the table."""
    assert gradient.read is not None
    rows = gradient.read.rows
    return rows if gradient.numbers is None else gradient.numbers[rows]
