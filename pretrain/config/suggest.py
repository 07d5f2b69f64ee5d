"""Suggestions for an invalid name or number: the nearest valid one."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable
from pathlib import Path

from pretrain.printable import printable


def did_you_mean(value: object, choices: Iterable[object]) -> str:
    """`: did you mean X?`, or nothing where no choice is alike."""
    close = difflib.get_close_matches(str(value), [str(choice) for choice in choices], n=1)
    return f": did you mean {close[0]}?" if close else ""


def did_you_mean_path(path: Path) -> str:
    """`: did you mean X?` for a path that is not there, or a full stop where no name is alike.

    The first part of the path that is missing is compared with the names beside it. Parts behind it are kept where
    they exist under the name that is meant.
    """
    for missing in reversed((path, *path.parents)):
        if missing.exists():
            continue
        try:
            # Names alone, as a long folder would make all of them alike; and not a link's own, which leads nowhere.
            beside = [name for name in os.listdir(missing.parent) if name != missing.name]
        except OSError:
            break
        close = difflib.get_close_matches(missing.name, beside, n=1)
        if not close:
            break
        meant = missing.with_name(close[0])
        whole = meant / path.relative_to(missing)
        return f": did you mean {printable(whole if whole.exists() else meant)}?"
    return "."


def nearest_multiples(value: int, unit: int) -> str:
    """The multiples of `unit` on both sides of `value`, in words; 0 is not one of them."""
    below = value // unit * unit
    return f"{below} or {below + unit}" if below else str(unit)
