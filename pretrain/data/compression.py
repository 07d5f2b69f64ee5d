"""Maps from token ids to fewer: ids of texts that differ in case, accents, compatibility forms and spaces become one.

The rule is that of Engram's demo (arXiv 2601.07372). Unicode's tables may change, so a map is made once and kept as a file.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from parallel.machine.atomic_write import atomic_write
from parallel.machine.refusals import check_can_write, describe_error
from pretrain.data.tokenizer import Tokenizer
from pretrain.errors import DataError

_SPACES = re.compile(r"[ \t\r\n]+")
_UNDECODED = "\N{REPLACEMENT CHARACTER}"
# Unicode's White_Space, which Python's `strip` exceeds by four control characters.
_WHITE_SPACE = "\t\n\x0b\x0c\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(map(chr, range(0x2000, 0x200B)))


def canonical_key(text: str, token: str) -> str:
    """Text that the ids of like texts have in common.

    Args:
        text: text that an id stands for.
        token: its name in the vocabulary, for ids of part of a character.
    """
    if _UNDECODED in text:
        return token
    plain = unicodedata.normalize("NFD", unicodedata.normalize("NFKC", text))
    # A character at a time: as part of a word a final sigma would be another one.
    plain = "".join(each.lower() for each in plain if not unicodedata.category(each).startswith("M"))
    plain = _SPACES.sub(" ", plain)
    return (plain if plain == " " else plain.strip(_WHITE_SPACE)) or text


def compress(tokens: Iterable[tuple[str, str]]) -> NDArray[np.int32]:
    """New id of every token (text, name in the vocabulary): keys are numbered in the order in which they come."""
    numbers: dict[str, int] = {}
    return np.array([numbers.setdefault(canonical_key(*each), len(numbers)) for each in tokens], dtype=np.int32)


def write_token_map(tokenizer: Tokenizer, output: Path) -> NDArray[np.int32]:
    """The map [vocab_size] of a tokenizer's ids, written to an .npy file.

    Raises:
        DataError: the file cannot be written.
    """
    try:
        check_can_write(output)
        mapped = compress((tokenizer.text_of(id), tokenizer.name_of(id)) for id in range(tokenizer.vocab_size))
        with atomic_write(output) as stream:
            np.save(stream, mapped)
    except OSError as error:
        raise DataError(f"the map of token ids is not made: {describe_error(error)}.") from error
    return mapped
