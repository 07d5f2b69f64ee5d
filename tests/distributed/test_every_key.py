"""Every key of the configuration does what it says, measured at a second value."""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from keys_of_health import HEALTH
from keys_of_layouts import LAYOUTS, STAND_INS, OnRank, on_rank
from keys_of_memory import MEMORIES
from keys_of_model import MODEL
from keys_of_runs import COMMANDS, RUNS, Outputs, prepare_corpora
from keys_of_sharing import SHARING
from keys_of_stages import SCHEDULES, STAGES
from keys_of_streams import STREAMS
from keys_of_token_memories import TOKEN_MEMORIES, prepare_token_maps
from keys_of_training import TRAINING, prepare_read_counts
from keys_table import BASE, Entry, Subject, schema_keys
from tiny_runs import joined

from pretrain.config.keys import ineffective_fields
from pretrain.config.schema import RunConfig
from tests.rotation import named_in_rotation

TABLES = {
    "model": MODEL,
    "memory": MEMORIES,
    "tokens": TOKEN_MEMORIES,
    "sharing": SHARING,
    "streams": STREAMS,
    "training": TRAINING,
    "layout": LAYOUTS,
    "standin": STAND_INS,
    "schedule": SCHEDULES,
    "run": RUNS,
    "health": HEALTH,
    "stage": STAGES,
    "command": COMMANDS,
}
ENTRIES = {
    f"{table}-{number}-{entry.name}": entry for table, of in TABLES.items() for number, entry in enumerate(of.entries)
}


TRIED = named_in_rotation(ENTRIES)


def problem(entry: Entry, base: Any, second: Any) -> str | None:
    """The traceback of an entry that does not hold; None: it does."""
    try:
        entry.check(base, second)
    except (Exception, pytest.fail.Exception):
        return traceback.format_exc()
    return None


def problems(tables: Sequence[str], subject: Callable[[RunConfig], Any]) -> dict[str, str | None]:
    """Problems of the entries of some tables, by name; a configuration is one subject in all of them."""
    of = cache(subject)
    entries = {name: entry for name, entry in TRIED.items() if name.partition("-")[0] in tables}
    return {name: problem(entry, of(entry.base), of(entry.second)) for name, entry in entries.items()}


def on_one_rank(folder: Path) -> dict[str, str | None]:
    """Problems of the entries that need one rank."""
    os.chdir(folder)
    prepare_read_counts()
    with joined(BASE) as groups:
        return {
            **problems(
                ["model", "memory", "tokens", "sharing", "streams", "training", "schedule"],
                lambda config: Subject(config, groups),
            ),
            **problems(["standin"], lambda config: Subject(config, groups)),
            **problems(["run", "health", "stage"], lambda config: Outputs(config, groups)),
            **problems(["command"], lambda config: config),
        }


@pytest.fixture(scope="module")
def found(run_ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str | None]:
    """Problem of each entry, by name."""
    folder = tmp_path_factory.mktemp("keys")
    prepare_corpora(folder)
    prepare_token_maps(folder)
    (of_one,) = run_ranks(lambda: on_one_rank(folder), 1, timeout_s=600)
    of_layouts = [entry for name, entry in TRIED.items() if name.startswith("layout-")]
    configs = list(dict.fromkeys(config for entry in of_layouts for config in (entry.base, entry.second)))
    by_rank = run_ranks(lambda: [on_rank(config) for config in configs], 2, timeout_s=600)
    of_config: dict[RunConfig, list[OnRank]] = dict(zip(configs, map(list, zip(*by_rank, strict=True)), strict=True))
    return {**of_one, **problems(["layout"], lambda config: of_config[config])}


@pytest.mark.parametrize("name", TRIED)
def test_a_key_does_what_it_says(found: dict[str, str | None], name: str) -> None:
    assert found[name] is None, found[name]


def test_every_key_of_the_schema_is_in_the_table() -> None:
    entered = {re.sub(r"\.\d+\.", ".N.", entry.key) for entry in ENTRIES.values()}
    assert entered == set(schema_keys(RunConfig))


def test_entries_are_about_keys_that_are_read() -> None:
    """The second value is not the first, and has an effect by the rules that refuse those without."""
    for name, entry in ENTRIES.items():
        assert entry.second != entry.base, name
        assert entry.key not in {item.key for item in ineffective_fields(entry.second)}, name
