"""The failure of one rank reaches the others through the store where they met."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch.distributed as dist

import parallel.processes.failure_watch as watch_module
from parallel.processes.failure_watch import FailureWatch, failures_shared, tell_who_waits
from parallel.processes.rank_errors import FailureKind, RankFailure
from parallel.processes.ranks import RankEnvironment
from tests.free_ports import free_ports

WORLD_SIZE = 3


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_module, "LOOK_EVERY_S", 0.02)
    monkeypatch.setattr(watch_module, "PATIENCE_S", 0.1)
    monkeypatch.setattr(watch_module, "LOST_S", 0.2)


@pytest.fixture
def store() -> dist.Store:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=30), wait_for_workers=False)


class Rank:
    """A rank that writes down how its process would end."""

    def __init__(self, store: dist.Store, rank: int) -> None:
        self.ended: list[tuple[str, int]] = []
        self.watch = FailureWatch(store, rank, WORLD_SIZE, lambda *end: self.ended.append(end))
        self.watch.start()


def wait_until(condition: Callable[[], object]) -> None:
    until = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.005)


def failure(rank: int, message: str = "no table for block 3") -> RankFailure:
    return RankFailure(rank, FailureKind.ERROR, message, exit_code=4)


def test_the_others_end_with_the_ones_words_and_code(store: dist.Store) -> None:
    ranks = [Rank(store, rank) for rank in range(WORLD_SIZE)]
    ranks[1].watch.stop()
    ranks[1].watch.tell(failure(1))
    wait_until(lambda: ranks[0].ended and ranks[2].ended)
    assert ranks[0].ended == [("rank 0 ends because rank 1 failed: no table for block 3", 4)]
    assert ranks[2].ended == [("rank 2 ends because rank 1 failed: no table for block 3", 4)]
    assert not ranks[1].ended


def test_who_fails_by_itself_meanwhile_has_its_own_words(store: dist.Store) -> None:
    """All ranks do so if the cause is the configuration. The first failure stays the one that is told."""
    ranks = [Rank(store, rank) for rank in range(WORLD_SIZE)]
    for rank in (1, 2):
        ranks[rank].watch.stop()
        ranks[rank].watch.tell(failure(rank, f"of rank {rank}"))
    wait_until(lambda: ranks[0].ended)
    assert ranks[0].ended == [("rank 0 ends because rank 1 failed: of rank 1", 4)]
    assert not ranks[1].ended + ranks[2].ended


def test_rank_0_leaves_when_all_have_heard(store: dist.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store may be its own, and then ends with it."""
    others = [Rank(store, rank) for rank in (1, 2)]
    watch = FailureWatch(store, 0, WORLD_SIZE)
    with monkeypatch.context() as patient:
        patient.setattr(watch_module, "PATIENCE_S", 1000.0)
        watch.tell(failure(0))
    assert store.add("megamem/informed", 0) == WORLD_SIZE
    for other in others:
        other.watch.stop()
        assert not other.ended


def test_a_store_that_is_gone_ends_a_rank_after_a_while() -> None:
    """Rank 0 was killed, and could tell nobody."""
    gone = threading.Event()

    class Store:
        def clone(self) -> Store:
            return self

        def set_timeout(self, _: timedelta) -> None: ...

        def check(self, _: list[str]) -> bool:
            if gone.is_set():
                raise dist.DistNetworkError("Connection reset by peer")
            return False

    rank = Rank(Store(), 1)  # type: ignore[arg-type]
    assert not rank.ended
    gone.set()
    wait_until(lambda: rank.ended)
    assert rank.ended == [("rank 1 ends because rank 0 failed: its store cannot be reached any more", 1)]


def test_an_error_is_told_and_goes_on(store: dist.Store) -> None:
    other = Rank(store, 2)
    with pytest.raises(ZeroDivisionError), failures_shared(store, 1, WORLD_SIZE):
        1 / 0  # noqa: B018
    wait_until(lambda: other.ended)
    assert other.ended == [
        ("rank 2 ends because rank 1 failed: rank 1 failed with ZeroDivisionError: division by zero", 1)
    ]


def test_an_orderly_end_tells_nobody(store: dist.Store) -> None:
    other = Rank(store, 2)
    with failures_shared(store, 1, WORLD_SIZE):
        pass
    assert not store.check(["megamem/failure"])
    other.watch.stop()
    assert not other.ended


def test_where_nobody_listens_nobody_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_ports()
    monkeypatch.setattr(watch_module, "_WAIT_FOR_ANYBODY_S", 0.1)
    met: list[str] = []
    monkeypatch.setattr(dist, "rendezvous", lambda *_, **__: met.append("tried") or iter([]))
    for name, value in {"RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}.items():
        monkeypatch.setenv(name, value)
    ranks = RankEnvironment(1, WORLD_SIZE, 1, "env://")
    tell_who_waits(ranks, ValueError("no table for block 3"))
    assert not met


def test_an_error_before_the_meeting_reaches_who_waits_there(
    store: dist.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Rank(store, 0)
    monkeypatch.setattr(dist, "rendezvous", lambda *_, **__: iter([(store, 1, WORLD_SIZE)]))
    tell_who_waits(
        RankEnvironment(1, WORLD_SIZE, 1, f"tcp://127.0.0.1:{store.port}"), ValueError("no table for block 3")
    )
    wait_until(lambda: other.ended)
    assert other.ended == [
        ("rank 0 ends because rank 1 failed: rank 1 failed with ValueError: no table for block 3", 1)
    ]
