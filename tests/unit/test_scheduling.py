"""Turns of threads that share cores, on Linux."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import pytest

from parallel.machine.scheduling import finish_turns

pytestmark = pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="policies are Linux's")


def in_a_thread(say: Callable[[], list[int]]) -> list[int]:
    """Answer of `say` from a thread of its own, as a policy is one thread's."""
    said: list[list[int]] = []
    thread = threading.Thread(target=lambda: said.append(say()))
    thread.start()
    thread.join()
    return said[0]


def set_policy(policy: int) -> None:
    os.sched_setscheduler(0, policy, os.sched_param(0))


def test_a_thread_and_those_that_it_starts_wait() -> None:
    def say() -> list[int]:
        set_policy(os.SCHED_OTHER)
        finish_turns()
        return [os.sched_getscheduler(0), *in_a_thread(lambda: [os.sched_getscheduler(0)])]

    assert in_a_thread(say) == [os.SCHED_BATCH] * 2


def test_a_chosen_policy_stays() -> None:
    def say() -> list[int]:
        set_policy(os.SCHED_IDLE)
        finish_turns()
        return [os.sched_getscheduler(0)]

    assert in_a_thread(say) == [os.SCHED_IDLE]


def test_a_container_may_forbid_it(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []

    def forbid(pid: int, policy: int, param: object) -> None:
        tried.append(policy)
        raise PermissionError(1, "Operation not permitted")

    def say() -> list[int]:
        set_policy(os.SCHED_OTHER)
        monkeypatch.setattr(os, "sched_setscheduler", forbid)
        finish_turns()
        return [os.sched_getscheduler(0)]

    assert in_a_thread(say) == [os.SCHED_OTHER]
    assert tried == [os.SCHED_BATCH]
