"""Settings that all lessons of a study have in common, and the result of one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lab.studies.teach.facts import Fact
from pretrain.config.schema import RunConfig
from pretrain.data.tokenizer import Tokenizer

if TYPE_CHECKING:
    from lab.studies.teach.asking import LogitsOf


@dataclass(frozen=True)
class Course:
    """Settings of every lesson of a study.

    Attributes:
        num_facts: facts that are taught.
        num_batches: batches, one after the other.
        num_steps: steps for each batch.
        batch_size: sequences of a step.
        num_windows: held-out windows that tell what is still known.
        num_rows: rows of each table that a step trains, where a way chooses.
    """

    num_facts: int
    num_batches: int
    num_steps: int
    batch_size: int
    num_windows: int
    num_rows: int


@dataclass(frozen=True)
class Taught:
    """Result of a lesson.

    Attributes:
        recall: share known of each batch so far, batch by batch.
        known: loss on held-out text, in nats per token, likewise.
        seconds: seconds of teaching.
        patch_bytes: bytes of the change, as a patch or as an adapter; None: it is a whole model.
    """

    recall: list[list[float]]
    known: list[float]
    seconds: float
    patch_bytes: int | None


def ask_all(
    logits_of: LogitsOf, config: RunConfig, batches: Sequence[Sequence[Fact]], tokenizer: Tokenizer, num_windows: int
) -> tuple[list[float], float]:
    """Recall of each batch, and the loss on held-out windows of the data of a model's own configuration."""
    from lab.studies.teach.asking import nats_per_token, recall
    from pretrain.data.held_out import HeldOutDataset

    held_out = HeldOutDataset(config.evaluated, config.train.sequence_length, num_windows)
    return [recall(logits_of, facts, tokenizer) for facts in batches], nats_per_token(logits_of, held_out)
