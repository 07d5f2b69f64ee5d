"""Any configuration survives being written and read, whole or as overrides."""

from __future__ import annotations

import dataclasses
import os
import tempfile
from pathlib import Path
from typing import Any

import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from megamem.config.base import FieldSpec, field_specs
from pretrain.config.keys import ineffective_fields, variants_of
from pretrain.config.loader import from_dict, to_dict, to_yaml
from pretrain.config.schema import RunConfig
from pretrain.config.source import Layer, dump_inline, parse_yaml, to_plain
from pretrain.config.stages import load_config
from tests.plain_config import parse_config
from tools.config.explained import explained_lines

TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), max_size=12)
TRICKY_TEXT = st.sampled_from(
    [
        "1e5",
        "1e-3",
        "on",
        "yes",
        "null",
        "~",
        "",
        "0x1F",
        "1:30",
        "2024-01-01",
        "1_000",
        "07",
        "- a",
        "a: b",
        "#x",
        "'",
        '"',
        "{",
        "\n",
        " x ",
    ]
)
FLOATS = st.floats(allow_nan=False, allow_infinity=False)


def values_of(spec: FieldSpec) -> st.SearchStrategy[Any]:
    """Any value of a field's type."""
    kind = spec.kind
    if spec.is_list:
        # Lists of numbers are lists of blocks, which ascend.
        numbers = st.lists(st.integers(0, 8), max_size=3, unique=True).map(sorted)
        lists: Any = numbers if spec.section is None else st.lists(sections(spec.section), max_size=3)
        if choices := spec.element.choices:
            lists = st.lists(st.sampled_from(choices), unique=True)
        values: st.SearchStrategy[Any] = lists.map(tuple)
    elif spec.section is not None:
        values = st.one_of([sections(cls) for cls in variants_of(spec.section).values() or (spec.section,)])
    elif spec.choices:
        values = st.sampled_from(spec.choices)
    else:
        # Sections refuse sizes below 1 themselves, and small ones divide each other more often.
        values = {
            int: st.integers(1, 8) | st.integers(1, 10**12),
            float: FLOATS,
            bool: st.booleans(),
            str: TEXT | TRICKY_TEXT,
        }[kind]
    return values | st.none() if spec.optional else values


@st.composite
def sections(draw: st.DrawFn, cls: Any) -> Any:
    """An instance of a configuration class with some of its fields set."""
    config = None
    chosen: dict[str, Any] = {}
    for name, spec in field_specs(cls).items():
        if not spec.required and not draw(st.booleans()):
            continue
        value = draw(values_of(spec))
        try:
            config = cls(**chosen, **{name: value})
        except ValueError:
            # The section refuses this combination: leave the field at its default.
            continue
        except ZeroDivisionError as error:
            raise AssertionError(f"{cls.__name__} divides by zero with {name} = {value!r}") from error
        chosen[name] = value
    return config if config is not None else cls(**chosen)


def found_from_anywhere(config: RunConfig) -> RunConfig:
    """The configuration with absolute paths, as the loader leaves them; an empty path stays empty."""

    def absolute(path: str | None) -> str | None:
        return path and os.path.abspath(os.path.expanduser(path))

    def all_of(entries: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(dataclasses.replace(entry, path=absolute(entry.path)) for entry in entries)

    data, evaluation, optimizer = config.data, config.evaluation, config.optimizer
    if (rows := optimizer.trained_rows) is not None:
        rows = dataclasses.replace(rows, background=absolute(rows.background), text=absolute(rows.text))
    return dataclasses.replace(
        config,
        data=dataclasses.replace(data, datasets=all_of(data.datasets)),
        evaluation=dataclasses.replace(evaluation, datasets=all_of(evaluation.datasets)),
        optimizer=dataclasses.replace(optimizer, table_folder=absolute(optimizer.table_folder), trained_rows=rows),
    )


def settled(config: RunConfig) -> RunConfig:
    """The configuration with what has no effect at its default, as the loader leaves it."""
    while silent := [item.key for item in ineffective_fields(config) if not item.at_default]:
        for key in silent:
            config = _with_default(config, key.split("."))
    return config


def _with_default(owner: Any, segments: list[str]) -> Any:
    head, *rest = segments
    if isinstance(owner, tuple):
        return tuple(_with_default(item, rest) if index == int(head) else item for index, item in enumerate(owner))
    value = _with_default(getattr(owner, head), rest) if rest else field_specs(type(owner))[head].default()
    return dataclasses.replace(owner, **{head: value})


def load_text(text: str, overrides: list[str] | None = None) -> RunConfig:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.yaml"
        path.write_text(text, encoding="utf-8")
        return load_config(path, overrides or [])


@settings(deadline=None, max_examples=40)
@given(sections(RunConfig).map(found_from_anywhere))
def test_stored_configurations_are_lossless(config: RunConfig) -> None:
    assert from_dict(to_dict(config)) == config


@settings(deadline=None, max_examples=40)
@given(sections(RunConfig).map(found_from_anywhere).map(settled))
def test_yaml_is_lossless(config: RunConfig) -> None:
    text = to_yaml(config)
    assert load_text(text) == config
    assert parse_config(to_dict(config), RunConfig) == config
    assert load_text("\n".join(explained_lines(config))) == config


@settings(deadline=None, max_examples=40)
@given(sections(RunConfig).map(found_from_anywhere).map(settled))
def test_overrides_say_all_that_a_file_can(config: RunConfig) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.yaml"
        path.write_text("{}")
        overrides = [f"{key}={value}" for key, value in leaves(to_dict(config), "")]
        assert load_config(path, overrides) == config
        path.write_text(to_yaml(config), encoding="utf-8")
        assert load_config(path, overrides) == config


def leaves(value: Any, key: str) -> list[tuple[str, str]]:
    """Every scalar below a value with its dotted key, and the containers that hold none."""
    if isinstance(value, dict) and value:
        return [leaf for name, child in value.items() for leaf in leaves(child, f"{key}.{name}" if key else name)]
    if isinstance(value, list) and value:
        return [leaf for index, child in enumerate(value) for leaf in leaves(child, f"{key}.{index}")]
    if isinstance(value, dict | list):
        return [(key, "{}" if isinstance(value, dict) else "[]")]
    return [(key, dump_inline(value))]


@settings(deadline=None)
@given(st.lists(st.dictionaries(st.sampled_from("abc"), TEXT | TRICKY_TEXT | FLOATS | st.none() | st.booleans())))
def test_lists_stand_on_one_line_and_mean_the_same(value: Any) -> None:
    text = dump_inline([value, value])
    assert "\n" not in text
    assert to_plain(parse_yaml(text, "x", Layer.FILE)) == yaml.safe_load(text) == [value, value]


@settings(deadline=None)
@given(TEXT | TRICKY_TEXT | FLOATS | st.integers() | st.booleans() | st.none())
def test_scalars_mean_the_same_to_us_and_to_other_readers(value: Any) -> None:
    text = dump_inline(value)
    parsed = parse_yaml(text, "x", Layer.FILE).value
    assert parsed == value
    assert type(parsed) is type(value)
    assert yaml.safe_load(text) == value
