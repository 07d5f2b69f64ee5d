"""Main weights and Adam moments of memory tables in host memory, stepped there.

They take 12 bytes per element, the largest part of a table's memory. With `optimizer.value_offload: cpu` a step brings
the gradients to the host, updates there, and sends the weights back. The device keeps the weights and the gradient
buffer, and nothing is added to them: everything passes through two windows of page-locked host memory of a fixed size,
one of which is in flight while the host works on the other.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from torch import Tensor

from kernels.common.cpp import cache_folder
from pretrain.config.optimizer import OptimizerConfig
from pretrain.config.updates import ADAMW
from pretrain.engine.optimizer_shards import state_entries
from pretrain.engine.update_rules import ReplicaRanges, Share, UpdateRule
from pretrain.errors import ConfigError

# Elements that pass through the host at a time: long enough to hide a copy behind the update of the one before, which
# takes longer. A multiple of every vector width, so that windows do not change what is computed.
WINDOW_ELEMENTS = 1 << 22


class HostAdamW:
    """AdamW on windows of host memory, with state that the caller keeps.

    Attributes:
        name: name of the implementation, for people.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, name: str, *, step_is_tensor: bool) -> None:
        """Wrap an optimizer whose only group, and state by parameter, are set anew for every window.

        Args:
            optimizer: an AdamW that keeps `step`, `exp_avg` and `exp_avg_sq` per parameter.
            name: name of the implementation, for people.
            step_is_tensor: its `step` is an fp32 tensor, and not a number.
        """
        self.name = name
        self._optimizer = optimizer
        self._step_is_tensor = step_is_tensor

    def update(
        self,
        weights: Tensor,
        gradient: Tensor,
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
        *,
        num_updates: int,
        lr: float,
        weight_decay: float,
    ) -> None:
        """One update in place of a window of main weights: all tensors are flat fp32 in host memory, of one size.

        `num_updates` counts those that the moments have seen before, for bias correction.
        """
        step: Any = torch.tensor(float(num_updates)) if self._step_is_tensor else num_updates
        weights.grad = gradient
        self._optimizer.param_groups[0].update(params=[weights], lr=lr, weight_decay=weight_decay)
        self._optimizer.state[weights] = {"step": step, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
        self._optimizer.step()
        self._optimizer.state.clear()


def has_deepspeed() -> bool:
    """True if DeepSpeed, being installed, steps tables in host memory."""
    return importlib.util.find_spec("deepspeed") is not None


def host_adamw(settings: OptimizerConfig) -> HostAdamW:
    """DeepSpeed's AdamW if it is installed, else PyTorch's fused one.

    Raises:
        ConfigError: DeepSpeed is installed, and its operation cannot be compiled.
    """
    arguments: dict[str, Any] = {
        "lr": settings.lr,
        "betas": (settings.beta1, settings.beta2),
        "eps": settings.epsilon,
        "weight_decay": settings.weight_decay,
    }
    # Optimizers want a parameter when they are made; windows take its place.
    nothing = [torch.zeros(1)]
    if not has_deepspeed():
        return HostAdamW(
            torch.optim.AdamW(nothing, fused=True, **arguments), "PyTorch's fused AdamW", step_is_tensor=True
        )
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    try:
        with _alone_in_build_folder():
            optimizer = DeepSpeedCPUAdam(nothing, adamw_mode=True, **arguments)
    except OSError as error:
        raise ConfigError(
            f"optimizer.value_offload is cpu, and DeepSpeed's CPU Adam cannot be built in {cache_folder()} ({error}): "
            "set MEGAMEM_CACHE_DIR to a folder of yours"
        ) from error
    except RuntimeError as error:
        raise ConfigError(
            "optimizer.value_offload is cpu and deepspeed is installed, but its CPU Adam cannot be compiled "
            f"({error.__cause__ or error}): install ninja and a C++ compiler, "
            "or uninstall deepspeed to use PyTorch's AdamW, or set optimizer.value_offload: none"
        ) from error
    return HostAdamW(optimizer, "DeepSpeed's CPU AdamW", step_is_tensor=False)


@contextlib.contextmanager
def _alone_in_build_folder() -> Iterator[None]:
    """PyTorch builds extensions in a folder of ours, one process at a time.

    Its own lock is a file that a killed process leaves behind, for which all later ones wait without end. Ours is
    released however its owner ends; so a file of PyTorch's that is there then was left behind.
    """
    folder = cache_folder() / f"deepspeed-torch{torch.__version__}-{sys.implementation.cache_tag}"
    folder.mkdir(parents=True, exist_ok=True)
    before = os.environ.get("TORCH_EXTENSIONS_DIR")
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for left_behind in folder.glob("*/lock"):
            left_behind.unlink()
        os.environ["TORCH_EXTENSIONS_DIR"] = str(folder)
        try:
            yield
        finally:
            if before is None:
                del os.environ["TORCH_EXTENSIONS_DIR"]
            else:
                os.environ["TORCH_EXTENSIONS_DIR"] = before


def host_state(share: Share) -> dict[str, Tensor]:
    """A share's main weights `param`, copied from the device's, and moments `exp_avg` and `exp_avg_sq`, at zero.

    Each is [E] fp32 in host memory, by its name in checkpoints.
    """
    names = ("param", *ADAMW.per_element)
    state = {name: torch.zeros(share.weights.numel(), dtype=torch.float32, device="cpu") for name in names}
    for window in _windows(share.weights.numel()):
        # Widened on the host: the device never holds an fp32 copy.
        state["param"][window].copy_(share.weights[window].cpu())
    return state


class _Slot:
    """One window's staging memory, and when it may be read.

    Attributes:
        gradient: fp32, filled from the device.
        weights: weights in the dtype of the model's, sent to it.
        arrived: the gradient is here.
    """

    def __init__(self, size: int, weights_dtype: torch.dtype, *, pinned: bool) -> None:
        self.gradient = torch.empty(size, dtype=torch.float32, device="cpu", pin_memory=pinned)
        self.weights = torch.empty(size, dtype=weights_dtype, device="cpu", pin_memory=pinned)
        self.arrived = torch.cuda.Event()


class HostTables(UpdateRule):
    """This rank's shares of all tables, with their state in host memory, and the update of them."""

    def __init__(self, shares: Sequence[Share], _spreads: Sequence[ReplicaRanges], *, adamw: HostAdamW) -> None:
        """Take over the shares, whose weights have one dtype; state and staging memory are allocated here, once."""
        self.shares, self._adamw = shares, adamw
        self.state = {share: host_state(share) for share in shares}
        self._windows = [(share, window) for share in shares for window in _windows(share.weights.numel())]
        if self._windows:
            size = max(window.stop - window.start for _, window in self._windows)
            device_weights = shares[0].weights
            self._slots = [_Slot(size, device_weights.dtype, pinned=device_weights.is_cuda) for _ in range(2)]
            self._copies = torch.cuda.Stream()

    @property
    def num_windows(self) -> int:
        """Windows of an update, over all shares."""
        return len(self._windows)

    def update_shares(self) -> None:
        """Update main weights and moments from the gradients on the device, and the device's weights from them.

        Copies run on a stream of their own, gradients one window ahead of the host's work and weights behind it.
        """
        if self._windows:
            self._copies.wait_stream(torch.cuda.current_stream())
            self._fetch(0)
            for index in range(len(self._windows)):
                if index + 1 < len(self._windows):
                    self._fetch(index + 1)
                self._update(index)
                self._send(index)
            torch.cuda.current_stream().wait_stream(self._copies)

    def main_weights(self, share: Share) -> Tensor:
        """See `UpdateRule.main_weights`."""
        return self.state[share]["param"]

    @torch.no_grad()
    def set_weights_from_main(self) -> None:
        """See `UpdateRule.set_weights_from_main`; a window at a time."""
        for share in self.shares:
            for window in _windows(share.weights.numel()):
                # Narrowed on the host, as in a step.
                share.weights[window].copy_(self.state[share]["param"][window].to(share.weights.dtype))

    def state_entries(self, share: Share, leaves: Sequence[ShardedTensor]) -> dict[str, ShardedTensor]:
        """See `UpdateRule.state_entries`."""
        return state_entries(share.parameter, leaves, share.start, share.stop, self.state[share])

    def device_state(self) -> Iterable[Tensor]:
        """None: all of it is in host memory."""
        return ()

    @property
    def host_bytes(self) -> int:
        """Host memory of this rank's main weights and moments."""
        return sum(tensor.nbytes for state in self.state.values() for tensor in state.values())

    def describe(self) -> str:
        """See `UpdateRule.describe`."""
        return (
            f"tables' main weights and moments in host memory ({self.host_bytes / 1e9:.3g} GB on this rank), stepped by "
            f"{self._adamw.name} on {torch.get_num_threads()} threads per rank"
        )

    def _fetch(self, index: int) -> None:
        share, window = self._windows[index]
        slot = self._slots[index % 2]
        with torch.cuda.stream(self._copies):
            slot.gradient[: window.stop - window.start].copy_(share.gradient[window], non_blocking=True)
            slot.arrived.record(self._copies)

    def _update(self, index: int) -> None:
        share, window = self._windows[index]
        slot, size = self._slots[index % 2], window.stop - window.start
        state = self.state[share]
        main = state["param"][window]
        # Host sync, as the host works on what arrives; the next window is on its way meanwhile.
        slot.arrived.synchronize()
        self._adamw.update(
            main,
            slot.gradient[:size],
            state["exp_avg"][window],
            state["exp_avg_sq"][window],
            num_updates=share.num_updates,
            lr=share.group["lr"],
            weight_decay=share.group["weight_decay"],
        )
        # Two windows ago this memory was sent from: before the gradient that has arrived, on the same stream.
        slot.weights[:size].copy_(main)

    def _send(self, index: int) -> None:
        share, window = self._windows[index]
        slot = self._slots[index % 2]
        with torch.cuda.stream(self._copies):
            share.weights[window].copy_(slot.weights[: window.stop - window.start], non_blocking=True)


def _windows(num_elements: int) -> Iterator[slice]:
    for start in range(0, num_elements, WINDOW_ELEMENTS):
        yield slice(start, min(start + WINDOW_ELEMENTS, num_elements))
