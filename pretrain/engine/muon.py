"""Muon, the update of hidden matrices by orthogonalised momentum (`optimizer.matrices: muon`).

With G the gradient of a matrix W [m, n], and NewtonSchulz of `pretrain.engine.newton_schulz`:

    B <- mu B + (1 - mu) G
    U = mu B + (1 - mu) G, or B without Nesterov's momentum
    W <- (1 - lr decay) W - lr s NewtonSchulz(U)

where s is 0.2 sqrt(max(m, n)), by which an update is as large as AdamW's (Liu et al., 2025), or max(1, sqrt(m / n)), as
in the original; with muP times a factor by which its spectral norm goes with sqrt(m / n) from width to width. Momentum and main weights are fp32, products in the precision of the run.

An update needs whole matrices, and ranks own ranges of parameters: each data-parallel replica a range of a
tensor-parallel rank's part. So every matrix has a rank of the stage that works on it. It receives the owners' pieces of
U, and returns their pieces of the result, in the precision of the products: no rank has more matrices than its share,
and what a matrix moves by depends on no layout.

Legend: E elements of a share, T tensor-parallel ranks, r rows and c columns of a rank's part of a unit.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Literal

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from torch import Tensor, nn

from megamem.config.width import WidthRules
from megamem.parameters.declaration import matrices_of, tensor_dim_of, width_of
from pretrain.config.optimizer import OptimizerConfig
from pretrain.config.updates import MUON, orthogonalisation_flops
from pretrain.engine.newton_schulz import orthogonalised
from pretrain.engine.optimizer_shards import state_entries
from pretrain.engine.update_rules import ReplicaRanges, Share, UpdateRule

ROUND_ELEMENTS = 1 << 24
"""Elements of matrices that a rank works on at a time, if no single one has more: buffers are of that size."""
(_MOMENTUM,) = MUON.per_element
Scale = Literal["match_rms_adamw", "original"]


@dataclass(frozen=True)
class Team:
    """Ranks of a stage that own ranges of the same matrices.

    Attributes:
        group: ranks of the team; a rank's number is replica x T + tensor-parallel rank.
        num_tensor: T.
    """

    group: dist.ProcessGroup
    num_tensor: int

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    @property
    def size(self) -> int:
        return self.group.size()


@dataclass(frozen=True)
class _Piece:
    """A range of a tensor-parallel rank's part of a unit that a rank of the team owns."""

    rank: int
    part: int
    start: int
    stop: int


