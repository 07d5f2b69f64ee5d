"""A stand-in for CUDA, so that Megatron-core runs on machines without a GPU.

Megatron-core asks for CUDA devices, streams and random states by name. `cuda_on_cpu()` answers those calls with
the CPU, through the list of redirections below; the parallel state, schedules, DDP, optimizer and checkpoints that then
run are Megatron's own. It is opt-in, refuses a machine that has a GPU, and is undone on exit. Beside it, `cpu_products.py`
alone replaces anything in a run. (A `TorchFunctionMode` would see every call of torch, and cost a small model a fifth of
its step.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import wraps
from importlib.metadata import version
from typing import Any
from unittest.mock import patch

import torch
from megatron.core import parallel_state

MEGATRON_VERSIONS = ("0.16.1", "0.19.2")
"""Versions against which the stand-in was checked, call by call."""


class _Event:
    """A CUDA event on a device that has finished whatever was asked of it."""

    def __init__(self, *_: Any, **__: Any) -> None: ...
    def record(self, *_: Any) -> None: ...
    def synchronize(self) -> None: ...


class _Stream:
    """A CUDA stream on a device that runs everything in order."""

    def __init__(self, *_: Any, **__: Any) -> None: ...
    def wait_stream(self, *_: Any) -> None: ...
    def record_event(self, *_: Any) -> _Event:
        return _Event()


def _get_rng_state(*_: Any, **__: Any) -> torch.Tensor:
    return torch.get_rng_state()


def _set_rng_state(state: torch.Tensor, *_: Any, **__: Any) -> None:
    torch.set_rng_state(state)


def _split_sizes(tensor: Any, as_numpy: bool = False, **_: Any) -> Any:
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


_tensor_type = torch.Tensor.type


def _type_of_optimizers(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    found = _tensor_type(tensor, *args, **kwargs)
    return found if args or kwargs else found.replace("torch.", "torch.cuda.", 1)


def _is_cuda(device: Any) -> bool:
    return isinstance(device, str | torch.device) and str(device).startswith("cuda")


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A function that makes tensors, for which "cuda" is the CPU, and from whose memory nobody copies to a device."""

    @wraps(factory)
    def make(*args: Any, **kwargs: Any) -> torch.Tensor:
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = torch.device("cpu")
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return factory(*args, **kwargs)

    return make


# Replacements while the stand-in is active, each with its caller and the meaning of the answer.
REDIRECTIONS: dict[str, Any] = {
    # device= arguments all over Megatron: the CPU is the current device.
    "torch.cuda.current_device": lambda: torch.device("cpu"),
    # Timers and messages between stages: CPU work is done when a call returns.
    "torch.cuda.synchronize": lambda *_: None,
    # model_parallel_cuda_manual_seed: the CPU generator takes the seed.
    # `torch.manual_seed` would also queue the seed, with the caller's stack, for devices that never come.
    "torch.cuda.manual_seed": lambda seed: torch.default_generator.manual_seed(seed),
    # The RNG tracker of tensor-parallel regions and recomputation, by both of the function's names.
    "torch.cuda.get_rng_state": _get_rng_state,
    "torch.cuda.random.get_rng_state": _get_rng_state,
    # Sets the state through CUDA's lazy-call queue.
    "megatron.core.tensor_parallel.random._set_cuda_rng_state": _set_rng_state,
    # The experts' all-to-all, and our copies of tables that are stepped on the host.
    "torch.cuda.Stream": _Stream,
    "torch.cuda.Event": _Event,
    "torch.cuda.stream": nullcontext,
    "torch.cuda.current_stream": _Stream,
    # The experts' all-to-all: turns split sizes into numbers only where they come from a GPU.
    "megatron.core.transformer.moe.token_dispatcher.maybe_move_tensor_to_cpu": _split_sizes,
    # Copies to the current device.
    "torch.Tensor.cuda": lambda tensor, *_, **__: tensor,
    # The optimizer takes parameters of CUDA's types alone.
    "torch.Tensor.type": _type_of_optimizers,
    # device="cuda" all over Megatron.
    **{
        f"torch.{name}": _on_cpu(getattr(torch, name))
        for name in ("arange", "empty", "empty_like", "full", "ones", "ones_like", "tensor", "zeros", "zeros_like")
    },
}


@contextmanager
def cuda_on_cpu() -> Iterator[None]:
    """Answer CUDA calls with the CPU until the context ends.

    Raises:
        RuntimeError: the machine has a GPU, or a Megatron-core that this was not checked against.
    """
    if torch.cuda.is_available():
        raise RuntimeError("this machine has a GPU: the CPU stand-in would hide it")
    if (found := version("megatron-core")) not in MEGATRON_VERSIONS:
        raise RuntimeError(
            f"the CPU stand-in is for megatron-core {' and '.join(MEGATRON_VERSIONS)}, found {found}: install one of them, "
            f"as in pip install megatron-core=={MEGATRON_VERSIONS[0]}"
        )
    with ExitStack() as stack:
        for name, replacement in REDIRECTIONS.items():
            stack.enter_context(patch(name, replacement))
        yield


@contextmanager
def one_group_per_ranks() -> Iterator[None]:
    """Let Megatron's axes share one of gloo's groups where they have the same ranks.

    Gloo connects a group when it is made and gives it three threads: two layouts of four ranks, three steps each, take
    15 to 20 % less CPU time without the copies. NCCL's groups cost nothing before their first use, and stay apart, as
    each works on a stream of its own.
    """
    make, made = parallel_state.create_group, {}

    def create_group(ranks: Sequence[int], **options: Any) -> Any:
        # On every rank, also those outside of the group: all take part in making one.
        if tuple(ranks) not in made:
            made[tuple(ranks)] = make(ranks, **options)
        return made[tuple(ranks)]

    with patch.object(parallel_state, "create_group", create_group):
        yield
