"""A file and overrides to one tree of located values, and back to text.

Every value remembers the file and line (or the override) that it came from, so that an error can point there. Scalars
follow YAML 1.2: `1e-3` is a number, `on`, `yes` and `2024-01-01` are text. PyYAML's own rules are those of YAML 1.1.

Mappings merge key by key, lists are replaced, `null` removes a section, and a mapping over null starts from the defaults
again.
"""

from __future__ import annotations

import enum
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from pretrain.errors import ConfigError
from pretrain.printable import printable

STAGES_KEY = "stages"
SIZE_KEY = "model.size"
Scalar = None | bool | int | float | str


class Layer(enum.IntEnum):
    """Source of a value. A base's value may lose its effect silently; one of the named file or an override may not."""

    BASE = 0
    FILE = 1
    OVERRIDE = 2


@dataclass(frozen=True)
class Node:
    """One value of a configuration and where it came from."""

    value: Scalar | dict[str, Node] | list[Node]
    origin: str
    layer: Layer
    key_origins: dict[str, str] = field(default_factory=dict)
    """For a mapping: the place of each key, which may be a line above its value."""

    @property
    def last_layer(self) -> Layer:
        """The topmost layer that set anything in here."""
        return max((child.last_layer for child in self.children()), default=self.layer)

    def children(self) -> Iterator[Node]:
        """The values directly below, of a mapping or a list."""
        if isinstance(self.value, dict):
            yield from self.value.values()
        elif isinstance(self.value, list):
            yield from self.value


MAX_VALUES = 100_000
"""In one file or override: a few lines whose aliases name each other would otherwise unfold without end."""
MAX_BYTES = 10_000_000
"""In one file."""
_TAG = "tag:yaml.org,2002:"
_DIGITS = "0123456789"
# YAML 1.2's scalar rules: the type, what it looks like, and the characters that it may begin with.
_RULES = (
    ("null", r"^(?:~|null|Null|NULL|)$", ["~", "n", "N", ""]),
    ("bool", r"^(?:true|True|TRUE|false|False|FALSE)$", list("tTfF")),
    ("int", r"^[-+]?(?:0|[1-9][0-9_]*)$", list("-+" + _DIGITS)),
    (
        "float",
        r"^(?:[-+]?(?:\.[0-9]+(?:[eE][-+]?[0-9]+)?|[0-9][0-9_]*\.[0-9]*(?:[eE][-+]?[0-9]+)?|[0-9][0-9_]*[eE][-+]?[0-9]+)"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$",
        list("-+." + _DIGITS),
    ),
)


class _CoreLoader(yaml.SafeLoader):
    """PyYAML's parser with YAML 1.2's scalar rules instead of its own."""

    yaml_implicit_resolvers = {}  # noqa: RUF012 (it is PyYAML that declares it so)


class _CarefulDumper(yaml.SafeDumper):
    """Dumper that quotes text that YAML 1.1 *or* 1.2 would read otherwise, so that every reader gets the same value."""

    def ignore_aliases(self, data: Any) -> bool:
        """Write a value as often as it is there: no reader has to look up `*id001`."""
        return True

    def represent_scalar(self, tag: str, value: str, style: str | None = None) -> yaml.ScalarNode:
        # Readers fold and convert line breaks, of which Unicode has many, unless they are escaped.
        return super().represent_scalar(tag, value, style if value.isprintable() else '"')


for _kind, _pattern, _first in _RULES:
    for _reader in (_CoreLoader, _CarefulDumper):
        _reader.add_implicit_resolver(_TAG + _kind, re.compile(_pattern), _first)


def dump_yaml(value: Any) -> str:
    """Plain values (mappings, lists, scalars) as YAML in the order given."""
    return yaml.dump(
        value, Dumper=_CarefulDumper, sort_keys=False, default_flow_style=False, allow_unicode=True, width=math.inf
    )


