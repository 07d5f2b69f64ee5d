"""Role of a config's field for a checkpoint: part of the model's identity, or of the way in which it is run."""

from __future__ import annotations

from enum import Enum


class Role(Enum):
    """Marks a field, by `Annotated`, and all fields of the section below it that have no mark of their own."""

    IDENTITY = "identity"
    """Another value is another model or another start: a checkpoint is not resumed with it."""
    RUNNING = "way of running"
    """Another value goes on with the same weights."""
