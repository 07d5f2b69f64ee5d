"""A law of losses: E + A / C^a + B / N^b + D / K^c, for compute C, rows N and rows read per token K.

Each term is the loss that one finite resource leaves, and vanishes as that grows: rows that grow without bound do not make
up for compute, as a product of powers would have it. Given the exponents the law is linear in E, A, B and D, which are not
negative; so only exponents are searched.

What cannot be told apart is refused: a resource needs three different amounts, for its term and E to be known.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product

import numpy as np
from numpy.typing import NDArray

LEAST_AMOUNTS = 3
"""Different amounts of a resource that make E, its factor and its exponent known."""
_EXPONENTS = (0.02, 3.0)
_COARSE = 9
_FINEST = 1e-5

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Law:
    """A fitted law.

    Attributes:
        floor: E.
        factors: factor of each resource's term, at the resource's geometric mean among the fitted models.
        exponents: exponent of each resource.
        means: geometric mean of each resource among the fitted models.
        residual: root mean square of what it misses the fitted losses by.
    """

    floor: float
    factors: Mapping[str, float]
    exponents: Mapping[str, float]
    means: Mapping[str, float]
    residual: float

    @property
    def useless(self) -> list[str]:
        """Resources of which more does not lower the fitted losses."""
        return [name for name, factor in self.factors.items() if factor == 0]

    @property
    def unsettled(self) -> list[str]:
        """Other resources whose exponent is at an end of those that are searched: the fitted losses say little of it."""
        return [
            name
            for name, exponent in self.exponents.items()
            if self.factors[name] > 0 and any(math.isclose(exponent, end, rel_tol=1e-3) for end in _EXPONENTS)
        ]

    def predict(self, amounts: Mapping[str, float]) -> float:
        """The loss of a model with these amounts of its resources."""
        terms = (
            factor * (amounts[name] / self.means[name]) ** -self.exponents[name]
            for name, factor in self.factors.items()
        )
        return self.floor + math.fsum(terms)


def lacking(amounts: Mapping[str, Sequence[float]]) -> dict[str, int]:
    """Different amounts that a fit needs beside those there are, of each resource that lacks some."""
    return {
        name: LEAST_AMOUNTS - len(set(values)) for name, values in amounts.items() if len(set(values)) < LEAST_AMOUNTS
    }


def fit(amounts: Mapping[str, Sequence[float]], losses: Sequence[float]) -> Law:
    """The law that misses the losses by least, in the mean of squares.

    Args:
        amounts: amounts of each resource, model by model, all above zero.
        losses: losses of the models.

    Raises:
        ValueError: the models cannot tell its terms apart.
    """
    if lack := lacking(amounts):
        raise ValueError(", ".join(f"{name}: {more} more different amounts" for name, more in lack.items()))
    num_unknowns = 1 + 2 * len(amounts)
    if len(losses) < num_unknowns:
        raise ValueError(f"{num_unknowns} models are needed, and there are {len(losses)}")
    names = list(amounts)
    logs = np.array([np.log(amounts[name]) for name in names])
    means = logs.mean(1, keepdims=True)
    found = np.asarray(losses, dtype=np.float64)

    def solved(exponents: Sequence[float]) -> tuple[float, Array]:
        return _not_negative(np.exp(-np.asarray(exponents)[:, None] * (logs - means)), found)

    exponents = _search(lambda at: solved(at)[0], len(names))
    squares, coefficients = solved(exponents)
    return Law(
        float(coefficients[0]),
        dict(zip(names, map(float, coefficients[1:]), strict=True)),
        dict(zip(names, exponents, strict=True)),
        dict(zip(names, map(float, np.exp(means[:, 0])), strict=True)),
        math.sqrt(squares / len(losses)),
    )


def _not_negative(terms: Array, losses: Array) -> tuple[float, Array]:
    """Sum of squares and coefficients, none of them negative, of the best sum of 1 and `terms` [resources, models]."""
    columns = np.vstack([np.ones_like(losses), terms])
    best: tuple[float, Array] | None = None
    for size in range(len(columns), 0, -1):
        for chosen in combinations(range(len(columns)), size):
            values, *_ = np.linalg.lstsq(columns[list(chosen)].T, losses, rcond=None)
            if (values >= 0).all():
                coefficients = np.zeros(len(columns))
                coefficients[list(chosen)] = values
                squares = float(np.square(columns.T @ coefficients - losses).sum())
                if best is None or squares < best[0]:
                    best = squares, coefficients
        if best is not None and size == len(columns):
            # Nothing with fewer terms is better.
            break
    assert best is not None, "losses are above zero, and so is their mean"
    return best


def _search(squares: Callable[[Sequence[float]], float], count: int) -> tuple[float, ...]:
    """Exponents at which a function of so many is least: the best of a grid of logarithms, then ever smaller steps."""
    low, high = (math.log(bound) for bound in _EXPONENTS)
    grid = [low + (high - low) * n / (_COARSE - 1) for n in range(_COARSE)]
    at = min(product(grid, repeat=count), key=lambda logs: squares([math.exp(x) for x in logs]))
    least, step = squares([math.exp(x) for x in at]), (high - low) / (_COARSE - 1)
    while step > _FINEST:
        moved = False
        for index, sign in product(range(count), (-1, 1)):
            tried = (*at[:index], min(high, max(low, at[index] + sign * step)), *at[index + 1 :])
            value = squares([math.exp(x) for x in tried])
            if value < least:
                at, least, moved = tried, value, True
        if not moved:
            step /= 2
    return tuple(math.exp(x) for x in at)