def dump_inline(value: Any) -> str:
    """A plain value as it stands behind `key: ` and `key=`, on one line: `null`, `[1, 2]`, `{path: data/mine}`."""
    text = yaml.dump(
        value, Dumper=_CarefulDumper, sort_keys=False, default_flow_style=True, allow_unicode=True, width=math.inf
    )
    # PyYAML ends a document that is one plain scalar.
    return text.removesuffix("...\n").strip()


def read_yaml_file(path: Path, layer: Layer) -> Node:
    """The mapping that a file holds.

    Raises:
        ConfigError: the file is missing, unreadable, empty, not UTF-8, not YAML, or not a mapping.
    """
    # A pipe that the command line names is the user's own; one that a file names could keep everybody waiting.
    if path.exists() and not (path.is_file() or path.is_dir() or (path.is_fifo() and layer == Layer.FILE)):
        raise ConfigError(f"{path} is no regular file: a configuration is a file of YAML")
    try:
        with path.open("rb") as stream:
            content = stream.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise ConfigError(
                f"{path} has more than {MAX_BYTES:,} bytes, which no configuration has: is it another file?"
            )
        text = content.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not a configuration: it is not UTF-8 text ({error.reason})") from error
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {path}: {error.strerror}") from error
    node = parse_yaml(text, str(path), layer)
    if node.value is None:
        raise ConfigError(f"{path} holds no keys: a configuration is a YAML mapping such as `model: {{num_layers: 4}}`")
    if not isinstance(node.value, dict):
        raise ConfigError(f"{path} holds {kind_of(node)}: a configuration is a mapping of keys")
    return node


def parse_yaml(text: str, source: str, layer: Layer, fixed_origin: bool = False) -> Node:
    """YAML text to a tree.

    Args:
        text: one YAML document.
        source: its name in messages.
        layer: source of these values: a base, the named file or an override.
        fixed_origin: leave line numbers out (for a value that was given on the command line).
    """
    try:
        root = yaml.compose(text, Loader=_CoreLoader)
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark and not fixed_origin else ""
        detail = ", ".join(part for part in (error.context, error.problem) if part)
        raise ConfigError(f"{source}{line} is not valid YAML: {detail}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{source} is not valid YAML: {' '.join(str(error).split())}") from error
    except RecursionError as error:
        raise ConfigError(f"{source} is nested too deeply for a configuration: are all brackets closed?") from error
    if root is None:
        return Node(None, source, layer)
    return _Converter(source, layer, fixed_origin, itertools.count(1)).node(root, ())


def comment_in(text: str) -> str:
    """The comment at the end of YAML text of one line; empty if there is none, or the text is no YAML."""
    try:
        end = max(token.end_mark.index for token in yaml.scan(text) if token.end_mark.index > token.start_mark.index)
    except ValueError:
        # There is no token.
        end = 0
    except yaml.YAMLError:
        return ""
    rest = text[end:].strip()
    return rest if rest.startswith("#") else ""


