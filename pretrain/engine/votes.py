"""What a rank tells the others of a save in flight, by way of a step."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SaveVotes:
    """What this rank says when a step begins.

    Attributes:
        done: its part of the present phase is done.
        failed: its part has failed.
    """

    done: bool = False
    failed: bool = False


NO_VOTES = SaveVotes()
