"""Progress of a rank's part of a save in flight, which a step adds up over all ranks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SaveProgress:
    """Progress when a step begins.

    Attributes:
        done: its part of the present phase is done.
        failed: its part has failed.
    """

    done: bool = False
    failed: bool = False


NO_SAVE = SaveProgress()
