"""Threads beside the one that computes take none of its cores, and change nothing for others."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from kernels.common.side_thread import side_thread


@pytest.fixture(params=[1, 3])
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def test_it_has_one_core_and_leaves_all_others_theirs(num_threads: int) -> None:
    side = side_thread("beside", torch.device("cpu"))
    assert side.submit(torch.get_num_threads).result() == 1
    found = [torch.get_num_threads()]
    later = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    later.start()
    later.join()
    assert found == [num_threads, num_threads]


def test_beside_a_gpu_it_has_the_hosts_cores(num_threads: int) -> None:
    side = side_thread("beside", torch.device("cuda"))
    assert side.submit(torch.get_num_threads).result() == num_threads
