"""The bytes that a rank holds from the first step to the last, by closed formulas."""

from __future__ import annotations

from dataclasses import dataclass

from pretrain.config.schema import RunConfig
from pretrain.costs.formulas import count_parameters

_MAIN_WEIGHT = 4
_MOMENTS = 4 + 4
_GRADIENT = 4


@dataclass(frozen=True)
class HeldBytes:
    """Bytes on a rank's device, the mean over pipeline stages; activations and buffers come on top.

    Attributes:
        model: weights and fp32 gradients of its part of the model.
        optimizer: its share of main weights and moments.
    """

    model: float
    optimizer: float

    @property
    def total(self) -> float:
        return self.model + self.optimizer


def held_bytes(config: RunConfig, num_ranks: int) -> HeldBytes:
    """What a rank of `num_ranks` holds; without `model.vocab_size` embeddings are not counted.

    Tables and experts are split over the G = `parallel.memory` ranks of a group, the rest over tensor parallelism, and
    all over the stages: (e + 4) ((dense / tensor + split / G) / pipeline), with e bytes per weight. The optimizer's
    state is split over all ranks: 8 bytes per parameter of moments, and 4 more of main weights beside bf16 ones.
    """
    counts, layout, train = count_parameters(config.model), config.parallel, config.train
    split = counts.tables + counts.experts
    per_rank = ((counts.total - split) / layout.tensor + split / layout.memory) / layout.pipeline
    stepped = counts.total - (counts.tables if config.optimizer.value_offload == "cpu" else 0)
    state = _MOMENTS + (_MAIN_WEIGHT if train.precision == "bf16" else 0)
    return HeldBytes(per_rank * (train.element_bytes + _GRADIENT), stepped * state / num_ranks)
