"""Reads of every rank: the same global batches on every layout, from any sample on."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pretrain.data.loader import held_out_microbatches, microbatches, on_device
from pretrain.errors import DataError

ROOT = Path(__file__).parents[3]


class Numbers:
    """Sample i is filled with i; `bad` is a sample that cannot be served."""

    def __init__(self, length: int, bad: int | None = None) -> None:
        self.length = length
        self.bad = bad

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if index == self.bad:
            raise DataError(f"sample {index} is damaged")
        return {"tokens": torch.full((3,), index), "loss_mask": torch.ones(3)}


def numbers(batch: dict[str, torch.Tensor]) -> list[int]:
    return batch["tokens"][:, 0].tolist()


@given(
    micro_batch_size=st.integers(1, 4),
    data_size=st.integers(1, 4),
    num_microbatches=st.integers(1, 4),
    start_step=st.integers(0, 5),
)
def test_global_batches_are_consecutive_samples_on_every_layout(
    micro_batch_size: int, data_size: int, num_microbatches: int, start_step: int
):
    global_batch_size = micro_batch_size * data_size * num_microbatches
    dataset = Numbers(global_batch_size * (start_step + 2))
    readers = [
        microbatches(
            dataset,
            start_sample=start_step * global_batch_size,
            micro_batch_size=micro_batch_size,
            data_rank=rank,
            data_size=data_size,
            num_workers=0,
        )
        for rank in range(data_size)
    ]
    for step in (start_step, start_step + 1):
        batches = [numbers(batch) for reader in readers for batch in islice(reader, num_microbatches)]
        assert all(len(batch) == micro_batch_size for batch in batches)
        wanted = range(step * global_batch_size, (step + 1) * global_batch_size)
        assert sorted(number for batch in batches for number in batch) == list(wanted)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_microbatch_m_of_rank_d(num_workers: int):
    options = {"start_sample": 8, "micro_batch_size": 2, "data_rank": 1, "data_size": 2, "num_workers": num_workers}
    batches = microbatches(Numbers(24), **options)
    assert [numbers(batch) for batch in islice(batches, 3)] == [[10, 11], [14, 15], [18, 19]]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_end_of_the_samples_is_an_error(num_workers: int):
    options = {"start_sample": 0, "micro_batch_size": 2, "data_rank": 0, "data_size": 1, "num_workers": num_workers}
    batches = microbatches(Numbers(5), **options)
    assert len(list(islice(batches, 2))) == 2
    with pytest.raises(DataError, match=r"used up: there are 5.*train\.num_steps"):
        next(batches)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_bad_sample_is_told_in_its_own_words(num_workers: int):
    options = {"start_sample": 0, "micro_batch_size": 2, "data_rank": 0, "data_size": 1, "num_workers": num_workers}
    batches = microbatches(Numbers(8, bad=3), **options)
    next(batches)
    with pytest.raises(DataError, match=r"^sample 3 is damaged$"):
        next(batches)


@given(
    length=st.integers(1, 30),
    micro_batch_size=st.integers(1, 4),
    data_size=st.integers(1, 4),
    num_silent=st.integers(0, 3),
)
def test_held_out_samples_count_once_and_ranks_stay_together(
    length: int, micro_batch_size: int, data_size: int, num_silent: int
):
    counted: list[int] = []
    num_microbatches = -(-length // (micro_batch_size * data_size)) + num_silent
    for rank in range(data_size):
        options = {"micro_batch_size": micro_batch_size, "data_rank": rank, "data_size": data_size}
        batches = list(held_out_microbatches(Numbers(length), num_microbatches=num_microbatches, **options))
        assert len(batches) == num_microbatches
        for batch in batches:
            assert batch["tokens"].shape == (micro_batch_size, 3)
            counted += [n for n, mask in zip(numbers(batch), batch["loss_mask"][:, 0].tolist(), strict=True) if mask]
    assert sorted(counted) == list(range(length))


READER = """
import multiprocessing, sys, time
import torch
from pretrain.data.loader import microbatches

class Ones:
    def __len__(self): return 1000
    def __getitem__(self, index): return {"tokens": torch.ones(3)}

batches = microbatches(Ones(), start_sample=0, micro_batch_size=1, data_rank=0, data_size=1, num_workers=2)
next(batches)
print(*[child.pid for child in multiprocessing.active_children()], flush=True)
time.sleep(120)
"""


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_readers_end_with_a_parent_that_was_killed():
    command = [sys.executable, "-W", "ignore", "-c", READER]
    parent = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    readers = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(readers) == 2
    assert all(is_running(pid) for pid in readers)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 20
    while any(is_running(pid) for pid in readers):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_readers_go_on_when_all_processes_of_a_run_are_asked_to_stop():
    """The rank finishes its step with what they read."""
    ones: Any = [{"tokens": torch.ones(3)} for _ in range(100)]
    batches = microbatches(ones, start_sample=0, micro_batch_size=1, data_rank=0, data_size=1, num_workers=2)
    next(batches)
    for reader in multiprocessing.active_children():
        reader.terminate()
    # More than the two that each of the readers has prepared.
    for _ in range(20):
        next(batches)


@pytest.mark.parametrize(("device", "steps"), [("cuda", ["pinned", "sent"]), ("cpu", ["sent"])])
def test_batches_reach_a_gpu_by_page_locked_memory(
    monkeypatch: pytest.MonkeyPatch, device: str, steps: list[str]
) -> None:
    """A stand-in for the GPU: what is called, in its order, with tensors that stay where they are."""
    seen = []

    def pin_memory(tensor: torch.Tensor) -> torch.Tensor:
        seen.append("pinned")
        return tensor.clone()

    def to(tensor: torch.Tensor, where: torch.device, *, non_blocking: bool) -> torch.Tensor:
        assert (where.type, non_blocking) == (device, True)
        seen.append("sent")
        return tensor

    batch = {"position_ids": torch.arange(4).expand(2, 4).contiguous()}
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    monkeypatch.setattr(torch.Tensor, "to", to)
    (moved,) = on_device(iter([batch]), torch.device(device))
    assert seen == steps
    assert torch.equal(moved["position_ids"], batch["position_ids"])
