"""Update of tables by the rows that a step read (`optimizer.table_gradients: rows`).

Megatron's DDP does not know of these tables (`pretrain.engine.tables.row_gradients`): norm, clipping and update work on the rows
that were read.

Legend: N rows that were read, W columns on this rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.distributed import DistributedDataParallel
from megatron.core.transformer.module import param_is_not_shared
from torch import Tensor, nn

from kernels.common.row_gradient import RowGradient
from kernels.common.table_scale import TableScale, scale_of
from megamem.parameters.declaration import GroupName
from pretrain.config.updates import SCALE
from pretrain.engine.optimizer_shards import leaves_by_parameter, number_entry
from pretrain.engine.tables.row_gradients import row_gradient_of
from pretrain.engine.tables.row_wise import RowWise, rounding_of
from pretrain.engine.tables.stored_tables import StoredTables
from pretrain.engine.update_rules import MakeRule, Share, UpdateRule


@dataclass(frozen=True)
class HeldRows:
    """Rows of a rank's part of a table that are on the device.

    Attributes:
        weights: [n, W].
        state: [n] each.
        numbers: [n] int64, of the rows in that part; None: they are all of its rows.
    """

    weights: Tensor
    state: Sequence[Tensor]
    numbers: Tensor | None = None

    def numbers_of(self, held: Tensor) -> Tensor | None:
        """Numbers, in that part, of some of the held rows; None: their own."""
        return None if self.numbers is None else self.numbers[held]


class ReadRows(RowWise):
    """The update by row, of the rows that were read: all that `RowWise` would change, to the bit without a decay. A decay is
    that of the table's scale (`kernels.common.table_scale`), or by the clock of reads that of the rows themselves."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        """See `RowWise`."""
        super().__init__(*arguments, **keywords)
        # As checkpoints have them, in host memory.
        self._scales = {share: torch.ones(1, dtype=torch.float64, device="cpu") for share in self.shares}

    def update_shares(self) -> None:
        """See `UpdateRule.update_shares`. Collective over the ranks that have other columns of the same rows."""
        for share in self.shares:
            gradient = row_gradient_of(share.parameter)
            assert gradient is not None
            self._decay(share)
            if gradient.read is not None and gradient.read.rows.numel():
                assert gradient.sums is not None
                self._update_rows(share, self.held(share), gradient.read.rows, gradient.read.sources, gradient.sums)
            gradient.clear()

    def _decay(self, share: Share) -> None:
        scale = _scale(share)
        fold = scale.decay(1 - (0.0 if self._counts_reads else share.group["lr"] * share.group["weight_decay"]))
        self._scales[share].fill_(scale.value)
        if fold is not None:
            self.multiply(share, fold)

    def multiply(self, share: Share, factor: float) -> None:
        """Multiply all stored rows of a table by a factor."""
        share.weights.mul_(factor)

    def set_num_updates(self, share: Share, num_updates: int) -> None:
        """See `UpdateRule.set_num_updates`."""
        super().set_num_updates(share, num_updates)
        saved = self._scales[share]
        if type(saved) is torch.Tensor:
            # Host sync: none in host memory. (A dry run's tensors have no values.)
            _scale(share).value = float(saved)

    def state_entries(self, share: Share, leaves: Sequence[ShardedTensor]) -> dict[str, ShardedTensor]:
        """See `UpdateRule.state_entries`."""
        (leaf,) = leaves
        entries = {**super().state_entries(share, leaves), **number_entry(leaf, SCALE, self._scales[share])}
        for entry in entries.values():
            # Every replica has all of it, where ranges of other parameters are each on one.
            *others, copy = entry.replica_id
            entry.replica_id = (*others, copy + self.groups.replicas.rank())
        return entries

    def held(self, share: Share) -> HeldRows:
        """Rows of the table, and their state, that are on the device: all of them."""
        weights = share.weights.view(-1, share.parameter.shape[1])
        return HeldRows(weights, self.state_of(share))

    def _update_rows(self, share: Share, held: HeldRows, rows: Tensor, sources: Tensor | None, sums: Tensor) -> None:
        place = self.places[share.parameter]
        squares = place.kernels.row_squares(sums)
        if self.groups.columns.size() > 1:
            # Ranks with other columns read the same rows.
            dist.all_reduce(squares, group=self.groups.columns)
        if sources is not None:
            squares = squares[sources]
        factors = self.factors_at(share, held.state, rows, squares)
        if sources is not None:
            # Rows behind the last repeat the first, which is updated once.
            factors.masked_fill_(sources != torch.arange(len(sources), device=sources.device), 0)
        if (scale := _scale(share).value) != 1:
            factors.mul_(1 / scale)
        rounding = rounding_of(held.weights, self.rounding_key(share), place.first_row, place.first_column)
        keep = 1 - share.group["weight_decay"] if self._counts_reads else 1.0
        place.kernels.row_update(held.weights, sums, factors, keep, rounding, rows, held.numbers_of(rows))


