"""Text of token ids as they come."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from pretrain.data.tokenizer import Tokenizer

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class StreamedText:
    """Text that a prompt's following ids add to it, a piece at a time.

    A token has no text of its own: a character may be spread over several, and a space depends on the token before. So
    all ids are decoded anew for each one, and the pieces given add up to `detokenize(all ids)` behind the prompt's. A
    thousand ids take a fraction of a millisecond, a token of a model more.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        """Begin behind a prompt's ids."""
        self._tokenizer = tokenizer
        self._ids = [id for id in prompt if id != tokenizer.eod]
        self._given = len(tokenizer.detokenize(self._ids))

    def add(self, id: int) -> str:
        """Text that is certain now, and was not before the id."""
        # The end of a document stands for nothing: what is on both sides of it is decoded as one.
        if id != self._tokenizer.eod:
            self._ids.append(id)
        return self._until(self._closed())

    def rest(self) -> str:
        """Text that was held back because a further id might have changed it."""
        return self._until(self._tokenizer.detokenize(self._ids))

    def _until(self, text: str) -> str:
        piece = text[self._given :]
        self._given += len(piece)
        return piece

    def _closed(self) -> str:
        """Text that no further id changes.

        Bytes at the end may begin a character, and decode to replacement characters until it is whole. Where single bytes
        are tokens beside those of text, a row of them is decoded as one: the next may spoil what is whole now.
        """
        num_closed = len(self._ids)
        while num_closed and _BYTE.fullmatch(self._tokenizer.name_of(self._ids[num_closed - 1])):
            num_closed -= 1
        return self._tokenizer.detokenize(self._ids[:num_closed]).rstrip(_REPLACEMENT)


def streamed_text(
    ids: Iterable[int], tokenizer: Tokenizer, *, prompt: Sequence[int] = (), stops: Sequence[str] = ()
) -> Iterator[str]:
    """Pieces of the text of ids as they come, up to the first of the texts that end it.

    Args:
        prompt: ids before them, whose text is not given.
        stops: texts that end it, and are no part of it.
    """
    text, held = StreamedText(tokenizer, prompt), ""
    for id in ids:
        held += text.add(id)
        if (end := _first_stop(held, stops)) is not None:
            yield held[:end]
            return
        # So much of what is there may be the beginning of such a text.
        doubtful = max((n for stop in stops for n in range(1, len(stop)) if held.endswith(stop[:n])), default=0)
        yield held[: len(held) - doubtful]
        held = held[len(held) - doubtful :]
    held += text.rest()
    yield held[: _first_stop(held, stops)]


def _first_stop(text: str, stops: Sequence[str]) -> int | None:
    return min((place for stop in stops if (place := text.find(stop)) >= 0), default=None)
