"""Update of memory tables with a second moment per row (`optimizer.tables: row_wise`).

With g the gradient of a row w of V columns, at its update number t:

    v <- beta2 v + (1 - beta2) |g|^2 / V
    w <- (1 - lr decay) w - lr g / (sqrt(v / (1 - beta2^t)) + epsilon)

That is AdamW without a first moment, whose second moment is the row's mean. A table's state is two numbers per row, where
AdamW's takes 12 bytes per element: v is kept as of the last update s in which g was not 0, and is beta2^(t - s) v later.
So a row that is not read is not touched, and an update by the rows that were read alone (`pretrain.engine.tables.read_rows`) is
this one, to the bit. bf16 weights have no fp32 main weights: they are rounded stochastically, by numbers
that depend on the table, the update and the element's place in it, so that a run is the same on every layout.

By the clock of reads (`optimizer.row_clock`, github.com/karpathy/nanochat/pull/854) rows that were read have

    v <- beta2 v + (1 - beta2) |g|^2 / V
    w <- (1 - decay) w - lr g / (sqrt(v) + epsilon)

and others stay. By plain gradients (`optimizer.row_rule: sgd`) an update is w <- (1 - lr decay) w - lr g, and v stays.

Ranks hold ranges of a table's columns and rows (`parallel.memory`), and each of their replicas a range of that, cut
wherever it comes: a row's sum of squares is added up over the ranks with its other columns, and over replicas where a
range ends within a row.

Legend: E elements of a share, W columns on this rank, V of the whole table.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from torch import Tensor, nn

from kernels.common.rounding import Rounding
from kernels.select import Kernels
from megamem.banks.hashing import key_of
from pretrain.config.optimizer import OptimizerConfig
from pretrain.config.updates import ROW_WISE
from pretrain.engine.optimizer_shards import row_entries, state_entries
from pretrain.engine.update_rules import ReplicaRanges, Share, UpdateRule
from pretrain.rectangles import rectangles_of_range


@dataclass(frozen=True)
class OwnedRectangle:
    """A rank's rectangle of a table.

    Attributes:
        name: the table's, in checkpoints.
        first_row, first_column: its place in the whole table.
        width: columns of the whole table.
        kernels: kernels of its bank.
    """

    name: str
    first_row: int
    first_column: int
    width: int
    kernels: Kernels


@dataclass(frozen=True)
class RowGroups:
    """Groups over which a row's sum of squares is added up.

    Attributes:
        columns: ranks with other columns of the same rows.
        replicas: ranks that own other ranges of the same columns.
    """

    columns: dist.ProcessGroup
    replicas: dist.ProcessGroup


@dataclass(frozen=True)
class _Part:
    """A rectangle [n, c] of a share.

    Attributes:
        rows: places among the share's touched rows.
        first_column: first of its columns, among the rank's W.
        flat: places among the share's E elements.
    """

    rows: slice
    first_column: int
    flat: slice

    def of(self, tensor: Tensor) -> Tensor:
        """[n, c], this rectangle of one of the share's flat tensors."""
        return tensor[self.flat].view(self.rows.stop - self.rows.start, -1)


