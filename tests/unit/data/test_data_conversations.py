"""Conversations, held against transformers' ids and mask."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, normalizers
from transformers import AutoTokenizer

import pretrain.data.prepare
from pretrain.config.schema import DatasetEntry
from pretrain.convert.huggingface.folder import ends_of
from pretrain.convert.huggingface.tokenizer_check import tokenizer_difference
from pretrain.convert.huggingface.tokenizer_files import read_tokenizer, write_tokenizer
from pretrain.data.blend import shared_tokenizer
from pretrain.data.chat_template import ChatTemplate
from pretrain.data.conversations import ConversationReader, MessagesField, chat_tokenizer, turn_end
from pretrain.data.dataset import build_train_dataset
from pretrain.data.held_out import HeldOutDataset
from pretrain.data.indexed_files import Document, IndexedWriter
from pretrain.data.manifest import PreparedDataset, open_dataset, save_tokenizer
from pretrain.data.prepare import prepare
from pretrain.data.sources import BadDocument
from pretrain.data.tokenizer import ByteTokenizer, HuggingFaceTokenizer, load_tokenizer
from pretrain.errors import DataError
from pretrain.run.folder import RunFolder
from pretrain.run.trained_data import going_on
from tests.unit.data.chat_templates import (
    BACKENDS,
    CHATML,
    LLAMA_2,
    MARKERS,
    NAMED,
    QWEN,
    TEMPLATES,
    TURN_ENDS,
    WITHOUT_END,
    backend,
    folder_of,
    ids_and_mask,
    oracle,
    without_generation,
)
from tests.unit.data.kinds_of_tokenizers import END, THINK
from tools.cli import main as megamem

Messages = list[dict[str, Any]]
FIELD = MessagesField("messages")


def tokenizer_of(kind: str, template: str) -> HuggingFaceTokenizer:
    return HuggingFaceTokenizer(
        backend(kind).to_str(), END, special_tokens=True, chat=ChatTemplate(template, dict(NAMED))
    )


def template_of(template: str, named: dict[str, str] = NAMED) -> ChatTemplate:
    return ChatTemplate(template, {name: token for name, token in named.items() if name in template})


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
    for template in (TEMPLATES[name], without_generation(TEMPLATES[name])):
        tokenizer = tokenizer_of(kind, template)
        assert turn_end(tokenizer) == tokenizer.id_of(TURN_ENDS[name])


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


# --- what is refused, and what is left out ---


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        (None, "the field 'messages' holds null, not a list of messages"),
        ("hi", "the field 'messages' holds a string, not a list"),
        ([], "none of its 0 messages has the role assistant"),
        (chat("a"), "none of its 1 messages has the role assistant"),
        (["a"], "message 1 is a string, not an object"),
        ([{"from": "human", "value": "hi"}], r"message 1 has no role \(present: from, value\)"),
        ([*chat("a", "b"), {"role": "user"}], r"message 3 \(user\) has no content"),
        (
            [*chat("a"), {"role": "assistant", "content": 3}],
            r"message 2 \(assistant\) has a content that is neither.*: 3",
        ),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}, *chat("a", "b")],
            r"message 1 \(user\) has a part of the kind 'image_url'",
        ),
        (chat("a", "b\0"), "NUL at character 1"),
        (chat("a\ud800", "b"), r"message 1 \(user\) holds half a surrogate pair"),
        (chat("a <|im_end|>", "b"), r"message 1 \(user\) holds <\|im_end\|>, by which.*--special-tokens"),
        (
            chat("a", f"b{END}"),
            r"message 2 \(assistant\) holds <\|endoftext\|>, by which a message could forge others: take it out\. Mend",
        ),
        ([*chat("a", "b"), {"role": "user", "content": "c", "name": "<s>"}], r"message 3 \(user\) holds <s>"),
        (
            [*chat("a"), {"role": "assistant", "content": [{"type": "text", "text": t} for t in ("<|im_", "end|>")]}],
            r"message 2 \(assistant\) holds <\|im_end\|>",
        ),
    ],
)
def test_bad_records_are_named_and_counted(tmp_path: Path, messages: Any, reason: str) -> None:
    source = write(tmp_path / "chats.jsonl", [chat("a", "b"), messages, chat("c", "d")])
    folder = folder_of(tmp_path / "tokenizer", "byte_level", without_generation(CHATML))
    with pytest.raises(DataError, match=rf"line 2: .*{reason}"):
        prepared(source, folder)
    dataset = prepared(source, folder, max_bad=1)
    assert dataset.manifest.num_skipped == 1
    assert dataset.manifest.splits["train"].num_documents == 2


REFUSES = "{{ raise_exception('roles must alternate') if messages[0].role == 'assistant' else '' }}"
THOUGHTS = (
    "{% for m in messages %}{% set c = m.content.split('</think>')[-1].lstrip('\\n') if not loop.last else m.content %}"
    "{{ '<|im_start|>' + m.role + '\\n' + (m.reasoning_content or '') + c + '<|im_end|>\\n' }}{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "messages", "reason"),
    [
        (
            REFUSES + CHATML,
            [{"role": "assistant", "content": "a"}],
            "the chat template refuses it: roles must alternate",
        ),
        (
            CHATML.replace("m['content'] +", "m['content'].replace('the', 'a') +"),
            chat("a", "the model"),
            "leaves out, moves or changes",
        ),
        (
            CHATML.replace("m['content'] +", "m['content'][:9] +"),
            chat("a", "the models"),
            "leaves out, moves or changes",
        ),
        (CHATML.replace("in messages", "in messages[:2]"), chat("a", "b", "c", "d"), "leaves out, moves or changes"),
        (CHATML.replace("in messages", "in messages | sort(attribute='role')"), chat("a", "b", "c", "d"), None),
        (
            CHATML.replace("m['content'] +", "m['content'] * 2 +"),
            chat("a", "b", "c", "b"),
            "leaves out, moves or changes",
        ),
        (THOUGHTS, chat("a", f"{THINK}x</think>\n\nb", "c", "d"), "leaves out, moves or changes"),
        (THOUGHTS, chat("a", "b", "c", f"{THINK}x</think>\n\nd"), None),
        (
            THOUGHTS,
            [*chat("a"), {"role": "assistant", "content": "b", "reasoning_content": "hm"}],
            r"the chat template writes reasoning_content of the assistant's messages, and only \{% generation %\}",
        ),
        (CHATML, [*chat("a"), {"role": "assistant", "content": "b", "thinking": "hm", "weight": 1}], None),
        (CHATML, [*chat("a"), {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}], "refuses it"),
    ],
)
def test_a_template_that_does_not_tell_what_is_said_is_not_guessed(
    template: str, messages: Messages, reason: str | None
) -> None:
    reader = reader_of("byte_level", without_generation(template))
    if reason is not None:
        with pytest.raises(BadDocument, match=reason):
            reader.marked(messages)
        return
    document = read(reader, messages)
    said = [f"{message['content']}<|im_end|>" for message in messages if message["role"] == "assistant"]
    assert reader.tokenizer.detokenize(document.ids[document.scored]) == "".join(said)


def test_a_template_that_marks_it_may_do_as_it_likes() -> None:
    """Reasoning that a template moves is the assistant's, and so are calls of tools without a content."""
    template = (
        "{% for m in messages %}{{ m.role }}:{% if m.role == 'assistant' %}{% generation %}{{ m.reasoning_content }}"
        "{{ m.tool_calls | tojson if m.tool_calls else m.content.upper() }}<|im_end|>{% endgeneration %}"
        "{% else %}{{ m.content }}{% endif %}\n{% endfor %}"
    )
    calls = [{"name": "f", "arguments": {"x": "<b>ü"}}]
    messages: Messages = [
        *chat("a", "b", "c"),
        {"role": "assistant", "content": None, "tool_calls": calls, "thinking": "hm"},
    ]
    document = read(reader_of("byte_level", template), messages)
    ids, mask = ids_and_mask(oracle("byte_level", template), messages)
    assert (document.ids.tolist(), scored_of(document)) == ([*ids, document.ids[-1]], [*mask, False])


