"""Ranks that would wait for each other for ever: all calls of all ranks, played as if each rank made one at a time.

A GPU may run calls of several communicators at a time, or may not: what is started first may keep all others from
starting, as it does with one queue of work or where kernels fill the device. NCCL asks for one order on all ranks
therefore. So each rank waits here until its call is complete; messages that are sent together are one call. An order
that comes to its end this way ends on any device.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

from pretrain.planning.dryrun.collectives import Collective

# One end of the n-th meeting of some ranks: (communicator, n), or (communicator, sender, receiver, n).
_Meeting = tuple[str, int] | tuple[str, int, int, int]


def deadlock(calls: Mapping[int, Sequence[Collective]]) -> Iterator[str]:
    """The circle of ranks of which each waits for the next, in a sentence; nothing if all come to their end.

    Args:
        calls: calls of every rank that is there, in order. Others are taken to answer at once.
    """
    steps = {rank: _steps(rank, of_rank, calls) for rank, of_rank in calls.items()}
    arrived: dict[_Meeting, set[int]] = defaultdict(set)
    position = dict.fromkeys(calls, 0)

    def advance(rank: int) -> bool:
        """Make the calls of a rank up to the first that others do not answer; True if it made any."""
        start = position[rank]
        while position[rank] < len(steps[rank]):
            for meeting, _ in steps[rank][position[rank]]:
                arrived[meeting].add(rank)
            if any(_absent(call, rank, calls, arrived[meeting]) for meeting, call in steps[rank][position[rank]]):
                break
            position[rank] += 1
        return position[rank] > start

    while any(advance(rank) for rank in calls):
        pass
    stuck = {rank: steps[rank][number] for rank, number in position.items() if number < len(steps[rank])}
    if stuck:
        yield _circle(stuck, calls, arrived)


def _steps(
    rank: int, of_rank: Sequence[Collective], calls: Mapping[int, Sequence[Collective]]
) -> list[list[tuple[_Meeting, Collective]]]:
    """A rank's calls with ranks that are there, those that are made at one time together."""
    counts: Counter[tuple[str, int, int]] = Counter()
    numbered: list[tuple[object, _Meeting, Collective]] = []
    for index, call in enumerate(of_rank):
        if not any(peer in calls for peer in call.ranks if peer != rank):
            continue
        meeting: _Meeting
        if call.is_message:
            ends = (rank, call.ranks[0]) if call.op == "send" else (call.ranks[0], rank)
            meeting = (call.group, *ends, counts[call.group, *ends])
            counts[call.group, *ends] += 1
        else:
            meeting = (call.group, counts[call.group, -1, -1])
            counts[call.group, -1, -1] += 1
        numbered.append((("alone", index) if call.batch is None else ("batch", call.batch), meeting, call))
    return [
        [(meeting, call) for _, meeting, call in together] for _, together in groupby(numbered, key=lambda one: one[0])
    ]


def _absent(call: Collective, rank: int, calls: Mapping[int, Sequence[Collective]], arrived: set[int]) -> list[int]:
    return [peer for peer in call.ranks if peer != rank and peer in calls and peer not in arrived]


def _circle(
    stuck: Mapping[int, Sequence[tuple[_Meeting, Collective]]],
    calls: Mapping[int, Sequence[Collective]],
    arrived: Mapping[_Meeting, set[int]],
) -> str:
    path = [next(iter(stuck))]
    waiting: dict[int, Collective] = {}
    while path[-1] not in waiting:
        rank = path[-1]
        call, peer = next(
            (call, absent[0])
            for meeting, call in stuck[rank]
            if (absent := _absent(call, rank, calls, arrived[meeting]))
        )
        waiting[rank] = call
        path.append(peer)
        if peer not in stuck:
            return f"rank {peer} has come to its end, and {_at(rank, call)}"
    circle = path[path.index(path[-1]) : -1]
    return (
        "ranks wait for each other, as their communicators come in different orders: "
        + "; ".join(_at(rank, waiting[rank]) for rank in circle)
    )  # fmt: skip


def _at(rank: int, call: Collective) -> str:
    peers = f" with rank {call.ranks[0]}" if call.is_message else f" of {len(call.ranks)} ranks"
    return f"rank {rank} is at {call.op} of {call.content} in group {call.axis}{peers} at {call.line}"
