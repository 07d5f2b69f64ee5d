"""What a field of a config says of itself besides its type and help, by `Annotated`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class EffectiveWhen:
    """Marks a field that has an effect only where `condition(owner)` holds, so that the loader can refuse a value that would change nothing.

    Args:
        condition: takes the config object that owns the field.
        reason: the condition in words, for the error message: "<key> has no effect unless <reason>".
    """

    condition: Callable[[Any], bool]
    reason: str
