"""What a field of a config is to a checkpoint: a part of what makes it that model's, or of how the model is run."""

from __future__ import annotations

from enum import Enum


class Role(Enum):
    """Marks a field, by `Annotated`, and all fields of the section below it that have no mark of their own."""

    IDENTITY = "identity"
    """Another value is another model or another start: a checkpoint is not resumed with it."""
    RUNNING = "way of running"
    """The same weights go on with another value."""
