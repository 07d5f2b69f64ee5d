"""`megamem bench updates`: training speed and memory of every way to update tables, by the size of the tables."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

import torch

from lab.bench.memory_in_use import begin_peak, free_bytes, peak_bytes
from lab.bench.synthetic_run import SyntheticRun
from lab.pages import Page
from parallel.groups import ParallelGroups
from pretrain.config.schema import RunConfig
from pretrain.engine.session import session
from pretrain.planning.bytes.memory import stage_bytes
from pretrain.planning.bytes.memory_parts import MemoryPart, StageBytes
from pretrain.planning.counts.formulas import count_parameters
from tools.common.drawing import model_colours, svg
from tools.parameter_table import markdown_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SPARE_BYTES = 2**31
"""Bytes left for everybody else."""
_OF_TABLES = (MemoryPart.TABLES, MemoryPart.TABLE_GRADIENTS, MemoryPart.TABLE_OPTIMIZER)


@dataclass(frozen=True)
class Measured:
    """Observations of a way at a size.

    Attributes:
        tokens_per_s: a figure per round.
        peak_bytes: most bytes of a step, with what is held, above what there was before the model.
    """

    tokens_per_s: list[float]
    peak_bytes: int


@dataclass(frozen=True)
class Case:
    """A way to update tables of a size.

    Attributes:
        num_table_parameters: table parameters of the model.
        planned: its bytes by the closed formulas.
        measured: None where it has no room.
    """

    num_table_parameters: int
    planned: StageBytes
    measured: Measured | None

    @property
    def table_bytes(self) -> float:
        """Bytes of tables, of their gradients and of their state, per parameter."""
        return sum(self.planned.by_part.get(part, 0.0) for part in _OF_TABLES) / self.num_table_parameters

    @property
    def bytes(self) -> float:
        """Bytes at the peak of a step, by formula where it was not run."""
        return self.planned.total if self.measured is None else self.measured.peak_bytes


def bench_updates_rank(
    sizes: Sequence[Mapping[str, RunConfig]], rounds: int, steps: int, page: Page | None, command: str
) -> None:
    """Measure on the one rank, print a line per size and way, and write the report after every size.

    Args:
        sizes: the configurations of each, by the names of their ways.
        page: page for the report; None: it is only printed.
        command: command that makes the report again.
    """
    done: list[dict[str, Case]] = []
    config = next(iter(sizes[0].values()))
    with session(config) as groups:
        for ways in sizes:
            done.append(measure_size(ways, groups, rounds, steps))
            for name, case in done[-1].items():
                print(
                    f"{case.num_table_parameters / 1e6:,.1f}M table parameters, {name}: {_describe(case)}", flush=True
                )
            if page is not None:
                page.write(report(config, done, rounds, steps, page.plot.name, command), svg(plot(done)))
    print(
        f"\n{tables(done)}\n\n{describe_bytes(done[-1])}"
        + (f"\n\nreport: {page.path}\nplot: {page.plot}" if page else ""),
        flush=True,
    )


def measure_size(ways: Mapping[str, RunConfig], groups: ParallelGroups, rounds: int, steps: int) -> dict[str, Case]:
    """Measure the ways that have room, in turns where all of these have room at once."""
    on_gpu = groups.device.type == "cuda"
    planned = {name: stage_bytes(config, 1, on_gpu=on_gpu)[0] for name, config in ways.items()}
    free = free_bytes(groups.device) - _SPARE_BYTES
    fitting = [name for name in ways if planned[name].total <= free]
    at_once = sum(planned[name].total for name in fitting) <= free
    measured: dict[str, Measured] = {}
    for turn in [fitting] if at_once else [[name] for name in fitting]:
        measured |= _measure({name: ways[name] for name in turn}, groups, rounds, steps)
        # Modules and their hooks refer to each other.
        gc.collect()
    return {
        name: Case(count_parameters(config.model).tables, planned[name], measured.get(name))
        for name, config in ways.items()
    }


def _measure(configs: Mapping[str, RunConfig], groups: ParallelGroups, rounds: int, steps: int) -> dict[str, Measured]:
    runs: dict[str, SyntheticRun] = {}
    peaks: dict[str, int] = {}
    speeds: dict[str, list[float]] = {name: [] for name in configs}
    for name, config in configs.items():
        before = begin_peak(groups.device)
        runs[name] = SyntheticRun(config, groups)
        # The optimizer's state and what libraries keep are there after the first step.
        runs[name].steps(1)
        gc.collect()
        begin_peak(groups.device)
        runs[name].steps(1)
        peaks[name] = peak_bytes(groups.device) - before
    for _ in range(rounds):
        for name, run in runs.items():
            speeds[name].append(configs[name].train.tokens_per_step * steps / run.steps(steps))
    for run in runs.values():
        run.cut_graphs()
    return {name: Measured(speeds[name], peaks[name]) for name in configs}


def _describe(case: Case) -> str:
    if case.measured is None:
        return f"no room for {case.planned.total / 1e9:.1f} GB"
    speeds = case.measured.tokens_per_s
    return (
        f"{median(speeds):,.0f} tokens/s ({min(speeds):,.0f} .. {max(speeds):,.0f}), "
        f"{case.measured.peak_bytes / 1e9:.2f} GB at the peak of a step"
    )


def tables(done: Sequence[Mapping[str, Case]]) -> str:
    """Markdown: a row per size, with the speed and the memory of each way."""
    ways = list(done[0])
    head = (
        "table parameters",
        *(f"tokens/s: {way}" for way in ways),
        *(f"GB: {way}" for way in ways),
    )
    return markdown_table(head, (_cells(cases) for cases in done))


def _cells(cases: Mapping[str, Case]) -> list[str]:
    (size,) = {case.num_table_parameters for case in cases.values()}
    speeds = [
        "no room" if case.measured is None else f"{median(case.measured.tokens_per_s):,.0f}" for case in cases.values()
    ]
    memory = [
        f"({case.bytes / 1e9:.2f})" if case.measured is None else f"{case.bytes / 1e9:.2f}" for case in cases.values()
    ]
    return [f"{size / 1e6:,.1f}M", *speeds, *memory]


def describe_bytes(cases: Mapping[str, Case]) -> str:
    """A sentence on what a table's parameter takes in each way."""
    each = ", ".join(f"{name} {case.table_bytes:.2f}" for name, case in cases.items())
    (size,) = {case.num_table_parameters for case in cases.values()}
    return f"Bytes per table parameter at {size / 1e6:,.1f}M, of weights, gradients and state of tables by formula: {each}."


