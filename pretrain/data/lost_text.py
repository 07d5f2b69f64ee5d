"""Text that a tokenizer does not give back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from pretrain.data.tokenizer import Tokenizer


@dataclass(frozen=True)
class LostText:
    """Characters of documents that are not in the text of their ids.

    Attributes:
        share: part of all characters that is lost.
        example: the first word that comes back as another, and what it comes back as; None: each does.
    """

    share: float
    example: tuple[str, str] | None


def lost_text(tokenizer: Tokenizer, texts: Iterable[str]) -> LostText:
    """Measure what is lost of some texts: case and accents of a tokenizer that folds them, blanks, unknown characters."""
    num_lost = num_characters = 0
    example: tuple[str, str] | None = None
    for text in texts:
        back = tokenizer.detokenize(tokenizer.tokenize(text))
        num_characters += len(text)
        num_lost += (Counter(text) - Counter(back)).total()
        if example is None and back != text:
            words = zip(text.split(), back.split(), strict=False)
            example = next((pair for pair in words if pair[0] != pair[1]), None)
    return LostText(num_lost / max(1, num_characters), example)
