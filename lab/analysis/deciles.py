"""Token types by how often they come in the training data, in bins of equally many types (TIDE, App. B)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pretrain.config.schema import DatasetEntry
from pretrain.data.manifest import TRAIN, open_dataset
from pretrain.data.tokenizer import Tokenizer
from pretrain.errors import DataError

NUM_BINS = 10
RARE, MID, COMMON = range(3), range(3, 7), range(7, 10)
"""Bins of rare, middling and common types, as the paper divides them."""

_TOKENS_AT_ONCE = 2**24


@dataclass(frozen=True)
class Deciles:
    """The bins.

    Attributes:
        bin_of: [vocabulary] int64, the bin of each id, 0 the rarest; NUM_BINS for ids that are in none: those that never
            come in training, and those that the filter leaves out.
        num_types: ids per bin.
        lowest, highest: counts per bin.
    """

    bin_of: NDArray[np.int64]
    num_types: tuple[int, ...]
    lowest: tuple[int, ...]
    highest: tuple[int, ...]


def count_tokens(entries: Sequence[DatasetEntry], vocab_size: int) -> NDArray[np.int64]:
    """[vocabulary], the number of times each id comes in the training documents of a blend, each document once.

    Raises:
        DataError: a data set does not open, or holds an id outside the vocabulary.
    """
    counts = np.zeros(vocab_size, np.int64)
    for entry in entries:
        dataset = open_dataset(entry.path)
        stream = np.memmap(f"{dataset.prefix(TRAIN)}.bin", dataset.open_split(TRAIN).index.dtype, mode="r")
        for start in range(0, len(stream), _TOKENS_AT_ONCE):
            found = np.bincount(stream[start : start + _TOKENS_AT_ONCE], minlength=vocab_size)
            if len(found) > vocab_size:
                raise DataError(
                    f"{entry.path} holds token id {len(found) - 1}, outside the vocabulary of {vocab_size}. The data set is "
                    "damaged or from another tokenizer: prepare it again."
                )
            counts += found
    return counts


def is_word(text: bytes) -> bool:
    """Tell whether a token passes the paper's filter: it has a letter or a digit. White space and punctuation alone
    have none, and neither have parts of a character."""
    return any(character.isalnum() for character in text.decode("utf-8", errors="ignore"))


def frequency_deciles(counts: NDArray[np.int64], tokenizer: Tokenizer) -> Deciles:
    """b(v) = min(floor(rank(v) B / |V|), B - 1), with 0-based ranks by ascending count (Eq. B.1).

    The paper does not say which of equally frequent types comes first; here the smaller id does. The end-of-document id
    is special, and in no bin.

    Raises:
        DataError: the types are fewer than the bins.
    """
    kept = [
        number
        for number in np.flatnonzero(counts).tolist()
        if number != tokenizer.eod and is_word(tokenizer.decode_bytes([number]))
    ]
    if len(kept) < NUM_BINS:
        raise DataError(
            f"the training data have {len(kept)} kinds of tokens with a letter or a digit, too few for {NUM_BINS} bins: "
            "analyse a run with a larger tokenizer"
        )
    types = np.array(kept, np.int64)
    # Stable, over ascending ids.
    ordered = types[np.argsort(counts[types], kind="stable")]
    bins = np.minimum(np.arange(len(ordered)) * NUM_BINS // len(ordered), NUM_BINS - 1)
    bin_of = np.full(len(counts), NUM_BINS, np.int64)
    bin_of[ordered] = bins
    of_bins = [counts[ordered[bins == number]] for number in range(NUM_BINS)]
    return Deciles(
        bin_of,
        tuple(len(of_bin) for of_bin in of_bins),
        tuple(int(of_bin.min()) for of_bin in of_bins),
        tuple(int(of_bin.max()) for of_bin in of_bins),
    )
