"""Conversations as documents: texts by a tokenizer's chat template, of which what the assistant says is scored.

A template either says itself what the assistant writes, by `{% generation %}`, or its text does not tell. Then the
conversation is rendered once more with marks around the assistant's contents. That shows what the template writes between
them, and so where they stand in the text, whole or without blanks at their edges. A text in which they stand otherwise is
a bad record. With a content is scored what a model has to write around it: blanks that are not in the prompt of a server
before it, and the token that ends the turn behind it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pretrain.data.chat_template import (
    TEMPLATE_FILE,
    ChatTemplate,
    Message,
    Rendered,
    Span,
    read_chat_template,
    unused_characters,
)
from pretrain.data.indexed_files import Document
from pretrain.data.named_end import SETTINGS_FILE
from pretrain.data.scored import runs_of
from pretrain.data.sources import BadDocument, checked
from pretrain.data.tokenizer import TOKENIZER_FILE, HuggingFaceTokenizer, Tokenizer, known_ends, load_tokenizer
from pretrain.errors import DataError

ASSISTANT = "assistant"
_QUESTION, _ANSWER = "A question", "An answer"
_EXCHANGE = ({"role": "user", "content": _QUESTION}, {"role": ASSISTANT, "content": _ANSWER})
"""Conversation by which a template is looked at."""
_OF_EVERY_MESSAGE = frozenset({"role", "content", "name"})
_MOST_CANDIDATES = 8


@dataclass(frozen=True)
class MessagesField:
    """The JSON field of the messages of a conversation.

    Attributes:
        may_hold_markers: text that reads as a special token in a message is that token; otherwise the record is bad.
    """

    name: str
    may_hold_markers: bool = False


class MarkedText(NamedTuple):
    """Text of a conversation, and the characters of it that the assistant writes."""

    text: str
    spans: Sequence[Span]


def chat_tokenizer(spec: str | Path, eod_token: str | None = None) -> HuggingFaceTokenizer:
    """Tokenizer with the chat template of its folder, whose markers are tokens.

    Args:
        spec: a `tokenizer.json`, or a folder that holds one.
        eod_token: the token that ends a document; None picks the only known name that the vocabulary has.

    Raises:
        DataError: the tokenizer is missing, has no template, or cannot be used.
    """
    tokenizer, definition = load_tokenizer(spec, eod_token), Path(spec)
    if not isinstance(tokenizer, HuggingFaceTokenizer):
        raise DataError(
            f"--tokenizer {spec} has no chat template, by which --messages-field reads messages: give the folder of a chat "
            f"model's tokenizer, with a {TOKENIZER_FILE} and a {TEMPLATE_FILE}."
        )
    definition = definition / TOKENIZER_FILE if definition.is_dir() else definition
    template = read_chat_template(definition)
    if template is None:
        raise DataError(
            f"{definition.parent} has no chat template, by which --messages-field reads messages (looked for "
            f"{TEMPLATE_FILE}, and for chat_template in {SETTINGS_FILE}): write one there, or give --tokenizer the folder "
            "of a chat model's tokenizer."
        )
    return tokenizer.taking_special_tokens(template)


def turn_end(tokenizer: Tokenizer) -> int | None:
    """Id of the token by which the template of a tokenizer ends what the assistant says; None: there is none.

    It is the token beside the vocabulary of texts that follows an answer, if only blanks are between.
    """
    if not isinstance(tokenizer, HuggingFaceTokenizer) or tokenizer.chat is None:
        return None
    if (text := _rendered(tokenizer.chat, datetime.now())) is None:
        return None
    _, answer, rest = text.rpartition(_ANSWER)
    ((ids, places),) = tokenizer.tokenize_with_places([text])
    for id, (first, end) in zip(ids.tolist(), places.tolist(), strict=True):
        if answer and first >= len(text) - len(rest):
            if id in tokenizer.added_ids:
                return int(id)
            if text[first:end].strip():
                return None
    return None


@dataclass(frozen=True)
class ConversationReader:
    """Reader of conversations; `open` makes one.

    Attributes:
        field: field that the messages are in.
        turn_end: id of the token that ends what the assistant says; None: there is none.
        blanks: blanks that the template writes before a content, and a server does not: the model does.
        reads_parts: the template reads contents that are lists of texts.
        forbidden: texts that no message may hold.
        now: the moment that the template is told it is.
    """

    tokenizer: HuggingFaceTokenizer
    template: ChatTemplate
    field: MessagesField
    turn_end: int | None
    blanks: str
    reads_parts: bool
    forbidden: re.Pattern[str]
    now: datetime

    @staticmethod
    def open(tokenizer: Tokenizer, field: MessagesField) -> ConversationReader:
        """Reader of conversations with a tokenizer that has a chat template.

        Raises:
            DataError: the tokenizer has no template; or the template is none, fails, or writes the end of a document
                within one.
        """
        if not isinstance(tokenizer, HuggingFaceTokenizer) or tokenizer.chat is None or not tokenizer.special_tokens:
            raise DataError("Conversations are read by a chat template: open the tokenizer by `chat_tokenizer`.")
        template, now = tokenizer.chat, datetime.now()
        if (fault := template.fault) is not None:
            raise DataError(
                f"The chat template is not one ({fault}): mend the {TEMPLATE_FILE} of the tokenizer's folder."
            )
        try:
            once, twice = (template.render(_EXCHANGE * count, now).text for count in (1, 2))
        except ValueError as error:
            raise DataError(
                f"The chat template does not read a message of the user and one of the assistant: {error}. Mend the "
                f"{TEMPLATE_FILE} of the tokenizer's folder."
            ) from error
        if _ANSWER not in once and not template.marks_generation:
            raise DataError(
                f"The chat template does not write what the role {ASSISTANT} says: mend the {TEMPLATE_FILE} of the "
                "tokenizer's folder."
            )
        _check_end(tokenizer, twice)
        end = turn_end(tokenizer)
        forbidden = {tokenizer.eod_token}
        if not field.may_hold_markers:
            forbidden |= {*tokenizer.markers, *([] if end is None else [tokenizer.name_of(end)])}
        return ConversationReader(
            tokenizer,
            template,
            field,
            end,
            _blanks_before(template, once, now),
            _reads_parts(template, once, now),
            re.compile("|".join(re.escape(text) for text in sorted(filter(None, forbidden), key=len, reverse=True))),
            now,
        )

    @property
    def scores_ends(self) -> bool:
        """True if the tokens that end the assistant's turns are scored, so that a model learns to end them."""
        marked = self.marked(_EXCHANGE)
        assert marked is not None
        (document,) = self.documents([marked])
        return self.turn_end is None or self.turn_end in document.ids[document.scored]

    def marked(self, messages: Sequence[Message]) -> MarkedText | None:
        """Text of a conversation; None: its assistant says nothing.

        Raises:
            BadDocument: the messages are no conversation, or the template does not tell what the assistant says.
        """
        for number, message in enumerate(messages, start=1):
            self._check(message, f"message {number} ({message['role']})")
        said = [message for message in messages if message["role"] == ASSISTANT]
        if not said:
            raise BadDocument(
                f"none of its {len(messages)} messages has the role {ASSISTANT}: there is nothing to learn"
            )
        if not any(_content(message).strip() or _keys_beside(message) for message in said):
            return None
        if not self.reads_parts:
            messages = [_with_one_text(message) for message in messages]
        text, generated = self._render(messages)
        if not self.template.marks_generation:
            self._check_other_keys(messages, text)
            return MarkedText(text, self._contents(messages, text))
        if not generated:
            raise BadDocument("the chat template marks nothing of it as the assistant's, by {% generation %}")
        return MarkedText(text, generated)

    def documents(self, texts: Sequence[MarkedText]) -> Iterator[Document]:
        """Documents of texts, in their order: their ids, and the end of a document where the template writes none."""
        tokenized = self.tokenizer.tokenize_with_places([text.text for text in texts])
        for text, (ids, places) in zip(texts, tokenized, strict=True):
            yield self._document(text, ids, places[:, 0], places[:, 1])

    def _render(self, messages: Sequence[Message]) -> Rendered:
        try:
            return self.template.render(messages, self.now)
        except ValueError as error:
            raise BadDocument(f"the chat template refuses it: {error}") from error

    def _check(self, message: Message, name: str) -> None:
        """Raise BadDocument for a message that is no text, or holds what no message may."""
        content = message.get("content")
        if isinstance(content, list):
            for part in content:
                if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                    kind = part.get("type") if isinstance(part, dict) else part
                    raise BadDocument(
                        f"{name} has a part of the kind {kind!r:.80}: parts of the kind 'text' are read alone"
                    )
        elif content is None and not _keys_beside(message):
            raise BadDocument(f"{name} has no content")
        elif content is not None and not isinstance(content, str):
            raise BadDocument(f"{name} has a content that is neither a text nor a list of parts: {content!r:.80}")
        # Parts may be put together without anything between.
        for text in [*_texts(message), _content(message)]:
            try:
                checked(text).encode("utf-8")
            except UnicodeEncodeError as error:
                raise BadDocument(f"{name} holds half a surrogate pair, which is not text") from error
            if (found := self._forbidden_in(text)) is not None:
                allowed = (
                    "" if found == self.tokenizer.eod_token else ", or let messages write markers by --special-tokens"
                )
                raise BadDocument(f"{name} holds {found}, by which a message could forge others: take it out{allowed}")

    def _forbidden_in(self, text: str) -> str | None:
        """Token that a message may not hold, and this one does."""
        if (match := self.forbidden.search(text)) is not None:
            return match[0]
        if not self.tokenizer.normalizes_markers:
            return None
        names = map(self.tokenizer.name_of, self.tokenizer.tokenize(text))
        return next((name for name in names if self.forbidden.fullmatch(name)), None)

    def _check_other_keys(self, messages: Sequence[Message], text: str) -> None:
        """Raise BadDocument if the template writes something that the assistant says in another key than its content."""
        plain = [
            {key: value for key, value in message.items() if key in _OF_EVERY_MESSAGE}
            if message["role"] == ASSISTANT
            else message
            for message in messages
        ]
        if plain != list(messages) and self._render([{"content": "", **message} for message in plain]).text != text:
            keys = sorted(
                {key for message in messages if message["role"] == ASSISTANT for key in _keys_beside(message)}
            )
            raise BadDocument(
                f"the chat template writes {' and '.join(keys)} of the assistant's messages, and only {{% generation %}} in "
                "it would tell where: add that, or take them out"
            )

    def _contents(self, messages: Sequence[Message], text: str) -> list[Span]:
        """Places of the assistant's contents in the text of a conversation."""
        mark = unused_characters(1, messages, self.template.source)
        # A mark before a content keeps its leading blanks; without any it would only hide how the content begins.
        contents = [_content(message) for message in messages if message["role"] == ASSISTANT]
        marked = iter([f"{mark if content[:1].isspace() else ''}{content}{mark}" for content in contents])
        with_marks = [
            {**message, "content": next(marked)} if message["role"] == ASSISTANT else message for message in messages
        ]
        between = _between(contents, self._render(with_marks).text.split(mark))
        if between is None or (found := _placed(contents, between, text)) is None:
            raise BadDocument(
                "the chat template leaves out, moves or changes a part of what the assistant says: take that out (as "
                "thoughts in earlier turns), or mark what is the assistant's by {% generation %} in the template"
            )
        return [(start - len(self.blanks) * text.endswith(self.blanks, 0, start), end) for start, end in found]

    def _document(
        self, marked: MarkedText, ids: NDArray[Any], starts: NDArray[np.int64], ends: NDArray[np.int64]
    ) -> Document:
        text, scored = marked.text, np.zeros(len(ids), dtype=np.bool_)
        if (np.diff(starts) < 0).any() or (np.diff(ends) < 0).any():
            raise DataError(
                "The tokenizer does not give tokens in the order of the text: no mask can be made of its places."
            )
        is_ended = False
        for start, end in marked.spans:
            # Tokens of which a character is within.
            first, stop = int(np.searchsorted(ends, start, side="right")), int(np.searchsorted(starts, end))
            if not self.template.marks_generation:
                first += int(first < stop and starts[first] < start and int(ids[first]) in self.tokenizer.added_ids)
                # A marker may take the blanks before it along.
                is_within = stop > 0 and ends[stop - 1] > end and int(ids[stop - 1]) == self.turn_end
                stop = stop if is_within else self._behind_turn(text, ids, starts, ends, stop)
            scored[first:stop] |= start < end or not self.template.marks_generation
            ends_turn = self.tokenizer.added_ids if self.template.marks_generation else {self.turn_end}
            is_ended = stop > 0 and int(ids[stop - 1]) in ends_turn
        eod = self.tokenizer.eod
        if has_end := len(ids) > 0 and int(ids[-1]) == eod:
            text = text[: starts[-1]]
        num_bytes = len(text.encode("utf-8"))
        scored_bytes = sum(len(text[starts[first] : ends[end - 1]].encode("utf-8")) for first, end in runs_of(scored))
        if not has_end:
            # It ends the assistant's turn where nothing else does.
            closes = not is_ended and not marked.text[marked.spans[-1][1] :].strip()
            ids, scored = np.append(ids, ids.dtype.type(eod)), np.append(scored, closes)
        return Document(ids, num_bytes, scored, num_bytes - scored_bytes)

    def _behind_turn(
        self, text: str, ids: NDArray[Any], starts: NDArray[np.int64], ends: NDArray[np.int64], stop: int
    ) -> int:
        """Token behind the one that ends a turn whose content ends before `stop`; `stop` where none does."""
        for place in range(stop, len(ids)):
            if int(ids[place]) == self.turn_end:
                return place + 1
            if int(ids[place]) in self.tokenizer.added_ids or text[starts[place] : ends[place]].strip():
                break
        return stop