class RowWise(UpdateRule):
    """The update of this rank's shares of tables, with second moments of the rows that they touch.

    Attributes:
        places: places of all tables.
        groups: groups over which a row's sum of squares is added up.
        num_rows: rows that this rank's shares touch.
    """

    def __init__(
        self,
        shares: Sequence[Share],
        spreads: Sequence[ReplicaRanges],
        *,
        settings: OptimizerConfig,
        seed: int,
        places: Mapping[nn.Parameter, OwnedRectangle],
        groups: RowGroups,
    ) -> None:
        """Take over the shares, with second moments at zero.

        Args:
            settings: keys of the optimizer, of which the clock, the betas of moments and epsilon are read.
            seed: seed of the random numbers of rounding.
            places: places of all tables.
        """
        self.shares = shares
        self._beta2 = settings.beta2 if settings.row_beta2 is None else settings.row_beta2
        self._epsilon, self._seed = settings.epsilon, seed
        self._counts_reads, self._is_plain = settings.row_clock == "reads", settings.row_rule == "sgd"
        self.places, self.groups = places, groups
        starts = [0]
        for share in shares:
            starts.append(starts[-1] + _num_rows(share))
        self._rows = {share: slice(*ends) for share, ends in zip(shares, pairwise(starts), strict=True)}
        device = shares[0].weights.device if shares else torch.device(torch.cuda.current_device())
        self.num_rows = starts[-1]
        self._state = self.make_state(device)
        self._cuts = _CutRows(shares, spreads, self._rows, device)

    def make_state(self, device: torch.device) -> Sequence[Tensor]:
        """Second moments and last updates: fp32, of the touched rows of all shares, one share after the other."""
        return [torch.zeros(self.num_rows, dtype=torch.float32, device=device) for _ in ROW_WISE.per_row]

    def state_of(self, share: Share) -> Sequence[Tensor]:
        """Second moments and last updates of the rows that a share touches, as views."""
        return [tensor[self._rows[share]] for tensor in self._state]

    @property
    def num_cut(self) -> int:
        """Rows of all tables of this rank's columns that ranges of several replicas have parts of."""
        return self._cuts.num

    def describe(self) -> str:
        """See `UpdateRule.describe`."""
        return f"tables updated by row: {self.num_rows * ROW_WISE.row_bytes / 1e6:.3g} MB of state on this rank"

    def main_weights(self, share: Share) -> Tensor:
        """The model's own, see `UpdateRule.main_weights`."""
        return share.weights

    def set_weights_from_main(self) -> None:
        """Nothing: the model's weights are what is updated, saved and loaded."""

    def state_entries(self, share: Share, leaves: Sequence[ShardedTensor]) -> dict[str, ShardedTensor]:
        """See `UpdateRule.state_entries`."""
        (leaf,) = leaves
        entries = state_entries(share.parameter, leaves, share.start, share.stop, {"param": share.weights})
        for name, tensor in zip(ROW_WISE.per_row, self.state_of(share), strict=True):
            entries |= row_entries(leaf, share.start, name, tensor)
        return entries

    def device_state(self) -> Iterable[Tensor]:
        """See `UpdateRule.device_state`."""
        return self._state

    def set_num_updates(self, share: Share, num_updates: int) -> None:
        """See `UpdateRule.set_num_updates`."""
        super().set_num_updates(share, num_updates)
        moments, last = self.state_of(share)
        # A row's first moment comes with its first update. One without an update was made of AdamW's state: as of now.
        last.masked_fill_((last == 0) & (moments > 0), num_updates)

    def update_shares(self) -> None:
        """See `UpdateRule.update_shares`. Collective over the stage."""
        squares = torch.zeros_like(self._state[0])
        for share in self.shares:
            of_share, row_squares = squares[self._rows[share]], self.places[share.parameter].kernels.row_squares
            for part in _parts(share):
                of_share[part.rows] += row_squares(part.of(share.gradient))
        if self.groups.columns.size() > 1 and squares.numel():
            # Ranks with other columns own the same range of theirs.
            dist.all_reduce(squares, group=self.groups.columns)
        self._cuts.add_up(squares, self.groups.replicas)
        for share in self.shares:
            self._update(share, squares[self._rows[share]])

    def _update(self, share: Share, squares: Tensor) -> None:
        place, decay = self.places[share.parameter], share.group["weight_decay"]
        factors = self._factors_of_share(share, self.state_of(share), squares)
        first_row = place.first_row + share.start // share.parameter.shape[1]
        keep, key = 1 - share.group["lr"] * decay, self.rounding_key(share)
        for part in _parts(share):
            weights = part.of(share.weights)
            place.kernels.row_update(
                weights,
                part.of(share.gradient),
                factors[part.rows],
                keep,
                rounding_of(weights, key, first_row + part.rows.start, place.first_column + part.first_column),
            )

    def _factors_of_share(self, share: Share, state: Sequence[Tensor], squares: Tensor) -> Tensor:
        """See `factors`, of all rows of a share."""
        moments, last_updates = state
        if squares.device.type != "cpu" or type(squares) is not torch.Tensor:
            return self.factors(share, moments, last_updates, squares)
        # Host sync: none on a CPU, where powers of all rows would take longer than the update of those that were read.
        # (A dry run's tensors have no values.)
        read = squares.nonzero().squeeze(1)
        return torch.zeros_like(squares).index_copy_(0, read, self.factors_at(share, state, read, squares[read]))

    def factors_at(self, share: Share, state: Sequence[Tensor], rows: Tensor, squares: Tensor) -> Tensor:
        """See `factors`, of some of the rows that `state` has; a row may be there more than once, with the same sum."""
        moments, last_updates = (tensor[rows] for tensor in state)
        factors = self.factors(share, moments, last_updates, squares)
        for tensor, updated in zip(state, (moments, last_updates), strict=True):
            tensor.index_copy_(0, rows, updated)
        return factors

    def factors(self, share: Share, moments: Tensor, last_updates: Tensor, squares: Tensor) -> Tensor:
        """[n], what gradients of rows are multiplied by for their updates, 0 for rows that were not read; moves the rows'
        state on.

        Args:
            moments, last_updates: [n], in place.
            squares: [n], sums of squares of whole rows, which are overwritten.
        """
        beta2, update = self._beta2, share.num_updates + 1
        read = squares > 0
        if self._is_plain:
            return torch.where(read, -share.group["lr"], 0.0)
        if self._counts_reads:
            current, correction = moments * beta2, 1.0
        else:
            # A power in fp32 may differ by a bit with the place in a vector; of fp64, rounded, it does not.
            elapsed = (update - last_updates).double()
            current, correction = moments * torch.pow(beta2, elapsed).float(), 1 - beta2**update
        # One operation at a time: a fused product and sum rounds once in the middle of a loop, and twice at its end.
        current.add_(squares.mul_((1 - beta2) / self.places[share.parameter].width))
        moments.copy_(torch.where(read, current, moments))
        last_updates.masked_fill_(read, update)
        factors = (current / correction).sqrt_().add_(self._epsilon).reciprocal_().mul_(-share.group["lr"])
        return factors.masked_fill_(~read, 0)

    def rounding_key(self, share: Share) -> int:
        """The key of an update's random numbers."""
        return key_of(self._seed, "rounding", self.places[share.parameter].name, str(share.num_updates))


