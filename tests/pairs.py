"""Cases in which any two values of two options occur together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations

Case = dict[str, str]


def pairwise(options: Mapping[str, Sequence[str]], excluded: Callable[[Mapping[str, str]], bool]) -> list[Case]:
    """Few cases that hold every pair of values of two options but those that are excluded.

    Args:
        options: the values of each.
        excluded: True of a pair, or of more, that cannot be asked for together; it judges a case by its pairs.
    """

    def allowed(case: Mapping[str, str]) -> bool:
        return not any(excluded(dict(pair)) for pair in combinations(case.items(), 2))

    missing = {
        frozenset(((first, a), (second, b))): None
        for first, second in combinations(options, 2)
        for a in options[first]
        for b in options[second]
        if allowed({first: a, second: b})
    }
    cases: list[Case] = []
    while missing:
        case: Case = dict(next(iter(missing)))
        # The option with most values has most pairs to bring in.
        for name in sorted(options.keys() - case.keys(), key=lambda name: (-len(options[name]), name)):
            possible = [value for value in options[name] if allowed({**case, name: value})]
            assert possible, f"no value of {name} goes with {case}"
            chosen = list(case.items())
            gains = [sum(frozenset(((name, value), other)) in missing for other in chosen) for value in possible]
            case[name] = possible[gains.index(max(gains))]
        for pair in combinations(case.items(), 2):
            missing.pop(frozenset(pair), None)
        cases.append({name: case[name] for name in options})
    return cases
