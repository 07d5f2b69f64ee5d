"""Token ids of a problem, of a given number: statements in a filler, then the question."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lab.suite.tasks import MOST_FACTS, TASKS, Names, Problem, stated
from pretrain.data.manifest import PreparedDataset
from pretrain.data.tokenizer import Tokenizer
from pretrain.errors import ConfigError, DataError

_STATEMENTS_MEASURED = 64
_SHARE_OF_QUESTIONS = 0.5
"""Share of a training document that further questions take. The more of its tokens can be looked up, the sooner a model
looks back."""


class Filler:
    """Text of prepared data sets, as ids without the ends of documents."""

    def __init__(self, parts: Sequence[tuple[PreparedDataset, str]]) -> None:
        """
        Args:
            parts: data sets of one tokenizer, each with the split to read.

        Raises:
            DataError: the data sets hold no text.
        """
        self.tokenizer: Tokenizer = parts[0][0].tokenizer
        filled = [part for part in parts if part[0].manifest.splits[part[1]].num_bytes]
        if not filled:
            raise DataError(f"{', '.join(str(dataset.path) for dataset, _ in parts)}: there is no text to fill with.")
        self._streams = [
            np.memmap(f"{dataset.prefix(split)}.bin", self.tokenizer.token_dtype, mode="r") for dataset, split in filled
        ]

    def take(self, draw: Random, number: int) -> NDArray[np.int64]:
        """Consecutive ids [number], from a random place on; at the end of a data set from its start.

        Raises:
            DataError: an id is outside of the vocabulary.
        """
        (stream,) = draw.choices(self._streams, [len(stream) for stream in self._streams])
        start = draw.randrange(len(stream))
        found, missing = [np.empty(0, np.int64)], number
        while missing:
            part = self.tokenizer.check_ids(stream[start : start + missing])
            found.append(part[part != self.tokenizer.eod])
            start = (start + len(part)) % len(stream)
            missing -= len(found[-1])
        return np.concatenate(found)


@dataclass(frozen=True)
class Text:
    """A problem in ids.

    Attributes:
        prompt: the end of a document, then statements, filler and question.
        answers: the right one, then the wrong ones.
    """

    prompt: NDArray[np.int64]
    answers: Sequence[NDArray[np.int64]]


class Writer:
    """Writer of problems as ids, of texts of any length."""

    def __init__(self, filler: Filler) -> None:
        self._filler, self.tokenizer = filler, filler.tokenizer

    def write(self, task: str, depth: float, length: int, num_wrong: int, draw: Random) -> Text:
        """A problem to ask: the prompt and its longest answer have `length` + 1 ids, so `length` are predicted.

        Raises:
            ConfigError: the length is too short for the task.
        """
        problem = self._fitting(task, depth, length, num_wrong, draw, asked=True)
        answers = [self._ids(text) for text in (problem.answer, *problem.wrong)]
        question = self._ids(problem.question)
        body = length - len(question) - max(map(len, answers))
        end_of_document = np.array([self.tokenizer.eod])
        return Text(np.concatenate([end_of_document, self._body(problem, body, draw), question]), answers)

    def document(self, task: str, length: int, draw: Random) -> str:
        """A document to train on, of about `length` tokens: further questions follow the first, at a random depth.

        Raises:
            ConfigError: the length is too short for the task.
        """
        for_questions = int(_SHARE_OF_QUESTIONS * length)
        try:
            problem = self._fitting(task, draw.random(), length - for_questions, 0, draw, asked=False)
        except ConfigError as error:
            raise ConfigError(
                f"documents of {length} tokens keep {for_questions} of them for further questions, and are too short: {error}"
            ) from error
        end, num_tokens = "", 0
        for question, answer in ((problem.question, problem.answer), *problem.further):
            asked = f"{question}{answer}\n"
            num_tokens += len(self._ids(asked))
            if not end or num_tokens <= for_questions:
                end += asked
        body = length - len(self._ids(end))
        return self.tokenizer.decode_bytes(self._body(problem, body, draw)).decode(errors="ignore") + end

    def _fitting(self, task: str, depth: float, length: int, num_wrong: int, draw: Random, *, asked: bool) -> Problem:
        """A problem whose statements and question fit, with as many statements as do."""
        num_facts = min(MOST_FACTS, length // self._tokens_of_a_statement)
        state = draw.getstate()
        while True:
            draw.setstate(state)
            problem = TASKS[task](Names(draw, asked=asked), depth, num_facts, num_wrong)
            answer = max(len(self._ids(text)) for text in (problem.answer, *problem.wrong))
            needed = self._size(problem) + len(self._ids(problem.question)) + answer
            if needed <= length:
                return problem
            if num_facts == 0:
                raise ConfigError(
                    f"{task} needs {needed} tokens of this tokenizer, and the length is {length}: ask longer"
                )
            num_facts = num_facts * 9 // 10

    def _body(self, problem: Problem, length: int, draw: Random) -> NDArray[np.int64]:
        """Statements and filler, [length]."""
        statements = [(place, self._ids(text)) for place, text in problem.statements]
        filler = self._filler.take(draw, length - sum(len(ids) for _, ids in statements))
        return np.concatenate(list(_woven(statements, filler)))

    def _size(self, problem: Problem) -> int:
        return sum(len(self._ids(text)) for _, text in problem.statements)

    @cached_property
    def _tokens_of_a_statement(self) -> int:
        names = Names(Random("statements"), asked=True)
        sizes = [len(self._ids(stated(*names.fact()))) for _ in range(_STATEMENTS_MEASURED)]
        return max(1, round(sum(sizes) / len(sizes)))

    def _ids(self, text: str) -> NDArray[np.int64]:
        return np.asarray(self.tokenizer.tokenize(text), dtype=np.int64)


def _woven(statements: Sequence[tuple[float, NDArray[Any]]], filler: NDArray[Any]) -> Iterator[NDArray[Any]]:
    done = 0
    for place, ids in statements:
        upto = max(done, round(place * len(filler)))
        yield filler[done:upto]
        yield ids
        done = upto
    yield filler[done:]
