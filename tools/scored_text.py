"""`megamem eval --text`: log-probabilities of a text's tokens."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pretrain.config.schema import RunConfig
from tools.common.words import aligned, plural

if TYPE_CHECKING:
    from pretrain.data.tokenizer import Tokenizer

_PART_OF_A_CHARACTER = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True)
class ScoredText:
    """A text, token by token.

    Attributes:
        ids: tokens.
        texts: text of each token by itself; the name of a token that is a part of a character.
        nats: log-probability of each.
        num_bytes: UTF-8 bytes of the text.
    """

    ids: Sequence[int]
    texts: Sequence[str]
    nats: Sequence[float]
    num_bytes: int

    @property
    def sum(self) -> float:
        """Log-probability of the text, in nats."""
        return math.fsum(self.nats)

    @property
    def bits_per_byte(self) -> float | None:
        """Bits that code the text over its bytes; None of special tokens alone, which have no text."""
        return -self.sum / math.log(2) / self.num_bytes if self.num_bytes else None

    def as_json(self, checkpoint: Path) -> Iterator[str]:
        """A line per token, and one for the text."""
        for token, text, logprob in zip(self.ids, self.texts, self.nats, strict=True):
            yield json.dumps({"token": token, "text": text, "logprob": logprob})
        whole = {"tokens": len(self.ids), "bytes": self.num_bytes, "logprob": self.sum}
        yield json.dumps({"checkpoint": str(checkpoint), **whole, "bits_per_byte": self.bits_per_byte})

    def as_table(self, checkpoint: Path) -> Iterator[str]:
        """A line per token, its text in quotes, and one for the text."""
        rows = [("token", "text", "log p")]
        for token, text, logprob in zip(self.ids, self.texts, self.nats, strict=True):
            rows.append((str(token), json.dumps(text, ensure_ascii=False), f"{logprob:.4f}"))
        yield from aligned(rows)
        bits = "" if self.bits_per_byte is None else f", {self.bits_per_byte:.4f} bits per byte"
        yield (
            f"{checkpoint}: log p {self.sum:.4f} nats over {plural(len(self.ids), 'token')} "
            f"({plural(self.num_bytes, 'byte')}): {-self.sum / len(self.ids):.4f} nats per token{bits}"
        )


def score_rank(
    config: RunConfig, tokenizer: Tokenizer, checkpoint: Path, ids: Sequence[int], with_memory: bool, as_json: bool
) -> None:
    """Score a text on one rank, and print it on the first."""
    from pretrain.data.one_text import TextWindows
    from pretrain.engine.session import session
    from pretrain.evaluation.restore import restore_model
    from pretrain.evaluation.score import log_probabilities

    length = config.train.sequence_length
    with session(config) as groups:
        if groups.is_main and len(ids) > length:
            print(
                f"note: the text has {len(ids):,} tokens, and is read in windows of {length:,} (train.sequence_length), "
                "the first token of each of which sees the one before it alone",
                file=sys.stderr,
            )
        chunks = restore_model(config, checkpoint, tokenizer, groups)
        for chunk in chunks:
            chunk.set_memory_enabled(with_memory)
        nats = log_probabilities(
            chunks,
            TextWindows(ids, length, tokenizer.eod),
            groups,
            micro_batch_size=config.train.micro_batch_size,
            pipeline=config.parallel.pipeline,
        )
        if groups.is_main:
            texts = [_text_of(token, tokenizer) for token in ids]
            scored = ScoredText(ids, texts, nats, len(tokenizer.decode_bytes(ids)))
            lines = scored.as_json(checkpoint) if as_json else scored.as_table(checkpoint)
            print("\n".join(lines), flush=True)


def _text_of(token: int, tokenizer: Tokenizer) -> str:
    text = tokenizer.text_of(token)
    return tokenizer.name_of(token) if _PART_OF_A_CHARACTER in text else text
