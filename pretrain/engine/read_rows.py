"""Update of tables by the rows that a step read (`optimizer.table_gradients: rows`).

Megatron's DDP does not know of these tables (`pretrain.engine.row_gradients`): norm, clipping and update work on the rows
that were read.

Legend: N rows that were read, W columns on this rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor, nn

from kernels.common.rounding import Rounding, round_stochastically
from kernels.common.row_gradient import RowGradient
from megamem.parameters import GroupName
from pretrain.engine.optimizer_shards import leaves_by_parameter
from pretrain.engine.row_gradients import row_gradient_of
from pretrain.engine.row_wise import RowWise, rows_at_once
from pretrain.engine.update_rules import MakeRule, Share, UpdateRule


class ReadRows(RowWise):
    """The update by row, of the rows that were read: all that `RowWise` would change, to the bit, without decay."""

    def update_shares(self) -> None:
        """See `UpdateRule.update_shares`. Collective over the ranks that have other columns of the same rows."""
        for share in self.shares:
            gradient = row_gradient_of(share.parameter)
            assert gradient is not None
            assert share.group["weight_decay"] == 0
            if gradient.read is not None and gradient.read.rows.numel():
                assert gradient.sums is not None
                self._update_rows(share, gradient.read.rows, gradient.read.sources, gradient.sums)
            gradient.clear()

    def _update_rows(self, share: Share, rows: Tensor, sources: Tensor | None, sums: Tensor) -> None:
        num, width = sums.shape
        windows = [slice(first, first + rows_at_once(sums)) for first in range(0, num, rows_at_once(sums))]
        squares = torch.cat([sums[window].square().sum(1) for window in windows])
        if self.groups.columns.size() > 1:
            # Ranks with other columns read the same rows.
            dist.all_reduce(squares, group=self.groups.columns)
        if sources is not None:
            squares = squares[sources]
        state = [tensor[self.rows_of(share)] for tensor in self.device_state()]
        moments, last_updates = (tensor[rows] for tensor in state)
        factors = self.factors(share, moments, last_updates, squares)
        for tensor, updated in zip(state, (moments, last_updates), strict=True):
            tensor.index_copy_(0, rows, updated)
        place, key = self.places[share.parameter], self.rounding_key(share)
        table = share.weights.view(-1, width)
        for window in windows:
            of_window = rows[window]
            weights = table[of_window]
            gradient = sums[window] if sources is None else sums[sources[window]]
            change = gradient * factors[window].unsqueeze(1)
            if weights.dtype == torch.float32:
                weights.add_(change)
            else:
                rounding = Rounding(key, place.first_row, place.first_column)
                round_stochastically(change.add_(weights.float()), weights, rounding, of_window)
            table.index_copy_(0, of_window, weights)


class ReadTables:
    """The tables of a rank as one of the optimizers that `MemoryOptimizer` chains: groups, and a rule for whole tables."""

    def __init__(
        self,
        config: Any,
        chunks: Sequence[DistributedDataParallel],
        param_groups: list[dict[str, Any]],
        make_rule: MakeRule,
    ) -> None:
        """
        Args:
            config: Megatron's, that of the optimizers beside.
            param_groups: as Megatron's optimizers have them.
            make_rule: of the rule.
        """
        self.config, self.model_chunks, self.param_groups = config, list(chunks), param_groups
        self._shares = [
            Share(table, 0, group, table.detach().view(-1), torch.empty(0, device=table.device))
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
        """Forget the gradients."""
        for share in self._shares:
            _gradient(share).clear()

    def prepare_grads(self) -> bool:
        """Nothing: they are in fp32, and a norm tells whether they are finite. Returns whether one was found not to be."""
        return False

    def gradients(self, *, counted_once: bool) -> Iterator[tuple[GroupName, Tensor]]:
        """See `MemoryDistributedOptimizer.gradients`. No two ranks have gradients of the same elements."""
        for share in self._shares:
            sums = _gradient(share).sums
            if sums is not None and sums.numel():
                yield share.group["name"], sums

    def main_weights(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """See `MemoryDistributedOptimizer.main_weights`."""
        for share in self._shares:
            yield share.parameter, self.rule.main_weights(share)

    def device_state(self) -> Iterator[Tensor]:
        """See `MemoryDistributedOptimizer.device_state`."""
        yield from self.rule.device_state()

    def step_with_ready_grads(self) -> bool:
        """Update the tables."""
        self.rule.step()
        return True

    def set_num_updates(self, updates_of: Any) -> None:
        """See `MemoryDistributedOptimizer.set_num_updates`."""
        for share in self._shares:
            self.rule.set_num_updates(share, updates_of(share.parameter))

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


def _gradient(share: Share) -> RowGradient:
    found = row_gradient_of(share.parameter)
    assert found is not None
    return found
