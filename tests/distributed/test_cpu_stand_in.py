"""The stand-in for CUDA: what it redirects while it is active, and that nothing of it is left afterwards."""

from __future__ import annotations

import inspect
import pkgutil
from typing import Any

import pytest
import torch
from megatron.core.tensor_parallel import random

import parallel.machine.cpu
from parallel.machine.cpu import REDIRECTIONS, cuda_on_cpu

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the stand-in refuses a machine with a GPU")


def target(name: str) -> Any:
    """The attribute that is in place now."""
    owner, _, attribute = name.rpartition(".")
    return inspect.getattr_static(pkgutil.resolve_name(owner), attribute)


def snapshot() -> list[Any]:
    return [target(name) for name in REDIRECTIONS]


@pytest.mark.parametrize("name", REDIRECTIONS)
def test_a_redirection_is_active_inside_and_gone_after(name: str) -> None:
    before = target(name)
    assert before is not REDIRECTIONS[name]
    with cuda_on_cpu():
        assert target(name) is REDIRECTIONS[name]
    assert target(name) is before


def test_everything_is_restored_after_an_exception(run_ranks: Any) -> None:
    def raise_inside() -> None:
        before = snapshot()
        with pytest.raises(KeyError, match="in the middle"), cuda_on_cpu():
            raise KeyError("in the middle")
        assert snapshot() == before
        with pytest.raises((RuntimeError, AssertionError)):
            torch.empty(1, device="cuda")

    # A process that has asked for CUDA starts no ranks any more.
    run_ranks(raise_inside, 1)


def test_everything_is_restored_when_entering_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    before = snapshot()
    broken = {**REDIRECTIONS, "torch.cuda.no_such_attribute": None}
    monkeypatch.setattr(parallel.machine.cpu, "REDIRECTIONS", broken)
    with pytest.raises(AttributeError, match="no_such_attribute"), cuda_on_cpu():
        pytest.fail("the context was entered")
    assert snapshot() == before


def test_it_may_be_nested() -> None:
    before = snapshot()
    with cuda_on_cpu():
        inside = snapshot()
        with cuda_on_cpu():
            assert torch.empty(1, device="cuda").device.type == "cpu"
        assert snapshot() == inside
        assert torch.empty(1, device="cuda").device.type == "cpu"
    assert snapshot() == before


def test_nothing_is_pinned_for_a_device_that_is_not_there() -> None:
    with cuda_on_cpu():
        assert not torch.tensor([1, 2], device="cpu", pin_memory=True).is_pinned()


@pytest.mark.parametrize("device", ["cuda", "cuda:0", torch.device("cuda"), torch.device("cuda", 3)], ids=str)
def test_devices_named_cuda_are_the_cpu(device: str | torch.device) -> None:
    with cuda_on_cpu():
        made = [
            torch.empty(2, device=device),
            torch.zeros(2, device=device),
            torch.tensor([1.0, 2.0], device=device),
            torch.arange(2, device=device),
            torch.ones(2, device=device, pin_memory=True),
            torch.full((2,), 1.0, device=device),
            torch.zeros_like(torch.ones(2), device=device),
            torch.ones(2).cuda(device),
        ]
    assert {tensor.device.type for tensor in made} == {"cpu"}


def test_cuda_of_tensors_is_the_identity() -> None:
    tensor = torch.ones(2)
    with cuda_on_cpu():
        assert tensor.cuda() is tensor


def test_types_are_named_as_megatrons_optimizers_compare_them() -> None:
    with cuda_on_cpu():
        assert torch.ones(1).type() == "torch.cuda.FloatTensor"
        assert torch.ones(1).bfloat16().type() == "torch.cuda.BFloat16Tensor"
        # With an argument it is a cast.
        assert torch.ones(1).type(torch.float64).dtype == torch.float64
    assert torch.ones(1).type() == "torch.FloatTensor"


def test_other_calls_are_what_they_were() -> None:
    with cuda_on_cpu():
        x = torch.arange(6.0, device="cpu").view(2, 3).requires_grad_()
        (x @ x.detach().t()).sum().backward()
        assert x.grad is not None
        assert x.to(torch.float64).dtype == torch.float64
        assert x.to("cpu") is x
        assert torch.empty(1, device="meta").device.type == "meta"


def test_random_states_are_the_cpus() -> None:
    saved = torch.get_rng_state()
    try:
        with cuda_on_cpu():
            torch.cuda.manual_seed(5)
            state = torch.cuda.get_rng_state()
            first = torch.rand(3)
            random._set_cuda_rng_state(state)
            assert torch.equal(torch.rand(3), first)
        torch.manual_seed(5)
        assert torch.equal(torch.rand(3), first)
    finally:
        torch.set_rng_state(saved)


def test_streams_and_events_answer() -> None:
    with cuda_on_cpu():
        assert torch.cuda.current_device() == torch.device("cpu")
        stream, event = torch.cuda.Stream(), torch.cuda.Event(enable_timing=True)
        with torch.cuda.stream(stream):
            event.record(stream)
        stream.wait_stream(torch.cuda.current_stream())
        event.synchronize()
        torch.cuda.synchronize()
        stream.record_event().synchronize()
        torch.cuda.empty_cache()
        assert torch.cuda.memory_allocated() == 0


def test_a_machine_with_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    before = snapshot()
    with pytest.raises(RuntimeError, match="has a GPU"), cuda_on_cpu():
        pytest.fail("the context was entered")
    assert snapshot() == before


def test_another_megatron_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel.machine.cpu, "version", lambda name: {"megatron-core": "0.17.0"}[name])
    before = snapshot()
    with pytest.raises(RuntimeError, match=r"megatron-core 0\.16\.1 and 0\.19\.2, found 0\.17\.0"), cuda_on_cpu():
        pytest.fail("the context was entered")
    assert snapshot() == before