class StoredRows(ReadRows):
    """The update of tables that lie in files, whose rows of a step are on the device (`pretrain.engine.tables.stored_tables`)."""

    def __init__(self, *arguments: Any, stored: StoredTables, **keywords: Any) -> None:
        """See `RowWise`.

        Args:
            stored: the tables.
        """
        self._stored = stored
        super().__init__(*arguments, **keywords)

    def make_state(self, device: torch.device) -> Sequence[Tensor]:
        """See `RowWise.make_state`: nothing, as the files have it beside the weights."""
        return ()

    def state_of(self, share: Share) -> Sequence[Tensor]:
        """See `RowWise.state_of`."""
        return self._stored.of(share.parameter).state

    def held(self, share: Share) -> HeldRows:
        """See `ReadRows.held`: those of the step, which it is about to change."""
        staged = self._stored.of(share.parameter).staged
        assert staged is not None
        staged.is_changed = True
        return HeldRows(staged.weights.detach(), staged.state, staged.numbers)

    def multiply(self, share: Share, factor: float) -> None:
        """See `ReadRows.multiply`."""
        self._stored.multiply(share.parameter, factor)

    def state_entries(self, share: Share, leaves: Sequence[ShardedTensor]) -> dict[str, ShardedTensor]:
        """See `UpdateRule.state_entries`: the files have all updates then, and may be read or loaded."""
        self._stored.settle()
        return super().state_entries(share, leaves)

    def set_weights_from_main(self) -> None:
        """See `UpdateRule.set_weights_from_main`: what was fetched before is not what the files have now."""
        self._stored.forget()

    def describe(self) -> str:
        """See `UpdateRule.describe`."""
        return f"tables in files, updated by row: {self._stored.num_bytes / 1e9:.3g} GB on this rank"


class ReadTables:
    """The tables of a rank as one of the optimizers that `MemoryOptimizer` chains: groups, and a rule for whole tables.

    Attributes:
        are_due: the step that begins next updates them; else what it reads waits for one that does
            (`optimizer.tables_every`).
    """

    def __init__(
        self,
        config: Any,
        chunks: Sequence[DistributedDataParallel],
        param_groups: list[dict[str, Any]],
        make_rule: MakeRule,
        *,
        is_counted: bool,
    ) -> None:
        """
        Args:
            config: Megatron's, that of the optimizers beside.
            param_groups: parameter groups in the form of Megatron's optimizers.
            make_rule: makes the update rule of shares.
            is_counted: this is the replica whose gradients count in the global norm.
        """
        self._is_counted = is_counted
        self.are_due = True
        self.config, self.model_chunks, self.param_groups = config, list(chunks), param_groups
        self._shares = [
            Share(
                table,
                0,
                group,
                table.detach().view(-1) if table.is_contiguous() else table.detach(),
                torch.empty(0, device=table.device),
            )
            for group in param_groups
            for table in group["params"]
        ]
        self.rule: UpdateRule = make_rule(self._shares, [])

    @property
    def is_stub_optimizer(self) -> bool:
        """True if the rank trains no such table."""
        return not self._shares

    @property
    def rules(self) -> tuple[UpdateRule, ...]:
        """See `MemoryDistributedOptimizer.rules`."""
        return (self.rule,)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients, but for what waits for an update."""
        for share in self._shares:
            _gradient(share).begin_step(is_due=self.are_due)

    def prepare_grads(self) -> bool:
        """Nothing: they are in fp32, and a norm tells whether they are finite. Returns whether one was found not to be."""
        return False

    def gradients(self, *, counted_once: bool) -> Iterator[tuple[GroupName, Tensor]]:
        """See `MemoryDistributedOptimizer.gradients`. Replicas and copies have the same ones."""
        for share in self._shares:
            sums = _gradient(share).sums
            # Megatron's mark of copies of which another stage's counts.
            counts = self._is_counted and param_is_not_shared(share.parameter)
            if sums is not None and sums.numel() and (counts or not counted_once):
                yield share.group["name"], sums

    def main_weights(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """See `MemoryDistributedOptimizer.main_weights`."""
        for share in self._shares:
            yield share.parameter, self.rule.main_weights(share)

    def device_state(self) -> Iterator[Tensor]:
        """See `MemoryDistributedOptimizer.device_state`."""
        yield from self.rule.device_state()

    def step_with_ready_grads(self) -> bool:
        """Update the tables, or have what the step has read wait."""
        if self.are_due:
            self.rule.step()
        else:
            for share in self._shares:
                _gradient(share).wait()
        return True

    def set_num_updates(self, updates_of: Any) -> None:
        """See `MemoryDistributedOptimizer.set_num_updates`. Nothing waits behind it: a checkpoint has been loaded."""
        for share in self._shares:
            self.rule.set_num_updates(share, updates_of(share.parameter))
            _gradient(share).clear()

    def set_weights_from_main(self) -> None:
        """See `MemoryDistributedOptimizer.set_weights_from_main`."""
        self.rule.set_weights_from_main()

    def sharded_state_dict(self, model_sharded_state_dict: Any) -> dict[str, Any]:
        """See `MemoryDistributedOptimizer.sharded_state_dict`."""
        leaves = leaves_by_parameter(model_sharded_state_dict)
        return {
            key: entry
            for share in self._shares
            for key, entry in self.rule.state_entries(share, leaves[share.parameter]).items()
        }


def _scale(share: Share) -> TableScale:
    found = scale_of(share.parameter)
    assert found is not None
    return found


def _gradient(share: Share) -> RowGradient:
    found = row_gradient_of(share.parameter)
    assert found is not None
    return found
