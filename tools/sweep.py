"""`--sweep key=a,b,c`: the grid of values that `megamem submit` queues as an array of runs."""

from __future__ import annotations

import argparse
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass

from pretrain.errors import ConfigError

_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._=+-]+")


@dataclass(frozen=True)
class SweepAxis:
    """A key, and the values that it takes, as the command line has them."""

    key: str
    values: tuple[str, ...]


@dataclass(frozen=True)
class SweepPoint:
    """One run of a sweep.

    Attributes:
        name: its values in words, behind the name of what is swept.
        overrides: `key=value` texts.
    """

    name: str
    overrides: tuple[str, ...]


def axis(text: str) -> SweepAxis:
    """Axis of `key=a,b,c`; commas within brackets belong to a value. For argparse."""
    key, sign, values = text.partition("=")
    found = _split(values)
    if not key or not sign or not all(found) or len(set(found)) < len(found):
        raise argparse.ArgumentTypeError(f"{text!r} is no key=a,b,c with values that differ")
    return SweepAxis(key, tuple(found))


def _split(text: str) -> list[str]:
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "[{") - (letter in "]}")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts]


def grid(axes: Sequence[SweepAxis]) -> list[SweepPoint]:
    """Every combination, the last key changing fastest.

    Raises:
        ConfigError: a key is given twice, or two runs would have the same name.
    """
    keys = [each.key for each in axes]
    for key in keys:
        if keys.count(key) > 1:
            raise ConfigError(f"--sweep {key} is given {keys.count(key)} times: give all its values at once")
    short = [_shortest(key, keys) for key in keys]
    points = []
    for values in itertools.product(*(each.values for each in axes)):
        words = "-".join(f"{name}={value}" for name, value in zip(short, values, strict=True))
        overrides = tuple(f"{key}={value}" for key, value in zip(keys, values, strict=True))
        points.append(SweepPoint(_NOT_IN_NAMES.sub("_", words), overrides))
    names = [point.name for point in points]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ConfigError(
            f"two runs of the sweep would be called {twice}: submit them one by one, with names of their own"
        )
    return points


def _shortest(key: str, keys: Sequence[str]) -> str:
    """The last words of a key, as many as tell it from the others."""
    words = key.split(".")
    for count in range(1, len(words)):
        end = ".".join(words[-count:])
        if sum(other == end or other.endswith(f".{end}") for other in keys) == 1:
            return end
    return key
