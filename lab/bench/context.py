"""`megamem bench context`: speed and memory of long sequences, cut over ranks and attended to in every way."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import replace
from statistics import median

import torch
import torch.distributed as dist

from lab.bench.mean_traffic import attention_bytes
from lab.bench.memory_in_use import begin_peak, peak_bytes
from lab.bench.synthetic_run import SyntheticRun
from parallel.groups import ParallelGroups
from pretrain.config.context_ways import WAYS, context_way, heads_problem, run_costs
from pretrain.config.schema import RunConfig
from pretrain.engine.session import relaid, session

_HEADER = ("tokens", "context", "attention", "tokens/s", "peak MB", "kept MB", "sent MB")


def context_cases(config: RunConfig, lengths: Sequence[int], sizes: Sequence[int], num_ranks: int) -> list[RunConfig]:
    """A run for each length, each number of context-parallel ranks, and each way that there is on them.

    A step of all of one length has as many tokens: a sequence per rank, one sequence per microbatch.
    """
    cases = []
    for length in lengths:
        train = replace(config.train, sequence_length=length, micro_batch_size=1, global_batch_size=num_ranks)
        for size in sizes:
            cut = replace(config, train=train, parallel=replace(config.parallel, context=size))
            if size == 1:
                cases.append(cut)
                continue
            ways = [way for way in WAYS if way != "heads" or heads_problem(cut) is None]
            cases += [replace(cut, parallel=replace(cut.parallel, context_attention=way)) for way in ways]
    return cases


def bench_context_rank(cases: Sequence[RunConfig], rounds: int, steps: int) -> None:
    """Measure on one rank, one case after the other."""
    with session(cases[0]) as groups:
        if groups.is_main:
            print(
                f"{groups.world_size} ranks; tokens/s: median of {rounds} rounds of {steps} steps; peak: above what a "
                "rank holds between steps, the most of any; kept (of a layer and microbatch) and sent (in a step), for "
                "attention: by formula"
            )
            print("".join(f"{name:>12}" for name in _HEADER))
        for number, case in enumerate(cases):
            if number:
                groups = relaid(case, groups)
            speed, peak_bytes = _measure(case, groups, rounds, steps)
            if groups.is_main:
                print(_row(case, speed, peak_bytes, groups.world_size), flush=True)


def _row(case: RunConfig, speed: float, peak_bytes: float, num_ranks: int) -> str:
    layout, train = case.parallel, case.train
    way = context_way(case)
    cells = (
        f"{train.sequence_length:,}",
        str(layout.context),
        way if layout.context > 1 else "-",
        f"{speed:,.0f}",
        f"{peak_bytes / 1e6:,.1f}",
        f"{run_costs(case, way).kept / 1e6:,.2f}",
        f"{attention_bytes(case, num_ranks) / 1e6:,.2f}",
    )
    return "".join(f"{cell:>12}" for cell in cells)


def _measure(case: RunConfig, groups: ParallelGroups, rounds: int, steps: int) -> tuple[float, float]:
    """Tokens per second over all ranks, and the largest peak of any of them in bytes. Collective."""
    run = SyntheticRun(case, groups)
    # The optimizer's state and what libraries keep are there after the first step.
    run.steps(1)
    gc.collect()
    before = begin_peak(groups.device)
    run.steps(1)
    peak = torch.tensor(float(peak_bytes(groups.device) - before), dtype=torch.float64, device=groups.device)
    dist.all_reduce(peak, op=dist.ReduceOp.MAX)
    seconds = median(run.steps(steps) / steps for _ in range(rounds))
    run.cut_graphs()
    return case.train.tokens_per_step / seconds, float(peak)
