"""Keys of n-gram memories that are token ids, held against the tokenizer that made them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from megamem.config.model import ModelConfig
from pretrain.data.compression import canonical_key
from pretrain.data.tokenizer import Tokenizer
from pretrain.errors import ConfigError, DataError

_IDS_LOOKED_AT = 4096
"""First ids of a vocabulary that are looked at: the commonest, and some milliseconds' work."""


def check_token_maps(model: ModelConfig, tokenizer: Tokenizer) -> None:
    """Refuse a map of token ids that another tokenizer of the same size made, by the texts of the first ids.

    Texts of ASCII alone are held: what else is alike changes with Unicode's tables.

    Raises:
        ConfigError: two ids of like texts are mapped apart, or two of unlike ones together.
    """
    for section, memory in model.families.items():
        path = getattr(memory, "token_map", None)
        if path is None:
            continue
        try:
            mapped = np.load(path, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError):
            # Whoever reads it for the model says why.
            continue
        by_key: dict[str, tuple[int, int]] = {}
        by_number: dict[int, tuple[str, int]] = {}
        for id in range(min(_IDS_LOOKED_AT, tokenizer.vocab_size, len(mapped))):
            text = _text_of(tokenizer, id)
            if not text.isascii():
                continue
            key, number = canonical_key(text, tokenizer.name_of(id)), int(mapped[id])
            before, other = by_key.setdefault(key, (number, id)), by_number.setdefault(number, (key, id))
            if before[0] != number or other[0] != key:
                first = before[1] if before[0] != number else other[1]
                raise ConfigError(
                    f"{section}.token_map is {path}, of another tokenizer than the data's: ids {first} and {id}, which are "
                    f"{_text_of(tokenizer, first)!r} and {text!r}, are {int(mapped[first])} and {number} there. Make it anew "
                    "with `megamem data compress TOKENIZER --output FILE`, or name the data's"
                )


def boundary_notes(model: ModelConfig, tokenizer: Tokenizer) -> Iterator[str]:
    """Notes on n-grams that are cut at another token than the one that ends the data's documents."""
    for section, memory in model.families.items():
        boundary = getattr(memory, "boundary_id", None)
        if boundary is None or boundary == tokenizer.eod or not getattr(memory, "cuts_at_boundary", False):
            continue
        yield (
            f"{section}.boundary_id is {boundary} ({_text_of(tokenizer, boundary)!r}), and the data's documents end with "
            f"{tokenizer.eod} ({tokenizer.name_of(tokenizer.eod)}): n-grams reach across documents. Set "
            f"{section}.boundary_id={tokenizer.eod}, unless the model was trained so"
        )


def _text_of(tokenizer: Tokenizer, id: int) -> str:
    try:
        return tokenizer.text_of(id)
    except DataError:
        return tokenizer.name_of(id)