@dataclass(frozen=True)
class _Converter:
    """PyYAML's nodes to ours."""

    source: str
    layer: Layer
    fixed_origin: bool
    numbers: Iterator[int]

    def _origin(self, raw: yaml.Node) -> str:
        return self.source if self.fixed_origin else f"{self.source}:{raw.start_mark.line + 1}"

    def node(self, raw: yaml.Node, above: tuple[yaml.Node, ...]) -> Node:
        origin = self._origin(raw)
        if any(raw is ancestor for ancestor in above):
            raise ConfigError(f"{origin}: an alias refers to a value that contains it")
        if next(self.numbers) > MAX_VALUES:
            raise ConfigError(
                f"{self.source} unfolds to more than {MAX_VALUES:,} values, which no configuration has: its aliases "
                "(*name) repeat each other"
            )
        if isinstance(raw, yaml.MappingNode) and raw.tag == _TAG + "map":
            return self._mapping(raw, (*above, raw))
        if isinstance(raw, yaml.SequenceNode) and raw.tag == _TAG + "seq":
            return Node([self.node(child, (*above, raw)) for child in raw.value], origin, self.layer)
        if isinstance(raw, yaml.ScalarNode):
            return Node(self._scalar(raw, origin), origin, self.layer)
        raise ConfigError(f"{origin}: the YAML tag {raw.tag} means nothing in a configuration: remove it")

    def _mapping(self, raw: yaml.MappingNode, above: tuple[yaml.Node, ...]) -> Node:
        children: dict[str, Node] = {}
        key_origins: dict[str, str] = {}
        for raw_key, raw_value in raw.value:
            if not isinstance(raw_key, yaml.ScalarNode):
                raise ConfigError(f"{self._origin(raw_key)}: a key must be a name, not a list or a mapping")
            key = raw_key.value
            if key == "<<":
                raise ConfigError(
                    f"{self._origin(raw_key)}: YAML's merge key << is not read here: name a file to build on with "
                    "`base:`, or write the keys out"
                )
            if key in children:
                raise ConfigError(
                    f"{self._origin(raw_key)}: the key {printable(key)} is given twice (first at {key_origins[key]}): remove one"
                )
            children[key] = self.node(raw_value, above)
            key_origins[key] = self._origin(raw_key)
        return Node(children, self._origin(raw), self.layer, key_origins)

    def _scalar(self, raw: yaml.ScalarNode, origin: str) -> Scalar:
        kind = raw.tag.removeprefix(_TAG)
        text = raw.value
        try:
            if kind == "null":
                return None
            if kind == "bool":
                return {"true": True, "false": False}[text.lower()]
            if kind == "int":
                return int(text)
            if kind == "float":
                # YAML writes infinity and not-a-number with a leading dot.
                return float(re.sub(r"^([-+]?)\.(?=[iInN])", r"\1", text))
        except (ValueError, KeyError) as error:
            raise ConfigError(f"{origin}: {text[:40]!r} cannot be read as a YAML {kind}") from error
        if kind == "str":
            return text
        raise ConfigError(f"{origin}: the YAML tag {raw.tag} means nothing in a configuration: remove it")


def from_plain(value: Any, source: str, layer: Layer) -> Node:
    """A tree of plain Python values as if it had been read from `source`.

    Raises:
        ConfigError: a key is not text, or a value is not one that YAML has.
    """
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise ConfigError(f"{source}: the key {key!r} is not text")
        children = {key: from_plain(child, source, layer) for key, child in value.items()}
        return Node(children, source, layer, dict.fromkeys(children, source))
    if isinstance(value, list | tuple):
        return Node([from_plain(child, source, layer) for child in value], source, layer)
    if value is None or isinstance(value, bool | int | float | str):
        return Node(value, source, layer)
    raise ConfigError(f"{source}: a value of type {type(value).__name__} cannot stand in a configuration")


def to_plain(node: Node) -> Any:
    """A tree without its places, as plain Python values."""
    if isinstance(node.value, dict):
        return {key: to_plain(child) for key, child in node.value.items()}
    return [to_plain(child) for child in node.value] if isinstance(node.value, list) else node.value


def merge(below: Node, above: Node) -> Node:
    """`above` laid over `below`: mappings key by key, everything else (lists and null too) replaced."""
    if not isinstance(below.value, dict) or not isinstance(above.value, dict):
        return above
    children = dict(below.value)
    for key, child in above.value.items():
        children[key] = merge(children[key], child) if key in children else child
    return replace(above, value=children, key_origins={**below.key_origins, **above.key_origins})


def find(node: Node, segments: list[str]) -> Node | None:
    """The value at a dotted key, or None where nothing is set."""
    for segment in segments:
        if isinstance(node.value, dict) and segment in node.value:
            node = node.value[segment]
        elif isinstance(node.value, list) and segment.isdecimal() and int(segment) < len(node.value):
            node = node.value[int(segment)]
        else:
            return None
    return node


def node_at(tree: Node, loc: tuple[str | int, ...]) -> Node:
    """The value at a place where there is one."""
    node = find(tree, [str(step) for step in loc])
    assert node is not None
    return node


