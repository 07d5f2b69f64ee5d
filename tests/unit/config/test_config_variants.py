"""Sections whose class is told by their `kind`: which one it is, and what is said where it is none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import pytest
from pydantic import PositiveInt

from megamem.config.base import Config
from pretrain.config.keys import KINDS, all_keys
from pretrain.config.loader import to_dict
from pretrain.errors import ConfigError
from tests.plain_config import parse_config
from tools.config.describe import describe_fields


@dataclass(frozen=True)
class Shape(Config):
    has_kinds: ClassVar[bool] = True

    kind: str
    """Kind of shape."""
    name: str = "x"
    """Its name."""


@dataclass(frozen=True)
class Disc(Shape):
    kind: Literal["disc"] = "disc"
    """disc: round."""
    radius: PositiveInt = 1
    """Its radius."""


@dataclass(frozen=True)
class Box(Shape):
    kind: Literal["box"] = "box"
    """box: with corners."""
    width: PositiveInt = 2
    """Its width."""
    holes: tuple[PositiveInt | None, ...] = ()
    """Widths of its holes."""


SHAPES: dict[str, type[Config]] = {"disc": Disc, "box": Box}


@dataclass(frozen=True)
class Drawing(Config):
    main: Shape | None = None
    """The largest."""
    others: tuple[Shape, ...] = ()
    """The rest."""
    frame: Shape = field(default_factory=Box)
    """Around it."""


@pytest.fixture(autouse=True)
def _shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KINDS, Shape, lambda: SHAPES)


def refusal(mapping: Mapping[str, object]) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_config(mapping, Drawing, "here")
    return str(caught.value)


def test_the_kind_chooses_the_class_and_the_first_is_the_default() -> None:
    drawing = parse_config({"main": {}, "others": [{"kind": "box", "width": 3}, {"radius": 4}]}, Drawing)
    assert drawing == Drawing(Disc(), (Box(width=3), Disc(radius=4)))
    assert parse_config(to_dict(drawing), Drawing) == drawing


def test_a_kind_that_comes_later_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass(frozen=True)
    class Line(Shape):
        kind: Literal["line"] = "line"
        """line: straight."""

    parse_config({}, Drawing)
    monkeypatch.setitem(SHAPES, "line", Line)
    assert parse_config({"main": {"kind": "line"}}, Drawing).main == Line()


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ({"main": {"kind": "bxo"}}, "main.kind is 'bxo' (text), expected one of disc, box: did you mean box?"),
        ({"main": {"kind": None}}, "main.kind is null, expected one of disc, box"),
        ({"main": {"kind": ["disc"]}}, "main.kind is a list, expected one of disc, box"),
        ({"main": 3}, "main is 3 (a number), expected a mapping of keys, or null"),
        ({"frame": None}, "frame is null, expected a mapping of keys"),
        ({"main": {"kind": "box", "width": 0}}, "main.width is 0: it must be at least 1"),
        ({"others": [{"kind": "box", "width": 0}]}, "others.0.width is 0: it must be at least 1"),
        ({"main": {"kind": "box", "holes": [1, 0]}}, "main.holes.1 is 0: it must be at least 1"),
        ({"main": {"kind": "box", "holes": ["x"]}}, "main.holes.0 is 'x' (text), expected a whole number, or null"),
        ({"main": {"kind": "box", "qqq": 0}}, "unknown key main.qqq: main has kind, name, width, holes"),
    ],
)
def test_what_is_refused(mapping: Mapping[str, object], message: str) -> None:
    assert refusal(mapping) == f"here: {message}"


def test_elements_of_lists_are_held_to_their_limits_in_code_too() -> None:
    assert Box(holes=(1, None)).holes == (1, None)
    with pytest.raises(ValueError, match=r"^Box\.holes is \(1, 0\): it must be at least 1$"):
        Box(holes=(1, 0))


def test_the_keys_of_all_kinds_are_listed_once() -> None:
    keys = [key for key in all_keys(Drawing) if key.startswith("main.")]
    assert keys == ["main.kind", "main.name", "main.radius", "main.width", "main.holes"]
    docs = {doc.key: doc for doc in describe_fields(Drawing)}
    assert docs["main.kind"].type == "disc | box"
    assert docs["others.N.width"].doc == "Its width."
