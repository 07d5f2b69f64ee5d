"""Meeting point of an attempt's ranks: rank 0 writes it into the attempt's folder.

Slurm's node list is sorted, and says nothing of who has rank 0 where tasks are placed by a host file
(`--distribution=arbitrary`). A port that follows from the job's number may be taken by somebody else's job on the node.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from parallel.machine.atomic_write import atomic_write
from pretrain.errors import UserError

_LOOK_EVERY_S = 0.05
_HIGHEST_PAUSE_S = 1.0


@dataclass(frozen=True)
class MeetingPoint:
    """Addresses at which the ranks of a job meet.

    Attributes:
        host: name of rank 0's node, as the other nodes know it.
        port: port of the run's store.
        check_port: port of the store of the nodes' check, which comes first.
    """

    host: str
    port: int
    check_port: int


def meeting_point(file: Path, rank: int, timeout_s: float, environ: Mapping[str, str] = os.environ) -> MeetingPoint:
    """Meeting point of the ranks, chosen and written by rank 0, read by the others.

    Args:
        file: a file in a folder that all nodes see.
        timeout_s: seconds that rank 0 may take to start.

    Raises:
        UserError: rank 0 has not written the meeting point in time.
    """
    if rank == 0:
        chosen = _choose(environ)
        with atomic_write(file) as stream:
            stream.write(json.dumps(asdict(chosen)).encode())
        return chosen
    give_up_s, pause_s = time.monotonic() + timeout_s, _LOOK_EVERY_S
    # Listed, not opened: network file systems remember for a while that a name did not exist.
    while file.name not in os.listdir(file.parent):
        if time.monotonic() > give_up_s:
            raise UserError(
                f"rank 0 has not said within {timeout_s:.0f} s where to meet ({file} is missing): its node did not "
                f"start it, or does not see {file.parent}"
            )
        time.sleep(pause_s)
        # Hundreds of ranks ask one file server.
        pause_s = min(1.5 * pause_s, _HIGHEST_PAUSE_S)
    return MeetingPoint(**json.loads(file.read_text(encoding="utf-8")))


def _choose(environ: Mapping[str, str]) -> MeetingPoint:
    with socket.socket() as first, socket.socket() as second:
        first.bind(("", 0))
        second.bind(("", 0))
        return MeetingPoint(_own_name(environ), first.getsockname()[1], second.getsockname()[1])


def _own_name(environ: Mapping[str, str]) -> str:
    """A name of this node that others can resolve: Slurm's, unless nobody knows it."""
    name = environ.get("SLURMD_NODENAME", "")
    try:
        socket.getaddrinfo(name or None, 0)
    except OSError:
        return socket.gethostname()
    return name or socket.gethostname()
