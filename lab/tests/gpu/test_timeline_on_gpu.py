"""The intervals of a step on a GPU: events tell the time of the device, and recording them does not wait for it."""

from __future__ import annotations

import torch

from lab.bench.timeline import Range, Timeline


def test_parts_take_the_time_of_their_work(gpu: torch.device) -> None:
    x = torch.randn(4096, 4096, device=gpu, requires_grad=True)
    weight = torch.randn(4096, 4096, device=gpu)
    timeline = Timeline(gpu)
    product = timeline.differentiable("product", lambda y: (y @ weight) @ weight)
    whole = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    for _ in range(2):
        timeline.begin("forward")
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            whole[0].record()
            out = product(x * 1)
            timeline.enter_phase("backward")
            out.backward(torch.ones_like(out))
            timeline.leave_phase()
            whole[1].record()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        found = timeline.end()
    forward, backward = (found.seconds[Range(phase, "product")] for phase in ("forward", "backward"))
    # Two products each, beside which all else is small.
    assert forward + backward > 0.5 * whole[0].elapsed_time(whole[1]) / 1e3
    assert found.entries[Range("backward", "product")] == 1
