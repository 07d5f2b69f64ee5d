"""The tasks: which statements stand in a text, and what is asked at its end.

All are written in one form, that of assignments and assertions, which tokenizers of text and of code write well:

    kovuza = 4821            a statement
    assert kovuza == 4821    a question, and its answer

Statements stand in a filler, text that has nothing to do with them. The depth of a question is the share of the text
before what answers it: at depth 0 that is the very beginning, at depth 1 the end, next to the question.

Values are four random digits, so that an answer that does not look back is right one time in 9,000. Names that are asked
for are never used in documents to train on (`Names`): a model cannot know them by heart.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

_CONSONANTS, _VOWELS = "bdfgklmnprstvz", "aeiou"
_SYLLABLES = [consonant + vowel for consonant in _CONSONANTS for vowel in _VOWELS]
_SYLLABLES_OF_A_NAME = 3
_SMALLEST_VALUE, _LARGEST_VALUE = 1000, 9999
_ONE_ASKED_OF = 4
"""Number of names of which one is kept for asking."""

NUM_HOPS = 2
"""Assignments between the name that is asked for and the one that has a value."""
MOST_ROUNDS = 8
MOST_FACTS = 20_000
"""Statements in one text, at most; there are about 85,750 names to ask for."""
_NUM_INPUTS, _NUM_LABELS = 8, 4


@dataclass(frozen=True)
class Problem:
    """A text around a filler, and a question about it.

    Attributes:
        statements: statements in their order, each with its place: the share of the filler that stands before it.
        question: end of the text.
        answer: text that follows the question.
        wrong: other answers, the likely mistakes first.
        further: other questions of the same text with their answers, for documents to train on.
    """

    statements: Sequence[tuple[float, str]]
    question: str
    answer: str
    wrong: Sequence[str]
    further: Sequence[tuple[str, str]] = ()


class Names:
    """Source of names and values, no name twice.

    Args:
        asked: names that are asked for, or names to train on: no name is both.
    """

    def __init__(self, draw: Random, *, asked: bool) -> None:
        self.draw, self._asked = draw, asked
        self._taken: set[str] = set()

    def name(self) -> str:
        """Another name of three syllables."""
        while True:
            name = "".join(self.draw.choices(_SYLLABLES, k=_SYLLABLES_OF_A_NAME))
            if name not in self._taken and is_asked(name) == self._asked:
                self._taken.add(name)
                return name

    def value(self) -> str:
        """Any four digits, the first of which is not 0."""
        return str(self.draw.randint(_SMALLEST_VALUE, _LARGEST_VALUE))

    def fact(self) -> tuple[str, str]:
        """A name and a value."""
        return self.name(), self.value()

    def wrong(self, answer: str, likely: Sequence[str], number: int) -> tuple[str, ...]:
        """Wrong answers, `number` different ones: likely ones, then any."""
        found = list(dict.fromkeys(value for value in likely if value != answer))[:number]
        while len(found) < number:
            value = self.value()
            if value != answer and value not in found:
                found.append(value)
        return tuple(f" {value}" for value in found)


def is_asked(name: str) -> bool:
    """Tell whether a name is kept for asking."""
    return hashlib.blake2b(name.encode(), digest_size=1).digest()[0] % _ONE_ASKED_OF == 0


def stated(name: str, value: str) -> str:
    """A statement, on lines of its own."""
    return f"\n{name} = {value}\n"


def asked(name: str) -> str:
    """A question; its answer is a space and the value."""
    return f"\nassert {name} =="


MakeProblem = Callable[[Names, float, int, int], Problem]
"""Maker of a problem from names, a depth in [0, 1], the number of statements that fit, and that of wrong answers."""


def needle(names: Names, depth: float, num_facts: int, num_wrong: int) -> Problem:
    """One statement in a filler."""
    name, value = names.fact()
    return Problem([(depth, stated(name, value))], asked(name), f" {value}", names.wrong(value, (), num_wrong))


def key_value(names: Names, depth: float, num_facts: int, num_wrong: int) -> Problem:
    """As many statements as there is room for, of which one is asked."""
    facts = [names.fact() for _ in range(max(2, num_facts))]
    place = _place(depth, len(facts))
    name, value = facts[place]
    others = [fact for number, fact in enumerate(facts) if number != place]
    likely = names.draw.sample([value for _, value in others], min(len(others), num_wrong))
    return Problem(
        [(1.0, stated(*fact)) for fact in facts],
        asked(name),
        f" {value}",
        names.wrong(value, likely, num_wrong),
        _further(names, others),
    )


def hops(names: Names, depth: float, num_facts: int, num_wrong: int) -> Problem:
    """A chain of assignments from the depth on, beside a second one with another value; its end is asked."""
    (chain, value), (rival, mistaken) = (([names.name() for _ in range(NUM_HOPS + 1)], names.value()) for _ in range(2))
    statements = []
    for link in range(NUM_HOPS + 1):
        place = depth + (1 - depth) * link / (NUM_HOPS + 1)
        statements += [
            (place, stated(of[link], of[link - 1] if link else first))
            for of, first in ((chain, value), (rival, mistaken))
        ]
    wrong = names.wrong(value, (mistaken,), num_wrong)
    return Problem(statements, asked(chain[-1]), f" {value}", wrong, [(asked(rival[-1]), f" {mistaken}")])


def rounds(names: Names, depth: float, num_facts: int, num_wrong: int) -> Problem:
    """Turns over the whole text, each of which states a fact and recalls an earlier one; one of them is asked later."""
    facts = [names.fact() for _ in range(max(2, min(MOST_ROUNDS, num_facts // 4)))]
    place = _place(depth, len(facts))
    statements = []
    for number, fact in enumerate(facts):
        # Not the one that is asked, whose own turn would no longer be the last place that says it.
        earlier = [fact for other, fact in enumerate(facts[:number]) if other != place]
        recalled = "assert {} == {}\n".format(*names.draw.choice(earlier)) if earlier else ""
        statements.append((number / (len(facts) - 1), stated(*fact) + recalled))
    name, value = facts[place]
    others = [fact for number, fact in enumerate(facts) if number != place]
    wrong = names.wrong(value, [value for _, value in reversed(others)], num_wrong)
    return Problem(statements, asked(name), f" {value}", wrong, _further(names, others))


def mapping(names: Names, depth: float, num_facts: int, num_wrong: int) -> Problem:
    """Examples of a random function from eight inputs to four labels; the asked one's last example is at the depth."""
    function, labels = names.name(), names.draw.sample(range(_SMALLEST_VALUE, _LARGEST_VALUE + 1), _NUM_LABELS)
    value_of = {names.name(): str(names.draw.choice(labels)) for _ in range(_NUM_INPUTS)}
    argument, *rest = value_of
    num_examples = max(2, num_facts)
    place = _place(depth, num_examples)
    examples = [names.draw.choice(list(value_of) if number < place else rest) for number in range(num_examples)]
    examples[place] = argument
    seen = [other for other in dict.fromkeys(examples) if other != argument]

    def question(of: str) -> str:
        return asked(f"{function}({of})")

    return Problem(
        [(1.0, f"{question(example)} {value_of[example]}\n") for example in examples],
        question(argument),
        f" {value_of[argument]}",
        names.wrong(value_of[argument], [str(label) for label in labels], num_wrong),
        [(question(other), f" {value_of[other]}") for other in seen],
    )


TASKS: dict[str, MakeProblem] = {
    "needle": needle,
    "kv": key_value,
    "hops": hops,
    "rounds": rounds,
    "mapping": mapping,
}
"""Tasks by the names that commands know."""


def _place(depth: float, number: int) -> int:
    return round(depth * (number - 1))


def _further(names: Names, facts: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Questions about all facts, in any order."""
    return [(asked(name), f" {value}") for name, value in names.draw.sample(facts, len(facts))]