PARTS = CHATML.replace(
    "m['content']", "(m['content'] if m['content'] is string else m['content'] | map(attribute='text') | join)"
)


@pytest.mark.parametrize("template", [CHATML, PARTS], ids=["texts", "parts"])
def test_contents_may_be_lists_of_texts(template: str) -> None:
    messages = chat("a", "the model", "c", "d")
    as_parts = [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in messages]
    reader = reader_of("byte_level", without_generation(template))
    assert reader.reads_parts == (template == PARTS)
    ours, same = read(reader, as_parts), read(reader, messages)
    assert (ours.ids.tolist(), scored_of(ours)) == (same.ids.tolist(), scored_of(same))
    # Several are lines for a template of texts.
    as_parts[1]["content"] = [{"type": "text", "text": text} for text in ("the", "model")]
    document = read(reader, as_parts)
    joined = "themodel" if reader.reads_parts else "the\nmodel"
    assert reader.tokenizer.detokenize(document.ids[document.scored]) == f"{joined}<|im_end|>d<|im_end|>"
    if reader.reads_parts:
        assert document.ids.tolist()[:-1] == ids_and_mask(oracle("byte_level", template), as_parts)[0]


def test_markers_that_take_blanks_along_are_no_part_of_what_is_said() -> None:
    """Phi's markers strip: their places in the text are those of the blanks too."""
    made = backend("byte_level")
    made.add_special_tokens([AddedToken("<|say|>", rstrip=True), AddedToken("<|done|>", lstrip=True)])
    template = ChatTemplate("{% for m in messages %}<|say|>{{ m.role }}\n<|say|>{{ m.content }}<|done|>\n{% endfor %}")
    tokenizer = HuggingFaceTokenizer(made.to_str(), END, special_tokens=True, chat=template)
    reader = ConversationReader.open(tokenizer, FIELD)
    document = read(reader, chat("a", "  the model \n"))
    assert reader.tokenizer.detokenize(document.ids[document.scored]) == "the model<|done|>"


