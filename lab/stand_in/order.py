"""Order of accesses to memory from streams and the host: which came before which for certain, and which only by chance.

Every stream, and the host, is an actor that does one thing after the other. An actor's clock says how far it knows each
actor to have come: a launch knows what the host knows, a wait what an event knows, and the host, once it has waited,
what the stream had done. An access comes before another if the second one's actor knows of it (Lamport 1978; vector
clocks, Mattern 1988). Two accesses to the same bytes of which neither comes before the other, and one of which writes,
are a race: a device may run them in any order.

Memory that is freed goes back to the stream that allocated it, as in PyTorch's caching allocator, which hands it out
again at once, in that stream's order alone. A reader on another stream must have been waited for by then, or announced
by `record_stream`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain

from pretrain.planning.dryrun.lines import CallSite
from pretrain.planning.dryrun.streams import HOST, Clock, Order


@dataclass(frozen=True)
class Access:
    """One access to memory.

    Attributes:
        actor: the stream, or the host.
        number: place of the operation among its actor's, from 1.
        what: the operation.
        line: line of the code that asked for it.
        writes: True if it writes, or else it only reads.
    """

    actor: str
    number: int
    what: str
    line: CallSite
    writes: bool

    def __str__(self) -> str:
        return f"{self.what} {'writes' if self.writes else 'reads'} on {self.actor} at {self.line}"


@dataclass(frozen=True)
class Race:
    """Two accesses without an order between them.

    Attributes:
        first: the earlier access, in the order of the program.
        second: the later one; an allocation of the same memory if `freed`.
        freed: True if the memory was freed in between.
        num_bytes: bytes of the memory.
    """

    first: Access
    second: Access
    freed: bool
    num_bytes: int

    def __str__(self) -> str:
        how = "freed and may be handed out again before" if self.freed else "not ordered after"
        return f"{self.num_bytes:,} bytes: {self.second}, {how} {self.first}"


@dataclass
class Allocation:
    """Bytes that were allocated together.

    Attributes:
        owner: the stream that allocated them.
        num_bytes: number of these bytes.
        announced: streams that `record_stream` was called with.
    """

    owner: str
    num_bytes: int
    announced: set[str] = field(default_factory=set)
    parts: dict[tuple[int, int], list[Access]] = field(default_factory=dict)
    """By range of bytes, the last write and each actor's last read since."""


class StreamOrder(Order):
    """Clocks of all actors, and what they have accessed.

    Attributes:
        races: found so far, each pair of lines once.
    """

    def __init__(self) -> None:
        self.races: list[Race] = []
        self._clocks: dict[str, Clock] = {HOST: {}}
        # Accesses to freed memory that its owner does not know of, by owner.
        self._unknown: dict[str, list[tuple[Allocation, Access]]] = {}
        self._told: set[tuple[str, CallSite, str, CallSite]] = set()

    def clock(self, actor: str) -> Clock:
        """A copy of what an actor knows now: for an event, which keeps it."""
        return dict(self._advanced(actor))

    def wait(self, actor: str, known: Clock) -> None:
        """Have an actor go on only after all that is known."""
        clock = self._advanced(actor)
        for other, number in known.items():
            if number > clock.get(other, 0):
                clock[other] = number

    def wait_for(self, actor: str, other: str) -> None:
        """Have an actor go on only after all that another was asked for so far."""
        self.wait(actor, self._advanced(other))

    def actors(self) -> tuple[str, ...]:
        """All streams that were heard of, and the host."""
        return tuple(self._clocks)

    def allocate(self, owner: str, num_bytes: int, line: CallSite) -> Allocation:
        """Memory from a stream's pool, which may be any that was freed there."""
        clock, freed = self._advanced(owner), self._unknown.pop(owner, ())
        for block, access in freed:
            if not _knows(clock, access):
                self._tell(Race(access, Access(owner, 0, "an allocation", line, writes=True), True, block.num_bytes))
        return Allocation(owner, num_bytes)

    def free(self, block: Allocation) -> None:
        """Give memory back to its owner's pool."""
        clock, safe = self._advanced(block.owner), {block.owner, HOST, *block.announced}
        for access in chain.from_iterable(block.parts.values()):
            if access.actor not in safe and not _knows(clock, access):
                self._unknown.setdefault(block.owner, []).append((block, access))
        block.parts.clear()

    def launch(
        self,
        actor: str,
        what: str,
        line: CallSite,
        *,
        reads: Sequence[tuple[Allocation, int, int]] = (),
        writes: Sequence[tuple[Allocation, int, int]] = (),
    ) -> None:
        """Something that an actor does, with the bytes [start, stop) of blocks that it reads and writes."""
        clock = self._advanced(actor)
        number = clock[actor] = clock.get(actor, 0) + 1
        for touched, is_write in ((reads, False), (writes, True)):
            access = Access(actor, number, what, line, is_write)
            for block, start, stop in touched:
                self._touch(block, (start, stop), access, clock)

    def _advanced(self, actor: str) -> Clock:
        """Knowledge of an actor with all that the host knows at this moment, for whatever it is asked next."""
        clock = self._clocks.setdefault(actor, {})
        if actor != HOST:
            for other, number in self._clocks[HOST].items():
                if number > clock.get(other, 0):
                    clock[other] = number
        return clock

    def _touch(self, block: Allocation, part: tuple[int, int], access: Access, clock: Clock) -> None:
        start, stop = part
        if start >= stop:
            return
        covered = []
        for other, before in block.parts.items():
            if other[0] < stop and start < other[1]:
                for earlier in before:
                    if (access.writes or earlier.writes) and not _knows(clock, earlier):
                        self._tell(Race(earlier, access, False, min(stop, other[1]) - max(start, other[0])))
                if access.writes and start <= other[0] and other[1] <= stop:
                    covered.append(other)
        # Whatever comes after this write comes after all before it, or a race was told.
        for other in covered:
            del block.parts[other]
        same = block.parts.setdefault(part, [])
        if not access.writes:
            same[:] = [earlier for earlier in same if earlier.writes or earlier.actor != access.actor]
        same.append(access)

    def _tell(self, race: Race) -> None:
        key = (race.first.actor, race.first.line, race.second.actor, race.second.line)
        if key not in self._told:
            self._told.add(key)
            self.races.append(race)


def _knows(clock: Clock, access: Access) -> bool:
    return clock.get(access.actor, 0) >= access.number
