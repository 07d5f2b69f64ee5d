"""Suggestions for an invalid name or number: the nearest valid one."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable
from pathlib import Path


def did_you_mean(value: object, choices: Iterable[object]) -> str:
    """`: did you mean X?`, or nothing where no choice is alike."""
    close = difflib.get_close_matches(str(value), [str(choice) for choice in choices], n=1)
    return f": did you mean {close[0]}?" if close else ""


def did_you_mean_path(path: Path) -> str:
    """`: did you mean X?` by the names beside a path that is not there, or a full stop where none is alike."""
    try:
        # Names alone, as a long folder would make all of them alike; and not a link's own, which leads nowhere.
        beside = [name for name in os.listdir(path.parent) if name != path.name]
    except OSError:
        beside = []
    close = difflib.get_close_matches(path.name, beside, n=1)
    return f": did you mean {path.parent / close[0]}?" if close else "."


def nearest_multiples(value: int, unit: int) -> str:
    """The multiples of `unit` on both sides of `value`, in words; 0 is not one of them."""
    below = value // unit * unit
    return f"{below} or {below + unit}" if below else str(unit)