class _CutRows:
    """Rows that ranges of several replicas have parts of, over all tables: as many on every replica."""

    def __init__(
        self,
        shares: Sequence[Share],
        spreads: Sequence[ReplicaRanges],
        rows: Mapping[Share, slice],
        device: torch.device,
    ) -> None:
        numbers: dict[tuple[nn.Parameter, int], int] = {}
        for spread in spreads:
            width = spread.parameter.shape[1]
            for row in sorted({cut // width for cut in spread.cuts if cut % width}):
                numbers[spread.parameter, row] = len(numbers)
        self.num = len(numbers)
        touched: dict[int, int] = {}
        for share in shares:
            first = share.start // share.parameter.shape[1]
            # A range has cut rows at its ends alone.
            for row in {first, first + _num_rows(share) - 1}:
                number = numbers.get((share.parameter, row))
                if number is not None:
                    touched[number] = rows[share].start + row - first
        self._numbers = torch.tensor(list(touched), dtype=torch.int64, device=device)
        self._rows = torch.tensor(list(touched.values()), dtype=torch.int64, device=device)

    def add_up(self, squares: Tensor, replicas: dist.ProcessGroup) -> None:
        """Replace, in sums per touched row, those of cut rows by sums over the replicas. Collective over them."""
        if self.num:
            sums = squares.new_zeros(self.num)
            sums[self._numbers] = squares[self._rows]
            dist.all_reduce(sums, group=replicas)
            squares[self._rows] = sums[self._numbers]


def _num_rows(share: Share) -> int:
    """Rows that a share has elements of."""
    width = share.parameter.shape[1]
    return -(-share.stop // width) - share.start // width


def rounding_of(weights: Tensor, key: int, first_row: int, first_column: int) -> Rounding | None:
    """Rounding of weights that begin there in the whole table; None for fp32 ones."""
    return None if weights.dtype == torch.float32 else Rounding(key, first_row, first_column)


def _parts(share: Share) -> Iterator[_Part]:
    """Rectangles of a share, in order: whole rows, and what its ends have of others."""
    first_row = share.start // share.parameter.shape[1]
    for part in rectangles_of_range(share.parameter.shape, share.start, share.stop):
        row, column = part.offset
        flat = part.flat_start - share.start
        rows = slice(row - first_row, row - first_row + part.shape[0])
        yield _Part(rows, column, slice(flat, flat + part.shape[0] * part.shape[1]))
