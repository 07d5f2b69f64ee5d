"""Seconds of an optimizer step on given hardware, in closed formulas: an estimate, part by part.

Products of matrices run at a share of the peak, streams and gathers at a share of the memory's bandwidth, messages at a
share of a link's. Work that overlaps other work counts only for the time by which it lasts longer, and `assumptions`
says what is taken to overlap. `configs/hardware` says which of these shares are assumed; `megamem study bench hardware`
measures them.

Legend: m microbatches, P stages.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from megamem.config.model import ModelConfig
from megamem.parameters.trained_part import Trained
from pretrain.config.overlap import memory_runs_beside
from pretrain.config.schema import RunConfig
from pretrain.planning.bytes.row_bytes import replica_bytes
from pretrain.planning.bytes.weights import reduced_tables, trained_dense
from pretrain.planning.counts.formulas import training_flops_per_token
from pretrain.planning.counts.pipeline_stages import Division, Stage, stages_of
from pretrain.planning.seconds.exchange_seconds import near_and_far
from pretrain.planning.seconds.hardware import Hardware
from pretrain.planning.seconds.microbatch_seconds import microbatch_seconds
from pretrain.planning.seconds.time_parts import REMEDIES, TimePart
from pretrain.planning.seconds.traffic import lookup_bytes_of_ways
from pretrain.planning.seconds.update_seconds import seconds_after_backward


@dataclass(frozen=True)
class SentBytes:
    """Bytes that one rank of a stage sends per optimizer step, to its own node and to others.

    Attributes:
        exchange: bytes of lookups.
        tables: reductions and gathers of tables.
        dense: reductions and gathers of all other weights.
    """

    exchange: tuple[float, float]
    tables: tuple[float, float]
    dense: tuple[float, float]


@dataclass(frozen=True)
class StepTime:
    """An estimated step of a run.

    Attributes:
        by_part: seconds of the slowest stage; they add up to the step.
        tokens_per_s: tokens of all ranks per second.
        mfu: model FLOPs (without recomputation) over the peak of all GPUs.
        sent: bytes that a rank of each stage sends.
        slowest_stage: number of the stage that `by_part` is of.
    """

    by_part: dict[TimePart, float]
    tokens_per_s: float
    mfu: float
    sent: tuple[SentBytes, ...]
    slowest_stage: int

    @property
    def total_s(self) -> float:
        return sum(self.by_part.values())

    @property
    def memory_s(self) -> float:
        """Seconds of the step that the memory takes."""
        return sum(seconds for part, seconds in self.by_part.items() if part.startswith("memory: "))

    @property
    def memory_costs(self) -> list[tuple[TimePart, float, str]]:
        """The three largest parts of the memory's cost, with seconds and what would lessen them."""
        own = [(part, self.by_part[part], words) for part, words in REMEDIES.items() if self.by_part[part] > 0]
        return sorted(own, key=lambda item: -item[1])[:3]


def step_time(config: RunConfig, num_ranks: int, hardware: Hardware) -> StepTime:
    """The estimate for a configuration that is valid on so many ranks."""
    division = Division.of(config, num_ranks)
    stages = stages_of(config)
    passes = [microbatch_seconds(config, stage, division, hardware) for stage in stages]
    slowest = max(range(len(stages)), key=lambda index: sum(passes[index].values()))
    per_microbatch, stage = passes[slowest], stages[slowest]
    microbatch_s = sum(per_microbatch.values())
    m, layout = division.num_microbatches, config.parallel
    parts = {part: m * seconds for part, seconds in per_microbatch.items()}
    parts[TimePart.BUBBLE] = (layout.pipeline - 1) / layout.virtual_pipeline * microbatch_s
    parts |= seconds_after_backward(config, stage, division, hardware, microbatch_s)
    step_s = sum(parts.values())
    tokens = config.train.tokens_per_step
    flops = _model_flops_per_token(config.model, config.train.sequence_length, config.optimizer.trained) * tokens
    return StepTime(
        by_part={part: parts.get(part, 0.0) for part in TimePart},
        tokens_per_s=tokens / step_s,
        mfu=flops / (step_s * num_ranks * hardware.peak_bf16_tflops * 1e12),
        sent=tuple(_sent(config, each, division, hardware) for each in stages),
        slowest_stage=slowest,
    )


