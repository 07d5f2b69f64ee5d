"""`model.size` in a configuration: one number in place of the keys that follow from it. Imports no torch.

The key is read where files are, and is gone before anything is built: a run stores the values that it stood for.

A value that is set anywhere wins, and rules of the others keep to it. But a file that says a size does not want to hear
from files below it, that say none, of the keys that follow from one (`lay_over`): else no model of a size could be
built on another model. On the command line a size is that of a file above the one that is named.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from pretrain.config.size import (
    LEAST,
    LEAST_DEPTH,
    MOST,
    MOST_DEPTH,
    Given,
    Size,
    run_of,
    shape_of,
)
from pretrain.config.source import SIZE_KEY, Layer, Node, apply_overrides, find, from_plain, kind_of, merge, without
from pretrain.errors import ConfigError

SIZE_HELP = (
    "Parameters of the backbone, without embeddings and memories, as in 120m or 1.3b, or its depth, as in d12: fills "
    "whatever of width, depth, heads, feed-forward, batch, steps and rates is not set. A run stores those values, and "
    "not this key. See docs/model.md."
)
FOLLOWING_KEYS = {
    **{
        name: f"model.{name}"
        for name in (
            "num_layers",
            "hidden_size",
            "num_attention_heads",
            "num_query_groups",
            "head_dim",
            "ffn_hidden_size",
        )
    },
    **{name: f"train.{name}" for name in ("sequence_length", "global_batch_size", "num_steps")},
    **{name: f"optimizer.{name}" for name in ("lr", "min_lr", "warmup_steps")},
}
"""Keys that follow from a size, by their last names."""
_FROM_BELOW = ("sequence_length",)
"""Names of those that have as little to do with it as a base's other keys, and are filled where nothing says them."""

_UNITS = {"k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
_COUNT = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,12})?)([kmbt])")
_DEPTH = re.compile(r"d([0-9]{1,9})")
_MEANT = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,12})?) *([a-z]?)")
_EXPECTED = "the parameters of the backbone, as in 120m or 1.3b, or its depth, as in d12"
_MOST_GIVEN = 10**15
_FARTHEST = 1.5


@dataclass(frozen=True)
class Filled:
    """Keys that followed from a size, and those that would have but were set.

    Attributes:
        text: the size, as in "120m".
        origin: its place.
        keys: values that it filled, by dotted key.
        kept: nodes of the keys that were set, by dotted key.
    """

    text: str
    origin: str
    keys: dict[str, int | float]
    kept: dict[str, Node]


def says_size(node: Node) -> bool:
    """True if a tree has a size; null is none."""
    at = find(node, SIZE_KEY.split("."))
    return at is not None and at.value is not None


def lay_over(below: Node, above: Node) -> Node:
    """A file over its base: a size over none takes the place of what the base says of the keys that follow from it."""
    return merge(without_following(below) if says_size(above) and not says_size(below) else below, above)


def override(node: Node, overrides: Sequence[str]) -> Node:
    """A file's tree with `key=value` texts laid over it, of which a size counts as that of a file above."""
    changed = apply_overrides(node, overrides)
    if says_size(changed) and not says_size(node):
        return apply_overrides(without_following(node), overrides)
    return changed


def without_following(node: Node) -> Node:
    """The tree without the keys that follow from a size."""
    for name, key in FOLLOWING_KEYS.items():
        segments = key.split(".")
        if name not in _FROM_BELOW and find(node, segments) is not None:
            node = without(node, segments)
    return node


def fill(node: Node) -> tuple[Node, Filled | None]:
    """A run's tree with the keys that follow from its size in place of it.

    Returns:
        The tree, and what was done; None where it has no size.

    Raises:
        ConfigError: the size cannot be read, or keys that are set leave it without a meaning.
    """
    at = find(node, SIZE_KEY.split("."))
    if at is None:
        return node, None
    node = without(node, SIZE_KEY.split("."))
    if at.value is None:
        return node, None
    size, given = read_size(at), _given(node)
    _check(node, at, size, given)
    shape = shape_of(size, given)
    found = {**vars(shape), **vars(run_of(shape, given))}
    # Null stands for the same.
    del found["head_dim"]
    if shape.num_query_groups == shape.num_attention_heads or _is_set(node, "model.latent_attention"):
        del found["num_query_groups"]
    wanted = {FOLLOWING_KEYS[name]: value for name, value in found.items()}
    kept = {key: there for key in FOLLOWING_KEYS.values() if (there := find(node, key.split("."))) is not None}
    keys = {key: value for key, value in wanted.items() if key not in kept}
    place = at.origin if at.layer == Layer.OVERRIDE else f"{at.origin} ({SIZE_KEY}: {size.text})"
    return merge(from_plain(_nested(keys), place, Layer.BASE), node), Filled(size.text, at.origin, keys, kept)


