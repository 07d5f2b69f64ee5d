"""`megamem bench kernels --static`: each kernel of a configuration's memory layer, its machine code and its floors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kernels.common.device_bytes import GRANULE_BYTES, SECTOR_BYTES
from lab.bench.static.builds import Build, build
from lab.bench.static.floors import (
    Gpu,
    issue_s,
    latency_s,
    moved_bytes,
    resident_programs,
)
from lab.bench.static.trips import trips_of
from lab.bench.static.warp import Latencies, Way, follow
from lab.bench.static.work import Call, calls_of
from pretrain.config.schema import RunConfig
from pretrain.planning.costs.hardware import Hardware
from pretrain.planning.costs.stages import Division, stages_of
from pretrain.planning.costs.timing import TimePart, step_time
from pretrain.progress import Progress
from tools.ranks import fewest_ranks
from tools.words import aligned


@dataclass(frozen=True)
class Judged:
    """A launch: what was built of it, and the way of its warps, with loads from the cache and from memory."""

    build: Build
    near: Way
    far: Way

    def floors_s(self, gpu: Gpu) -> tuple[float, float, float]:
        """By instructions issued, and by waits for loads, from the cache and from memory."""
        return (
            issue_s(self.build, self.near, gpu),
            latency_s(self.build, self.near, gpu),
            latency_s(self.build, self.far, gpu),
        )


def judge(built: Build, call: Call, gpu: Gpu) -> Judged:
    """Send warps through what was built of one of a call's launches."""
    trips = trips_of(built.launch, call.reads)
    near, far = (follow(built.code, trips, Latencies(load)) for load in (gpu.l2_cycles, gpu.memory_cycles))
    return Judged(built, near, far)


def build_all(calls: Sequence[Call], gpu: Gpu) -> list[list[Build]]:
    """Builds of each launch of each call."""
    with Progress("kernel", total=sum(len(call.launches) for call in calls), leave=False) as progress:
        builds: list[list[Build]] = []
        for call in calls:
            builds.append([])
            for launch in call.launches:
                builds[-1].append(build(launch, gpu.capability))
                progress.update(1, launch.name)
    return builds


def static_lines(
    config: RunConfig, gpu: Gpu, hardware: Hardware, exponents: Sequence[float], num_tokens: int | None = None
) -> Iterator[str]:
    """The report: a table of machine code and one of floors, for rows that are read by each of these laws of Zipf."""
    calls = calls_of(config, exponents[0], num_tokens)
    builds = build_all(calls, gpu)
    for exponent in exponents:
        calls = calls_of(config, exponent, num_tokens)
        judged = [[judge(built, call, gpu) for built in row] for call, row in zip(calls, builds, strict=True)]
        yield from ("", f"Rows read by {f'Zipf {exponent:g}' if exponent else 'chance, all alike'}:", "")
        yield from aligned(
            [
                _CODE_HEADER,
                *(_code_row(call, each, gpu) for call, row in zip(calls, judged, strict=True) for each in row),
            ]
        )
        yield ""
        floors = [_floor_row(call, row, gpu, hardware) for call, row in zip(calls, judged, strict=True)]
        yield from aligned([_FLOOR_HEADER, *floors])
        yield ""
        yield from aligned([_PART_HEADER, *_part_rows(config, calls, judged, gpu, hardware)])


_CODE_HEADER = (
    *("op", "kernel", "programs x warps", "registers", "spilled", "shared", "at once", "load bytes"),
    *("instructions", "barriers", "chain", "loop: trips x instructions, barriers, chain"),
)
_FLOOR_HEADER = ("floors of an op, ms", "bytes/32", "bytes/64", "issue", "latency", "to", "largest", "by")
_PART_HEADER = ("a layer's passes over a microbatch, ms", "floors", "plan")


def _code_row(call: Call, judged: Judged, gpu: Gpu) -> tuple[str, ...]:
    built, way = judged.build, judged.near
    loops = "; ".join(
        f"{loop.trips:.3g} x {loop.instructions:.0f}, {loop.barriers:.0f}, {loop.chain:.0f}" for loop in way.loops
    )
    widths = " ".join(f"{count}x{width}" for width, count in sorted(built.code.load_widths.items(), reverse=True))
    return (
        call.op,
        built.launch.name.removesuffix("_kernel"),
        f"{built.launch.num_programs:,} x {built.launch.num_warps}",
        str(built.registers),
        str(built.spilled_bytes),
        str(built.shared_bytes),
        str(resident_programs(built, gpu)),
        widths,
        f"{way.instructions:,.0f}",
        f"{way.barriers:.0f}",
        f"{way.chain:.1f}",
        loops or "-",
    )


def _floors_s(call: Call, judged: Sequence[Judged], gpu: Gpu, hardware: Hardware) -> dict[str, float]:
    """Seconds of a call by each floor, its launches one after the other."""
    bandwidth = hardware.memory_bandwidth_gb_per_s * 1e9
    small, large = (moved_bytes(call.accesses, granule, gpu) / bandwidth for granule in (SECTOR_BYTES, GRANULE_BYTES))
    issue, near, far = (sum(floor) for floor in zip(*(each.floors_s(gpu) for each in judged), strict=True))
    return {"bytes/32": small, "bytes": large, "issue": issue, "latency": near, "to": far}


def _largest(floors: dict[str, float]) -> str:
    """The floor that is the highest, of those that are no guess."""
    return max(("bytes", "issue", "latency"), key=lambda name: floors[name])


def _floor_row(call: Call, judged: Sequence[Judged], gpu: Gpu, hardware: Hardware) -> tuple[str, ...]:
    floors = _floors_s(call, judged, gpu, hardware)
    largest = _largest(floors)
    return (call.op, *(f"{seconds * 1e3:.2f}" for seconds in (*floors.values(), floors[largest])), largest)


def _part_rows(
    config: RunConfig, calls: Sequence[Call], judged: Sequence[Sequence[Judged]], gpu: Gpu, hardware: Hardware
) -> Iterator[tuple[str, ...]]:
    """One layer's passes over a microbatch, by parts of a plan: the floors' sum, and the plan's figure."""
    num_ranks = fewest_ranks(config.parallel)
    time, stages = step_time(config, num_ranks, hardware), stages_of(config)
    passes = Division.of(config, num_ranks).num_microbatches * stages[time.slowest_stage].num_lookups
    forwards = 2 if config.train.recompute == "full" else 1
    for part in dict.fromkeys(call.part for call in calls):
        if part == TimePart.MEMORY_UPDATE:
            # Once per step.
            continue
        seconds = 0.0
        for call, row in zip(calls, judged, strict=True):
            if call.part == part:
                floors = _floors_s(call, row, gpu, hardware)
                seconds += floors[_largest(floors)] * (forwards if call.is_forward else 1)
        name = "in no plan: the others" if part is None else part
        planned = "-" if part is None else f"{time.by_part[part] / passes * 1e3:.2f}"
        yield name, f"{seconds * 1e3:.2f}", planned
