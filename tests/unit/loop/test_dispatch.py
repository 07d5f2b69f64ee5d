"""Callbacks as one: every hook reaches all of them, in the order of their priorities."""

from __future__ import annotations

import inspect
from typing import Any
from unittest.mock import Mock

import pytest

from pretrain.train.callback import Callback, Callbacks, Priority
from pretrain.train.callbacks import default_callbacks
from tests.unit.loop.world import spaced

HOOKS = [name for name in vars(Callback) if name.startswith("on_")]


class Noting(Callback):
    """Notes its name in a list, whichever hook is called, with what it was given."""

    def __init__(self, name: str, priority: Priority, notes: list[Any]) -> None:
        self.priority = priority  # type: ignore[misc]
        for hook in HOOKS:
            setattr(self, hook, lambda *given, hook=hook: notes.append((name, hook, given)))


@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_reaches_all_in_their_order(hook: str) -> None:
    notes: list[Any] = []
    given = [Mock() for _ in list(inspect.signature(getattr(Callback, hook)).parameters)[1:]]
    last, first, second = (
        Noting(name, priority, notes)
        for name, priority in (("last", Priority.RELEASE), ("first", Priority.GUARD), ("second", Priority.GUARD))
    )
    everyone = Callbacks([last, first, second])
    getattr(everyone, hook)(*given)
    assert notes == [(name, hook, tuple(given)) for name in ("first", "second", "last")]
    assert first.callbacks is everyone


def test_nothing_is_written_before_the_owner_of_the_folder_is_known_to_be_this_run(make: Any) -> None:
    callbacks = default_callbacks(make(spaced(usage=3, evaluation=3)).run, Mock())
    kinds = [type(callback).__name__ for callback in sorted(callbacks, key=lambda each: each.priority)]
    assert kinds[:2] == ["Hangs", "Ownership"]
    # What says that all was saved comes when it was.
    assert kinds[-3:] == ["Checkpoints", "History", "NextStep"]