def read_size(at: Node) -> Size:
    """The size that a value is.

    Raises:
        ConfigError: the value is no size, or one that the rules do not reach.
    """
    size = _named(at.value.strip().lower()) if isinstance(at.value, str) else None
    if size is None:
        meant = _meant(at)
        raise ConfigError(
            f"{at.origin}: {SIZE_KEY} is {kind_of(at)}, expected {_EXPECTED}"
            + (f": did you mean {meant}?" if meant else "")
        )
    if not _is_within_reach(size):
        depths, counts = (f"d{LEAST_DEPTH}", f"d{MOST_DEPTH}"), (f"{LEAST // 10**6}m", f"{MOST // 10**9}b")
        least, most = counts if size.depth is None else depths
        raise ConfigError(
            f"{at.origin}: {SIZE_KEY} is {size.text}, and the rules reach from {least} to {most}: choose one between, "
            f"or set {FOLLOWING_KEYS['num_layers']}, {FOLLOWING_KEYS['hidden_size']} and the others yourself"
        )
    return size


def _named(text: str) -> Size | None:
    """The size that a text names, within the reach of the rules or not; None if it names none."""
    if count := _COUNT.fullmatch(text):
        return Size(text, round(float(count[1]) * _UNITS[count[2]]))
    if depth := _DEPTH.fullmatch(text):
        return Size.of_depth(int(depth[1])) if int(depth[1]) else None
    return None


def _is_within_reach(size: Size) -> bool:
    """True where the rules hold for a size."""
    if size.depth is not None:
        return LEAST_DEPTH <= size.depth <= MOST_DEPTH
    return LEAST <= size.target <= MOST


def _meant(at: Node) -> str:
    """A size that looks like a value that is none; empty where nothing does."""
    value = at.value
    if isinstance(value, int | float) and not isinstance(value, bool):
        unit = next((unit for unit in "bm" if value >= _UNITS[unit]), None)
        text = f"{value / _UNITS[unit]:.4g}{unit}" if unit else f"{value}m"
    elif isinstance(value, str) and (parts := _MEANT.search(value.strip().lower().replace(",", "."))):
        number, letter = parts.groups()
        text = f"d{number}" if letter == "d" else f"{number}{letter if letter in _UNITS else 'm'}"
    else:
        return ""
    size = _named(text)
    return text if size is not None and _is_within_reach(size) else ""


def _given(node: Node) -> Given:
    """The values that are set and that rules can keep to; whatever else is set is for the schema to judge."""
    found: dict[str, Any] = {}
    for name in (field.name for field in fields(Given)):
        at = find(node, FOLLOWING_KEYS[name].split("."))
        value = None if at is None or isinstance(at.value, bool) else at.value
        if isinstance(value, int | float) and 0 < value < _MOST_GIVEN:
            is_whole = value == int(value)
            if name == "lr" or is_whole:
                found[name] = value if name == "lr" else int(value)
    return Given(**found)


def _check(node: Node, at: Node, size: Size, given: Given) -> None:
    """Refuse keys beside a size that leave it nothing to decide, or that its rules know nothing of.

    Raises:
        ConfigError: a key does not go with the size; the message has key, value, place and fix.
    """
    said = f"{at.origin}: {SIZE_KEY} is {size.text}"
    layers, width = (FOLLOWING_KEYS[name] for name in ("num_layers", "hidden_size"))
    if size.depth is not None and given.num_layers is not None:
        raise ConfigError(f"{said}, and {_set_at(node, layers)} is set too, which is the depth: remove one of the two")
    if given.num_layers is not None and given.hidden_size is not None:
        raise ConfigError(
            f"{said}, but with {_set_at(node, layers)} and {_set_at(node, width)} nothing of the shape is left to "
            f"follow from it: remove one of the two, or {SIZE_KEY}"
        )
    plain = shape_of(size, Given(num_layers=given.num_layers, hidden_size=given.hidden_size))
    ratio = plain.parameters / size.target
    if size.depth is None and not 1 / _FARTHEST < ratio < _FARTHEST:
        key = layers if given.num_layers is not None else width
        raise ConfigError(
            f"{said}, but with {_set_at(node, key)} the nearest backbone has {plain.parameters:,} parameters: remove "
            f"{key}, or change {SIZE_KEY}"
        )
    if _is_set(node, "model.mup") and given.lr is None:
        raise ConfigError(
            f"{said}, whose learning rate is that of the model's own width, and {_set_at(node, 'model.mup')} takes the "
            "one that was searched at its base_hidden_size: set optimizer.lr to that, or remove model.mup"
        )


def _set_at(node: Node, key: str) -> str:
    """A key with its value and place, in words."""
    at = find(node, key.split("."))
    assert at is not None
    value = "" if isinstance(at.value, dict) else f" {at.value}"
    return f"{key}{value} ({at.origin})"


def _is_set(node: Node, key: str) -> bool:
    at = find(node, key.split("."))
    return at is not None and at.value is not None


def _nested(values: dict[str, int | float]) -> dict[str, dict[str, int | float]]:
    """Mappings of sections to values, of keys of two parts each."""
    found: dict[str, dict[str, int | float]] = {}
    for key, value in values.items():
        section, name = key.split(".")
        found.setdefault(section, {})[name] = value
    return found
