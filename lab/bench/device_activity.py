"""Work of a GPU in a step, by the profiler's record of the device: how long it is busy, and with which kernels.

Marks on the device's clock (`lab.bench.timeline`) cannot tell a kernel that takes long from one that the host asks for
late. The device's own record can: what is not busy waits for the host.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile

_NAME_LENGTH = 100
_NUM_NAMES = 20


@dataclass(frozen=True)
class Work:
    """One kernel, copy or fill of memory.

    Attributes:
        name: kernel's name.
        start_s, end_s: seconds on the device's clock.
    """

    name: str
    start_s: float
    end_s: float


@dataclass(frozen=True)
class DeviceActivity:
    """Work of a step.

    Attributes:
        busy_s: seconds in which something runs.
        num_kernels: pieces of work, fills and copies of memory among them.
        by_name: seconds and pieces by name, the longest first.
    """

    busy_s: float
    num_kernels: int
    by_name: tuple[tuple[str, float, int], ...]

    @classmethod
    def of(cls, work: Iterable[Work]) -> DeviceActivity:
        """Sum up work, which may run side by side."""
        seconds: defaultdict[str, float] = defaultdict(float)
        pieces: Counter[str] = Counter()
        busy_s, end_s = 0.0, -float("inf")
        for each in sorted(work, key=lambda each: each.start_s):
            seconds[each.name] += each.end_s - each.start_s
            pieces[each.name] += 1
            busy_s += max(0.0, each.end_s - max(each.start_s, end_s))
            end_s = max(end_s, each.end_s)
        longest = sorted(seconds.items(), key=lambda item: -item[1])
        by_name = tuple((name, taken_s, pieces[name]) for name, taken_s in longest)
        return cls(busy_s, pieces.total(), by_name)

    def lines(self, step_s: float) -> Iterator[str]:
        """Lines of a report, of a step that takes `step_s` without the profiler."""
        idle = max(0.0, 1 - self.busy_s / step_s)
        yield (
            f"  the device is busy for {self.busy_s * 1e3:.2f} ms, idle for {idle:.0%} of the step: "
            f"{self.num_kernels:,} kernels, {step_s / max(1, self.num_kernels) * 1e6:.1f} us of the step for each"
        )
        for name, seconds, number in self.by_name[:_NUM_NAMES]:
            yield f"    {seconds * 1e3:10.2f} ms {seconds / self.busy_s:6.1%} {number:6d}  {name[:_NAME_LENGTH]}"
        if rest := self.by_name[_NUM_NAMES:]:
            seconds, number = sum(each[1] for each in rest), sum(each[2] for each in rest)
            yield f"    {seconds * 1e3:10.2f} ms {seconds / self.busy_s:6.1%} {number:6d}  {len(rest)} other names"


def device_activity(step: Callable[[], object]) -> DeviceActivity:
    """Work of the GPU in one call of `step`, which the profiler makes slower; the device's seconds stay."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        step()
        torch.cuda.synchronize()
    return DeviceActivity.of(
        Work(event.name, event.time_range.start / 1e6, event.time_range.end / 1e6)
        for event in profiler.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    )
