"""The seam for parameters that another rule than Megatron's AdamW updates.

Megatron's DDP reduces their gradients and gathers their weights as those of all others: each replica owns a range of
the flattened parameter. To Megatron's optimizer their groups are empty, so it allocates nothing for them; a rule gets
this rank's ranges and keeps what state it likes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from torch import Tensor, nn


@dataclass(eq=False)
class Share:
    """One rank's range of a parameter: E elements of it, flat.

    Attributes:
        parameter: the model's, with this rank's part of it in the model's layout.
        start: the range's first position in the flattened parameter.
        group: the optimizer group, whose `lr` and `weight_decay` the schedule sets before every step.
        weights: [E], a view of the model's; gathered from here over the replicas after an update. Of a table in a file,
            whose rows lie apart, [R, W].
        gradient: [E] fp32, a view of the reduced gradient's buffer; empty where a table has a `row_gradient`.
        num_updates: updates that the state has seen.
    """

    parameter: nn.Parameter
    start: int
    group: dict[str, Any]
    weights: Tensor
    gradient: Tensor
    num_updates: int = 0

    @property
    def stop(self) -> int:
        """The position behind the range's last."""
        return self.start + self.weights.numel()


@dataclass(frozen=True)
class ReplicaRanges:
    """Division of a parameter over the replicas that own ranges of it, in the order of their ranks: the same on all.

    Attributes:
        parameter: the model's.
        first_owner: rank, among the replicas, of the one that owns the first element.
        cuts: positions in the flattened parameter at which the ranges of the replicas behind it begin.
    """

    parameter: nn.Parameter
    first_owner: int
    cuts: tuple[int, ...]

    @staticmethod
    def over(num_replicas: int, parameter: nn.Parameter, start: int, num_padded: int) -> ReplicaRanges:
        """Division of a parameter that starts at a position of a part of Megatron's buffer.

        Args:
            start: position of its first element in the part.
            num_padded: elements of the part, which the replicas own equal ranges of.
        """
        size = num_padded // num_replicas
        first, last = start // size, (start + parameter.numel() - 1) // size
        return ReplicaRanges(parameter, first, tuple(owner * size - start for owner in range(first + 1, last + 1)))


class UpdateRule(ABC):
    """An update of some parameters, on the rank's own shares of them.

    All ranks of a pipeline stage have a rule for the same parameters, each with other shares, which may be none: an
    update may be collective over the ranks of the stage.

    Attributes:
        shares: this rank's.
    """

    shares: Sequence[Share]

    @torch.no_grad()
    def step(self) -> None:
        """Update state and weights of the shares, and count the update."""
        self.update_shares()
        for share in self.shares:
            share.num_updates += 1

    @abstractmethod
    def update_shares(self) -> None:
        """Update state and weights by the shares' gradients, which are reduced, finite and clipped."""

    def set_num_updates(self, share: Share, num_updates: int) -> None:
        """Say how many updates the state of a share has seen: after loading it, too."""
        share.num_updates = num_updates

    @abstractmethod
    def main_weights(self, share: Share) -> Tensor:
        """The weights of a share that are updated, as its own are: fp32 main weights, or the model's own."""

    @abstractmethod
    def set_weights_from_main(self) -> None:
        """Round main weights, if there are any, to the model's, as after an update."""

    @abstractmethod
    def state_entries(self, share: Share, leaves: Sequence[ShardedTensor]) -> dict[str, ShardedTensor]:
        """Checkpoint entries of a share's main weights and state: views, so that loading fills them in place.

        Args:
            share: this rank's share of the parameter.
            leaves: the parameter's shards in the model's checkpoint.
        """

    @abstractmethod
    def device_state(self) -> Iterable[Tensor]:
        """Main weights and state that the rule allocated on the device."""

    @property
    def num_windows(self) -> int:
        """Windows in which an update passes through host memory; 0: none."""
        return 0

    def describe(self) -> str | None:
        """Place and implementation of the update, in words, where a run says so at its start."""
        return None


MakeRule: TypeAlias = Callable[[Sequence[Share], Sequence[ReplicaRanges]], UpdateRule]
"""Makes a rule of this rank's shares, and of the division of all its parameters, in the same order on all replicas."""
