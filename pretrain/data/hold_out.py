"""Division of documents into those to train on and those held out.

Each document is drawn by a hash of its number, so that nothing has to be known of the others, and the share of the
documents is about that of the text where they are many. Where those drawn are less than half or more than twice as
much of the text as was asked for, as a few documents or a very long one can be, all are divided anew by their bytes.
Equal documents go where the first of them goes: what a text that was trained on costs measures nothing.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from pretrain.errors import DataError

_MOST_WHOLE = 0.1
"""Largest share of the text of a document that is held out whole for want of a smaller one."""
_MOST_PER_CHARACTER = 4
"""Most bytes of a character in UTF-8: a longer text has two characters, and can be cut."""


@dataclass(frozen=True)
class HoldOut:
    """Choice of the documents that are held out.

    Attributes:
        inputs: files and directories whose documents are all held out, and no others; empty: documents are drawn.
        fraction: share of their text; 0: none.
        seed: seed of the draw.
    """

    inputs: tuple[str, ...] = ()
    fraction: float = 0.01
    seed: int = 1

    def __post_init__(self) -> None:
        if not 0.0 <= self.fraction < 1.0:
            raise DataError(
                f"A validation fraction of {self.fraction} is impossible: give one from 0 (no validation) to less than "
                "1, such as 0.01."
            )

    @property
    def is_drawn(self) -> bool:
        """True if held-out documents are drawn from among the others."""
        return not self.inputs and self.fraction > 0

    def takes(self, document_index: int, input_index: int, num_inputs: int) -> bool:
        """True if a document is held out, by its number and that of its input among the inputs of both kinds."""
        if self.inputs:
            return input_index >= num_inputs
        return held_out_score(self.seed, document_index) < self.fraction

    def is_about(self, share: float) -> bool:
        """True if a share of the text is half to twice the one asked for, and its rest at least half of that one's."""
        return self.fraction / 2 <= share <= 2 * self.fraction and 1 - share >= (1 - self.fraction) / 2


@dataclass(frozen=True)
class TextDivision:
    """Texts by their number.

    Attributes:
        held_out: whole.
        cut: the one of which the end is held out; None: none is.
        cut_share: share of its end that is held out.
    """

    held_out: frozenset[int]
    cut: int | None = None
    cut_share: float = 0.0


@dataclass(frozen=True)
class DrawnDocuments:
    """Documents in their order, as they were drawn.

    Attributes:
        held_out: [N] flags of those that were drawn to be held out.
        sizes: [N] bytes of their text.
        digests: [N] hashes of their contents.
    """

    held_out: NDArray[np.bool_]
    sizes: NDArray[np.int64]
    digests: NDArray[np.uint64]

    @cached_property
    def _texts(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        _, first, place = np.unique(self.digests, return_index=True, return_inverse=True)
        number = np.empty_like(first)
        number[np.argsort(first)] = np.arange(len(first))
        return number[place], np.sort(first)

    @property
    def texts(self) -> NDArray[np.int64]:
        """[N] number of each document's text among the different ones, in the order of their first documents."""
        return self._texts[0]

    @property
    def first(self) -> NDArray[np.int64]:
        """[texts] number of the first document with each text."""
        return self._texts[1]


def mended(hold_out: HoldOut, drawn: DrawnDocuments, *, can_cut: bool) -> TextDivision | None:
    """The division of texts where the draw parts equal documents, or is not about as much of all text as was asked for;
    None: the draw is right as it is.

    Raises:
        DataError: the text is the only one, and cannot be cut.
    """
    held_out = drawn.held_out[drawn.first]
    sizes = np.bincount(drawn.texts, drawn.sizes).astype(np.int64)
    if not (0 < held_out.sum() < len(held_out) and hold_out.is_about(sizes[held_out].sum() / sizes.sum())):
        return divide(hold_out, sizes.tolist(), can_cut=can_cut)
    parts_none = bool((held_out[drawn.texts] == drawn.held_out).all())
    return None if parts_none else TextDivision(frozenset(np.flatnonzero(held_out).tolist()))


def held_out_score(seed: int, document_index: int) -> float:
    """A number in [0, 1) that depends on nothing but its arguments; documents with the lowest scores are held out."""
    digest = hashlib.blake2b(struct.pack("<qq", seed, document_index), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) / 2.0**53


def divide(hold_out: HoldOut, sizes: Sequence[int], *, can_cut: bool) -> TextDivision:
    """The texts to hold out by their bytes. At least one is, or the end of one, and one is left.

    In the order of scores each one but the longest is held out that brings their bytes nearer to the share asked for. If
    that is less than half of it, because the others are long, the shortest of those follows; or, where it is more than a
    tenth of the text, the end of the one with the lowest score that is longer than a character.

    Args:
        sizes: bytes of each text, in all documents that have it.
        can_cut: a text may be cut.

    Raises:
        DataError: the text is the only one, and cannot be cut.
    """
    total = sum(sizes)
    wanted = hold_out.fraction * total
    order = sorted(range(len(sizes)), key=lambda index: held_out_score(hold_out.seed, index))
    left = max(reversed(order), key=sizes.__getitem__)
    taken: list[int] = []
    num_bytes = 0
    for index in order:
        if index != left and abs(num_bytes + sizes[index] - wanted) < abs(num_bytes - wanted):
            taken.append(index)
            num_bytes += sizes[index]
    held_out = frozenset(taken)
    if num_bytes >= wanted / 2 and taken:
        return TextDivision(held_out)
    rest = [index for index in order if index not in held_out]
    shortest = min(rest, key=sizes.__getitem__)
    cuttable = [index for index in rest if can_cut and sizes[index] > _MOST_PER_CHARACTER]
    if len(rest) > 1 and (sizes[shortest] <= _MOST_WHOLE * total or not cuttable):
        return TextDivision(frozenset([*taken, shortest]))
    # A single text may be shorter: only the code that cuts it knows its characters.
    if cuttable or (can_cut and not taken):
        longer = (cuttable or rest)[0]
        return TextDivision(held_out, longer, (wanted - num_bytes) / sizes[longer])
    if not taken:
        raise DataError(
            "There is only one prompt with an answer, or conversation, and training and validation need one each: add some, or leave "
            "validation out with --validation-fraction 0."
        )
    return TextDivision(held_out)