@dataclass(frozen=True, eq=False)
class MuonUnit:
    """Rows of a parameter that one rank works on: a matrix, or several whose rows take turns.

    Attributes:
        spread: spread of the parameter over replicas.
        start, stop: places of the rows in the flattened parameter, alike on every tensor-parallel rank.
        tensor_ranks: ranks that have the rows: parts of the same matrices if `dim` is a dimension, else copies.
        dim: dimension in which the parts are joined; None: the first is whole.
        rows: numbers of rows of the whole that belong to its matrices in turn, over and over.
    """

    spread: ReplicaRanges
    start: int
    stop: int
    tensor_ranks: tuple[int, ...]
    dim: int | None
    rows: tuple[int, ...]

    @property
    def parameter(self) -> nn.Parameter:
        return self.spread.parameter

    @property
    def part_shape(self) -> tuple[int, int]:
        """(r, c)."""
        columns = self.parameter.shape[-1]
        return (self.stop - self.start) // columns, columns

    @property
    def num_parts(self) -> int:
        """Parts that the whole is joined of."""
        return 1 if self.dim is None else len(self.tensor_ranks)

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the whole."""
        rows, columns = self.part_shape
        return (rows * self.num_parts, columns) if self.dim == 0 else (rows, columns * self.num_parts)

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def matrix_shapes(self) -> tuple[tuple[int, int], ...]:
        """Rows and columns of its matrices, in order."""
        rows, columns = self.shape
        return tuple((own * (rows // sum(self.rows)), columns) for own in self.rows)

    def sent(self, team: Team) -> Iterator[_Piece]:
        """Pieces that owners send to the rank that works on it."""
        return self._pieces(team, self.tensor_ranks[: self.num_parts])

    def returned(self, team: Team) -> Iterator[_Piece]:
        """Pieces that it returns to owners."""
        return self._pieces(team, self.tensor_ranks)

    def _pieces(self, team: Team, tensor_ranks: Sequence[int]) -> Iterator[_Piece]:
        bounds = (0, *self.spread.cuts, self.parameter.numel())
        for part, tensor_rank in enumerate(tensor_ranks):
            for index in range(len(bounds) - 1):
                start, stop = max(bounds[index], self.start), min(bounds[index + 1], self.stop)
                if start < stop:
                    rank = (self.spread.first_owner + index) * team.num_tensor + tensor_rank
                    yield _Piece(rank, min(part, self.num_parts - 1), start - self.start, stop - self.start)

    def orthogonalised(self, parts: Tensor, num_steps: int) -> Tensor:
        """[parts, r, c], the update that U, [parts, r, c], gives."""
        whole = parts.transpose(0, 1).flatten(1) if self.dim == 1 else parts.flatten(0, 1)
        turns = whole.view(-1, sum(self.rows), whole.shape[1]).split(self.rows, 1)
        matrices = [orthogonalised(turn.flatten(0, 1), num_steps) for turn in turns]
        by_turn = [matrix.view(*turn.shape) for matrix, turn in zip(matrices, turns, strict=True)]
        joined = by_turn[0] if len(by_turn) == 1 else torch.cat(by_turn, 1)
        joined = joined.reshape(whole.shape)
        if self.dim == 1:
            return joined.unflatten(1, (self.num_parts, -1)).transpose(0, 1)
        return joined.unflatten(0, (self.num_parts, -1))

    def scales(self, scale: Scale, widths: WidthRules, tensor_rank: int) -> Iterator[tuple[int, float]]:
        """(end, s) of runs of a tensor-parallel rank's part, flat, in order: s is the matrix's that the run is of."""
        rows, columns = self.part_shape
        by_matrix = [self._scale(shape, scale, widths) for shape in self.matrix_shapes]
        if len(set(by_matrix)) == 1:
            yield rows * columns, by_matrix[0]
            return
        first, end = (rows * self.tensor_ranks.index(tensor_rank) if self.dim == 0 else 0), 0
        for own, factor in cycle(zip(self.rows, by_matrix, strict=True)):
            end += own
            if end > first:
                yield min(end - first, rows) * columns, factor
            if end - first >= rows:
                return

    def _scale(self, shape: tuple[int, int], scale: Scale, widths: WidthRules) -> float:
        """s of a matrix of the unit, with its factor for the model's width."""
        width, own = width_of(self.parameter), _scale(shape, scale)
        return own * widths.spectral_factor(width, shape, own, _scale(widths.base_shape(width, shape), scale))


def _scale(shape: tuple[float, float], scale: Scale) -> float:
    """s of a matrix [m, n]."""
    rows, columns = shape
    return 0.2 * math.sqrt(max(rows, columns)) if scale == "match_rms_adamw" else math.sqrt(max(1.0, rows / columns))


def units_of(spreads: Sequence[ReplicaRanges], num_tensor: int) -> list[MuonUnit]:
    """The units that parameters consist of, alike on all ranks of a team."""
    units = []
    for spread in spreads:
        parameter, matrices = spread.parameter, matrices_of(spread.parameter)
        assert matrices is not None
        columns, dim = parameter.shape[-1], tensor_dim_of(parameter)
        num_rows = parameter.numel() // columns
        everyone = tuple(range(num_tensor))
        holders = [(rank,) for rank in everyone] if matrices.by_rank and dim is not None else [everyone]
        joined = None if matrices.by_rank else dim
        blocks: list[tuple[int, int, tuple[int, ...]]]
        if sum(matrices.rows) == num_rows:
            # One below the other on every rank.
            ends = [sum(matrices.rows[: index + 1]) for index in range(len(matrices.rows))]
            blocks = [(end - own, end, (own,)) for own, end in zip(matrices.rows, ends, strict=True)]
        else:
            blocks = [(0, num_rows, matrices.rows or (num_rows,))]
        for tensor_ranks in holders:
            for first, end, rows in blocks:
                units.append(MuonUnit(spread, first * columns, end * columns, tensor_ranks, joined, rows))
    return units


@dataclass(frozen=True)
class _Assigned:
    """A unit and the rank that works on it."""

    unit: MuonUnit
    worker: int


