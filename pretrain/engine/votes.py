"""Votes of the ranks on a save in flight, summed by a step."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SaveVotes:
    """Votes of this rank when a step begins.

    Attributes:
        done: its part of the present phase is done.
        failed: its part has failed.
    """

    done: bool = False
    failed: bool = False


NO_VOTES = SaveVotes()