def test_special_tokens_in_normalised_texts_are_found_in_messages() -> None:
    made = backend("byte_level")
    made.normalizer = normalizers.NFKC()
    made.add_special_tokens([AddedToken("<|say|>", normalized=True)])
    template = ChatTemplate(without_generation(CHATML), dict(NAMED))
    reader = ConversationReader.open(
        HuggingFaceTokenizer(made.to_str(), END, special_tokens=True, chat=template), FIELD
    )
    read(reader, chat("ＡＢＣ", "ok"))
    with pytest.raises(BadDocument, match=r"message 1 \(user\) holds <\|say\|>"):
        reader.marked(chat("<|ｓay|>", "ok"))


# --- templates and where they are ---


def write(path: Path, conversations: list[Any]) -> str:
    path.write_text("".join(json.dumps({"messages": each, "id": "ü"}) + "\n" for each in conversations))
    return str(path)


def prepared(source: str, folder: Path, output: str = "data", **options: Any) -> PreparedDataset:
    options = {"num_workers": 1, "validation_fraction": 0.0} | options
    field = options.pop("messages", FIELD)
    tokenizer = chat_tokenizer(folder, options.pop("eod_token", END))
    return prepare([source], folder.parent / output, tokenizer, messages=field, **options).dataset


def test_a_file_of_its_own_comes_before_the_settings(tmp_path: Path) -> None:
    both = folder_of(tmp_path / "both", "byte_level", QWEN, {"chat_template": CHATML})
    in_settings = folder_of(
        tmp_path / "one",
        "byte_level",
        None,
        {"chat_template": CHATML, "bos_token": {"__type": "AddedToken", "content": "<s>"}},
    )
    several = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": LLAMA_2}]
    of_several = folder_of(tmp_path / "several", "byte_level", None, {"chat_template": several, "eos_token": None})
    (of_several / "special_tokens_map.json").write_text(json.dumps({"eos_token": "</s>"}))
    for folder, template in ((both, QWEN), (in_settings, CHATML), (of_several, LLAMA_2)):
        assert chat_tokenizer(folder, END).chat == template_of(template)
        assert chat_tokenizer(folder / "tokenizer.json", END).chat == template_of(template)
        assert AutoTokenizer.from_pretrained(folder).get_chat_template() == template


