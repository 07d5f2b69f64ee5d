"""Reader of files with a JSON object per line: metrics, history and jobs of a run. It imports no torch.

A row that cannot be read is named on stderr and left out: a record is for people, and nothing that trains may end over it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pretrain.printable import printable

# A file that is no record at all has as many bad rows as lines.
_NAMED_ROWS = 3


@dataclass(frozen=True)
class NumberedRow:
    """A row of a file.

    Attributes:
        number: number of its line, from 1.
        line: its bytes, without the line's end.
        values: its object.
    """

    number: int
    line: bytes
    values: dict[str, Any]


def parse_row(line: bytes, **needed: type) -> dict[str, Any]:
    """The object of a line.

    Args:
        line: bytes of a line, with or without its end.
        needed: keys that it must have, and the types of their values.

    Raises:
        ValueError: the line is no such object; the message goes after "the row".
    """
    try:
        values = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise ValueError(f"has a byte that is not UTF-8 ({error.object[error.start]:#04x})") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is not JSON ({error})") from error
    if not isinstance(values, dict):
        raise ValueError("is not an object")
    for key, kind in needed.items():
        # True is an int to Python, and no step.
        if type(values.get(key)) is not kind:
            raise ValueError(f"has no `{key}`" if key not in values else f"has no {kind.__name__} as its `{key}`")
    return values


def numbered_rows(path: Path, **needed: type) -> Iterator[NumberedRow]:
    """The rows of a file in their order, one at a time; none if there is no such file.

    Half a line at the end is being written, or was by a process that is dead: it is left out without a word.
    """
    if not path.exists():
        return
    num_bad = 0
    with path.open("rb") as stream:
        for number, line in enumerate(stream, start=1):
            try:
                values = parse_row(line, **needed)
            except ValueError as error:
                if line.endswith(b"\n"):
                    num_bad += 1
                    if num_bad <= _NAMED_ROWS:
                        note_bad_row(f"{path}, line {number}", error)
                continue
            yield NumberedRow(number, line.rstrip(b"\n"), values)
    if num_bad > _NAMED_ROWS:
        print(f"note: {path}: {num_bad - _NAMED_ROWS:,} more rows are bad, and left out", file=sys.stderr, flush=True)


def read_rows(path: Path, **needed: type) -> list[dict[str, Any]]:
    """All rows of a file, as `numbered_rows` finds them."""
    return [row.values for row in numbered_rows(path, **needed)]


def note_bad_row(where: str, error: Exception) -> None:
    """Say that a row is left out, and why."""
    print(f"note: {printable(where)}: the row {printable(error)}, and is left out", file=sys.stderr, flush=True)
