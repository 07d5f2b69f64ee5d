"""A stand-in for CUDA, so that Megatron-core runs on machines without a GPU.

Megatron-core 0.16.1 asks for CUDA devices, streams and random states by name. `cuda_on_cpu()` answers those calls with
the CPU, through the list of redirections below and one `TorchFunctionMode`; the parallel state, schedules, DDP,
optimizer and checkpoints that then run are Megatron's own. It is opt-in, refuses a machine that has a GPU, and is
undone on exit. Nothing else in the project patches anything.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

# The stand-in was checked against this version, call by call.
_MEGATRON_VERSION = "0.16.1"


@dataclass(frozen=True)
class Redirection:
    """One attribute that is replaced while the stand-in is active.

    Attributes:
        owner: dotted name of the module (or module:class) that has the attribute.
        name: the attribute.
        replacement: what takes its place.
        reason: who calls it, and what the answer stands for.
    """

    owner: str
    name: str
    replacement: Any
    reason: str


class _Event:
    """A CUDA event on a device that has finished whatever was asked of it."""

    def __init__(self, *_: Any, **__: Any) -> None: ...
    def record(self, *_: Any) -> None: ...
    def wait(self, *_: Any) -> None: ...
    def synchronize(self) -> None: ...
    def query(self) -> bool:
        return True


class _Stream(_Event):
    """A CUDA stream on a device that runs everything in order."""

    def wait_stream(self, *_: Any) -> None: ...
    def wait_event(self, *_: Any) -> None: ...
    def record_event(self, *_: Any) -> _Event:
        return _Event()


@contextmanager
def _null_context(*_: Any, **__: Any) -> Iterator[None]:
    yield


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _cpu(*_: Any, **__: Any) -> torch.device:
    return torch.device("cpu")


def _get_rng_state(*_: Any, **__: Any) -> torch.Tensor:
    return torch.get_rng_state()


def _set_rng_state(state: torch.Tensor, *_: Any, **__: Any) -> None:
    torch.set_rng_state(state)


def _manual_seed(seed: int) -> None:
    torch.manual_seed(seed)


def _same_module(self: torch.nn.Module, *_: Any, **__: Any) -> torch.nn.Module:
    return self


def _zero(*_: Any, **__: Any) -> int:
    return 0


def _split_sizes(tensor: Any, as_numpy: bool = False, **_: Any) -> Any:
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


REDIRECTIONS = (
    Redirection(
        "torch.cuda", "current_device", _cpu, "device= arguments all over Megatron; the CPU is the current device"
    ),
    Redirection(
        "torch.cuda", "synchronize", _nothing, "timers and checkpoint writers; CPU work is done when a call returns"
    ),
    Redirection(
        "torch.cuda", "manual_seed", _manual_seed, "model_parallel_cuda_manual_seed; the CPU generator takes the seed"
    ),
    Redirection(
        "torch.cuda", "get_rng_state", _get_rng_state, "the RNG tracker of tensor-parallel regions and recomputation"
    ),
    Redirection(
        "torch.cuda", "set_rng_state", _set_rng_state, "the RNG tracker of tensor-parallel regions and recomputation"
    ),
    Redirection("torch.cuda.random", "get_rng_state", _get_rng_state, "the same, by its defining module"),
    Redirection("torch.cuda.random", "set_rng_state", _set_rng_state, "the same, by its defining module"),
    Redirection(
        "megatron.core.tensor_parallel.random",
        "_set_cuda_rng_state",
        _set_rng_state,
        "sets the state through CUDA's lazy-call queue",
    ),
    Redirection("torch.cuda", "Stream", _Stream, "DDP and checkpoint staging"),
    Redirection("torch.cuda", "Event", _Event, "DDP and checkpoint staging"),
    Redirection("torch.cuda", "stream", _null_context, "DDP's side-stream reductions"),
    Redirection("torch.cuda", "current_stream", _Stream, "DDP's side-stream reductions"),
    Redirection("torch.cuda", "default_stream", _Stream, "side-stream users that hand work back"),
    Redirection("torch.cuda", "empty_cache", _nothing, "checkpoint savers; the CPU allocator has no cache to empty"),
    Redirection("torch.cuda", "memory_allocated", _zero, "checkpoint savers; no device memory is in use"),
    Redirection(
        "megatron.core.transformer.moe.token_dispatcher",
        "maybe_move_tensor_to_cpu",
        _split_sizes,
        "the experts' all-to-all; turns split sizes into numbers only where they come from a GPU",
    ),
    Redirection("torch.nn:Module", "cuda", _same_module, "modules built on the CPU stay there"),
)


class _CudaNamesToCpu(TorchFunctionMode):
    """Maps `device="cuda"` to the CPU in any torch call, and gives CPU tensors the type names that optimizers expect."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.", 1)
        if func is torch.tensor and kwargs.get("pin_memory"):
            # Pinned for a copy to the device that rotary embeddings make under context parallelism: there is none to
            # copy to.
            kwargs = {**kwargs, "pin_memory": False}
        if "device" in kwargs and _is_cuda(kwargs["device"]):
            kwargs = {**kwargs, "device": torch.device("cpu")}
        if func is torch.Tensor.to and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], torch.device("cpu"), *args[2:])
        return func(*args, **kwargs)


def _is_cuda(device: Any) -> bool:
    return (isinstance(device, str) and device.startswith("cuda")) or (
        isinstance(device, torch.device) and device.type == "cuda"
    )


@contextmanager
def cuda_on_cpu() -> Iterator[None]:
    """Answer CUDA calls with the CPU until the context ends.

    Raises:
        RuntimeError: on a machine with a GPU, or with another Megatron-core than the one this was checked against.
    """
    if torch.cuda.is_available():
        raise RuntimeError("this machine has a GPU: the CPU stand-in would hide it")
    if version("megatron-core") != _MEGATRON_VERSION:
        raise RuntimeError(
            f"the CPU stand-in is for megatron-core {_MEGATRON_VERSION}, found {version('megatron-core')}: "
            "install the pinned version"
        )
    saved = []
    try:
        for entry in REDIRECTIONS:
            owner = _resolve(entry.owner)
            saved.append((owner, entry.name, getattr(owner, entry.name)))
            setattr(owner, entry.name, entry.replacement)
        with _CudaNamesToCpu():
            yield
    finally:
        for owner, name, value in reversed(saved):
            setattr(owner, name, value)


def _resolve(owner: str) -> Any:
    module, _, attribute = owner.partition(":")
    resolved = importlib.import_module(module)
    return getattr(resolved, attribute) if attribute else resolved
