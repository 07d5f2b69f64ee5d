"""Time of a training step by part: puts the marks of `lab.bench.timeline` around the parts of a built run.

Nothing in the run knows of them, and they are taken away again. Phases come from Megatron's timers (`config.timers`),
from the gradient reduction and from the optimizer's methods; parts of the memory from the layers' methods, their
kernels, the exchange and the tables' optimizer and gradient buffers.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from enum import StrEnum
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from megatron.core.distributed import DistributedDataParallel
from torch import nn

from kernels.common.main_grad import MainGradient
from kernels.common.table_gradient import gradient_of
from kernels.select import Kernels, assemble
from lab.bench.device_activity import DeviceActivity, device_activity
from lab.bench.part_costs import Part
from lab.bench.synthetic_run import SyntheticRun
from lab.bench.timeline import RangeTimes, Timeline
from megamem.banks.bank import Bank
from megamem.blocks.memory_sites import FfnWithMemory
from megamem.chunk.side_stream import SideStream
from megamem.layers.layer import MemoryLayer
from megamem.layers.retrieval import RetrievalLayer
from parallel.exchange import Exchange
from parallel.groups import ParallelGroups, barrier
from pretrain.config.schema import RunConfig
from pretrain.engine.chunks import unwrap
from pretrain.engine.optimizer import MemoryOptimizer
from pretrain.engine.session import relaid


class StepPhase(StrEnum):
    """A phase of a step, in the order of a report. Recomputation belongs to backward, zeroing gradients to the rest."""

    FORWARD = "forward"
    BACKWARD = "backward"
    MESSAGES = "pipeline messages"
    REDUCTION = "gradient reduction"
    CLIPPING = "norm and clipping"
    OPTIMIZER = "optimizer"
    REST = "rest"


def profiled_steps(
    chunks: Sequence[DistributedDataParallel],
    optimizer: MemoryOptimizer,
    timeline: Timeline,
    step: Callable[[], object],
    count: int,
) -> RangeTimes:
    """Times of `count` steps, each of which one call of `step` takes. Waits for the device after every step.

    Memories that run on a stream of their own (`parallel.overlap_memory`) run on the common one meanwhile: times of two
    streams would overlap.
    """
    sums = RangeTimes()
    with ExitStack() as undo:
        hooks = _Hooks(undo, timeline)
        hooks.add_phases(chunks, optimizer)
        for chunk in chunks:
            hooks.add_memory(chunk)
        if unwrap(chunks[0]).model_config.memory is not None:
            hooks.add_tables(chunks, optimizer)
            hooks.add_exchange()
        for _ in range(count):
            timeline.begin(StepPhase.REST)
            step()
            sums.add(timeline.end())
    return sums


@dataclass(frozen=True)
class StepTimes:
    """One configuration's optimizer steps.

    Attributes:
        step_s: seconds per step without marks, one figure per round.
        marked: the steps with marks, of all rounds, on this rank.
        activity: work of this rank's GPU in one step without marks; none on a CPU.
    """

    step_s: list[float]
    marked: RangeTimes
    activity: list[DeviceActivity] = field(default_factory=list)


def turns(configs: Mapping[str, RunConfig], *, alone: bool = False) -> list[dict[str, RunConfig]]:
    """Sets that take turns: the configurations of a layout, or, where memory is short, each one `alone`."""
    found: dict[object, dict[str, RunConfig]] = {}
    for name, config in configs.items():
        found.setdefault(name if alone else config.parallel, {})[name] = config
    return list(found.values())


def measure_turns(
    sets: Iterable[Mapping[str, RunConfig]],
    groups: ParallelGroups,
    *,
    rounds: int,
    steps: int,
    with_marks: bool = True,
) -> Iterator[dict[str, StepTimes]]:
    """Measure one set of configurations after the other, and forget its models. Collective.

    Args:
        sets: configurations of one layout each, by name (`turns`); all of a set are in memory at once.
        groups: this rank's, of the first set's layout.
        rounds: figures per configuration.
        steps: optimizer steps behind each.
        with_marks: False leaves the marked steps out.
    """
    layout = None
    for configs in sets:
        first = next(iter(configs.values()))
        if layout not in (None, first.parallel):
            groups = relaid(first, groups)
        layout = first.parallel
        measured = measure_steps(list(configs.values()), groups, rounds=rounds, steps=steps, with_marks=with_marks)
        # Modules and their hooks refer to each other.
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        yield dict(zip(configs, measured, strict=True))


def measure_steps(
    configs: Sequence[RunConfig], groups: ParallelGroups, *, rounds: int, steps: int, with_marks: bool = True
) -> list[StepTimes]:
    """Take turns, so that a change of the machine's load meets all configurations. Collective.

    Every round times `steps` of each configuration without marks, and then as many with them.
    """
    runs = [SyntheticRun(config, groups) for config in configs]
    timeline = Timeline(groups.device)
    times = [StepTimes([], RangeTimes()) for _ in runs]
    for run in runs:
        run.steps(1)
    for _ in range(rounds):
        for run, of_run in zip(runs, times, strict=True):
            of_run.step_s.append(run.steps(steps) / steps)
            if with_marks:
                barrier()
                of_run.marked.add(profiled_steps(run.chunks, run.optimizer, timeline, run.step, steps))
    for run, of_run in zip(runs, times, strict=True):
        if with_marks and torch.cuda.is_initialized():
            of_run.activity.append(device_activity(run.step))
        run.cut_graphs()
    return times


class _Hooks:
    """Replaces attributes of living objects, which the exit stack puts back."""

    def __init__(self, undo: ExitStack, timeline: Timeline) -> None:
        self._undo, self._timeline = undo, timeline

    def add_phases(self, chunks: Sequence[DistributedDataParallel], optimizer: MemoryOptimizer) -> None:
        """Mark forward, backward, messages, reduction, clipping and optimizer."""
        # One object for all chunks of a rank.
        config = unwrap(chunks[0]).config
        self._set(config, "timers", _megatron_timers(self._timeline))
        self._phase(config, "finalize_model_grads_func", StepPhase.REDUCTION)
        for name in ("prepare_grads", "gradient_norms", "clip"):
            self._phase(optimizer, name, StepPhase.CLIPPING)
        self._phase(optimizer, "step_with_ready_grads", StepPhase.OPTIMIZER)

    def add_memory(self, chunk: nn.Module) -> None:
        """The memory layers of a chunk, the banks that they read, and what they do once per step."""
        model = unwrap(chunk)
        if model.memory_layers:
            self._part(model, "begin_step", Part.SINGULAR_VECTORS)
        for bank in model.banks.values():
            assert isinstance(bank, Bank)
            self._set(bank, "kernels", self._marked_kernels(bank.kernels))
            for table in bank.parameters():
                gradient = gradient_of(table)
                if isinstance(gradient, MainGradient):
                    self._set(gradient, "stream", None)
        for layer in model.memory_layers:
            self._add_layer(layer)
        for module in model.modules():
            if isinstance(module, FfnWithMemory):
                self._set(module, "side_stream", SideStream(None))

    def add_tables(self, chunks: Sequence[DistributedDataParallel], optimizer: MemoryOptimizer) -> None:
        """Mark the costs of tables (and experts, if there are any) outside of forward and backward."""
        for chunk in chunks:
            for buffer in chunk.expert_parallel_buffers:
                self._part(buffer, "reset", Part.ZEROING)
                self._part(buffer, "scale_gradients", Part.TABLE_REDUCTION)
            for bucket_group in chunk.expert_parallel_bucket_groups:
                self._part(bucket_group, "finish_grad_sync", Part.TABLE_REDUCTION)
        for of_tables in optimizer.chained_optimizers[1:]:
            self._part(of_tables, "step_with_ready_grads", Part.TABLE_STEP)

    def add_exchange(self) -> None:
        """Mark what ranks that share tables send each other."""
        # On the class, because every lookup makes an exchange of its own.
        for name in ("gather", "to_columns", "to_tokens"):
            self._part(Exchange, name, Part.EXCHANGE)

    def _add_layer(self, layer: MemoryLayer) -> None:
        self._set(layer, "kernels", self._marked_kernels(layer.kernels))
        parts = {"forward": Part.OTHER}
        if isinstance(layer, RetrievalLayer):
            parts |= {"retrieve": Part.SCORES, "key_scores": Part.KEYS}
            parts |= {"pre_input": Part.PROJECTIONS, "project": Part.PROJECTIONS}
            self._part(layer, "locate", Part.ROWS)
        differentiable = self._timeline.differentiable
        for name, part in parts.items():
            self._set(layer, name, differentiable(part, getattr(layer, name)))
        reads = {name: differentiable(Part.WEIGHTING, getattr(layer.lookup, name)) for name in ("read", "read_heads")}
        self._set(layer, "lookup", SimpleNamespace(**reads))

    def _marked_kernels(self, kernels: Kernels) -> Kernels:
        """Kernels with marks; a naive gather has its table gradient inside, where no mark reaches."""
        mark = self._timeline
        accumulate = mark.part(Part.TABLE_GRADIENT)(kernels.segment_accumulate)
        made = assemble(kernels.implementations, {**kernels.raw, "segment_accumulate": accumulate})
        return replace(
            made,
            gather_sum=mark.differentiable(Part.GATHER_SUM, made.gather_sum),
            gather_dot=mark.differentiable(Part.GATHER_DOT, made.gather_dot),
            tucker_topk=mark.part(Part.SELECTION)(made.tucker_topk),
            product_topk=mark.part(Part.SELECTION)(made.product_topk),
        )

    def _phase(self, owner: Any, name: str, phase: str) -> None:
        self._set(owner, name, self._timeline.phase(phase)(getattr(owner, name)))

    def _part(self, owner: Any, name: str, part: str) -> None:
        self._set(owner, name, self._timeline.part(part)(getattr(owner, name)))

    def _set(self, owner: Any, name: str, value: Any) -> None:
        self._undo.enter_context(patch.object(owner, name, value))


def _megatron_timers(timeline: Timeline) -> Callable[..., SimpleNamespace]:
    """Timers of Megatron's schedules (`config.timers`): they say when they compute, and when they send."""

    def timer(name: str, log_level: int = 0) -> SimpleNamespace:
        phase = {"forward-compute": StepPhase.FORWARD, "backward-compute": StepPhase.BACKWARD}.get(name)
        if name.endswith(("-send", "-recv")):
            phase = StepPhase.MESSAGES
        if phase is None:
            return SimpleNamespace(start=lambda **_: None, stop=lambda **_: None)
        return SimpleNamespace(start=lambda **_: timeline.enter_phase(phase), stop=lambda **_: timeline.leave_phase())

    return timer
