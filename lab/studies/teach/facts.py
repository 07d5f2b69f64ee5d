"""Facts that a model of text cannot know: names of four syllables, each with a code of two capitals.

`badu_kepo` asks, and `HM` and the end of the line answer: the code stands behind its name, so that a model that only sees a few tokens
can know it. Codes are drawn at random: who has not learnt a fact pays 2 ln 26 = 6.5 nats for it, once the form is known.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from string import ascii_uppercase

from pretrain.data.manifest import MANIFEST_FILE
from pretrain.data.tokenizer import Tokenizer

_SYLLABLES = [consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou"]
MAX_FACTS = 1_000_000
"""Largest number of facts: a twenty-fourth of the names that there are, so that they are drawn quickly."""


@dataclass(frozen=True)
class Fact:
    """A question and its answer."""

    question: str
    answer: str


def draw_facts(number: int, seed: int) -> list[Fact]:
    """So many facts, of different names."""
    draw = random.Random(f"facts to teach {seed}")
    names: dict[str, None] = {}
    while len(names) < number:
        first, second = ("".join(draw.choices(_SYLLABLES, k=2)) for _ in range(2))
        names[f"{first}_{second}"] = None
    return [Fact(name, f"{''.join(draw.choices(ascii_uppercase, k=2))}\n") for name in names]


def in_batches(facts: Sequence[Fact], number: int) -> list[Sequence[Fact]]:
    """The facts in so many batches of about one size."""
    size = -(-len(facts) // number)
    return [facts[start : start + size] for start in range(0, len(facts), size)]


def prepare_facts(facts: Sequence[Fact], folder: Path, tokenizer: Tokenizer) -> None:
    """Make a data set of prompts and answers of them, unless it is there."""
    from pretrain.data.prepare import prepare
    from pretrain.data.sources import PairFields

    if (folder / MANIFEST_FILE).exists():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    source = folder.with_name(f"{folder.name}.jsonl")
    lines = [json.dumps({"question": fact.question, "answer": fact.answer}) for fact in facts]
    source.write_text("\n".join(lines), encoding="utf-8")
    names = PairFields("question", "answer")
    prepare([str(source)], folder, tokenizer, pair=names, validation_fraction=0, num_workers=1)
    source.unlink()
