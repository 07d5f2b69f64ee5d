"""Questions to a taught model: for its facts, and for the text that it was trained on before.

Legend: b rows, s tokens of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from lab.studies.teach.facts import Fact
from pretrain.data.tokenizer import Tokenizer

if TYPE_CHECKING:
    from pretrain.data.held_out import HeldOutDataset

_FACTS_AT_ONCE, _WINDOWS_AT_ONCE = 128, 8

LogitsOf: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""Logits [b, s, ids] of tokens [b, s] at positions [b, s]."""


def rows_of(facts: Sequence[Fact], tokenizer: Tokenizer) -> tuple[Tensor, Tensor]:
    """Ids [b, s + 1] of documents, before each of which an end stands, as in training, filled up with ends; and where answers
    stand, bool [b, s]: as labels of the tokens before them, without the end."""
    rows = [([tokenizer.eod, *tokenizer.tokenize(fact.question)], tokenizer.tokenize(fact.answer)) for fact in facts]
    longest = max(len(prompt) + len(answer) for prompt, answer in rows) + 1
    ids = torch.full((len(rows), longest), tokenizer.eod)
    is_answer = torch.zeros(len(rows), longest - 1, dtype=torch.bool)
    for row, (prompt, answer) in enumerate(rows):
        ids[row, : len(prompt) + len(answer)] = torch.tensor([*prompt, *answer])
        is_answer[row, len(prompt) - 1 : len(prompt) + len(answer) - 1] = True
    return ids, is_answer


@torch.no_grad()
def recall(logits_of: LogitsOf, facts: Sequence[Fact], tokenizer: Tokenizer) -> float:
    """Share of the facts of whose answer every token is the likeliest, given the question and the tokens before it."""
    known = 0
    for first in range(0, len(facts), _FACTS_AT_ONCE):
        ids, is_answer = rows_of(facts[first : first + _FACTS_AT_ONCE], tokenizer)
        tokens, labels = ids[:, :-1], ids[:, 1:]
        likeliest = logits_of(tokens, torch.arange(tokens.shape[1]).expand_as(tokens)).argmax(-1)
        known += int(((likeliest == labels) | ~is_answer).all(1).sum())
    return known / len(facts)


@torch.no_grad()
def nats_per_token(logits_of: LogitsOf, held_out: HeldOutDataset) -> float:
    """Loss on held-out windows."""
    nats = num_tokens = 0.0
    for first in range(0, len(held_out), _WINDOWS_AT_ONCE):
        windows = [held_out[number] for number in range(first, min(first + _WINDOWS_AT_ONCE, len(held_out)))]
        tokens, labels, mask, positions = (
            torch.stack([window[name] for window in windows])
            for name in ("tokens", "labels", "loss_mask", "position_ids")
        )
        losses = torch.nn.functional.cross_entropy(
            logits_of(tokens, positions).float().transpose(1, 2), labels, reduction="none"
        )
        nats, num_tokens = nats + float((losses * mask).sum()), num_tokens + float(mask.sum())
    return nats / num_tokens