def without(node: Node, segments: list[str]) -> Node:
    """The tree with the value at a dotted key left out."""
    head, *rest = segments
    if isinstance(node.value, list):
        items = list(node.value)
        items[int(head)] = without(items[int(head)], rest)
        return replace(node, value=items)
    assert isinstance(node.value, dict)
    children = dict(node.value)
    if rest:
        children[head] = without(children[head], rest)
    else:
        del children[head]
    return replace(node, value=children)


def kind_of(node: Node) -> str:
    """Kind of a value, in the words of an error message."""
    value = node.value
    if value is None:
        return "null"
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    if isinstance(value, bool):
        return f"{str(value).lower()} (true/false)"
    if isinstance(value, int | float):
        return f"{value} (a number)"
    shown = value if len(value) <= 80 else value[:77] + "..."
    return f"{shown!r} (text)"


def apply_overrides(node: Node, overrides: Sequence[str]) -> Node:
    """Lay `key.sub=value` texts over a tree, in order.

    The value is YAML. A number names a list element; the number after the last one appends.

    Raises:
        ConfigError: an override is malformed, has a comment, or names a list element that is not there.
    """
    for text in overrides:
        key, separator, value = text.partition("=")
        segments = key.strip().split(".")
        if not separator or not all(segments):
            raise ConfigError(f"the override {text!r} is not of the form key=value, as in optimizer.lr=3e-4")
        origin = f"override {text}"
        if comment := comment_in(value):
            raise ConfigError(
                f"the override {text!r} ends before {comment!r}, which is a comment in YAML: put the value in quotes that "
                f"the shell leaves, as in '{key}=\"...\"'"
            )
        node = _set(node, segments, 0, parse_yaml(value, origin, Layer.OVERRIDE, fixed_origin=True))
    return node


def _set(node: Node, segments: list[str], depth: int, value: Node) -> Node:
    """`node` with `value` at `segments[depth:]`."""
    if depth == len(segments):
        return value
    segment = segments[depth]
    # No field is named by a number, so a number where nothing is set yet means the first element of a list.
    if isinstance(node.value, list) or (segment.isdecimal() and not isinstance(node.value, dict)):
        return _set_element(node, segments, depth, value)
    children = dict(node.value) if isinstance(node.value, dict) else {}
    below = children.get(segment, Node(None, value.origin, value.layer))
    children[segment] = _set(below, segments, depth + 1, value)
    key_origins = {**node.key_origins, segment: value.origin}
    return Node(children, value.origin, value.layer, key_origins)


def _set_element(node: Node, segments: list[str], depth: int, value: Node) -> Node:
    items = list(node.value) if isinstance(node.value, list) else []
    name, segment = ".".join(segments[:depth]), segments[depth]
    if name == STAGES_KEY:
        segment = _number_of_stage(items, segment, value)
    if not segment.isdecimal():
        raise ConfigError(
            f"{value.origin}: {name} is a list: name an element by its number, as in "
            f"{name}.0.{'.'.join(segments[depth:])}, or replace all of it with {name}=[...]"
        )
    index = int(segment)
    if index > len(items):
        raise ConfigError(
            f"{value.origin}: {name} has {len(items)} elements: use {name}.{len(items)} to append one, "
            "or a number below it"
        )
    if index == len(items):
        items.append(Node(None, value.origin, value.layer))
    items[index] = _set(items[index], segments, depth + 1, value)
    return Node(items, value.origin, value.layer)


def _number_of_stage(stages: list[Node], segment: str, value: Node) -> str:
    """The number of the stage that a segment names; a number stays."""
    found = [find(stage, ["name"]) for stage in stages]
    names = [str(name.value) for name in found if name is not None]
    if segment.isdecimal():
        return segment
    if segment not in names:
        there = f"the stages are {', '.join(names)}" if names else "the configuration has none"
        raise ConfigError(f"{value.origin}: there is no stage {segment}: {there}")
    return str([name is not None and name.value == segment for name in found].index(True))
