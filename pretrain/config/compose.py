"""Compose a configuration of a file, the bases it names, and the overrides of the command line.

`base: other.yaml` (or a list, later ones winning) is relative to the file that says it. Mappings merge key by key,
lists are replaced, `null` removes a section, and a mapping over null starts from the defaults again.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from pretrain.config.source import Layer, Node, comment_in, find, kind_of, merge, parse_yaml, read_yaml_file
from pretrain.errors import ConfigError

BASE_KEY = "base"
STAGES_KEY = "stages"


def read_with_bases(path: Path) -> Node:
    """The file laid over its bases; only its own values count as `Layer.FILE`.

    Raises:
        ConfigError: a file is missing or malformed, or the bases form a cycle.
    """
    return _read(path, Layer.FILE, chain=())


def _read(path: Path, layer: Layer, chain: tuple[Path, ...]) -> Node:
    if path.resolve() in [earlier.resolve() for earlier in chain]:
        names = " -> ".join(str(step) for step in (*chain, path))
        raise ConfigError(f"the bases of {chain[0]} form a cycle: {names}. Remove one `base:`")
    if not path.exists():
        raise ConfigError(_missing_message(path, chain))
    node = read_yaml_file(path, layer)
    assert isinstance(node.value, dict)
    bases = _base_paths(path, node)
    own = replace(node, value={key: child for key, child in node.value.items() if key != BASE_KEY})
    merged: Node | None = None
    for base in bases:
        below = _read(base, Layer.BASE, (*chain, path))
        merged = below if merged is None else merge(merged, below)
    return own if merged is None else merge(merged, own)


def _base_paths(path: Path, node: Node) -> list[Path]:
    assert isinstance(node.value, dict)
    if BASE_KEY not in node.value:
        return []
    base = node.value[BASE_KEY]
    entries = base.value if isinstance(base.value, list) else [base]
    paths = []
    for entry in entries:
        if not isinstance(entry.value, str) or not entry.value:
            raise ConfigError(
                f"{entry.origin}: base is {kind_of(entry)}, expected the path of a configuration file or a list of them"
            )
        paths.append(Path(os.path.normpath(path.parent / os.path.expanduser(entry.value))))
    return paths


def _missing_message(path: Path, chain: tuple[Path, ...]) -> str:
    wanted_by = f" (the base of {chain[-1]})" if chain else ""
    siblings = sorted(entry.name for entry in path.parent.glob("*.y*ml")) if path.parent.is_dir() else []
    close = difflib.get_close_matches(path.name, siblings, n=1)
    hint = f": did you mean {path.parent / close[0]}?" if close else ""
    return f"there is no configuration file {path}{wanted_by}{hint}"


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