def rendered_exchanges(tokenizer: HuggingFaceTokenizer) -> tuple[list[Message], str] | None:
    """Messages of a user and an assistant, and their text by a tokenizer's chat template; None: it has none that reads them."""
    text = None if tokenizer.chat is None else _rendered(tokenizer.chat, datetime.now(), count=2)
    return None if text is None else (list(_EXCHANGE * 2), text)


def other_ends(tokenizer: HuggingFaceTokenizer) -> list[str] | None:
    """Known ends of documents that a tokenizer's chat template does not write, where it writes the tokenizer's own within
    conversations; None: it does not, or nothing tells."""
    if tokenizer.chat is None or (text := _rendered(tokenizer.chat, datetime.now(), count=2)) is None:
        return None
    ids = tokenizer.tokenize(text)
    if tokenizer.eod not in ids[:-1]:
        return None
    return [token for token in known_ends(tokenizer) if tokenizer.id_of(token) not in ids]


def _rendered(template: ChatTemplate, now: datetime, *, count: int = 1) -> str | None:
    """Text of some exchanges; None: the template fails on them."""
    try:
        return template.render(_EXCHANGE * count, now).text
    except ValueError:
        return None


def _check_end(tokenizer: HuggingFaceTokenizer, text: str) -> None:
    """Refuse an end of documents that a conversation of two exchanges has before its end."""
    if (known := other_ends(tokenizer)) is None:
        return
    written = {tokenizer.name_of(id) for id in tokenizer.tokenize(text)}
    others = [*known, *(token for token in tokenizer.markers if token not in {*written, *known})]
    named = ", ".join(others[:_MOST_CANDIDATES]) or f"none here, so add one to the added tokens of its {TOKENIZER_FILE}"
    raise DataError(
        f"The chat template writes {tokenizer.eod_token} within conversations, and it ends documents. Name another token that "
        f"ends them with --eod-token (the template does not write {named})."
    )


