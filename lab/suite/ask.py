"""Asking a model: rows of ids on any layout through the real schedules, and the likelihood of every answer.

Legend: b sequences of a microbatch, s tokens per sequence, t tokens of it on this context-parallel rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from random import Random
from typing import Any

import torch
from torch import Tensor

from lab.suite.plan import Question, SuitePlan
from lab.suite.texts import Text, Writer
from parallel.groups import ParallelGroups
from pretrain.engine.chunks import Chunk, unwrap
from pretrain.engine.step import Batch, forward_passes, read_microbatch, world_sums
from pretrain.evaluation.evaluate import passes_over
from pretrain.progress import Progress


class AnswerRows(torch.utils.data.Dataset[dict[str, Tensor]]):
    """A row for every answer to every question of one length.

    A row is `tokens`, `labels`, `position_ids`, `row` (its number, at every token), int64, and `loss_mask`, float32:
    1 where the label is a token of the answer; each [s].
    """

    def __init__(self, writer: Writer, plan: SuitePlan, length: int) -> None:
        self.sequence_length, self._plan = length, plan
        self._questions: Sequence[Question] = plan.questions()
        self._eod = writer.tokenizer.eod

        # The answers to one question follow each other.
        @lru_cache(maxsize=2)
        def text_of(question: Question) -> Text:
            draw = Random(f"{plan.seed} {question.task} {length} {question.sample}")
            return writer.write(question.task, question.depth, length, plan.num_wrong, draw)

        self._text_of = text_of

    @property
    def num_answers(self) -> int:
        """Answers to each question."""
        return 1 + self._plan.num_wrong

    def __len__(self) -> int:
        return len(self._questions) * self.num_answers

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        text = self._text_of(self._questions[index // self.num_answers])
        answer = text.answers[index % self.num_answers]
        # An answer does not see what follows it.
        ids = torch.full((self.sequence_length + 1,), self._eod)
        start, end = len(text.prompt), len(text.prompt) + len(answer)
        ids[:start], ids[start:end] = torch.from_numpy(text.prompt), torch.from_numpy(answer)
        positions = torch.arange(self.sequence_length)
        return {
            "tokens": ids[:-1],
            "labels": ids[1:],
            "loss_mask": ((positions >= start - 1) & (positions < end - 1)).float(),
            "position_ids": positions,
            "row": torch.full_like(positions, index),
        }


def ask(
    chunks: Sequence[Chunk],
    rows: AnswerRows,
    groups: ParallelGroups,
    *,
    micro_batch_size: int,
    pipeline: int,
    bar: Progress | None = None,
) -> list[list[tuple[float, float, float]]]:
    """Nats, tokens and likeliest tokens of every answer, by question. Collective; all ranks know them.

    Args:
        micro_batch_size: rows per forward pass and rank.
        bar: told of rows that are done.
    """
    streams, passes = passes_over(rows, chunks, groups, micro_batch_size=micro_batch_size, pipeline=pipeline)
    table = torch.zeros(len(rows), 3, dtype=torch.float64, device=groups.device)
    for num_microbatches in passes:
        results = forward_passes(
            chunks, streams, _asking_step, num_microbatches, micro_batch_size, rows.sequence_length
        )
        for result in results:
            table.index_add_(0, result[:, 0].long(), result[:, 1:])
        if bar is not None:
            bar.update(num_microbatches * micro_batch_size * groups.data_size)
    # Host sync: the end of a length.
    scores = world_sums(table, groups).view(-1, rows.num_answers, 3).tolist()
    return [[(nats, num_tokens, hits) for nats, num_tokens, hits in answers] for answers in scores]


def _asking_step(iterator: Iterator[Batch], chunk: Chunk) -> tuple[Tensor, Callable[[Tensor], Any]]:
    model = unwrap(chunk)
    # Every row is one document, whatever its padding is.
    batch, bounds = read_microbatch(iterator, model)
    mask = batch.get("loss_mask")
    output = chunk(batch.get("tokens"), batch.get("position_ids"), bounds, labels=batch.get("labels"), asked=mask)
    return output, partial(_scores, mask, batch.get("row"))


def _scores(mask: Tensor | None, row: Tensor | None, judged: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Scores of this rank's part of each row [b, 4]: number, nats, tokens, likeliest tokens; `judged` is [2, b, t]."""
    assert mask is not None
    assert row is not None
    nats, likeliest = (judged.double() * mask).sum(-1)
    num_tokens = mask.double().sum(-1)
    measured = torch.stack([row[:, 0].double(), nats, num_tokens, likeliest], -1)
    return nats.sum(), num_tokens.sum().int(), {"loss": measured}
