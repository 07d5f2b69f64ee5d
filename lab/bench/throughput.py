"""`megamem bench`: training speed of several configurations, measured side by side on the same ranks."""

from __future__ import annotations

import multiprocessing
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from statistics import median

from lab.bench.mean_traffic import attention_bytes, exchanged_bytes
from lab.bench.step_profile import StepTimes, measure_turns, turns
from parallel.machine.devices import hide_gpus
from pretrain.config.schema import RunConfig
from pretrain.engine.session import session
from pretrain.planning.counts.formulas import count_parameters


def bench_rank(configs: Mapping[str, RunConfig], rounds: int, steps: int) -> None:
    """Measure on one rank, one layout after the other."""
    times: dict[str, StepTimes] = {}
    with session(*configs.values()) as groups:
        for measured in measure_turns(turns(configs), groups, rounds=rounds, steps=steps, with_marks=False):
            times |= measured
        if groups.is_main:
            print(
                f"{groups.world_size} ranks, {rounds} rounds of {steps} steps each; tokens/s as median (lowest .. "
                "highest)"
            )
            _print(configs, times, groups.world_size)


def _print(configs: Mapping[str, RunConfig], times: Mapping[str, StepTimes], num_ranks: int) -> None:
    reference = None
    for name, config in configs.items():
        tokens = config.train.tokens_per_step
        speeds = [tokens / seconds for seconds in times[name].step_s]
        reference = reference or median(speeds)
        counts = count_parameters(config.model)
        sent = exchanged_bytes(config, num_ranks) + attention_bytes(config, num_ranks)
        print(
            f"  {name:36} {median(speeds):12,.0f} ({min(speeds):,.0f} .. {max(speeds):,.0f})  "
            f"{median(speeds) / reference:5.2f}x  {tokens / median(speeds):.3f} s/step  {sent / 1e6:.2f} MB sent  "
            f"{counts.total / 1e6:.2f}M parameters, {counts.active / 1e6:.2f}M active"
        )


def memory_lines(configs: Mapping[str, RunConfig], num_ranks: int) -> Iterator[str]:
    """Memory of rank 0 of each configuration, counted on tensors without data; ratios of peaks are to the first."""
    # A process of its own: a dry run takes the place of CUDA, and hides GPUs.
    context = multiprocessing.get_context("spawn")
    # Before Megatron is imported, which warns of optional packages.
    with ProcessPoolExecutor(1, context, initializer=warnings.simplefilter, initargs=("ignore",)) as executor:
        counted = list(executor.map(held_and_peak, configs.values(), [num_ranks] * len(configs)))
    yield "memory of rank 0, counted on tensors without data: between steps, and at the peak of a step"
    for name, (held, peak) in zip(configs, counted, strict=True):
        yield f"  {name:36} {held / 1e6:,.1f} MB held  {peak / 1e6:,.1f} MB at peak  {peak / counted[0][1]:5.2f}x"


def held_and_peak(config: RunConfig, num_ranks: int) -> tuple[int, int]:
    """Bytes of rank 0 between steps, and at most in one."""
    from pretrain.planning.dryrun.rank import dry_run

    hide_gpus()
    (report,) = dry_run(config, num_ranks, [0])
    return report.held.total, report.peak_of_step.total