def rounds_of(units: Sequence[MuonUnit], team: Team, settings: OptimizerConfig) -> list[list[_Assigned]]:
    """Units by rounds, in each of which ranks have about equal numbers of operations; the largest come first."""
    costs = {unit: sum(orthogonalisation_flops(unit.matrix_shapes, settings)) for unit in units}
    largest_first = sorted(units, key=lambda unit: -costs[unit])
    limit = team.size * max([ROUND_ELEMENTS, *(unit.num_elements for unit in units)])
    rounds: list[list[_Assigned]] = []
    loads: list[tuple[float, int]] = []
    num_elements = limit
    for unit in largest_first:
        if num_elements + unit.num_elements > limit:
            rounds.append([])
            loads = [(0.0, rank) for rank in range(team.size)]
            num_elements = 0
        load, rank = loads[0]
        heapq.heapreplace(loads, (load + costs[unit], rank))
        rounds[-1].append(_Assigned(unit, rank))
        num_elements += unit.num_elements
    return rounds


@dataclass(frozen=True)
class _OfOwner:
    """A piece of a unit that this rank owns.

    Attributes:
        share: the share that it lies in.
        inside: its place in the share.
        buffer: its place among the pieces of a round that this rank owns.
        scales: (place in the share, s) of its runs.
    """

    share: Share
    inside: slice
    buffer: slice
    scales: tuple[tuple[slice, float], ...]


@dataclass(frozen=True)
class _OfWorker:
    """A piece of a unit that this rank works on: its part, its place there, and that among all such pieces of a round."""

    part: int
    inside: slice
    buffer: slice


@dataclass(frozen=True)
class _Way:
    """Pieces of a round between owners and workers, in the order of ranks and then of units.

    Attributes:
        owned: this rank's as an owner.
        worked: pieces of the units that it works on.
        to_workers: elements of `owned` by worker.
        to_owners: elements of `worked` by owner.
    """

    owned: tuple[_OfOwner, ...]
    worked: dict[MuonUnit, list[_OfWorker]]
    to_workers: list[int]
    to_owners: list[int]


