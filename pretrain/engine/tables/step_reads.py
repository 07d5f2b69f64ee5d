"""Rows that a step reads, known before it runs: ids of its tokens, of which each rank of a pipeline stage reads a share.

All ranks of a memory group look up the tokens of all of them, and replicas update the rows that any of them has read, so each
needs all ids. A rank reads its share of the samples from the data set, the stage exchanges ids and positions, 8 bytes per
token, and the hashes are computed on the device.

Legend: n ranks of the stage, k samples of a share, s tokens of a sample.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megamem.model import MemoryGPTModel
from parallel.groups import ParallelGroups
from pretrain.data.loader import SampleSource


@dataclass(frozen=True)
class StepReads:
    """Reads ahead of a step for the tables of a rank's bare chunks.

    Attributes:
        data: samples by their numbers.
    """

    data: SampleSource
    chunks: Sequence[MemoryGPTModel]
    groups: ParallelGroups

    @property
    def ranks(self) -> dist.ProcessGroup:
        """The ranks of the stage."""
        return self.groups.megatron.tp_dp_cp

    def own_ids(self, samples: range) -> Tensor:
        """[2, k, s] int32 in host memory, token ids and positions of this rank's share of the samples; it may be called
        in a thread. Shares are equally large: the last sample stands in for those that are not there."""
        share = -(-len(samples) // self.ranks.size())
        first = self.ranks.rank() * share
        read = [self.data[samples[min(number, len(samples) - 1)]] for number in range(first, first + share)]
        ids = [torch.stack([sample[name] for sample in read]) for name in ("tokens", "position_ids")]
        return torch.stack(ids).to(torch.int32)

    def exchanged(self, own: Tensor) -> Tensor:
        """[2, n k, s] int32 of all shares, for this rank's on the device. Collective over the stage."""
        size = self.ranks.size()
        gathered = own.new_empty(size * len(own), *own.shape[1:])
        dist.all_gather_into_tensor(gathered, own, group=self.ranks)
        return gathered.view(size, *own.shape).transpose(0, 1).flatten(1, 2)

    def rows(self, ids: Tensor) -> Mapping[int, Tensor]:
        """Rows of this rank's banks, by index and as often as they come, that tokens read; it may be called in a thread."""
        tokens, positions = ids.to(torch.int64)
        return {bank: rows for chunk in self.chunks for bank, rows in chunk.rows_read(tokens, positions).items()}