@lru_cache(maxsize=16)
def _model_flops_per_token(model: ModelConfig, sequence_length: int, trained: Trained) -> float:
    return training_flops_per_token(model, sequence_length, trained)


def assumptions(config: RunConfig, stage: Stage, hardware: Hardware) -> tuple[str, ...]:
    """Sentences that say what the estimate of a stage takes to run beside other work, and how its rows are read."""
    layout, memories = config.parallel, stage.blocks.memories
    said = []
    if memories and layout.memory > 1:
        beside = stage.blocks.beside if layout.overlap_memory else 0
        said.append(f"exchanges of {beside} of {memories} memories run beside the products of their feed-forwards")
    if memories and memory_runs_beside(config):
        share = layout.gradient_sm_share
        said.append(
            "backward's exchanges also run beside gradients of tables"
            if share == 1
            else f"backward's exchanges and products run beside gradients of tables, which have {100 * share:g} % of the "
            f"multiprocessors and reach their bandwidth with {100 * hardware.row_sm_share:g} %"
        )
    if memories:
        said.append("all other kernels of a memory run alone")
    for on, key, work, where in (
        (
            layout.overlap_grad_reduce,
            "overlap_grad_reduce",
            "reductions",
            "the last backward pass, each when it is due",
        ),
        (
            layout.overlap_param_gather,
            "overlap_param_gather",
            "gathers",
            "the next forward pass, each until it is needed",
        ),
    ):
        said.append(f"{work} run beside {where}" if on else f"{work} run alone (parallel.{key} is false)")
    if memories:
        skew = f"by Zipf's law with {hardware.row_skew:g}" if hardware.row_skew else "evenly"
        said.append(f"rows of tables are read {skew}")
    return (*said, "collectives of tensor and context parallelism, and messages between stages, run alone")


def _exchanged(config: RunConfig, stage: Stage, division: Division, hardware: Hardware) -> tuple[float, float]:
    """Bytes that a rank of a stage sends per step for its lookups, to its own node and to others."""
    group = config.parallel.memory
    ways = lookup_bytes_of_ways(config, stage, division)
    parts = [
        near_and_far(sum(way.direct for way in ways), group, hardware),
        near_and_far(sum(way.meeting for way in ways), config.parallel.memory_columns, hardware),
    ]
    gathered = sum(way.gathered for way in ways)
    # A ring crosses between nodes once per node, whose ranks share their adapters.
    crossing = gathered / hardware.gpus_per_node if group > hardware.gpus_per_node else 0.0
    near, far = (sum(both) for both in zip((gathered - crossing, crossing), *parts, strict=True))
    return division.num_microbatches * near, division.num_microbatches * far


def _sent(config: RunConfig, stage: Stage, division: Division, hardware: Hardware) -> SentBytes:
    layout, width = config.parallel, 4 + config.train.element_bytes

    def ring(weights: float, size: int, stride: int, more: float = 0.0) -> tuple[float, float]:
        sent = weights * width * (size - 1) / size + more
        in_node = max(1, min(size, hardware.gpus_per_node // stride))
        far = sent / in_node if size > in_node else 0.0
        return sent - far, far

    return SentBytes(
        exchange=_exchanged(config, stage, division, hardware),
        tables=ring(
            reduced_tables(config, stage),
            division.table_replicas,
            layout.memory,
            replica_bytes(config, stage, division),
        ),
        dense=ring(trained_dense(config, stage), division.replicas * layout.context, layout.tensor),
    )
