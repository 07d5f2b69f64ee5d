"""`megamem bench hardware`: the figures of this machine that `megamem plan` needs, measured on the ranks at hand."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

from kernels.select import select_kernels
from lab.bench.step import known_peak
from parallel.groups import ParallelGroups
from parallel.machine.atomic_write import atomic_write
from pretrain.config.schema import RunConfig
from pretrain.engine.session import session
from pretrain.run.preflight import machine_memory_bytes

_AROUND_LAUNCHES = 6.4
"""Host time per kernel of a step over that of a bare launch, as one H100's host took 45 and 7 us: Triton's launcher, autograd
and Megatron."""
_ROW_COLUMNS = 256
"""Columns of the table that is gathered from: rows of 512 bytes in bf16."""


def _precision(device: torch.device) -> torch.dtype:
    """Precision of training: CPUs have no fast bf16."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


@dataclass(frozen=True)
class Sizes:
    """Amounts moved and computed per figure.

    Attributes:
        copied_bytes: bytes of a buffer in device memory.
        matrix: rows and columns of a product of matrices.
        sent_bytes: bytes of a message from each rank.
        rounds: rounds of each; the median counts.
    """

    copied_bytes: int
    matrix: int
    sent_bytes: int
    rounds: int

    @staticmethod
    def of(device: torch.device, rounds: int) -> Sizes:
        on_gpu = device.type == "cuda"
        return Sizes(1 << 30, 8192, 256 << 20, rounds) if on_gpu else Sizes(1 << 26, 512, 4 << 20, rounds)


def bench_hardware_rank(path: Path, like: str, rounds: int) -> None:
    """Measure on one rank, and on the first one write `path` over the hardware file `like`."""
    with session(RunConfig()) as groups:
        measured = measure(groups, Sizes.of(groups.device, rounds))
        if groups.is_main:
            for key, value in measured.items():
                print(f"{key}: {value:.4g}")
            _write(path, like, measured, groups.world_size)
            print(f"wrote {path}; what is not in it is that of {like}")


def measure(groups: ParallelGroups, sizes: Sizes) -> dict[str, float]:
    """The measured keys of `pretrain.planning.seconds.hardware.Hardware`. Collective.

    Shares of a peak are 1 where the peak is what was measured.
    """
    device = groups.device
    stream = _stream_bytes_per_s(device, sizes)
    tflops = _matmul_flops_per_s(device, sizes) / 1e12
    peak = known_peak(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    total = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else machine_memory_bytes()
    measured = {
        "memory_gb": total / 1e9 / (1 if device.type == "cuda" else groups.world_size),
        "peak_bf16_tflops": peak or tflops,
        "matmul_fraction": min(1.0, tflops / peak) if peak else 1.0,
        "memory_bandwidth_gb_per_s": stream / 1e9,
        "stream_fraction": 1.0,
        "gather_fraction": min(1.0, _gather_bytes_per_s(device, sizes) / stream),
        "launch_us": _AROUND_LAUNCHES * _launch_s(device, sizes) * 1e6,
    }
    if groups.world_size > 1:
        # Each rank sends all others a part, and of its own part nothing.
        slowest = max(_all_to_all_s(groups, sizes), _all_reduce_s(groups, sizes) / 2)
        share = (groups.world_size - 1) / groups.world_size
        measured |= {"nvlink_gb_per_s": sizes.sent_bytes * share / slowest / 1e9, "nvlink_fraction": 1.0}
        measured["gpus_per_node"] = groups.world_size
    return measured


def _stream_bytes_per_s(device: torch.device, sizes: Sizes) -> float:
    source = torch.ones(sizes.copied_bytes // 4, device=device)
    target = torch.empty_like(source)
    return 2 * sizes.copied_bytes / _seconds(lambda: target.copy_(source), device, sizes.rounds)


def _matmul_flops_per_s(device: torch.device, sizes: Sizes) -> float:
    # Random numbers: ones need less power, and a GPU's clock is then higher than in training.
    left, right = (torch.randn(sizes.matrix, sizes.matrix, dtype=_precision(device), device=device) for _ in range(2))
    return 2 * sizes.matrix**3 / _seconds(lambda: left @ right, device, sizes.rounds)


def _gather_bytes_per_s(device: torch.device, sizes: Sizes) -> float:
    """Bytes per second of the rows that `gather_sum` reads."""
    dtype = _precision(device)
    row_bytes = dtype.itemsize * _ROW_COLUMNS
    rows = sizes.copied_bytes // row_bytes
    table = torch.ones(rows, _ROW_COLUMNS, dtype=dtype, device=device)
    reads = 128
    ids = torch.randint(rows, (max(1, rows // reads), reads), device=device)
    coef = torch.ones(*ids.shape, 1, dtype=dtype, device=device)
    gather_sum = select_kernels("auto", device_type=device.type).gather_sum
    return ids.numel() * row_bytes / _seconds(lambda: gather_sum(table, ids, coef), device, sizes.rounds)


def _launch_s(device: torch.device, sizes: Sizes) -> float:
    """Host time per kernel, of many that have next to nothing to do."""
    number, count = torch.ones(1, device=device), 1000

    def launch() -> None:
        for _ in range(count):
            number.add_(1)

    return _seconds(launch, device, sizes.rounds) / count


def _all_to_all_s(groups: ParallelGroups, sizes: Sizes) -> float:
    source = torch.ones(sizes.sent_bytes // 4 // groups.world_size * groups.world_size, device=groups.device)
    target = torch.empty_like(source)
    return _seconds(lambda: dist.all_to_all_single(target, source), groups.device, sizes.rounds)


def _all_reduce_s(groups: ParallelGroups, sizes: Sizes) -> float:
    buffer = torch.zeros(sizes.sent_bytes // 4, device=groups.device)
    return _seconds(lambda: dist.all_reduce(buffer), groups.device, sizes.rounds)


def _seconds(work: Callable[[], object], device: torch.device, rounds: int) -> float:
    """The median over rounds, after one that is not counted."""
    taken = []
    for _ in range(rounds + 1):
        started = time.perf_counter()
        work()
        # Work that was asked of a GPU is not done when a call returns; on the CPU this does nothing.
        torch.cuda.synchronize(device)
        taken.append(time.perf_counter() - started)
    return median(taken[1:])


def _write(path: Path, like: str, measured: dict[str, float], num_ranks: int) -> None:
    lines = [
        f"# Measured by megamem bench hardware on {num_ranks} ranks; the rest is that of the base.",
        f"base: {like}",
    ]
    lines += [
        f"{key}: {value:.6g}" if isinstance(value, float) else f"{key}: {value}" for key, value in measured.items()
    ]
    with atomic_write(path) as stream:
        stream.write(("\n".join(lines) + "\n").encode())
