"""Results kept on a tensor of which they are made: what several backward passes need is made once, and goes with the graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch import Tensor

Result = TypeVar("Result")


def kept_on(tensor: Tensor, attribute: str, key: object, make: Callable[[], Result]) -> Result:
    """`make()`, or what it returned when this tensor was last asked for the attribute with an equal key.

    Args:
        key: all that the result depends on; versions of tensors that may be written to are a part of it.
    """
    known: tuple[object, Result] | None = getattr(tensor, attribute, None)
    if known is None or known[0] != key:
        known = key, make()
        setattr(tensor, attribute, known)
    return known[1]
