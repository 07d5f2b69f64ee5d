"""Bins of token types: Eq. B.1 on counts that are written down, and the filter."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lab.analysis.deciles import NUM_BINS, frequency_deciles, is_word
from pretrain.errors import DataError


def tokenizer(texts: list[bytes], eod: int) -> Any:
    return SimpleNamespace(eod=eod, decode_bytes=lambda ids: b"".join(texts[number] for number in ids))


def test_the_first_bin_takes_what_does_not_divide() -> None:
    # 65,541 types, as in the paper's Table 3: 6,555 in the first bin, 6,554 in each other.
    found = frequency_deciles(np.arange(1, 65_542), tokenizer([b"a"] * 65_541, eod=-1))
    assert found.num_types == (6_555, *(6_554,) * 9)
    assert (found.lowest[0], found.highest[-1]) == (1, 65_541)


def test_bins_go_by_ascending_count_and_equal_counts_by_id() -> None:
    counts = np.array([5, 5, 1, 9, 5, 0, 2, 2, 7, 5, 3, 8, 100, 50])
    texts = [b"a"] * 12 + [b"<end>", b" ,"]
    found = frequency_deciles(counts, tokenizer(texts, eod=12))
    # Ids by (count, id): 2, 6, 7, 10, 0, 1, 4, 9, 8, 11, 3; the bin of rank r of 11 is floor(10 r / 11).
    order = [2, 6, 7, 10, 0, 1, 4, 9, 8, 11, 3]
    wanted = {number: min(10 * rank // 11, 9) for rank, number in enumerate(order)}
    # Never seen, the end of a document, and punctuation.
    wanted |= {5: NUM_BINS, 12: NUM_BINS, 13: NUM_BINS}
    assert found.bin_of.tolist() == [wanted[number] for number in range(14)]
    assert found.num_types == (2, *(1,) * 9)
    assert found.lowest == (1, 2, 3, 5, 5, 5, 5, 7, 8, 9)
    assert found.highest == (2, 2, 3, 5, 5, 5, 5, 7, 8, 9)


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        (b" the", True),
        (b"7", True),
        ("é".encode(), True),
        (b"\n\t ", False),
        (b"--", False),
        (b"_", False),
        (b"", False),
        ("é".encode()[:1], False),
        (b"x" + "é".encode()[:1], True),
    ],
)
def test_tokens_without_a_letter_or_digit_are_left_out(text: bytes, kept: bool) -> None:
    assert is_word(text) == kept


def test_too_few_types_are_told() -> None:
    with pytest.raises(DataError, match="9 kinds of tokens with a letter or a digit, too few for 10 bins"):
        frequency_deciles(np.ones(9, np.int64), tokenizer([b"a"] * 9, eod=-1))
