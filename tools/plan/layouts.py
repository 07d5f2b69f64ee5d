"""The layouts that a model can have on so many GPUs, each with what it would hold and take."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Literal

from pretrain.config.graphs import graph_problems
from pretrain.config.keys import ineffective_fields
from pretrain.config.layout_rules import layout_problems
from pretrain.config.schema import RunConfig
from pretrain.config.settled import settled
from pretrain.config.updates import ADAMW, table_update
from pretrain.config.validate import batch_problems
from pretrain.planning.bytes.memory import stage_bytes
from pretrain.planning.bytes.memory_parts import MemoryPart, StageBytes, total
from pretrain.planning.seconds.hardware import Hardware
from pretrain.planning.seconds.timing import StepTime, step_time

_LONG_SEQUENCE_TOKENS = 16_384
_MICRO_BATCHES = (1, 2, 4, 8)
# More parts of rows move less still, but the fullest part's share of skewed reads grows with their number.
_ROW_PARTS = (1, 2, 4)
_MOST_VIRTUAL = 8
_STREAMS_OF_BLOCKS = (None, 2, 4)
"""Blocks whose residual streams are kept once, of those that are tried."""


@dataclass(frozen=True)
class Estimate:
    """One layout: its configuration, bytes of a rank of every stage, and its step.

    Attributes:
        counted: device bytes by part of a rank of the fullest stage at the peak of a step, if a dry run counted them.
    """

    config: RunConfig
    stages: tuple[StageBytes, ...]
    time: StepTime
    counted: Mapping[MemoryPart, float] | None = None

    @property
    def fullest_stage(self) -> int:
        return max(range(len(self.stages)), key=lambda index: self.stages[index].total)

    @property
    def predicted_bytes(self) -> float:
        """Device bytes of a rank of the fullest stage, at the peak of a step."""
        return self.stages[self.fullest_stage].total

    @property
    def peak_bytes(self) -> float:
        """Device bytes of a rank of the fullest stage at the peak of a step: counted by a dry run, or predicted."""
        return self.predicted_bytes if self.counted is None else total(self.counted)

    @property
    def host_bytes(self) -> float:
        """Host bytes of the rank that takes most of them while it saves."""
        return max(stage.host for stage in self.stages)

    def fits(self, hardware: Hardware) -> bool:
        """Tell whether device and host memory suffice."""
        return self.peak_bytes <= hardware.usable_bytes and self.host_bytes <= hardware.host_bytes

    @property
    def days(self) -> float:
        """Days to the end of the run."""
        return self.time.total_s * self.config.train.num_steps / 86_400

    @property
    def overrides(self) -> dict[str, object]:
        """The keys that make this layout of any other of the model."""
        layout, train = self.config.parallel, self.config.train
        keys: dict[str, object] = {
            "parallel.tensor": layout.tensor,
            "parallel.pipeline": layout.pipeline,
            "parallel.context": layout.context,
            "parallel.memory": layout.memory,
            "train.micro_batch_size": train.micro_batch_size,
            "train.recompute": train.recompute,
            "train.recompute_streams": train.recompute_streams,
        }
        if layout.memory > 1 and self.config.model.memory is not None:
            keys["parallel.memory_rows"] = layout.memory_rows
        if layout.pipeline > 1:
            keys["parallel.virtual_pipeline"] = layout.virtual_pipeline
            keys["parallel.pipeline_layout"] = layout.pipeline_layout
        if self.config.model.memory is not None and table_update(self.config.optimizer) is ADAMW:
            keys["optimizer.value_offload"] = self.config.optimizer.value_offload
        # A file that says what nothing reads is refused: parallel.memory of a dense model.
        silent = {each.key for each in ineffective_fields(self.config)}
        return {key: value for key, value in keys.items() if key not in silent}


def estimate(config: RunConfig, num_ranks: int, hardware: Hardware) -> Estimate:
    """Estimate of a configuration that is valid on `num_ranks` ranks, with what a run settles."""
    config = settled(config)
    return Estimate(config, stage_bytes(config, num_ranks), step_time(config, num_ranks, hardware))


def estimates_of(layout: RunConfig, num_ranks: int, hardware: Hardware) -> list[Estimate]:
    """Estimates of a layout with every microbatch, recomputation and offloading that it can have."""
    return [
        estimate(varied, num_ranks, hardware)
        for varied in _variants(layout)
        if next(chain(batch_problems(varied, num_ranks), graph_problems(settled(varied))), None) is None
    ]


def possible_layouts(config: RunConfig, num_ranks: int, hardware: Hardware) -> Iterator[RunConfig]:
    """The configuration with every division of the model over `num_ranks` that it can have."""
    layers = config.model.num_layers
    contexts = [1, 2, 4, 8] if config.train.sequence_length >= _LONG_SEQUENCE_TOKENS else [config.parallel.context]
    for tensor in _divisors(hardware.gpus_per_node):
        for context in contexts:
            for pipeline in (size for size in _divisors(num_ranks) if size <= layers):
                if num_ranks % (tensor * context * pipeline):
                    continue
                virtuals = range(1, min(_MOST_VIRTUAL, layers // pipeline) + 1) if pipeline > 1 else [1]
                for virtual in virtuals:
                    own = config.parallel.pipeline == pipeline and config.parallel.virtual_pipeline == virtual
                    layout = replace(
                        config.parallel,
                        tensor=tensor,
                        context=context,
                        pipeline=pipeline,
                        virtual_pipeline=virtual,
                        pipeline_layout=config.parallel.pipeline_layout if own else None,
                        memory=1,
                        memory_rows=1,
                    )
                    if next(layout_problems(replace(config, parallel=layout), num_ranks), None) is not None:
                        continue
                    for memory, row_parts in _memory_groups(config, num_ranks // pipeline):
                        split = replace(config, parallel=replace(layout, memory=memory, memory_rows=row_parts))
                        if next(layout_problems(split, num_ranks), None) is None:
                            yield split


def _memory_groups(config: RunConfig, num_ranks: int) -> Iterator[tuple[int, int]]:
    """Sizes of the memory group on a stage's ranks, each with the parts that rows of tables are cut in."""
    has_tables, has_experts = config.model.memory is not None, config.model.moe is not None
    parts = sorted({*_ROW_PARTS, config.parallel.memory_rows}) if has_tables else [1]
    for memory in _divisors(num_ranks) if has_tables or has_experts else [1]:
        yield from ((memory, number) for number in parts if memory % number == 0)