class Muon(UpdateRule):
    """The update of this rank's shares of hidden matrices, with their fp32 main weights and momentum."""

    def __init__(
        self,
        shares: Sequence[Share],
        spreads: Sequence[ReplicaRanges],
        *,
        settings: OptimizerConfig,
        widths: WidthRules,
        dtype: torch.dtype,
        team: Team,
    ) -> None:
        """Take over the shares, with momentum at zero.

        Args:
            settings: the keys of Muon.
            widths: rules by which updates follow the model's width.
            dtype: dtype of products.
            team: team that owns the shares' parameters together.
        """
        self.shares, self._team, self._dtype, self._settings = shares, team, dtype, settings
        self._widths = widths
        self._momentum = {share: torch.zeros_like(share.gradient) for share in shares}
        # In fp32 the weights are their own main weights, as Megatron has it.
        self._main = {share: share.weights.float() for share in shares}
        units = units_of(spreads, team.num_tensor)
        self.num_matrices = sum(len(unit.rows) for unit in units)
        by_parameter = {share.parameter: share for share in shares}
        self._rounds = [
            (self._way(of_round, by_parameter, sent=True), self._way(of_round, by_parameter, sent=False))
            for of_round in rounds_of(units, team, settings)
        ]

    def _way(self, of_round: Sequence[_Assigned], shares: dict[nn.Parameter, Share], *, sent: bool) -> _Way:
        me, size = self._team.rank, self._team.size
        mine: list[list[tuple[MuonUnit, _Piece]]] = [[] for _ in range(size)]
        theirs: list[list[tuple[MuonUnit, _Piece]]] = [[] for _ in range(size)]
        for assigned in of_round:
            unit = assigned.unit
            for piece in unit.sent(self._team) if sent else unit.returned(self._team):
                if piece.rank == me:
                    mine[assigned.worker].append((unit, piece))
                if assigned.worker == me:
                    theirs[piece.rank].append((unit, piece))
        owned, position = [], 0
        for unit, piece in (each for of_rank in mine for each in of_rank):
            share, num = shares[unit.parameter], piece.stop - piece.start
            first = unit.start - share.start
            inside = slice(first + piece.start, first + piece.stop)
            scales = self._scales(unit, piece, first)
            owned.append(_OfOwner(share, inside, slice(position, position + num), scales))
            position += num
        worked: dict[MuonUnit, list[_OfWorker]] = {each.unit: [] for each in of_round if each.worker == me}
        position = 0
        for unit, piece in (each for of_rank in theirs for each in of_rank):
            num = piece.stop - piece.start
            place = slice(position, position + num)
            worked[unit].append(_OfWorker(piece.part, slice(piece.start, piece.stop), place))
            position += num
        return _Way(tuple(owned), worked, _sizes(mine), _sizes(theirs))

    def _scales(self, unit: MuonUnit, piece: _Piece, first: int) -> tuple[tuple[slice, float], ...]:
        """Runs of a piece with their s, in a share that the unit begins at `first` of."""
        found, start = [], piece.start
        for end, factor in unit.scales(self._settings.muon_scale, self._widths, piece.rank % self._team.num_tensor):
            stop = min(end, piece.stop)
            if start < stop:
                found.append((slice(first + start, first + stop), factor))
                start = stop
        return tuple(found)

    def update_shares(self) -> None:
        """See `UpdateRule.update_shares`. Collective over the team."""
        mu, nesterov = self._settings.muon_momentum, self._settings.muon_nesterov
        for sent, returned in self._rounds:
            for piece in returned.owned:
                self._momentum[piece.share][piece.inside].lerp_(piece.share.gradient[piece.inside], 1 - mu)
            pieces = self._buffer(sent.to_workers)
            for piece in sent.owned:
                momentum = self._momentum[piece.share][piece.inside]
                pieces[piece.buffer] = piece.share.gradient[piece.inside].lerp(momentum, mu) if nesterov else momentum
            updates = self._exchanged(self._worked(self._exchanged(pieces, sent), sent, returned), returned, back=True)
            for piece in returned.owned:
                self._apply(piece, updates[piece.buffer])
        for share in self.shares:
            self._write_weights(share)

    def _worked(self, pieces: Tensor, sent: _Way, returned: _Way) -> Tensor:
        """Work on what this rank was sent. Returns what it sends back."""
        results = self._buffer(returned.to_owners)
        for unit, of_unit in sent.worked.items():
            parts = pieces.new_empty(unit.num_parts, math.prod(unit.part_shape))
            for piece in of_unit:
                parts[piece.part, piece.inside] = pieces[piece.buffer]
            update = unit.orthogonalised(parts.unflatten(1, unit.part_shape), self._settings.muon_ns_steps).flatten(1)
            for piece in returned.worked[unit]:
                results[piece.buffer] = update[piece.part, piece.inside]
        return results

    def _apply(self, piece: _OfOwner, update: Tensor) -> None:
        lr, decay = piece.share.group["lr"], piece.share.group["weight_decay"]
        main = self._main[piece.share]
        main[piece.inside].mul_(1 - lr * decay)
        start = piece.inside.start
        for run, factor in piece.scales:
            main[run].add_(update[run.start - start : run.stop - start], alpha=-lr * factor)

    def _buffer(self, sizes: Sequence[int]) -> Tensor:
        return torch.empty(sum(sizes), dtype=self._dtype, device=torch.cuda.current_device())

    def _exchanged(self, pieces: Tensor, way: _Way, *, back: bool = False) -> Tensor:
        """Pieces of owners at their workers; or `back`."""
        if self._team.size == 1:
            return pieces
        send, receive = (way.to_owners, way.to_workers) if back else (way.to_workers, way.to_owners)
        received = self._buffer(receive)
        dist.all_to_all_single(received, pieces, receive, send, group=self._team.group)
        return received

    def _write_weights(self, share: Share) -> None:
        if self._main[share] is not share.weights:
            share.weights.copy_(self._main[share])

    def main_weights(self, share: Share) -> Tensor:
        """See `UpdateRule.main_weights`."""
        return self._main[share]

    @torch.no_grad()
    def set_weights_from_main(self) -> None:
        """See `UpdateRule.set_weights_from_main`."""
        for share in self.shares:
            self._write_weights(share)

    def state_entries(self, share: Share, leaves: Sequence[ShardedTensor]) -> dict[str, ShardedTensor]:
        """See `UpdateRule.state_entries`."""
        state = {"param": self._main[share], _MOMENTUM: self._momentum[share]}
        return state_entries(share.parameter, leaves, share.start, share.stop, state)

    def device_state(self) -> Iterable[Tensor]:
        """See `UpdateRule.device_state`."""
        return [*self._momentum.values(), *self._main.values()]

    def describe(self) -> str | None:
        """See `UpdateRule.describe`."""
        return f"hidden matrices of this stage updated by Muon: {self.num_matrices}" if self.num_matrices else None


def _sizes(by_rank: Sequence[Sequence[tuple[MuonUnit, _Piece]]]) -> list[int]:
    return [sum(piece.stop - piece.start for _, piece in of_rank) for of_rank in by_rank]
