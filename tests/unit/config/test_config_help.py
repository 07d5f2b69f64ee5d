"""The help of every key."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, field
from typing import Annotated, Literal

from megamem.config.base import Config, EffectiveWhen
from pretrain.config.keys import all_keys, nearest_keys
from pretrain.config.schema import RunConfig
from tools.config.describe import FieldDoc, describe_fields


@dataclass(frozen=True)
class Item(Config):
    path: str
    """Path
    of it."""
    size: float = 0.5


@dataclass(frozen=True)
class Toy(Config):
    """A toy."""

    mode: Literal["a", "b"] = "a"
    """The mode."""
    item: Item | None = None
    """One."""
    items: tuple[Item, ...] = ()
    """Many."""
    depth: Annotated[int, EffectiveWhen(lambda c: c.mode == "b", "mode is b")] = field(default=3)
    """Its depth."""


def test_docs_types_defaults_and_conditions_come_from_the_source() -> None:
    assert describe_fields(Toy) == [
        FieldDoc("mode", "a | b", "a", "The mode.", None),
        FieldDoc("item", "section | null", None, "One.", None, is_section=True),
        FieldDoc("item.path", "str", MISSING, "Path\nof it.", None),
        FieldDoc("item.size", "float", 0.5, "", None),
        FieldDoc("items", "list", (), "Many.", None, is_section=True),
        FieldDoc("items.N.path", "str", MISSING, "Path\nof it.", None),
        FieldDoc("items.N.size", "float", 0.5, "", None),
        FieldDoc("depth", "int", 3, "Its depth.", "mode is b"),
    ]


def test_every_key_of_a_run_is_described() -> None:
    docs = describe_fields(RunConfig)
    assert [doc.key for doc in docs] == list(all_keys(RunConfig))
    assert all(doc.doc for doc in docs), [doc.key for doc in docs if not doc.doc]


def test_conditions_on_other_sections_are_described_too() -> None:
    reasons = {doc.key: doc.effective_when for doc in describe_fields(RunConfig)}
    assert reasons["optimizer.value_lr"] == "model.memory is set"
    assert reasons["optimizer.value_lr_multiplier"] == "optimizer.value_lr is null and model.memory is set"
    assert reasons["optimizer.lr"] is None


def test_the_nearest_key() -> None:
    keys = list(all_keys(RunConfig))
    assert nearest_keys("lr", keys) == ["optimizer.lr"]
    assert nearest_keys("memory.topk", keys) == ["model.memory.top_k"]
    assert nearest_keys("memory.num_keys", keys) == ["model.memory.num_keys"]
    assert nearest_keys("tensor_parallel", keys) != []
    assert set(nearest_keys("every_steps", keys)) == {
        "evaluation.every_steps",
        "checkpoint.every_steps",
        "logging.every_steps",
    }
    assert nearest_keys("evaluation.every_step", keys) == ["evaluation.every_steps"]
    assert nearest_keys("xyzzy", keys) == []
