"""Shares of long lists of cases: a run of the suite takes one, the next week's run another, so that all have their turn.

A list is one where cases meet the same code in other company, such as models on layouts: most mistakes fail many of them.
Cases that are alone on a path of the code stay out of it, and are run every week.
`make test` names the week, `make test CASES=all` and pytest by itself take every case.
"""

from __future__ import annotations

import os
import random
from collections.abc import Mapping, Sequence
from typing import TypeVar

import pytest

T = TypeVar("T")

WEEK = int(os.environ["MEGAMEM_WEEK"]) if os.environ.get("MEGAMEM_WEEK") else None
"""Number of the week whose share is run; None runs every case."""


def in_rotation(cases: Sequence[T], parts: int = 3, week: int | None = WEEK) -> list[T]:
    """Cases of this week's share, in their order. Neighbours, which are often of one kind, are spread over the shares.

    Args:
        parts: weeks after which all have been run; at most the number of cases, as no share may be empty.
        week: counted from any time.
    """
    assert len(cases) >= parts, f"{len(cases)} cases cannot be spread over {parts} weeks: name fewer parts"
    places = list(range(len(cases)))
    random.Random(len(cases)).shuffle(places)
    return [case for case, place in zip(cases, places, strict=True) if week is None or place % parts == week % parts]


def in_turn(number: int, parts: int = 2, week: int | None = WEEK) -> pytest.MarkDecorator:
    """Mark of a test that costs seconds, number `number` of those that take turns: it is run in one of `parts` weeks."""
    assert 0 <= number < parts, f"{number} is none of {parts} weeks"
    return pytest.mark.skipif(
        week is not None and week % parts != number, reason="in another week's share: make test CASES=all runs it"
    )


def named_in_rotation(cases: Mapping[str, T], parts: int = 3, week: int | None = WEEK) -> dict[str, T]:
    """Cases of this week's share by their names, as `in_rotation`."""
    return {name: cases[name] for name in in_rotation(list(cases), parts, week)}
