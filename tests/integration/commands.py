"""Tiny models' commands run in forks of the test process, and how to read what their runs leave behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, Protocol

import psutil
import torch
import torch.distributed.checkpoint as torch_checkpoint
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from parallel.processes import launch
from tests.patience import patience
from tools.cli import main

# Reached only when something hangs.
DEADLINE_S = 240.0

TINY: dict[str, Any] = {
    "name": "tiny",
    "model": {
        "num_layers": 4,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "ffn_hidden_size": 64,
        "memory": {
            "num_keys": 16,
            "key_dim": 8,
            "value_dim": 16,
            "pre_value_dim": 8,
            "top_k": 4,
            "sharing": {"pattern": "block", "group": 2},
        },
    },
    "train": {"num_steps": 20, "global_batch_size": 8, "micro_batch_size": 4, "sequence_length": 32},
    "optimizer": {
        "lr": 4e-3,
        "min_lr": 4e-4,
        "warmup_steps": 3,
        "value_lr_multiplier": 3.0,
        "value_lr_end_multiplier": 0.5,
        "pre_value_lr_multiplier": 2.0,
    },
    "evaluation": {"max_sequences": 8},
    "checkpoint": {"every_steps": 10},
}

TIMING = {"step_s", "tokens_per_s", "tflops_per_gpu"}


@dataclass(frozen=True)
class Result:
    """Exit code and output of a command. `output` is stdout and stderr as a terminal would show them."""

    code: int
    output: str

    @property
    def last_line(self) -> str:
        return self.output.rstrip().splitlines()[-1] if self.output.strip() else ""

    @property
    def generated(self) -> str:
        """Text that `megamem generate` printed before it said how long that took."""
        text, separator, pace = self.output.rpartition("prefill ")
        assert separator, self.output
        assert pace.endswith(" per token\n"), self.output
        return text


@dataclass
class Command:
    """A command that runs in the background in a session of its own."""

    pid: int
    log: Path
    _code: int | None = field(default=None)

    def ranks(self) -> list[psutil.Process]:
        """Its ranks, by number: the children of its only child, which watches over them."""
        (supervisor,) = psutil.Process(self.pid).children()
        return sorted(supervisor.children(), key=lambda child: (child.create_time(), child.pid))

    def poll(self) -> int | None:
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._code = os.waitstatus_to_exitcode(status)
        return self._code

    def wait(self, deadline_s: float = DEADLINE_S) -> Result:
        """Its end, by itself."""
        wait_until(lambda: self.poll() is not None, "the command to end", deadline_s)
        assert self._code is not None
        return Result(self._code, self.log.read_text(errors="replace"))

    def kill(self) -> None:
        """End it and all below it, if that has not happened."""
        if self.poll() is None:
            for process in [psutil.Process(self.pid), *psutil.Process(self.pid).children(recursive=True)]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            wait_until(lambda: self.poll() is not None, "the command to die")


class Megamem(Protocol):
    """Type of the `megamem` fixture."""

    def __call__(self, *args: object, before: Callable[[], None] | None = None) -> Result: ...


class MadeOnce(Protocol):
    """Type of the `made_once` fixture."""

    def __call__(self, name: str, make: Callable[[Path], None]) -> Path: ...


class Start(Protocol):
    """Type of the `start` fixture."""

    def __call__(self, *args: object, before: Callable[[], None] | None = None) -> Command: ...


def wait_until(condition: Callable[[], object], what: str, deadline_s: float = DEADLINE_S) -> None:
    deadline_s *= patience()
    give_up_s = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < give_up_s, f"waited {deadline_s:g} s for {what}"
        time.sleep(0.01)


def start_command(args: Sequence[object], log: Path, before: Callable[[], None] | None = None) -> Command:
    """`megamem ARGS...` in a fork; `before` runs in it first."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    pid = os.fork()
    if pid == 0:
        _become_command([str(arg) for arg in args], log, before)
    return Command(pid, log)


def _become_command(argv: list[str], log: Path, before: Callable[[], None] | None) -> NoReturn:
    """The whole life of the fork."""
    code = 70
    try:
        os.setsid()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(output, 1)
        os.dup2(output, 2)
        # pytest has replaced the streams.
        sys.stdout = sys.__stdout__ = os.fdopen(1, "w", buffering=1, closefd=False)  # type: ignore[misc]
        sys.stderr = sys.__stderr__ = os.fdopen(2, "w", buffering=1, closefd=False)  # type: ignore[misc]
        # PyTorch replaces its threads in the first call after a fork, and two threads that are first together fail.
        torch.set_num_threads(torch.get_num_threads())
        # Several test processes share the cores: threads of a rank would wait for each other at every barrier.
        launch.launch_ranks = partial(launch.launch_ranks, num_threads=1)
        if before is not None:
            before()
        code = main(argv)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code & 0xFF)


def assert_no_orphans(command: Command) -> None:
    """No process has the command's log open, as every process below it inherits it."""
    wait_until(lambda: not _holders(command.log), f"the processes that hold {command.log} to go", 20)


def _holders(log: Path) -> list[int]:
    holders = []
    for descriptors in Path("/proc").glob("[0-9]*/fd"):
        if descriptors.parent.name == str(os.getpid()):
            continue
        try:
            if any(os.readlink(link) == str(log) for link in descriptors.iterdir()):
                holders.append(int(descriptors.parent.name))
        except OSError:
            continue
    return holders


def rows(run: Path) -> list[dict[str, Any]]:
    """The rows of `metrics.jsonl`; a value that is no JSON fails."""

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    path = run / "metrics.jsonl"
    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def steps(run: Path) -> list[dict[str, Any]]:
    """The rows of steps, without what depends on the clock."""
    return [{k: v for k, v in row.items() if k not in TIMING} for row in rows(run) if "loss" in row]


def evaluations(run: Path) -> list[dict[str, Any]]:
    return [row for row in rows(run) if "validation_loss" in row]


def last_step(run: Path) -> int:
    """The last whole row's step; 0 while there is none."""
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    found = [json.loads(line)["step"] for line in lines if line.endswith("\n")]
    return max(found, default=0)


def checkpoint(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step_{step:08d}"


def tensors(path: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, whole."""
    reader = torch_checkpoint.FileSystemReader(path)
    metadata = reader.read_metadata().state_dict_metadata
    state = {}
    for name, entry in metadata.items():
        assert isinstance(entry, TensorStorageMetadata)
        state[name] = torch.empty(entry.size, dtype=entry.properties.dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch_checkpoint.load(state, storage_reader=reader, no_dist=True)
    return state


def assert_same_tensors(actual: Path, expected: Path) -> None:
    """Bit for bit, names and shapes included."""
    left, right = tensors(actual), tensors(expected)
    assert left.keys() == right.keys()
    assert any("exp_avg_sq" in name for name in left)
    different = [name for name in left if not torch.equal(left[name], right[name])]
    assert not different
