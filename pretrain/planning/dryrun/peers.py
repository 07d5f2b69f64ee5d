"""Check that ranks that were dry-run one by one would have met: the same calls in the same order, of the same tensors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise, zip_longest

from pretrain.planning.dryrun.collectives import Collective
from pretrain.planning.dryrun.meeting import deadlock
from pretrain.planning.dryrun.rank import RankReport


def mismatches(reports: Sequence[RankReport]) -> list[str]:
    """See `find_mismatches`."""
    return find_mismatches({report.rank: (*report.collectives, *report.next_collectives) for report in reports})


def find_mismatches(calls: Mapping[int, Sequence[Collective]]) -> list[str]:
    """Calls that one of these ranks makes and another does not answer, in sentences; empty if they agree.

    Messages are compared between ranks that are both there, other collectives between all members of a group that are
    there. Ranks of one stage hold the same shapes, so the first rank of every stage stands for all. Where every
    communicator has its calls in one order, it is also checked that no two ranks come to different ones first.
    """
    found = [*_messages(calls), *_groups(calls), *_splits(calls)]
    return found or list(deadlock(calls))


def _messages(calls: Mapping[int, Sequence[Collective]]) -> Iterator[str]:
    ends: dict[tuple[int, int], tuple[list[Collective], list[Collective]]] = defaultdict(lambda: ([], []))
    for rank, of_rank in calls.items():
        for call in of_rank:
            if call.is_message and call.ranks[0] in calls:
                peer = call.ranks[0]
                pair = (rank, peer) if call.op == "send" else (peer, rank)
                ends[pair][call.op == "recv"].append(call)
    for (sender, receiver), (sent, received) in sorted(ends.items()):
        for number, (left, right) in enumerate(zip_longest(sent, received)):
            if left is None or right is None or (left.content, left.group) != (right.content, right.group):
                yield (
                    f"message {number} from rank {sender} to rank {receiver}: {_said(left, 'sent')}, "
                    f"{_said(right, 'expected')}"
                )
                break


def _said(call: Collective | None, verb: str) -> str:
    if call is None:
        return f"nothing {verb}"
    return f"{call.content} ({call.num_bytes:,} bytes) {verb} in group {call.axis} at {call.line}"


def _groups(calls: Mapping[int, Sequence[Collective]]) -> Iterator[str]:
    for members in _by_group(calls).values():
        for (one, left), (other, right) in pairwise(sorted(members.items())):
            for number, pair in enumerate(zip_longest(left, right)):
                if _agreed(pair[0]) != _agreed(pair[1]):
                    call = pair[0] or pair[1]
                    assert call is not None
                    yield (
                        f"call {number} in group {call.axis} of {len(call.ranks)} ranks: rank {one} makes "
                        f"{_made(pair[0])}, rank {other} {_made(pair[1])}"
                    )
                    break


def _splits(calls: Mapping[int, Sequence[Collective]]) -> Iterator[str]:
    """Rows that one member sends another by an all_to_all, and the other does not expect."""
    for members in _by_group(calls).values():
        for of_members in zip(*members.values(), strict=False):
            parts = {rank: call for rank, call in zip(members, of_members, strict=True) if call.splits is not None}
            for sender, left in parts.items():
                for receiver, right in parts.items():
                    assert left.splits is not None
                    assert right.splits is not None
                    sent = left.splits[0][left.ranks.index(receiver)]
                    expected = right.splits[1][right.ranks.index(sender)]
                    if sent != expected:
                        yield (
                            f"all_to_all in group {left.axis} of {len(left.ranks)} ranks: rank {sender} sends rank "
                            f"{receiver} {sent} rows at {left.line}, which expects {expected} at {right.line}"
                        )


def _by_group(calls: Mapping[int, Sequence[Collective]]) -> dict[str, dict[int, list[Collective]]]:
    """Calls that are no messages, by communicator and by rank; those of every member that is there, made or not."""
    groups: dict[str, dict[int, list[Collective]]] = {}
    for of_rank in calls.values():
        for call in of_rank:
            if not call.is_message and call.group not in groups:
                groups[call.group] = {rank: [] for rank in call.ranks if rank in calls}
    for rank, of_rank in calls.items():
        for call in of_rank:
            if not call.is_message:
                groups[call.group][rank].append(call)
    return groups


def _agreed(call: Collective | None) -> tuple[str, str, bool] | None:
    return None if call is None else (call.op, call.content, call.splits is None)


def _made(call: Collective | None) -> str:
    if call is None:
        return "no call"
    return f"{call.op} of {call.content} ({call.num_bytes:,} bytes) at {call.line}"
