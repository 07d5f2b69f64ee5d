"""Starts and ends of a run, and incidents, a line each in `history.jsonl`. It imports no torch."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import BinaryIO, TypeAlias

from parallel.machine.refusals import naming
from pretrain.run.folder import RunFolder
from pretrain.run.metric_rows import note_bad_row, numbered_rows


@dataclass(frozen=True)
class Start:
    """The run started, or went on from a checkpoint.

    Attributes:
        step, consumed_tokens: counters of the run as it started.
        at: UTC, as ISO 8601 has it.
        host: machine of rank 0.
        num_ranks: ranks over all machines.
    """

    step: int
    consumed_tokens: int
    at: str
    host: str
    num_ranks: int


@dataclass(frozen=True)
class End:
    """The run came to its last step or stopped as it was asked to, and all of it was saved.

    Attributes:
        step, consumed_tokens: counters of the run at its end.
        at: UTC, as ISO 8601 has it.
    """

    step: int
    consumed_tokens: int
    at: str


@dataclass(frozen=True)
class Incident:
    """Something that the run's owner should know of; the run went on, or stopped with these words.

    Attributes:
        step: step after which it was noticed.
        kind: non-finite, spike, rewind, slow rank, replicas, collapsed keys or silent memory.
        message: the finding, its place, and the action taken.
        at: UTC, as ISO 8601 has it.
    """

    step: int
    kind: str
    message: str
    at: str


Event: TypeAlias = Start | End | Incident
_NAMES: dict[str, type[Start] | type[End] | type[Incident]] = {"start": Start, "end": End, "incident": Incident}


def now() -> str:
    """The time in UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def write_event(folder: RunFolder, event: Event) -> None:
    """Add a line.

    Raises:
        OSError: the file cannot be written.
    """
    name = next(name for name, cls in _NAMES.items() if isinstance(event, cls))
    with naming(folder.history), open(folder.history, "a+b") as stream:
        # A line that a killed process left half-written stays one of its own.
        torn = stream.tell() > 0 and _last_byte(stream) != b"\n"
        stream.write(b"\n" * torn + json.dumps({"event": name, **asdict(event)}).encode() + b"\n")


def _last_byte(stream: BinaryIO) -> bytes:
    stream.seek(-1, os.SEEK_END)
    return stream.read(1)


def read_history(folder: RunFolder) -> tuple[Event, ...]:
    """Recorded events, in their order; none of runs from before there was such a file. Bad rows are named and left out."""
    events: list[Event] = []
    for row in numbered_rows(folder.history, event=str, step=int):
        values = dict(row.values)
        try:
            events.append(_NAMES[values.pop("event")](**values))
        except (TypeError, KeyError) as error:
            note_bad_row(f"{folder.history}, line {row.number}", ValueError(f"is no event of a run ({error})"))
    return tuple(events)
