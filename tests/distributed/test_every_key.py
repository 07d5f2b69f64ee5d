"""Every key of the configuration does what it says, measured at a second value."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import pytest
from keys_of_model import MODEL
from keys_of_training import TRAINING
from keys_table import Entry, Subject, schema_keys
from tiny_runs import joined

from pretrain.config.effective import ineffective_fields
from pretrain.config.schema import RunConfig

ENTRIES = [*MODEL.entries, *TRAINING.entries]


def by_name(entries: list[Entry]) -> dict[str, Entry]:
    found = {f"{number}-{entry.name}": entry for number, entry in enumerate(entries)}
    assert len(found) == len(entries)
    return found


OF_ONE_RANK = by_name([*MODEL.entries, *TRAINING.entries])


@pytest.fixture(scope="module")
def models(run_ranks: Any) -> dict[str, str | None]:
    """What each entry of single models found wrong, by name; None: nothing."""

    def main() -> dict[str, str | None]:
        with joined(MODEL.entries[0].base) as groups:

            @lru_cache(maxsize=None)
            def subject(config: RunConfig) -> Subject:
                return Subject(config, groups)

            return {name: problem(entry, subject(entry.base), subject(entry.second)) for name, entry in OF_ONE_RANK.items()}

    (found,) = run_ranks(main, 1)
    return found  # type: ignore[no-any-return]


def problem(entry: Entry, base: Any, second: Any) -> str | None:
    """The traceback of an entry that does not hold."""
    try:
        entry.check(base, second)
    except Exception:
        return traceback.format_exc()
    return None


@pytest.mark.parametrize("name", OF_ONE_RANK)
def test_of_models(models: Mapping[str, str | None], name: str) -> None:
    assert models[name] is None, models[name]