def _reads_parts(template: ChatTemplate, text: str, now: datetime) -> bool:
    """Tell whether a template reads contents that are lists of texts as it reads texts."""
    parts = [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in _EXCHANGE]
    try:
        return template.render(parts, now).text == text
    except ValueError:
        return False


def _blanks_before(template: ChatTemplate, text: str, now: datetime) -> str:
    """Blanks of a template between what a server writes before an answer, and the answer."""
    try:
        prompt = template.render(_EXCHANGE[:1], now, asks=True).text
    except ValueError:
        return ""
    before, _, _ = text.rpartition(_ANSWER)
    blanks = before.removeprefix(prompt)
    return blanks if before.startswith(prompt) and not blanks.strip() else ""


def _keys_beside(message: Message) -> list[str]:
    """Keys of a message that not every one has, with a value."""
    return [key for key, value in message.items() if key not in _OF_EVERY_MESSAGE and value is not None]


def _content(message: Message) -> str:
    """Content of a message as one text."""
    content = message.get("content")
    return "".join(part["text"] for part in content) if isinstance(content, list) else content or ""


def _with_one_text(message: Message) -> Message:
    """Message whose content is one text, of its parts as lines: servers join them so where a template reads no parts."""
    content = message.get("content")
    return {**message, "content": "\n".join(part["text"] for part in content)} if isinstance(content, list) else message


