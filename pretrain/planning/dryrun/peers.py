"""Check that ranks that were dry-run one by one would have met: the same calls in the same order, of the same sizes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise, zip_longest

from pretrain.planning.dryrun.rank import RankReport
from pretrain.planning.dryrun.recorder import Collective


def mismatches(reports: Sequence[RankReport]) -> list[str]:
    """Calls that one of these ranks makes and another does not answer, in sentences; empty if they agree.

    Messages are compared between ranks that are both there, other collectives between all members of a group that are
    there. Ranks of one stage hold the same shapes, so the first rank of every stage stands for all.
    """
    return [*_messages(reports), *_groups(reports)]


def _messages(reports: Sequence[RankReport]) -> Iterator[str]:
    for sender in reports:
        for receiver in reports:
            sent = _sizes(sender, "send", receiver.rank)
            received = _sizes(receiver, "recv", sender.rank)
            for number, (left, right) in enumerate(zip_longest(sent, received)):
                if left != right:
                    yield (
                        f"message {number} from rank {sender.rank} to rank {receiver.rank}: {_bytes(left)} sent, "
                        f"{_bytes(right)} expected"
                    )
                    break


def _sizes(report: RankReport, op: str, peer: int) -> list[int]:
    return [call.num_bytes for call in report.collectives if call.op == op and call.ranks == (peer,)]


def _bytes(size: int | None) -> str:
    return "nothing" if size is None else f"{size:,} bytes"


def _groups(reports: Sequence[RankReport]) -> Iterator[str]:
    groups = {(call.axis, call.ranks) for report in reports for call in report.collectives if not _is_message(call)}
    for axis, ranks in sorted(groups):
        members = [report for report in reports if report.rank in ranks]
        for one, other in pairwise(members):
            left, right = (_calls(report, axis, ranks) for report in (one, other))
            if left != right:
                number = next(i for i, pair in enumerate(zip_longest(left, right)) if pair[0] != pair[1])
                yield (
                    f"call {number} in group {axis} of {len(ranks)} ranks: rank {one.rank} makes {_nth(left, number)}, "
                    f"rank {other.rank} {_nth(right, number)}"
                )


def _is_message(call: Collective) -> bool:
    return call.op in ("send", "recv")


def _calls(report: RankReport, axis: str, ranks: tuple[int, ...]) -> list[tuple[str, int]]:
    return [
        (call.op, call.num_bytes)
        for call in report.collectives
        if call.axis == axis and call.ranks == ranks and not _is_message(call)
    ]


def _nth(calls: Sequence[tuple[str, int]], number: int) -> str:
    return f"{calls[number][0]} of {calls[number][1]:,} bytes" if number < len(calls) else "no call"