def _variants(config: RunConfig) -> Iterator[RunConfig]:
    """Variants of a layout: microbatch, recomputation, where tables are stepped."""
    offloads: tuple[Literal["none", "cpu"], ...] = ("none",)
    if config.model.memory is not None and table_update(config.optimizer) is ADAMW:
        offloads = ("none", "cpu")
    # The core of attention alone keeps little more than its inputs, but where it has gathered those of other ranks.
    selective = config.parallel.context > 1
    recomputes: tuple[Literal["none", "selective", "full"], ...] = (
        ("none", "selective", "full") if selective else ("none", "full")
    )
    of_blocks = dict.fromkeys((*_STREAMS_OF_BLOCKS, config.train.recompute_streams))
    ways = [
        (recompute, most)
        for recompute in recomputes
        for most in of_blocks
        if most is None or (recompute != "full" and config.model.residual_streams is not None)
    ]
    for size in sorted({*_MICRO_BATCHES, config.train.micro_batch_size}):
        for recompute, most in ways:
            for offload in offloads:
                train = replace(config.train, micro_batch_size=size, recompute=recompute, recompute_streams=most)
                yield replace(config, train=train, optimizer=replace(config.optimizer, value_offload=offload))


_WORTH = 1.05


def recommended(found: Sequence[Estimate], hardware: Hardware) -> Estimate | None:
    """Layout of the smallest predicted peak that fits and whose step is within 5 % of the fastest's; None if nothing fits.

    Estimated seconds are no better than that, and free memory is what a run meets surprises with. Counted bytes say
    whether a layout fits; they are not compared with what is predicted of another.
    """
    fitting = [each for each in found if each.fits(hardware)]
    if not fitting:
        return None
    fastest = min(each.time.total_s for each in fitting)
    return min((e for e in fitting if e.time.total_s <= _WORTH * fastest), key=lambda each: each.predicted_bytes)


def all_estimates(config: RunConfig, num_ranks: int, hardware: Hardware) -> list[Estimate]:
    """Estimates of every layout, the fastest first."""
    found = [
        e for layout in possible_layouts(config, num_ranks, hardware) for e in estimates_of(layout, num_ranks, hardware)
    ]
    return sorted(found, key=lambda each: each.time.total_s)


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


_HELP = {
    MemoryPart.TABLES: "raise parallel.memory or parallel.pipeline",
    MemoryPart.TABLE_GRADIENTS: "raise parallel.memory or parallel.pipeline",
    MemoryPart.TABLE_OPTIMIZER: "use more GPUs, optimizer.value_offload: cpu or optimizer.tables: row_wise",
    MemoryPart.WEIGHTS: "raise parallel.tensor or parallel.pipeline",
    MemoryPart.GRADIENTS: "raise parallel.tensor or parallel.pipeline",
    MemoryPart.OPTIMIZER: "use more GPUs",
    MemoryPart.LOSS: "lower train.loss_chunk_tokens, or raise parallel.tensor",
}


def too_large(found: Estimate, hardware: Hardware) -> str:
    """Reason that a layout does not fit: the fullest stage's largest part, and what makes it smaller."""
    stage = found.stages[found.fullest_stage]
    if found.fits(replace(hardware, host_memory_gb=math.inf)):
        return (
            f"a rank would take {found.host_bytes / 1e9:,.1f} GB of host memory while it saves, and its share of a node's "
            f"is {hardware.host_bytes / 1e9:,.1f} GB: use more GPUs, optimizer.value_offload: none, or "
            "checkpoint.asynchronous: false"
        )
    by_part, said = (stage.by_part, "") if found.counted is None else (found.counted, ", as a dry run counts")
    part, num_bytes = max(by_part.items(), key=lambda item: item[1])
    help_ = _HELP.get(part, "use train.recompute: full or a smaller train.micro_batch_size, or raise parallel.tensor")
    return (
        f"a rank of stage {found.fullest_stage} would hold {found.peak_bytes / 1e9:,.1f} GB at its peak{said}, of which "
        f"{part} {num_bytes / 1e9:,.1f} GB, and a GPU has {hardware.usable_bytes / 1e9:,.1f} GB for tensors "
        f"({hardware.memory_gb:g} GB less {hardware.reserve_gb:g} GB in reserve): {help_}"
    )
