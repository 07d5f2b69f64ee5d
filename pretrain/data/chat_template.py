"""Chat templates of Hugging Face's folders: where they are, and what they make of a conversation.

A template is a text in Jinja's language. It runs in the sandbox, with the settings and the names that transformers gives
it, as it was written for these.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from pretrain.data.named_end import PREPARED_FILES, SETTINGS_FILE, read_object
from pretrain.errors import DataError

if TYPE_CHECKING:
    from jinja2 import Template

TEMPLATE_FILE = "chat_template.jinja"
_LEGACY_TOKENS_FILE = "special_tokens_map.json"
_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Special tokens that a template may name."""
_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Keys under which files hold a message's reasoning. Templates read the first one, and a few the second."""
_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_PRIVATE_USE = range(0xE000, 0xF900)

Message = Mapping[str, Any]
Span = tuple[int, int]


class Rendered(NamedTuple):
    """Text of a conversation.

    Attributes:
        text: text that the template writes.
        generated: first character, and the one behind the last, of each `{% generation %}` block.
    """

    text: str
    generated: list[Span]


@dataclass(frozen=True)
class ChatTemplate:
    """Template by which a model reads conversations.

    Attributes:
        source: text in Jinja's language.
        special_tokens: texts of those that it names, such as `bos_token`.
    """

    source: str
    special_tokens: Mapping[str, str] = field(default_factory=dict)

    @staticmethod
    def from_plain(values: Mapping[str, Any]) -> ChatTemplate:
        """Template of what `asdict` made of one."""
        return ChatTemplate(str(values["source"]), dict(values["special_tokens"]))

    @property
    def marks_generation(self) -> bool:
        """True if it says itself, by `{% generation %}`, what the assistant writes."""
        return _GENERATION.search(self.source) is not None

    @property
    def fault(self) -> str | None:
        """Reason that it is no template; None: it is one."""
        from jinja2 import TemplateError

        try:
            _compiled(self.source)
        except TemplateError as error:
            return str(error)
        return None

    def render(self, messages: Sequence[Message], now: datetime, *, asks: bool = False) -> Rendered:
        """Text of a conversation.

        Args:
            messages: messages of JSON's kinds.
            now: the moment that the template is told it is.
            asks: add what a server writes before an answer.

        Raises:
            ValueError: the template fails on it, or refuses it.
        """
        opening, closing = tuple(unused_characters(2, messages, self.source))
        try:
            written = _compiled(self.source).render(
                messages=[_as_read(message) for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=asks,
                strftime_now=lambda form: now.strftime(form),
                **self.special_tokens,
                **{_MARKS: (opening, closing)},
            )
            return _unmarked(written, opening, closing)
        except Exception as error:  # it is a program of someone else
            raise ValueError(str(error) or type(error).__name__) from error


def unused_characters(number: int, messages: Sequence[Message], source: str) -> str:
    """Different characters for private use that neither a message nor a template holds."""
    held = json.dumps(messages, ensure_ascii=False) + source
    free = (character for character in map(chr, _PRIVATE_USE) if character not in held)
    return "".join(next(free) for _ in range(number))


def _as_read(message: Message) -> dict[str, Any]:
    """Message as templates expect it: a key with null is none, and reasoning is where they look for it."""
    read = {key: value for key, value in message.items() if value is not None}
    reasoning = next((read[key] for key in _REASONING if key in read), None)
    return read if reasoning is None else {"thinking": reasoning, **read, _REASONING[0]: reasoning}


def _unmarked(written: str, opening: str, closing: str) -> Rendered:
    """Text without the marks around generated blocks, and the blocks' places in it."""
    parts: list[str] = []
    generated, begun, length = [], [], 0
    for part in re.split(f"([{opening}{closing}])", written):
        if part == opening:
            begun.append(length)
        elif part == closing:
            generated.append((begun.pop(), length))
        else:
            parts.append(part)
            length += len(part)
    return Rendered("".join(parts), sorted(generated))


_MARKS = "_marks_of_generation"


@lru_cache(maxsize=8)
def _compiled(source: str) -> Template:
    """Template in transformers' environment, in which generated blocks stand between two marks."""
    from jinja2 import Environment, TemplateError, nodes, pass_context
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.runtime import Context, Macro
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

        @pass_context
        def _marked(self, context: Context, caller: Macro) -> str:
            opening, closing = context[_MARKS]
            return f"{opening}{caller()}{closing}"

    def raise_exception(message: str) -> NoReturn:
        raise TemplateError(message)

    def to_json(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        # Jinja's own is for pages, and escapes what HTML reads.
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment: Environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    return environment.from_string(source)


def read_chat_template(definition: Path) -> ChatTemplate | None:
    """Template of the folder of a `tokenizer.json`; None: it has none.

    Prepared data sets and runs keep the one that they were made with. Hugging Face's folders have it in a file of its own,
    older ones in the tokenizer's settings.

    Raises:
        DataError: a file cannot be read, or holds several templates, of which none is the default.
    """
    for name in PREPARED_FILES:
        made_with = read_object(definition.with_name(name))
        info = made_with.get("tokenizer", made_with)
        if isinstance(info, dict) and info.get("chat") is not None:
            try:
                return ChatTemplate.from_plain(info["chat"])
            except (KeyError, TypeError, ValueError) as error:
                raise DataError(
                    f"{definition.with_name(name)} has no usable chat template: copy the folder again"
                ) from error
    settings, file = read_object(definition.with_name(SETTINGS_FILE)), definition.with_name(TEMPLATE_FILE)
    try:
        source = file.read_text(encoding="utf-8") if file.exists() else settings.get("chat_template")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file} cannot be read ({error}): copy the folder again") from error
    if isinstance(source, list):
        source = _default(source, definition.with_name(SETTINGS_FILE))
    if not isinstance(source, str):
        return None
    return ChatTemplate(source, {name: token for name, token in _named_tokens(definition, settings) if name in source})


def _default(templates: Sequence[Any], file: Path) -> str:
    named = {each["name"]: each["template"] for each in templates if isinstance(each, dict) and len(each) == 2}
    if not isinstance(named.get("default"), str):
        raise DataError(
            f"{file} has the chat templates {', '.join(map(str, named)) or 'none'}, and none is named default: write the "
            f"one that is meant into {file.with_name(TEMPLATE_FILE)}"
        )
    return str(named["default"])


def _named_tokens(definition: Path, settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Names and texts of special tokens, as the tokenizer's settings have them, or a file of older folders."""
    older = {} if "added_tokens_decoder" in settings else read_object(definition.with_name(_LEGACY_TOKENS_FILE))
    for name in _NAMES:
        token = {**settings, **older}.get(name)
        # Older files write a token with its options.
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str):
            yield name, token