@pytest.mark.parametrize(
    ("template", "settings", "said"),
    [
        (None, {}, r"tokenizer has no chat template.*chat_template\.jinja.*write one there"),
        (
            None,
            {"chat_template": [{"name": "rag", "template": "x"}]},
            r"has the chat templates rag, and none is named default",
        ),
        ("{% for m in messages %}", {}, r"The chat template is not one \(.*\): mend the chat_template\.jinja"),
        (
            "{{ nothing.more }}",
            {},
            "does not read a message of the user and one of the assistant: 'nothing' is undefined",
        ),
        ("{{ messages[0].content }}", {}, "does not write what the role assistant says"),
        (
            without_generation(CHATML).replace("m['content'] +", "m['content'].upper() +"),
            {},
            "does not write what the role",
        ),
        (
            LLAMA_2.replace("bos_token", "'<|im_start|>'"),
            {"eos_token": "</s>"},
            r"writes </s> within conversations.*--eod-token \(the template does not write <\|endoftext\|>, <\|im_end\|>, <s>",
        ),
        ("<|endoftext|>" + CHATML, {"eos_token": END}, r"writes <\|endoftext\|> within.*does not write </s>, <s>"),
    ],
)
def test_templates_that_are_of_no_use_are_refused_before_any_work(
    tmp_path: Path, template: str | None, settings: dict[str, Any], said: str
) -> None:
    folder = folder_of(tmp_path / "tokenizer", "byte_level", template, settings)
    with pytest.raises(DataError, match=said):
        prepared(str(tmp_path / "missing.jsonl"), folder, eod_token=settings.get("eos_token", END))
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize(
    ("code", "said"),
    [("{{ ''.__class__.__mro__ }}", "unsafe|undefined"), ("{% do messages.append(1) %}", "")],
)
def test_templates_run_in_a_sandbox(code: str, said: str) -> None:
    with pytest.raises(DataError, match=said):
        reader_of("byte_level", code + CHATML)


def test_what_is_no_conversation_is_refused(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "tokenizer", "byte_level", CHATML)
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(DataError, match="conversations are read from JSON lines"):
        prepared(str(tmp_path / "a.txt"), folder)
    source = write(tmp_path / "some.jsonl", [chat("a", "b")])
    with pytest.raises(DataError, match="--cut-documents would cut conversations in two"):
        prepared(source, folder, cut_documents=9)
    with pytest.raises(DataError, match="by `chat_tokenizer`"):
        prepare([source], tmp_path / "out", ByteTokenizer(), messages=FIELD)
    # Without a word of the assistant there is nothing to learn.
    source = write(tmp_path / "some.jsonl", [chat("a", ""), chat("a", "b"), chat("a", " \n", "b", "")])
    assert prepared(source, folder).manifest.num_empty == 2


# --- data sets ---


def many(count: int = 40) -> list[Messages]:
    words = ["the memory", "reads ü", "ok", "a few rows\n", "", "def run(self):", "ok"]
    return [
        chat(*(words[(number * 3 + place) % 7] for place in range(2 + number % 4)), "last") for number in range(count)
    ]


def expected(folder: Path, conversations: list[Messages]) -> list[tuple[list[int], list[bool]]]:
    reads = AutoTokenizer.from_pretrained(folder)
    end = reads.convert_tokens_to_ids(END)
    made = [ids_and_mask(reads, messages) for messages in conversations]
    return [([*ids, end], [*mask, False]) for ids, mask in made if any(mask)]


