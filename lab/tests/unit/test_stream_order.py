"""Order of accesses from streams: planted sequences, with a wait and without it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from lab.stand_in.order import Allocation, Race, StreamOrder
from pretrain.planning.dryrun.lines import CallSite
from pretrain.planning.dryrun.streams import HOST

MAIN, SIDE, COPIES = "stream 0", "stream 1", "stream 2"


class Program:
    """Writes and reads of whole blocks; each line of code is where it is called from in the list."""

    def __init__(self) -> None:
        self.order = StreamOrder()
        self.line = 0

    def block(self, owner: str = MAIN, num_bytes: int = 8) -> Allocation:
        return self.order.allocate(owner, num_bytes, self._next())

    def write(self, actor: str, block: Allocation, start: int = 0, stop: int = 8) -> None:
        self.order.launch(actor, "write", self._next(), writes=[(block, start, stop)])

    def read(self, actor: str, block: Allocation, start: int = 0, stop: int = 8) -> None:
        self.order.launch(actor, "read", self._next(), reads=[(block, start, stop)])

    def wait(self, actor: str, other: str) -> None:
        self.order.wait_for(actor, other)

    def _next(self) -> CallSite:
        self.line += 1
        return CallSite(f"program.py:{self.line}")


def handed_over(p: Program, *, right: bool) -> None:
    """A wait left out: read on the side what was written on the main stream."""
    block = p.block()
    p.write(MAIN, block)
    if right:
        p.wait(SIDE, MAIN)
    p.read(SIDE, block)


def not_joined(p: Program, *, right: bool) -> None:
    block = p.block(SIDE)
    p.write(SIDE, block)
    if right:
        p.wait(MAIN, SIDE)
    p.read(MAIN, block)


def overwritten(p: Program, *, right: bool) -> None:
    """A buffer used again before it was read."""
    block = p.block()
    p.write(MAIN, block)
    p.wait(SIDE, MAIN)
    p.read(SIDE, block)
    if right:
        p.wait(MAIN, SIDE)
    p.write(MAIN, block)


def recorded_early(p: Program, *, right: bool) -> None:
    """An event recorded before the write that it is meant for."""
    block = p.block()
    event = p.order.clock(MAIN)
    p.write(MAIN, block)
    if right:
        event = p.order.clock(MAIN)
    p.order.wait(SIDE, event)
    p.read(SIDE, block)


def freed_early(p: Program, *, right: bool) -> None:
    """Memory freed while the side still reads it, and not announced."""
    block = p.block()
    p.write(MAIN, block)
    p.wait(SIDE, MAIN)
    p.read(SIDE, block)
    if right:
        block.announced.add(SIDE)
    p.order.free(block)
    p.block()


def freed_and_waited(p: Program, *, right: bool) -> None:
    """Freed before the wait is right, as long as nothing is allocated in between."""
    block = p.block()
    p.write(SIDE, block)
    p.order.free(block)
    if right:
        p.wait(MAIN, SIDE)
    p.block()


def host_reads(p: Program, *, right: bool) -> None:
    """Page-locked memory read by the host before its copy has come."""
    block = p.block(HOST)
    p.write(COPIES, block)
    if right:
        p.wait(HOST, COPIES)
    p.read(HOST, block)


def host_writes(p: Program, *, right: bool) -> None:
    """Page-locked memory written by the host before its copy has left."""
    block = p.block(HOST)
    p.write(HOST, block)
    p.read(COPIES, block)
    if right:
        p.wait(HOST, COPIES)
    p.write(HOST, block)


def through_the_host(p: Program, *, right: bool) -> None:
    """A launch comes after all that the host has waited for."""
    block = p.block()
    p.write(SIDE, block)
    if right:
        p.wait(HOST, SIDE)
    p.write(MAIN, block)


def through_a_third(p: Program, *, right: bool) -> None:
    block = p.block()
    p.write(MAIN, block)
    p.wait(SIDE, MAIN)
    if right:
        p.wait(COPIES, SIDE)
    p.read(COPIES, block)


def older_reader(p: Program, *, right: bool) -> None:
    """Two readers, of which only the later one is waited for."""
    block = p.block()
    for reader in (COPIES, SIDE):
        p.read(reader, block)
        if right or reader == SIDE:
            p.wait(MAIN, reader)
    p.write(MAIN, block)


def other_part(p: Program, *, right: bool) -> None:
    """Parts of a buffer are apart; bytes that overlap are not."""
    block = p.block()
    p.write(MAIN, block, 0, 4)
    p.read(SIDE, block, 4 if right else 3, 8)


PLANTED = (
    handed_over, not_joined, overwritten, recorded_early, freed_early, freed_and_waited, host_reads, host_writes,
    through_the_host, through_a_third, older_reader, other_part,
)  # fmt: skip


@pytest.mark.parametrize("program", PLANTED, ids=lambda program: program.__name__)
def test_a_race_is_told_with_both_accesses_and_order_is_no_race(program: Callable[..., None]) -> None:
    right, wrong = Program(), Program()
    program(right, right=True)
    assert right.order.races == []
    program(wrong, right=False)
    (race,) = wrong.order.races
    first, second = race.first, race.second
    assert first.actor != second.actor
    assert first.writes or second.writes
    assert str(race).count("program.py:") == 2
    assert race.freed == (program in (freed_early, freed_and_waited))


def test_a_race_in_a_loop_is_told_once() -> None:
    p = Program()
    block = p.block()
    for _ in range(3):
        p.line = 10
        p.write(MAIN, block)
        p.read(SIDE, block)
    assert [(race.first.actor, race.second.actor) for race in p.order.races] == [(MAIN, SIDE), (SIDE, MAIN)]


def test_bytes_of_a_race_are_those_of_both() -> None:
    p = Program()
    block = p.block(num_bytes=100)
    p.write(MAIN, block, 0, 60)
    p.read(SIDE, block, 40, 100)
    assert [race.num_bytes for race in p.order.races] == [20]
    assert isinstance(p.order.races[0], Race)


def test_an_actor_that_reads_ever_again_is_remembered_once() -> None:
    p = Program()
    block = p.block()
    for _ in range(100):
        p.read(SIDE, block)
    assert len(block.parts[0, 8]) == 1
    p.write(SIDE, block)
    assert list(block.parts) == [(0, 8)]
    assert len(block.parts[0, 8]) == 1
