"""Suggestions for an invalid key, name or number: the nearest valid one."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable
from pathlib import Path

from pretrain.config.fields import ELEMENT

_LEAST_SIMILARITY = 0.6
_SECTION_WEIGHT = 0.1
_MAX_SUGGESTIONS = 3


def nearest_keys(unknown: str, keys: Iterable[str]) -> list[str]:
    """The valid keys most like an unknown one: by its last name wherever it stands (`lr`: `optimizer.lr`), the
    nearest section preferred.

    Args:
        unknown: the dotted key that does not exist.
        keys: every dotted key that does; `N` stands for the number of a list element.

    Returns:
        The best one, more where several are equally good, none where nothing is alike.
    """
    segments = unknown.split(".")
    pattern = ".".join(ELEMENT if segment.isdecimal() else segment for segment in segments)
    section, _, name = pattern.rpartition(".")
    keys = list(keys)
    # A user who names an existing section means a key of it, or one of exactly this name elsewhere.
    knows_section = any(key.startswith(f"{section}.") for key in keys)
    scores = {}
    for key in keys:
        key_section, _, key_name = key.rpartition(".")
        similarity = _ratio(name, key_name)
        least = 1.0 if knows_section and key_section != section else _LEAST_SIMILARITY
        if similarity >= least:
            scores[key] = similarity + _SECTION_WEIGHT * _ratio(section, key_section)
    best = max(scores.values(), default=0.0)
    numbers = [segment for segment in segments if segment.isdecimal()]
    return [_with_numbers(key, numbers) for key, score in scores.items() if score == best][:_MAX_SUGGESTIONS]


def _ratio(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, one, other).ratio()


def _with_numbers(key: str, numbers: list[str]) -> str:
    remaining = iter(numbers)
    return ".".join(next(remaining, "0") if segment == ELEMENT else segment for segment in key.split("."))


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
