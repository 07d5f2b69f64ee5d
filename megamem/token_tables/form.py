"""In which form the rows of a trained table are kept where it is only read: as they are, in fewer bits, or as factors.

Imports no torch: a command looks here before it starts ranks.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from fractions import Fraction

TABLES_FILE = "tables.json"
"""In a folder of tables, what says how they are kept."""

_BITS = {"int8": 8, "int4": 4}


@dataclass(frozen=True)
class TableForm:
    """A form of a table.

    Attributes:
        text: its name: `full`, `int8`, `int4`, `rank:R`, or `cut:P`, TIDE's rank of a cut by P percent.
        bits: bits of an element's code; None: elements are as they are, or factors.
        rank: R of `rank:R`.
        cut: P / 100 of `cut:P`.
    """

    text: str
    bits: int | None = None
    rank: int | None = None
    cut: Fraction | None = None

    @property
    def is_factored(self) -> bool:
        return self.rank is not None or self.cut is not None

    def rank_of(self, width: int) -> int:
        """r: that which is asked for, or ceil((1 - p) width) (TIDE, Fig. 12), in exact arithmetic.

        Raises:
            ValueError: rows of this width have no such rank.
        """
        rank = self.rank if self.cut is None else math.ceil((1 - self.cut) * width)
        assert rank is not None, "a form without factors has no rank"
        if not 1 <= rank <= width:
            raise ValueError(f"{self.text} asks for rank {rank}, but rows have {width} columns: ask for 1 to {width}")
        return rank

    def num_bytes(self, *, num_rows: int, num_slots: int, width: int, element_bytes: int) -> int:
        """Bytes of a table of `num_slots` rows per token, whose rows are restored to elements of so many bytes."""
        if self.bits is not None:
            # A scale per row.
            return num_rows * (4 + -(-width * self.bits // 8))
        if self.is_factored:
            return (num_rows + num_slots * width) * self.rank_of(width) * element_bytes
        return num_rows * width * element_bytes


def parse_form(text: str) -> TableForm:
    """The form of a word.

    Raises:
        ValueError: no form has that name.
    """
    if text == "full":
        return TableForm(text)
    if text in _BITS:
        return TableForm(text, bits=_BITS[text])
    if match := re.fullmatch(r"rank:(\d{1,9})", text):
        return TableForm(text, rank=int(match[1]))
    if (match := re.fullmatch(r"cut:(\d{1,2}(?:\.\d{1,6})?)%?", text)) is not None:
        return TableForm(text, cut=Fraction(match[1]) / 100)
    raise ValueError(
        f"there is no form {text!r} of a table: ask for full, int8, int4, rank:R as in rank:64, or cut:P as in cut:30 "
        "(the rank that is left when P percent of the columns are cut off)"
    )
