"""State of the optimizer that another update than the run's kept: refused, or made into what the run's keeps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from torch import Tensor

from pretrain.checkpoint.index import Index
from pretrain.checkpoint.loading import LoadTarget, target_of
from pretrain.checkpoint.store.tensors import Region
from pretrain.checkpoint.write_plan import region_of
from pretrain.config.updates import ADAMW, MUON, ROW_WISE, STATE_PREFIX
from pretrain.errors import CheckpointError


def check_matrices(shard: ShardedTensor, weight: str, index: Index) -> None:
    """Refuse a checkpoint in which another update than the run's kept the state of a hidden matrix.

    Neither's state can be made of the other's: momentum has another decay, and no second moment.
    """
    for ours, theirs in ((ADAMW, MUON), (MUON, ADAMW)):
        own, others = ([f"{STATE_PREFIX}{name}.{weight}" for name in update.per_element] for update in (ours, theirs))
        if shard.key in own and shard.key not in index.tensors and all(name in index.tensors for name in others):
            raise CheckpointError(
                f"the checkpoint has the state of {weight} as optimizer.matrices: {theirs.name} keeps it "
                f"({', '.join(theirs.per_element)}), and optimizer.matrices is {ours.name}: set it to {theirs.name}, or "
                f"change it where a stage begins with optimizer_state: reset"
            )


def of_other_update(shard: ShardedTensor, weight: str, index: Index) -> Iterator[LoadTarget]:
    """Targets of a table's moments that a checkpoint has none of, by those that its other update kept.

    The mean over a row of AdamW's second moments is the row's, to rounding: both are averages over the same steps. The
    other way each element gets its row's; first moments have nothing to come from, and stay at zero.
    """
    names = (*ADAMW.per_element, *ROW_WISE.per_row)
    first, of_elements, of_rows, last_updates = (f"{STATE_PREFIX}{name}.{weight}" for name in names)
    if shard.key == last_updates:
        # The rule of the tables takes them to be as of now.
        return
    if shard.key == of_rows and of_elements in index.tensors:
        num_rows, columns = shard.global_shape[0], index.tensors[of_elements].shape[1]
        region = Region(of_elements, (shard.global_offset[0], 0), (shard.local_shape[0], columns))
        yield LoadTarget(region, (num_rows, columns), shard.data, rows="mean")
    elif shard.key == of_elements and of_rows in index.tensors:
        whole = region_of(shard)
        region = Region(of_rows, whole.offset[:1], whole.shape[:1])
        yield LoadTarget(region, tuple(shard.global_shape[:1]), shard.data.detach().view(whole.shape), rows="spread")
    elif shard.key != first or of_rows not in index.tensors:
        # Its absence is an error.
        yield target_of(shard)


@dataclass(frozen=True)
class StaleMoments:
    """Second moments of elements that were made of their rows', which are as of each row's last update.

    Attributes:
        weight: name of the table.
        moments: [n, columns].
        last_updates: [n].
    """

    weight: str
    moments: Tensor
    last_updates: Tensor

    def bring_up(self, num_updates: int, beta2: float) -> None:
        """Have them be as of an update."""
        elapsed = (num_updates - self.last_updates).double()
        self.moments.mul_(torch.pow(beta2, elapsed).float().unsqueeze(1))


def stale_moments(shards: Sequence[ShardedTensor], index: Index) -> Iterator[tuple[StaleMoments, LoadTarget]]:
    """Moments of elements that come from rows, and targets of the rows' last updates."""
    *_, name = ROW_WISE.per_row
    prefix = f"{STATE_PREFIX}{ADAMW.per_element[-1]}."
    for shard in shards:
        weight = shard.key.removeprefix(prefix)
        last_updates = f"{STATE_PREFIX}{name}.{weight}"
        if shard.key.startswith(prefix) and shard.key not in index.tensors and last_updates in index.tensors:
            whole = region_of(shard)
            stale = StaleMoments(weight, shard.data.detach().view(whole.shape), shard.data.new_zeros(whole.shape[0]))
            region = Region(last_updates, whole.offset[:1], whole.shape[:1])
            yield stale, LoadTarget(region, tuple(shard.global_shape[:1]), stale.last_updates)
