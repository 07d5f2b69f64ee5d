"""Conversations, held against transformers' ids and mask."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pretrain.data.chat_template import ChatTemplate
from pretrain.data.conversations import ConversationReader, MessagesField, turn_end
from pretrain.data.indexed_files import Document
from pretrain.data.sources import BadDocument
from pretrain.data.tokenizer import HuggingFaceTokenizer
from tests.unit.data.chat_templates import (
    BACKENDS,
    MARKERS,
    NAMED,
    TEMPLATES,
    TURN_ENDS,
    WITHOUT_END,
    backend,
    ids_and_mask,
    oracle,
    without_generation,
)
from tests.unit.data.kinds_of_tokenizers import END

Messages = list[dict[str, Any]]
FIELD = MessagesField("messages")


def tokenizer_of(kind: str, template: str) -> HuggingFaceTokenizer:
    return HuggingFaceTokenizer(
        backend(kind).to_str(), END, special_tokens=True, chat=ChatTemplate(template, dict(NAMED))
    )


def reader_of(kind: str, template: str, field: MessagesField = FIELD) -> ConversationReader:
    return ConversationReader.open(tokenizer_of(kind, template), field)


def read(reader: ConversationReader, messages: Messages) -> Document:
    marked = reader.marked(messages)
    assert marked is not None
    (document,) = reader.documents([marked])
    return document


def scored_of(document: Document) -> list[bool]:
    assert document.scored is not None
    return document.scored.tolist()


def chat(*contents: str) -> Messages:
    return [
        {"role": "assistant" if number % 2 else "user", "content": content} for number, content in enumerate(contents)
    ]


@cache
def readers(kind: str, name: str) -> tuple[Any, ConversationReader, ConversationReader, ConversationReader]:
    template, marked = TEMPLATES[name], MessagesField("messages", may_hold_markers=True)
    plain = without_generation(template)
    return (
        oracle(kind, template),
        reader_of(kind, template),
        reader_of(kind, plain),
        reader_of(kind, plain, marked),
    )


texts = st.one_of(
    st.sampled_from(
        [
            "ok",
            "",
            "the model reads",
            "Ünï 😀👩‍🚀",
            " the memory",
            "é\n",
            "\n\nin\n \n",
            "\u00a0x\u3000",
            "[/INST",
            "user",
        ]
    ),
    st.text(st.characters(exclude_characters="\0", codec="utf-8"), max_size=12),
    st.text("a \n\tö😀<|>", max_size=12),
)


@st.composite
def conversations(draw: st.DrawFn, content: st.SearchStrategy[str] = texts) -> Messages:
    """System's words or none, and exchanges; some contents are equal, and the last answer may be missing."""
    said = draw(st.lists(content, min_size=2, max_size=7))
    system = [{"role": "system", "content": draw(content)}] if draw(st.booleans()) else []
    return system + chat(*said)


@pytest.mark.parametrize("kind", BACKENDS)
@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=60)
@given(messages=conversations())
def test_ids_and_mask_are_those_of_transformers(kind: str, name: str, messages: Messages) -> None:
    """A template that does not say what the assistant writes gives the mask of the same template that does."""
    theirs, *ours, _ = readers(kind, name)
    ids, mask = ids_and_mask(theirs, messages)
    for reader in ours:
        marked = reader.marked(messages)
        if not any(message["content"].strip() for message in messages if message["role"] == "assistant"):
            assert marked is None
            continue
        assert marked is not None
        (document,) = reader.documents([marked])
        assert document.ids.tolist() == [*ids, reader.tokenizer.eod]
        # Turns have ends of their own, so that of the document is not one.
        assert scored_of(document) == [*mask, False]
        assert document.text_bytes == len(marked.text.encode())
        assert 0 <= document.unscored_bytes < document.text_bytes


@pytest.mark.parametrize("kind", BACKENDS)
@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=30)
@given(messages=conversations(st.lists(st.one_of(texts, st.sampled_from(MARKERS)), max_size=3).map("".join)))
def test_messages_may_write_markers_where_they_are_allowed_to(kind: str, name: str, messages: Messages) -> None:
    theirs, _, refusing, allowing = readers(kind, name)
    if any(marker in message["content"] for message in messages for marker in MARKERS):
        with pytest.raises(BadDocument, match=r"message \d \(\w+\) holds .*--special-tokens"):
            refusing.marked(messages)
    marked = allowing.marked(messages)
    if marked is not None:
        ids, mask = ids_and_mask(theirs, messages)
        (document,) = allowing.documents([marked])
        assert (document.ids.tolist(), scored_of(document)) == ([*ids, allowing.tokenizer.eod], [*mask, False])


@pytest.mark.parametrize("kind", BACKENDS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_the_end_of_turns_is_found(kind: str, name: str) -> None:
    assert turn_end(tokenizer_of(kind, TEMPLATES[name])) == TURN_ENDS[name]
    assert turn_end(tokenizer_of(kind, without_generation(TEMPLATES[name]))) == TURN_ENDS[name]


@pytest.mark.parametrize("template", [WITHOUT_END, without_generation(WITHOUT_END)], ids=["marked", "plain"])
def test_the_documents_end_is_the_turns_where_there_is_no_other(template: str) -> None:
    reader = reader_of("byte_level", template)
    assert reader.turn_end is None
    document = read(reader, chat("a", "the model", "b", "ü"))
    shown = [reader.tokenizer.name_of(id) for id in document.ids[np.array(scored_of(document))].tolist()]
    assert shown[-1] == END
    assert reader.tokenizer.detokenize(document.ids[document.scored]) == "the modelü"
    # The user has the last word.
    document = read(reader, chat("a", "the model", "b"))
    assert not scored_of(document)[-1]
    assert reader.tokenizer.detokenize(document.ids[document.scored]) == "the model"
    assert document.text_bytes - document.unscored_bytes == len("the model")
