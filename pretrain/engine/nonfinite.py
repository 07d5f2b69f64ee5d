"""Find the parameters and ranks with gradients that are not finite. Run only in a step that has some."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor, nn

from megamem.model import MemoryGPTModel
from parallel.groups import ParallelGroups
from pretrain.engine.chunks import unwrap
from pretrain.engine.tables.row_gradients import row_gradient_of

NAMES_PER_RANK = 3
RANKS_IN_WORDS = 4


@dataclass(frozen=True)
class NonFinite:
    """Parameters of one rank with gradients that are not finite.

    Attributes:
        rank, host: number of the rank, and its machine.
        stage: its pipeline stage.
        names: the first few parameters.
        num_parameters: the number of all of them.
        of: parameters of the rank.
    """

    rank: int
    host: str
    stage: int
    names: tuple[str, ...]
    num_parameters: int
    of: int

    def __str__(self) -> str:
        more = f" and {self.num_parameters - len(self.names)} more" if self.num_parameters > len(self.names) else ""
        return (
            f"rank {self.rank} ({self.host}, stage {self.stage}): {', '.join(self.names)}{more} "
            f"({self.num_parameters} of {self.of} parameters)"
        )


def find_non_finite(chunks: Sequence[DistributedDataParallel], groups: ParallelGroups) -> tuple[NonFinite, ...]:
    """Findings of all ranks that have such gradients, by rank, on every rank. Collective.

    A rank looks at its own gradients, and, in the share that it steps, at the sum over replicas. So the rank that made
    them is among those that are named, beside the ranks that own the sum.
    """
    mine: list[str] = []
    count = 0
    for chunk in chunks:
        for name, parameter in named_globally(unwrap(chunk)):
            rows = row_gradient_of(parameter)
            gradient: Tensor | None = getattr(parameter, "main_grad", None) if rows is None else rows.sums
            if gradient is not None:
                count += 1
                if gradient.numel() and not _is_finite(gradient):
                    mine.append(name)
    found = NonFinite(
        groups.rank, socket.gethostname(), groups.pipeline_rank, tuple(mine[:NAMES_PER_RANK]), len(mine), count
    )
    of_all: list[NonFinite | None] = [None] * groups.world_size
    dist.all_gather_object(of_all, found)
    return tuple(of_rank for of_rank in of_all if of_rank is not None and of_rank.names)


def _is_finite(gradient: Tensor) -> bool:
    # A table's gradient has no room for a mask beside it; both ends of a range are NaN if any element is.
    ends = torch.stack(torch.aminmax(gradient))
    # Host sync: only in a step that is skipped.
    return bool(torch.isfinite(ends).all())


def describe_non_finite(found: Sequence[NonFinite]) -> str:
    """Parameters with gradients that are not finite on the first few ranks, in words."""
    if not found:
        return "the gradients are finite, but the loss is not, or a sum of squares is too large"
    more = f"; and {len(found) - RANKS_IN_WORDS} ranks more" if len(found) > RANKS_IN_WORDS else ""
    return f"not finite are gradients on {'; '.join(map(str, found[:RANKS_IN_WORDS]))}{more}"


def named_globally(model: MemoryGPTModel) -> Iterator[tuple[str, nn.Parameter]]:
    """A chunk's parameters, by names whose blocks count from the model's first one."""
    blocks = {
        f"{prefix}.": f"{prefix.rpartition('.')[0]}.{module.layer_number - 1}."
        for prefix, module in model.named_modules()
        if prefix.rpartition(".")[0] == "decoder.layers"
    }
    for name, parameter in model.named_parameters():
        local = ".".join(name.split(".")[:3]) + "."
        yield (blocks[local] + name.removeprefix(local) if local in blocks else name), parameter