def report(
    config: RunConfig, done: Sequence[Mapping[str, Case]], rounds: int, steps: int, plot_name: str, command: str
) -> str:
    """The part of a page between its marks."""
    train = config.train
    return f"""\
{config.name}, {train.precision}, {train.tokens_per_step:,} tokens per step on one rank of {torch.get_num_threads()} threads: medians of {rounds} rounds \
of {steps} steps, in turns. GB are those of a step's peak, resident above what there was before the model, in brackets by formula where there \
was no room.

{tables(done)}

{describe_bytes(done[-1])}

![Speed and memory against table parameters]({plot_name})

```
{command}
```
"""


def plot(done: Sequence[Mapping[str, Case]]) -> Figure:
    """Plot tokens per second on the left, and bytes on the right, against table parameters; hollow dots are formulas."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    speed, memory = figure.subplots(1, 2)
    for axes, label in ((speed, "tokens per second"), (memory, "GB at the peak of a step")):
        model_colours(axes)
        axes.set_xscale("log")
        axes.set_xlabel("table parameters")
        axes.set_ylabel(label)
        axes.grid(alpha=0.4)
    memory.set_yscale("log")
    for way in done[0]:
        cases = [cases[way] for cases in done]
        run = [case for case in cases if case.measured is not None]
        speeds = [(case.num_table_parameters, median(case.measured.tokens_per_s)) for case in run if case.measured]
        (line,) = speed.plot(*zip(*speeds, strict=True), marker="o") if speeds else speed.plot([], [])
        memory.plot([case.num_table_parameters for case in cases], [case.bytes / 1e9 for case in cases], label=way)
        for case in cases:
            fill = line.get_color() if case.measured is not None else "white"
            memory.plot(case.num_table_parameters, case.bytes / 1e9, "o", color=line.get_color(), markerfacecolor=fill)
    speed.set_ylim(bottom=0)
    figure.legend(loc="outside right upper", frameon=False)
    return figure