def documents_of(dataset: PreparedDataset, split: str) -> list[tuple[list[int], list[bool]]]:
    scored, start, found = dataset.open_scored(split), 0, []
    assert scored is not None
    documents = dataset.open_split(split) if dataset.manifest.splits[split].num_documents else ()
    for ids in documents:
        found.append((ids.tolist(), scored.flags(start, start + len(ids)).tolist()))
        start += len(ids)
    assert scored.count(start) == sum(sum(flags) for _, flags in found)
    assert scored.count(start // 2) == int(scored.flags(0, start // 2).sum())
    return found


def spoken(conversations: list[Messages]) -> list[Messages]:
    """Conversations in which the assistant says something."""
    return [
        messages
        for messages in conversations
        if any(message["content"] for message in messages if message["role"] == "assistant")
    ]


@pytest.mark.parametrize("options", [{}, {"validation_fraction": 1e-9}, {"num_workers": 2}], ids=str)
def test_a_data_set_holds_what_transformers_reads(tmp_path: Path, options: dict[str, Any]) -> None:
    """The one conversation that is held out takes its flags along."""
    folder = folder_of(tmp_path / "tokenizer", "byte_level", CHATML)
    dataset = prepared(write(tmp_path / "chats.jsonl", many()), folder, **options)
    found = documents_of(dataset, "train") + documents_of(dataset, "validation")
    assert sorted(found) == sorted(expected(folder, spoken(many())))
    for split, info in dataset.manifest.splits.items():
        of_split = documents_of(dataset, split)
        assert info.num_scored_tokens == sum(sum(flags) for _, flags in of_split)
        texts = [dataset.tokenizer.detokenize(np.array(ids)[np.array(flags)]) for ids, flags in of_split]
        assert info.num_scored_bytes == len("".join(texts).encode())
        assert info.scored is not None
        assert (dataset.path / f"{split}.scored").stat().st_size == info.scored.file_bytes == -(-info.num_tokens // 8)
    dataset.verify()
    assert dataset.tokenizer.special_tokens
    assert dataset.tokenizer.chat == template_of(CHATML)


def files(dataset: PreparedDataset) -> dict[str, bytes]:
    return {name: (dataset.path / name).read_bytes() for name, _, _ in dataset.manifest.files}


def test_a_preparation_that_was_cut_off_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bits of a byte that is not full yet are written when the work is noted."""
    folder = folder_of(tmp_path / "tokenizer", "byte_level", without_generation(CHATML))
    source, options = write(tmp_path / "chats.jsonl", many()), {"validation_fraction": 0.2}
    whole = files(prepared(source, folder, "whole", **options))
    assert {"train.scored", "validation.scored"} < whole.keys()
    monkeypatch.setattr(pretrain.data.prepare, "NOTE_EVERY_S", 0.0)
    add, count = IndexedWriter.add, 0

    def cut_off(self: IndexedWriter, *document: Any) -> None:
        nonlocal count
        count += 1
        if count % 9 == 0:
            raise KeyboardInterrupt
        add(self, *document)

    monkeypatch.setattr(IndexedWriter, "add", cut_off)
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            prepared(source, folder, "cut", **options)
    monkeypatch.setattr(IndexedWriter, "add", add)
    assert files(prepared(source, folder, "cut", **options)) == whole
    assert count == 27


LOUD = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<|assistant|>{{ m.content }}<|im_end|>"
    "{% else %}<|user|>{{ m.content }}{% endif %}{% endfor %}"
)
"""Template by which an id tells whether it is scored, if the assistant alone speaks in capitals."""


def loud(count: int) -> list[Messages]:
    random = np.random.RandomState(7)
    letters = "abcdefghijklmnopqrstuvwxyz"

    def said(place: int) -> str:
        return "".join(random.choice(list(letters.upper() if place % 2 else letters), random.randint(1, 30)))

    return [chat(*map(said, range(random.randint(2, 7)))) for _ in range(count)]


@pytest.mark.parametrize(
    "options", [{}, {"separate_documents": True}, {"shuffle": "samples"}], ids=["packed", "separate", "samples"]
)
def test_samples_count_what_the_assistant_says_and_its_ends_alone(tmp_path: Path, options: dict[str, Any]) -> None:
    """Samples begin and end anywhere, over several passes. In a blend all of a plain text counts."""
    folder = folder_of(tmp_path / "tokenizer", "byte_level", LOUD)
    (tmp_path / "plain.jsonl").write_text(json.dumps({"text": "0123456789" * 3}) + "\n")
    plain = prepare(
        [str(tmp_path / "plain.jsonl")],
        tmp_path / "plain",
        load_tokenizer(folder, END),
        num_workers=1,
        validation_fraction=0,
    ).dataset
    chats = prepared(write(tmp_path / "chats.jsonl", loud(40)), folder)
    tokenizer = chats.tokenizer
    assert isinstance(tokenizer, HuggingFaceTokenizer)
    scored = [id for id in range(tokenizer.vocab_size) if re.fullmatch(r"[A-Z0-9]|<\|im_end\|>", tokenizer.name_of(id))]
    samples = build_train_dataset(
        [DatasetEntry(str(chats.path), weight=0.8), DatasetEntry(str(plain.path), weight=0.2)],
        sequence_length=16,
        num_samples=400,
        seed=3,
        tokenizer=tokenizer,
        cache_dir=tmp_path / "cache",
        **options,
    )
    shares = []
    for sample in map(samples.__getitem__, range(400)):
        labels, mask = sample["labels"].numpy(), sample["loss_mask"].numpy() > 0
        digits = np.isin(labels, [tokenizer.id_of(digit) for digit in "0123456789"])
        ends = labels == tokenizer.eod
        assert (mask == (np.isin(labels, scored) | (ends & digits.any()))).all()
        shares.append(mask.mean())
    assert min(shares) == 0
    assert max(shares) == 1


@pytest.mark.parametrize("max_sequences", [None, 7])
def test_evaluation_codes_what_the_assistant_says(tmp_path: Path, max_sequences: int | None) -> None:
    folder = folder_of(tmp_path / "tokenizer", "byte_level", CHATML)
    dataset = prepared(write(tmp_path / "chats.jsonl", many()), folder, validation_fraction=0.3)
    held_out = HeldOutDataset([DatasetEntry(str(dataset.path))], 16, max_sequences)
    whole = documents_of(dataset, "validation")
    stop = None if max_sequences is None else max_sequences * 16
    ids = np.concatenate([ids for ids, _ in whole])[:stop]
    flags = np.concatenate([flags for _, flags in whole])[:stop]
    counted = [
        window["labels"][window["loss_mask"] > 0].numpy() for window in map(held_out.__getitem__, range(len(held_out)))
    ]
    assert np.concatenate(counted).tolist() == ids[flags].tolist()
    assert held_out.num_target_tokens == int(flags.sum())
    assert held_out.num_bytes == len(dataset.tokenizer.decode_bytes(ids[flags]))


def test_a_blend_has_the_template_of_the_first_that_has_one(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "tokenizer", "byte_level", CHATML)
    (tmp_path / "plain.jsonl").write_text('{"text": "the <|im_end|>"}\n' * 3)
    plain = load_tokenizer(folder, END)
    texts_alone = prepare(
        [str(tmp_path / "plain.jsonl")], tmp_path / "plain", plain, num_workers=1, validation_fraction=0
    ).dataset
    chats = prepared(write(tmp_path / "chats.jsonl", many()), folder)
    for blend in ([texts_alone, chats], [chats, texts_alone]):
        assert shared_tokenizer(blend).chat == chats.tokenizer.chat
        assert shared_tokenizer(blend).special_tokens
    # A folder that was prepared with it has its template for more.
    assert chat_tokenizer(chats.path).chat == chats.tokenizer.chat
    assert chat_tokenizer(chats.path).eod_token == END


def test_a_run_that_goes_on_keeps_the_template_that_it_knows(tmp_path: Path) -> None:
    run, plain = RunFolder(tmp_path / "run"), HuggingFaceTokenizer(backend("byte_level").to_str(), END)
    saved: Any = SimpleNamespace(path=run.checkpoints / "step_00000001")
    assert going_on(plain, saved) is plain
    save_tokenizer(plain, run.tokenizer)
    assert going_on(plain, saved) is plain
    save_tokenizer(tokenizer_of("byte_level", CHATML), run.tokenizer)
    kept = going_on(plain, saved)
    assert (kept.chat, kept.special_tokens) == (ChatTemplate(CHATML, NAMED), True)
    # That of the data comes first.
    assert going_on(tokenizer_of("byte_level", QWEN), saved).chat == ChatTemplate(QWEN, NAMED)
    assert chat_tokenizer(run.tokenizer).chat == kept.chat


def test_damaged_bits_are_found(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "tokenizer", "byte_level", CHATML)
    path = prepared(write(tmp_path / "chats.jsonl", many()), folder).path
    content = (path / "train.scored").read_bytes()
    (path / "train.scored").write_bytes(bytes([content[0] ^ 64]) + content[1:])
    with pytest.raises(DataError, match=r"train\.scored is not the file that was"):
        open_dataset(path).verify()
    (path / "train.scored").write_bytes(content[:-1])
    with pytest.raises(DataError, match=r"train\.scored has \d+ bytes where \d+ were written"):
        open_dataset(path)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = folder_of(tmp_path / "tokenizer", "byte_level", without_generation(CHATML), {"eos_token": "<|im_end|>"})
    source = write(tmp_path / "chats.jsonl", [*many(), chat("a</s>", "b")])
    out = tmp_path / "out"
    command = ["data", "prepare", source, "--output", str(out), "--workers", "1", "--messages-field", "messages"]
    assert megamem(command) == 3
    assert "--tokenizer bytes has no chat template" in capsys.readouterr().err
    command += ["--tokenizer", str(folder)]
    assert megamem([*command, "--field", "x"]) == 3
    assert "--field has no effect beside --messages-field" in capsys.readouterr().err
    assert megamem([*command, "--prompt-field", "x", "--answer-field", "y"]) == 3
    assert "leave one out" in capsys.readouterr().err
    assert megamem(command) == 3
    assert "does not write <|endoftext|>" in capsys.readouterr().err
    command += ["--eod-token", END]
    assert megamem(command) == 3
    assert "line 41: message 1 (user) holds </s>" in capsys.readouterr().err
    assert not out.exists()
    assert megamem([*command, "--special-tokens"]) == 0
    printed = capsys.readouterr()
    assert "the assistant's turns end with <|im_end|>" in printed.out
    assert "leaves out" not in printed.err
    assert megamem([*command, "--special-tokens"]) == 0
    assert "already complete" in capsys.readouterr().out
    assert megamem(command) == 3
    assert "other arguments" in capsys.readouterr().err
    assert megamem([*command, "--max-bad", "1", "--overwrite"]) == 0
    assert megamem(["data", "inspect", str(out), "--documents", "1", "--verify"]) == 0
    shown = capsys.readouterr().out
    assert "of them scored: in «»" in shown
    assert "<|im_start|>assistant\n«reads ü<|im_end|>»\n" in shown
    (folder / "chat_template.jinja").write_text(
        CHATML.replace(" + '<|im_end|>' }}{% endgeneration %}", " }}{% endgeneration %}{{ '<|im_end|>' }}")
    )
    assert megamem([*command, "--max-bad", "1", "--overwrite"]) == 0
    assert "leaves out: models do not learn to write it" in capsys.readouterr().err


# --- exports ---


@pytest.mark.parametrize("kind", BACKENDS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_an_export_reads_conversations_as_they_were_prepared(tmp_path: Path, kind: str, name: str) -> None:
    folder = folder_of(tmp_path / "tokenizer", kind, without_generation(TEMPLATES[name]), {"pad_token": END})
    dataset = prepared(write(tmp_path / "chats.jsonl", many()), folder)
    out = tmp_path / "exported"
    out.mkdir()
    write_tokenizer(dataset.tokenizer, out, sequence_length=32)
    (out / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": dataset.tokenizer.eod}))
    assert (out / "chat_template.jinja").read_text() == without_generation(TEMPLATES[name])
    reads = AutoTokenizer.from_pretrained(out)
    ids = [reads.apply_chat_template(messages, return_dict=True)["input_ids"] for messages in spoken(many())]
    assert [[*each, dataset.tokenizer.eod] for each in ids] == [each for each, _ in documents_of(dataset, "train")]
    assert tokenizer_difference(out, dataset.tokenizer) is None
    again = read_tokenizer(out)
    assert (again.chat, again.eod_token) == (dataset.tokenizer.chat, END)
    assert again.special_tokens


def test_what_a_template_names_and_did_not_have_is_not_there_in_an_export(tmp_path: Path) -> None:
    template = ChatTemplate("{{ bos_token }}" + CHATML)
    tokenizer = HuggingFaceTokenizer(backend("byte_level").to_str(), END, special_tokens=True, chat=template)
    write_tokenizer(tokenizer, tmp_path, sequence_length=32)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    reads = AutoTokenizer.from_pretrained(tmp_path)
    assert (reads.bos_token, reads.eos_token) == (None, END)
    reader = ConversationReader.open(tokenizer, FIELD)
    ids = reads.apply_chat_template(chat("a", "b"), return_dict=True)["input_ids"]
    assert read(reader, chat("a", "b")).ids.tolist() == [*ids, tokenizer.eod]


def test_a_tokenizer_that_transformers_reads_conversations_otherwise_with_is_told(tmp_path: Path) -> None:
    tokenizer = tokenizer_of("byte_level", CHATML)
    write_tokenizer(tokenizer, tmp_path, sequence_length=32)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "chat_template.jinja").write_text(QWEN)
    told = tokenizer_difference(tmp_path, tokenizer)
    assert told is not None
    assert "conversation" in told


@pytest.mark.parametrize(
    ("template", "ends"),
    [(CHATML, ["<|im_end|>", END]), (WITHOUT_END, [END]), ("{{ raise_exception('no') }}", [END]), (None, [END])],
)
def test_texts_that_are_being_written_end_with_a_turn(template: str | None, ends: list[str]) -> None:
    chat = None if template is None else ChatTemplate(template)
    tokenizer = HuggingFaceTokenizer(backend("byte_level").to_str(), END, special_tokens=True, chat=chat)
    ids = [tokenizer.id_of(end) for end in ends]
    assert ends_of(tokenizer) == (ids if len(ids) > 1 else ids[0])


@pytest.mark.parametrize(
    ("template", "settings", "config", "end"),
    [
        # Qwen's: the turn's end ends sequences, and there is one other that is known.
        (CHATML, {"eos_token": "<|im_end|>"}, {"eos_token_id": 302}, "</s>"),
        (CHATML, {"eos_token": "</s>"}, {}, "</s>"),
        # An export's: the model names the end that documents had.
        (LLAMA_2, {"eos_token": "</s>"}, {"eos_token_id": 303}, THINK),
        # None is left: the folder's, which preparing conversations refuses.
        (LLAMA_2.replace("eos_token", f"'</s>{END}'"), {"eos_token": "<s>"}, {}, "<s>"),
    ],
)
def test_documents_of_an_imported_model_end_with_what_its_template_does_not_write(
    tmp_path: Path, template: str, settings: dict[str, Any], config: dict[str, Any], end: str
) -> None:
    folder = folder_of(tmp_path / "model", "byte_level", template, settings)
    definition = backend("byte_level")
    (folder / "config.json").write_text(json.dumps(config))
    if template == CHATML:
        (folder / "tokenizer.json").write_text(definition.to_str().replace(END, "<|other|>"))
    read = read_tokenizer(folder)
    assert (read.eod_token, read.chat) == (end, template_of(template, {**NAMED, **settings}))
