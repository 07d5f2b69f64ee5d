"""Ranks whose hardware is slower than that of the others.

A step takes as long on every rank: the fast ones wait for the slow one in collectives, and on a GPU the host cannot tell
waiting from computing. So what is measured is a multiplication that needs nobody else, of the same size on all ranks,
after the last step of a window: 2 n^3 operations, the fastest of some repetitions. It sees clocks that were throttled, a
GPU or a CPU that somebody else uses too; it does not see a slow disk or a slow network.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from statistics import median

import torch
import torch.distributed as dist

from pretrain.run.history import Incident, now
from pretrain.train.callback import Callback, Priority, Row
from pretrain.train.run import Run

_REPETITIONS = 5
# Rows of the square matrices: a GPU needs more to be busy for longer than it takes to start.
_SIZE = {"cpu": 256, "cuda": 4096}

Measure = Callable[[torch.device], float]


def probe_s(device: torch.device) -> float:
    """Seconds of a multiplication of two square matrices in fp32 on this rank alone."""
    size = _SIZE[device.type]
    left = torch.ones(size, size, device=device)
    times = []
    for _ in range(_REPETITIONS + 1):
        _wait_for(device)
        started = time.perf_counter()
        left @ left
        _wait_for(device)
        times.append(time.perf_counter() - started)
    # The first one may load a library.
    return min(times[1:])


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        # Host sync: once in so many steps, at their boundary.
        torch.cuda.synchronize(device)


class SlowRanks(Callback):
    """Gather the ranks' times every so many steps, and name who is slow for some windows in a row. All ranks.

    The row of such a step says how much slower than the median rank the slowest is (`slowest_rank`,
    `slowest_rank_times`).
    """

    priority = Priority.JUDGE

    def __init__(self, measure: Measure = probe_s) -> None:
        self._measure = measure
        self._windows: dict[int, int] = {}

    def on_step(self, run: Run, row: Row) -> None:
        if run.state.step % run.config.health.slow_ranks.every_steps == 0:
            self._close_window(run, row)

    def _close_window(self, run: Run, row: Row) -> None:
        rule, world_size, device = run.config.health.slow_ranks, run.groups.world_size, run.groups.device
        gathered = torch.empty(world_size, dtype=torch.float64, device=device)
        dist.all_gather_into_tensor(gathered, torch.tensor([self._measure(device)], dtype=torch.float64, device=device))
        # Host sync: as above.
        times = gathered.tolist()
        usual = median(times)
        slowest = max(range(world_size), key=times.__getitem__)
        row |= {"slowest_rank": slowest, "slowest_rank_times": times[slowest] / usual}
        slow = [rank for rank, seconds in enumerate(times) if seconds > rule.factor * usual]
        self._windows = {rank: self._windows.get(rank, 0) + 1 for rank in slow}
        # Told again only after as many windows more.
        named = [rank for rank in slow if self._windows[rank] % rule.windows == 0]
        if named:
            hosts: list[str] = [""] * world_size
            dist.all_gather_object(hosts, socket.gethostname())
            message = "; ".join(
                f"rank {rank} on {hosts[rank]} computes {times[rank] / usual:.2f} times as long as the median rank "
                f"({times[rank]:.3g} s and {usual:.3g} s), for {self._windows[rank]} windows in a row"
                for rank in named
            )
            self.callbacks.on_incident(run, Incident(run.state.step, "slow rank", message, now()))
