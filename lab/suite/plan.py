"""Questions of a suite, and their results, without torch: a command looks here before it starts ranks."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

from lab.suite.tasks import TASKS
from parallel.machine.atomic_write import atomic_write
from pretrain.errors import ConfigError


@dataclass(frozen=True)
class Question:
    """One text to ask about. Whatever the depth, the same sample draws from the same seed."""

    task: str
    depth: float
    sample: int


@dataclass(frozen=True)
class SuitePlan:
    """The questions of a suite.

    Attributes:
        lengths: tokens of a text, question and answer included.
        depths: places of what answers the question, from 0 (the beginning) to 1 (next to the question).
        num_samples: texts per task, length and depth.
        num_wrong: wrong answers that the right one is set against.

    Raises:
        ConfigError: an attribute is out of its range.
    """

    tasks: tuple[str, ...]
    lengths: tuple[int, ...]
    depths: tuple[float, ...]
    num_samples: int
    num_wrong: int
    seed: int

    def __post_init__(self) -> None:
        for task in self.tasks:
            if task not in TASKS:
                raise ConfigError(f"there is no task {task!r}: ask for some of {', '.join(TASKS)}")
        if min(self.lengths) < 1:
            raise ConfigError(f"a length is {min(self.lengths)} tokens: ask for at least 1")
        for depth in self.depths:
            if not 0 <= depth <= 1:
                raise ConfigError(f"a depth is {depth:g}: give shares of the text from 0 to 1")
        if self.num_samples < 1:
            raise ConfigError(f"--samples is {self.num_samples}: ask for at least one")
        if self.num_wrong < 0:
            raise ConfigError(f"--wrong is {self.num_wrong}: give 0 to leave wrong answers out, or more")

    def questions(self) -> list[Question]:
        """Questions of each length, in the order of their cells."""
        return [Question(*key) for key in product(self.tasks, self.depths, range(self.num_samples))]


@dataclass(frozen=True)
class Cell:
    """Results of a model on the texts of one task, length and depth.

    Attributes:
        exact: share of the texts of which every token of the answer was the likeliest, given those before it.
        chosen: share of which the right answer has a higher mean log-likelihood per token than every wrong one; None
            without wrong ones.
        nats: mean over the texts of the right answer's nats per token.
    """

    task: str
    length: int
    depth: float
    num_samples: int
    exact: float
    chosen: float | None
    nats: float


@dataclass(frozen=True)
class Answers:
    """Answers of a model: a file in its run's folder."""

    name: str
    """Name of the run."""
    checkpoint: str
    overrides: tuple[str, ...]
    seed: int
    num_wrong: int
    cells: tuple[Cell, ...]

    def write(self, path: Path) -> None:
        """Write it as JSON, whole or not at all."""
        with atomic_write(path) as stream:
            stream.write(f"{json.dumps(asdict(self), indent=1)}\n".encode())

    @classmethod
    def read(cls, path: Path) -> Answers:
        """Inverse of `write`."""
        values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        cells = tuple(Cell(**cell) for cell in values.pop("cells"))
        return cls(**{**values, "overrides": tuple(values["overrides"]), "cells": cells})


def cells(plan: SuitePlan, length: int, scores: Sequence[Sequence[tuple[float, float, float]]]) -> Iterator[Cell]:
    """The cells of one length.

    Args:
        scores: scores of each question's answers, the right one first: nats, number of tokens, and how many of them
            were the likeliest.
    """
    keys = list(product(plan.tasks, plan.depths))
    for number, (task, depth) in enumerate(keys):
        of_cell = scores[number * plan.num_samples : (number + 1) * plan.num_samples]
        means = [[nats / num_tokens for nats, num_tokens, _ in answers] for answers in of_cell]
        exact = sum(hits == num_tokens for (_, num_tokens, hits), *_ in of_cell)
        # An answer that is only as likely as a wrong one is not chosen.
        chosen = sum(right < min(wrong) for right, *wrong in means) if plan.num_wrong else None
        count = len(of_cell)
        yield Cell(
            task,
            length,
            depth,
            count,
            exact / count,
            None if chosen is None else chosen / count,
            sum(right for right, *_ in means) / count,
        )
