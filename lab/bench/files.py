"""`megamem bench files`: training with tables on the device, and in files of folders."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

import torch

from lab.bench.memory_in_use import begin_peak, free_bytes, mapped_bytes, peak_bytes
from lab.bench.synthetic_run import SyntheticRun
from lab.pages import wrapped
from parallel.groups import ParallelGroups
from pretrain.config.schema import RunConfig
from pretrain.engine.chunks import unwrap
from pretrain.engine.session import session
from pretrain.engine.tables.stored_tables import Waits
from pretrain.planning.bytes.memory import stage_bytes
from pretrain.planning.counts.formulas import count_parameters
from tools.parameter_table import markdown_table

_SPARE_BYTES = 2**31
"""Bytes left for everybody else."""


@dataclass(frozen=True)
class MeasuredPlace:
    """Observations of one place of the tables.

    Attributes:
        step_s: a figure per round.
        peak_bytes: bytes of a step above what there was before the model, without pages of files, which the system may take back.
        waits: seconds of a step for fetching, writing and waiting; None: tables are on the device.
        digest: sum over the tables after all steps, which is the same in every place.
    """

    step_s: list[float]
    peak_bytes: int
    waits: Waits | None
    digest: float


def bench_files_rank(
    config: RunConfig, on_device: RunConfig | None, places: Mapping[str, RunConfig], rounds: int, steps: int
) -> None:
    """Measure every place on the one rank, one after the other, and print.

    Args:
        config: configuration of any place.
        on_device: configuration with tables on the device, which comes first if it has room; None: it is left out.
        places: configurations with tables in files, by their folder.
    """
    found: dict[str, MeasuredPlace | None] = {}
    with session(config) as groups:
        if on_device is not None:
            planned = stage_bytes(on_device, 1, on_gpu=groups.on_gpu)[0].total
            fits = planned <= free_bytes(groups.device) - _SPARE_BYTES
            found["device"] = _measure(on_device, groups, rounds, steps) if fits else None
        for name, each in places.items():
            found[name] = _measure(each, groups, rounds, steps)
    digests = {each.digest for each in found.values() if each is not None}
    if len(digests) > 1:
        raise AssertionError("tables in files are not those on the device after the same steps")
    print(wrapped(report(config, found, rounds, steps)), flush=True)


def _measure(config: RunConfig, groups: ParallelGroups, rounds: int, steps: int) -> MeasuredPlace:
    before = begin_peak(groups.device) - mapped_bytes(groups.device)
    run = SyntheticRun(config, groups)
    # What libraries keep is there after the first step, and rows of a second one have been fetched ahead.
    run.steps(1)
    gc.collect()
    begin_peak(groups.device)
    run.steps(1)
    peak = peak_bytes(groups.device) - mapped_bytes(groups.device) - before
    if run.stored is not None:
        run.stored.waits = Waits()
    seconds = [run.steps(steps) / steps for _ in range(rounds)]
    waits = None
    if run.stored is not None:
        run.stored.settle()
        of_all = run.stored.waits
        num = rounds * steps
        waits = Waits(of_all.fetching_s / num, of_all.writing_s / num, of_all.waiting_s / num)
    digest = sum(
        float(bank.get_parameter("values").detach()[::997].double().sum())
        for chunk in run.chunks
        for bank in unwrap(chunk).own_banks
    )
    run.cut_graphs()
    del run
    # Modules and their hooks refer to each other.
    gc.collect()
    return MeasuredPlace(seconds, peak, waits, digest)


def report(config: RunConfig, found: Mapping[str, MeasuredPlace | None], rounds: int, steps: int) -> str:
    """The figures in markdown."""
    train, parameters = config.train, count_parameters(config.model).tables
    head = ("tables", "ms of a step", "fetching", "writing back", "waited", "hidden", "GB at the peak")
    rows = [_row(name, each) for name, each in found.items()]
    return f"""\
{config.name}, {train.precision}, {parameters / 1e9:.2f}B in tables, {train.tokens_per_step:,} random tokens per step on one rank of \
{torch.get_num_threads()} threads: medians of {rounds} rounds of {steps} steps (fastest to slowest). Fetching and writing back are ms per \
step of the thread, and hidden is the share of them that no step waited for.

{markdown_table(head, rows)}"""


def _row(name: str, each: MeasuredPlace | None) -> tuple[str, ...]:
    if each is None:
        return name, "no room", *[""] * 5
    step = f"{1e3 * median(each.step_s):,.0f} ({1e3 * min(each.step_s):,.0f}-{1e3 * max(each.step_s):,.0f})"
    peak = f"{each.peak_bytes / 1e9:.2f}"
    if each.waits is None:
        return name, step, "", "", "", "", peak
    of_thread = each.waits.fetching_s + each.waits.writing_s
    hidden = 1 - each.waits.waiting_s / of_thread
    figures = (each.waits.fetching_s, each.waits.writing_s, each.waits.waiting_s)
    return name, step, *(f"{1e3 * seconds:,.1f}" for seconds in figures), f"{100 * hidden:.0f} %", peak
