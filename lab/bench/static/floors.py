"""Least time of a launch on a GPU: by the bytes that it moves, the instructions that it issues, and the waits of its
warps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lab.bench.static.builds import Build
from lab.bench.static.warp import Way
from lab.bench.static.work import Access
from pretrain.errors import ConfigError
from pretrain.planning.costs import rows


@dataclass(frozen=True)
class Gpu:
    """Figures of a GPU that its data sheet and CUDA's programming guide give.

    Attributes:
        capability: times ten.
        num_sms: streaming multiprocessors.
        clock_hz: at which its peak is given.
        l2_bytes: of the cache.
        shared_bytes: of an SM's memory that programs share; each takes 1 KiB more than it asks for.
        l2_cycles: until a load from the cache is there.
        memory_cycles: until one from device memory is.
    """

    capability: int
    num_sms: int
    clock_hz: float
    l2_bytes: int
    shared_bytes: int
    l2_cycles: float
    memory_cycles: float
    registers: int = 65_536
    max_warps: int = 64
    max_programs: int = 32
    schedulers: int = 4


# Clocks are the peaks of configs/hardware over SMs and FLOPs per cycle and SM. Latencies of Hopper as measured in
# arXiv:2402.13499, of an idle GPU; those of Blackwell are taken to be the same.
_HOPPER = Gpu(90, 132, 1.83e9, 50 << 20, 227 << 10, 263.0, 479.0)
GPUS = {
    "h100-80g": _HOPPER,
    "h200-141g": _HOPPER,
    "b200-192g": Gpu(100, 148, 1.86e9, 126 << 20, 227 << 10, 263.0, 479.0),
}
"""By the names of `configs/hardware`."""


def gpu_of(name: str) -> Gpu:
    """A GPU by its name.

    Raises:
        ConfigError: there is none of that name.
    """
    if name not in GPUS:
        raise ConfigError(f"--gpu is {name}, of which the number of SMs is not known: use {', '.join(GPUS)}")
    return GPUS[name]


def resident_programs(build: Build, gpu: Gpu) -> int:
    """Programs that an SM runs at once."""
    # Registers are given out to warps by 256, and each of four schedulers has its own.
    of_warp = math.ceil(build.registers * 32 / 256) * 256
    warps = min(gpu.max_warps, gpu.registers // gpu.schedulers // of_warp * gpu.schedulers)
    by_memory = gpu.shared_bytes // (build.shared_bytes + 1024)
    return max(1, min(warps // build.launch.num_warps, by_memory, gpu.max_programs))


def moved_bytes(accesses: Sequence[Access], granule: int, gpu: Gpu) -> float:
    """Bytes between the device's memory and its cache, where so many move at the least.

    A tensor that fits into half of the cache moves once. Of a table the most frequent rows are taken to stay in the
    other half.
    """
    total = 0.0
    for access in accesses:
        if not access.item_bytes or access.tensor_bytes <= gpu.l2_bytes // 2:
            total += access.tensor_bytes
            continue
        touched = rows.moved_bytes(access.item_bytes, granule)
        if access.reads is None:
            count = access.count
        elif access.once:
            count = access.reads.num_distinct
        else:
            count = access.reads.misses(gpu.l2_bytes // 2 // touched)
        total += count * touched
    return total


def issue_s(build: Build, way: Way, gpu: Gpu) -> float:
    """Seconds to issue all instructions, one per scheduler and cycle."""
    warps = build.launch.num_programs * build.launch.num_warps
    return warps * way.instructions / (gpu.num_sms * gpu.schedulers * gpu.clock_hz)


def latency_s(build: Build, way: Way, gpu: Gpu) -> float:
    """Seconds until all programs have waited for their loads, with as many at once as fit."""
    at_once = gpu.num_sms * resident_programs(build, gpu)
    rounds = max(1.0, build.launch.num_programs / at_once)
    return rounds * way.cycles / gpu.clock_hz
