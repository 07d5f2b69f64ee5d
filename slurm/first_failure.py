"""The first failure among the ranks of an attempt, from what they recorded and from what srun says of them.

A rank that raises an error records it. One that is killed cannot, nor can a node that dies: its peers then lose their
connections, and say so first. srun names who was killed, in the order in which it heard of it.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator

from parallel.processes.peer_errors import says_peer_is_gone
from slurm.records import AttemptFolder, FirstFailure

_TASKS = re.compile(r"^srun: error: (?P<node>[^:\s]+): tasks? (?P<rank>\d+)[\d,-]*: (?P<how>.+)$", re.MULTILINE)
_NODE = re.compile(r"^srun: error: Node failure on (?P<node>\S+)", re.MULTILINE)
_CODE = re.compile(r"Exited with exit code (\d+)")
# As srun writes them, by the name of the signal in the C library.
_SIGNALS = {
    "Killed": signal.SIGKILL,
    "Out Of Memory": signal.SIGKILL,
    "Segmentation fault": signal.SIGSEGV,
    "Bus error": signal.SIGBUS,
    "Illegal instruction": signal.SIGILL,
    "Floating point exception": signal.SIGFPE,
    "Aborted": signal.SIGABRT,
    "Terminated": signal.SIGTERM,
}
# Also the end of ranks whose peer is gone, or that were told to end.
_TERMINATED = 128 + signal.SIGTERM
_MAY_BE_AN_ECHO = (128 + signal.SIGABRT, _TERMINATED)


def first_failure(folder: AttemptFolder) -> tuple[FirstFailure, str] | None:
    """The rank that failed first, and how it did in words; None if nobody says so."""
    recorded, heard = folder.first_failure(), list(_heard(folder.srun_words()))
    if heard and heard[0][0].exit_code > 128 and heard[0][0].exit_code not in _MAY_BE_AN_ECHO:
        return _told(folder, *heard[0])
    if recorded is not None:
        how = f"ended with exit code {recorded.exit_code}"
        if not says_peer_is_gone(folder.last_words(recorded.rank)):
            return _told(folder, recorded, how)
        others = [each for each in heard if each[0].rank != recorded.rank and each[0].exit_code != _TERMINATED]
        if others:
            return _told(folder, *others[0])
        return recorded, f"rank {recorded.rank} on {recorded.node} lost its connection to a rank that left no word"
    return _told(folder, *heard[0]) if heard else None


def failed_node(folder: AttemptFolder) -> str | None:
    """The node that Slurm says has failed."""
    found = _NODE.search(folder.srun_words())
    return None if found is None else found["node"]


def _heard(words: str) -> Iterator[tuple[FirstFailure, str]]:
    """The ends of ranks that srun tells of, each with its words."""
    for found in _TASKS.finditer(words):
        how, code = found["how"], _CODE.match(found["how"])
        number = next((number for name, number in _SIGNALS.items() if how.startswith(name)), None)
        if code is not None:
            yield FirstFailure(int(found["rank"]), found["node"], int(code[1])), f"ended with exit code {code[1]}"
        elif number is not None:
            yield FirstFailure(int(found["rank"]), found["node"], 128 + number), f"was killed (srun: {how})"


def _told(folder: AttemptFolder, failure: FirstFailure, how: str) -> tuple[FirstFailure, str]:
    said = folder.last_words(failure.rank)
    where = f"rank {failure.rank} on {failure.node} {how}"
    return failure, f"{where}: {said}" if said else where
