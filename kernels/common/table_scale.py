"""Scale of a table, by which a weight decay reaches rows that a step does not read.

The rows w of a table are its scale times what is stored: a decay multiplies the scale, and no row. An update divides what it
adds by it, and a gather multiplies its result by it, so that gradients are those of w.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from torch import Tensor

FOLD = 2.0**-32
"""Scale below which the stored rows take this factor. A power of two changes no bit of their fractions, so that nothing hangs
on when it is done; stored rows stay far below the largest numbers."""

_ATTRIBUTE = "_megamem_scale"

Gather = TypeVar("Gather", bound=Callable[..., Tensor])


class TableScale:
    """The scale of a table.

    Attributes:
        value: number in (0, 1], known to the host without a look at a device.
    """

    def __init__(self) -> None:
        self.value = 1.0

    def decay(self, keep: float) -> float | None:
        """Decay a table by an update.

        Args:
            keep: the part that stays of it, in (0, 1].

        Returns:
            The factor that its stored rows have to take now; None: they stay as they are.
        """
        assert 0 < keep <= 1
        self.value *= keep
        fold = None
        while self.value < FOLD:
            self.value /= FOLD
            fold = (1.0 if fold is None else fold) * FOLD
        return fold


def scale_of(table: Tensor) -> TableScale | None:
    """A table's scale; None: its rows are what is stored."""
    found: TableScale | None = getattr(table, _ATTRIBUTE, None)
    return found


def give_scale(table: Tensor, scale: TableScale | None) -> None:
    """Have rows of a table be the scale times what is stored."""
    setattr(table, _ATTRIBUTE, scale)


def of_scaled(gather: Gather, table: Tensor) -> Gather | partial[Tensor]:
    """A gather, which has no gradients, from rows of a table that are its scale times what is stored."""
    scale = scale_of(table)
    return gather if scale is None or scale.value == 1 else partial(_times, scale.value, gather)


def _times(factor: float, gather: Callable[..., Tensor], *operands: Any) -> Tensor:
    return gather(*operands).mul_(factor)
