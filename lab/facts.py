"""Facts to learn by heart, and nothing else, as a table of vectors should be able to.

A fact is a name of four small letters and a value of two capitals, both drawn at random, written `nameVA`. The value
cannot be guessed from the name: a model that has not learnt the fact pays 2 ln 26 = 6.5 nats for it. Documents state
facts in random order, all of them once before any of them again.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from string import ascii_lowercase, ascii_uppercase

from parallel.machine.atomic_write import atomic_write

NAME_LETTERS, VALUE_LETTERS = 4, 2
FACT_LETTERS = NAME_LETTERS + VALUE_LETTERS
MAX_FACTS = len(ascii_lowercase) ** NAME_LETTERS
"""Number of the names that there are."""

GUESS_NATS = VALUE_LETTERS * math.log(len(ascii_uppercase))
"""Loss on a value of a model that knows its letters and not the fact."""


def make_facts(number: int, seed: int) -> list[str]:
    """So many facts, of different names."""
    draw = random.Random(f"facts {seed}")
    names = draw.sample(range(MAX_FACTS), number)
    return [
        _letters(name, ascii_lowercase, NAME_LETTERS) + "".join(draw.choices(ascii_uppercase, k=VALUE_LETTERS))
        for name in names
    ]


def _letters(number: int, alphabet: str, length: int) -> str:
    letters = ""
    for _ in range(length):
        number, digit = divmod(number, len(alphabet))
        letters += alphabet[digit]
    return letters


def documents(facts: Sequence[str], num_letters: int, document_letters: int, seed: int) -> Iterator[str]:
    """Documents of at most `document_letters` letters that together have at least `num_letters`."""
    draw = random.Random(f"documents {seed}")
    per_document = document_letters // FACT_LETTERS
    stated: list[str] = []
    written = 0
    while written < num_letters:
        while len(stated) < per_document:
            stated += draw.sample(facts, len(facts))
        document, stated = "".join(stated[:per_document]), stated[per_document:]
        written += len(document)
        yield document


def write_documents(path: Path, texts: Iterator[str]) -> None:
    """JSON lines, as `megamem data prepare` reads them; the file appears when it is complete."""
    with atomic_write(path) as stream:
        for text in texts:
            stream.write(f"{json.dumps({'text': text})}\n".encode())