def _texts(value: Any) -> Iterator[str]:
    """All texts in a value of JSON, keys too."""
    left = [value]
    while left:
        each = left.pop()
        if isinstance(each, str):
            yield each
        elif isinstance(each, dict):
            left += [*each.keys(), *each.values()]
        elif isinstance(each, list):
            left += each


def _between(contents: Sequence[str], pieces: Sequence[str]) -> list[str] | None:
    """Texts before the first content, between contents, and behind the last one; None: the contents are not there.

    Args:
        pieces: parts of the text, split at the marks before contents that begin with a blank and behind every content.
    """
    found, left = [], iter(pieces)
    for content in contents:
        piece = next(left, None)
        if piece is None or not (content[:1].isspace() or piece.endswith(content)):
            return None
        found.append(piece if content[:1].isspace() else piece.removesuffix(content))
        if content[:1].isspace() and next(left, None) != content:
            return None
    rest = list(left)
    return [*found, *rest] if len(rest) == 1 else None


def _placed(contents: Sequence[str], between: Sequence[str], text: str) -> list[Span] | None:
    """Places of contents in a text, each whole or without blanks at its edges; None: there are none, or several."""
    ways: list[list[Span]] = [[]] if text.startswith(between[0]) else []
    for content, (before, behind) in zip(contents, pairwise(between), strict=True):
        further = []
        for spans in ways:
            start = (spans[-1][1] if spans else 0) + len(before)
            for variant in _without_blanks(content):
                if text.startswith(variant + behind, start):
                    further.append([*spans, (start, start + len(variant))])
        ways = further
        if len(ways) > _MOST_WAYS:
            return None
    ways = [spans for spans in ways if spans[-1][1] + len(between[-1]) == len(text)]
    return ways[0] if len(ways) == 1 else None


_MOST_WAYS = 64
"""Ways that are followed; texts with more are of blanks."""


def _without_blanks(content: str) -> set[str]:
    blanks = (None, "\n")
    return {content, *(strip(blank) for blank in blanks for strip in (content.strip, content.lstrip, content.rstrip))}
