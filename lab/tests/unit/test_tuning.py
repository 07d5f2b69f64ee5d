"""The search of a comparison: as many trials for every model, over the keys that it has, from the best so far."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from lab.studies.compare.rules import load_configs
from lab.studies.compare.tuning import Search, Tuning, check_keys, read_tuning
from megamem.families.ultramem_v2.config import UltraMemV2Config
from pretrain.config.schema import RunConfig
from pretrain.errors import ConfigError

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
KEYS = {
    "optimizer.lr": (1e-3, 2e-3, 4e-3),
    "model.memory.key_balance_weight": (0.5,),
    "optimizer.weight_decay": (0.0,),
}


def search(tmp_path: Path, model: Mapping[str, Any], num_trials: int, cost: Mapping[str, float]) -> Search:
    """A search whose losses are the sums of what the values that it has cost, by `key=value`."""
    file = tmp_path / "model.yaml"
    file.write_text(yaml.safe_dump({"name": "model", "model": dict(model), "optimizer": {"lr": 1e-3, "min_lr": 0.0}}))
    found = Search(str(file), ["train.num_steps=100"], Tuning(num_trials, 50, 7, KEYS))

    def train(config: RunConfig, number: int) -> float:
        assert number == len(found.trials) + 1
        # Shorter, from the seed of trials, in the same order of the data, and evaluated at its end alone.
        assert (config.train.num_steps, config.seed, config.data.seed) == (50, 7, 1)
        assert config.evaluation.every_steps == 0
        assert config.name == "model"
        memory = config.model.memory
        values = {
            "optimizer.lr": config.optimizer.lr,
            "optimizer.weight_decay": config.optimizer.weight_decay,
            "model.memory.key_balance_weight": None if memory is None else memory.loss_weights.key_balance,
        }
        return 10.0 + sum(cost.get(f"{key}={value}", 0.0) for key, value in values.items())

    found.run(train)
    return found


def test_each_value_is_tried_with_the_best_so_far(tmp_path: Path) -> None:
    cost = {"optimizer.lr=0.002": -1.0, "optimizer.lr=0.004": 1.0, "model.memory.key_balance_weight=0.5": -2.0}
    found = search(tmp_path, {"memory": {"kind": "ultramem_v2"}}, 5, cost)
    better = {"optimizer.lr": 2e-3}
    assert [trial.changes for trial in found.trials] == [
        {},
        better,
        {"optimizer.lr": 4e-3},
        {**better, "model.memory.key_balance_weight": 0.5},
        {**better, "model.memory.key_balance_weight": 0.5, "optimizer.weight_decay": 0.0},
    ]
    assert [trial.loss for trial in found.trials] == [10, 9, 11, 7, 7]
    # The earlier one of two alike, and as long as the model's own runs.
    assert found.best is found.trials[3]
    assert found.best.config.train.num_steps == 100
    assert found.best.config.optimizer.lr == 2e-3


def test_a_model_without_a_key_has_its_trials_for_others(tmp_path: Path) -> None:
    found = search(tmp_path, {}, 6, {"optimizer.weight_decay=0.0": -1.0})
    assert [trial.changes for trial in found.trials] == [
        {},
        {"optimizer.lr": 2e-3},
        {"optimizer.lr": 4e-3},
        {"optimizer.weight_decay": 0.0},
        # The second time through, from the best.
        {"optimizer.weight_decay": 0.0, "optimizer.lr": 2e-3},
        {"optimizer.weight_decay": 0.0, "optimizer.lr": 4e-3},
    ]
    assert all(trial.config.model.memory is None for trial in found.trials)


def test_keys_can_be_set_together(tmp_path: Path) -> None:
    """The columns of a row that go from one table to the other are set so."""
    pair = "model.memory.pre_value_dim, model.memory.value_dim"
    path = tmp_path / "tuning.yaml"
    path.write_text(yaml.safe_dump({"trials": 3, "steps": 5, "seed": 1, "keys": {pair: [[0, 64], [32, 32]]}}))
    tuning = read_tuning(path)
    found = Search(str(CONFIGS / "compare" / "ultramemv2.yaml"), [], tuning)
    check_keys(tuning, path, [found])
    rows: list[tuple[int, int]] = []

    def train(config: RunConfig, number: int) -> float:
        memory = config.model.memory
        assert isinstance(memory, UltraMemV2Config)
        rows.append((memory.pre_value_dim, memory.value_dim))
        return float(number)

    found.run(train)
    assert rows == [(16, 48), (0, 64), (32, 32)]
    assert found.trials[1].changes == {"model.memory.pre_value_dim": 0, "model.memory.value_dim": 64}
    path.write_text(yaml.safe_dump({"trials": 3, "steps": 5, "seed": 1, "keys": {pair: [0, 64]}}))
    with pytest.raises(ConfigError, match="expected a list of lists, each with 2 values"):
        read_tuning(path)


def test_a_search_ends_where_nothing_is_left(tmp_path: Path) -> None:
    found = search(tmp_path, {}, 100, {})
    # From what the file says, each other value once: nothing was better.
    assert len(found.trials) == 4


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"trials": 0}, "trials is 0, expected a number of at least 1"),
        ({"steps": "many"}, "steps is 'many', expected a number"),
        ({"seed": True}, "seed is True, expected a number"),
        ({"keys": ["optimizer.lr"]}, "expected a mapping of keys"),
        ({"keys": {"optimizer.lr": 1e-3}}, "optimizer.lr is 0.001, expected a list"),
        ({"keys": {"optimizer.lr": []}}, "expected a list"),
        ({"keys": {"train.num_steps": [3]}}, "train.num_steps cannot be tuned"),
        ({"more": 1}, "has the keys trials, steps, seed, keys, and no other"),
    ],
    ids=lambda value: "" if isinstance(value, str) else str(value),
)
def test_a_wrong_tuning_file_is_refused(tmp_path: Path, change: dict[str, Any], problem: str) -> None:
    file = tmp_path / "tuning.yaml"
    good = {"trials": 3, "steps": 10, "seed": 1, "keys": {"optimizer.lr": [1e-3]}}
    file.write_text(yaml.safe_dump(good))
    assert read_tuning(file) == Tuning(3, 10, 1, {"optimizer.lr": (1e-3,)})
    file.write_text(yaml.safe_dump({**good, **change}))
    with pytest.raises(ConfigError, match=r"tuning\.yaml: ") as caught:
        read_tuning(file)
    assert problem in str(caught.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--tune is .*none.yaml, which cannot be read"):
        read_tuning(tmp_path / "none.yaml")


def searches_of(*names: str) -> list[Search]:
    return [Search(str(CONFIGS / "compare" / f"{name}.yaml"), [], None) for name in names]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("optimizer.warmup_step", 4, "unknown key optimizer.warmup_step: did you mean optimizer.warmup_steps?"),
        ("model.qqqqqqqq", 1, "unknown key model.qqqqqqqq: megamem config show --keys lists them all"),
        ("optimizer.lr", -1, "no model of the comparison takes optimizer.lr=-1: correct it, or leave it out"),
        ("model.memory.top_k", "two", "no model of the comparison takes model.memory.top_k=two"),
        ("optimizer.beta1, optimizer.beta2", [0.9, 2], "no model of the comparison takes optimizer.beta1, optimizer"),
    ],
)
def test_values_that_no_model_can_have_are_refused(key: str, value: Any, problem: str) -> None:
    searches = searches_of("dense", "pkm")
    check_keys(Tuning(1, 1, 1, {"optimizer.lr": (1e-3,), "model.memory.top_k": (2,)}), Path("tuning.yaml"), searches)
    with pytest.raises(ConfigError, match=re.escape(f"tuning.yaml: {problem}")) as caught:
        check_keys(Tuning(1, 1, 1, {key: (value,)}), Path("tuning.yaml"), searches)
    if "no model" in problem:
        # The loader's own words stand below: the key and what it expects.
        assert key.split()[-1] in str(caught.value).splitlines()[1]


def test_keys_of_other_families_are_told_and_passed_over() -> None:
    """One shipped search serves a single model, too."""
    tuning = read_tuning(CONFIGS / "tuning" / "small.yaml")
    unread = check_keys(tuning, Path(), searches_of("peer"))
    assert unread == [
        "model.memory.initialisation=[matched]",
        "model.memory.pre_value_dim, model.memory.value_dim=[[0, 64]]",
        "model.moe.balance_loss_weight=[0.1, 0.001]",
    ]
    assert "optimizer.value_lr_multiplier=[8.0, 16.0]" in check_keys(tuning, Path(), searches_of("dense"))
    assert check_keys(tuning, Path(), searches_of("peer", "moe", "ultramemv2")) == []


@pytest.mark.parametrize("size", ["small", "medium", "large"])
def test_the_shipped_search_gives_every_model_as_many_trials(size: str) -> None:
    """A model with few keys has nothing left to try before the others have, if nothing helps."""
    tuning = read_tuning(CONFIGS / "tuning" / f"{size}.yaml")
    folder = CONFIGS / "compare" / ("" if size == "small" else size)
    searches = [
        Search(path, [], tuning) for path in load_configs([str(path) for path in sorted(folder.glob("*.yaml"))])
    ]
    assert check_keys(tuning, Path(), searches) == []
    for found in searches:
        found.run(lambda config, number: float(number))
        name = found.best.config.name
        few_keys = any(kind in name for kind in ("moe", "move", "lave", "tide", "engram"))
        assert len(found.trials) == (8 if "dense" in name else 10 if few_keys else tuning.num_trials)
        assert tuning.num_steps == found.best.config.train.num_steps // 2


def test_the_search_of_models_that_the_token_addresses_is_the_beginning_of_the_others() -> None:
    every, own = (read_tuning(CONFIGS / "tuning" / f"{name}.yaml") for name in ("small", "small_by_token"))
    for name in ("move", "lave", "tide", "engram", "engram_ple"):
        path = str(CONFIGS / "compare" / f"{name}.yaml")
        first, all_of_it = Search(path, [], own), Search(path, [], every)
        assert check_keys(own, Path(), [first]) == []
        for search in (first, all_of_it):
            # Every trial is better than the one before, so that each value stays.
            search.run(lambda config, number: -float(number))
        assert len(first.trials) == own.num_trials
        assert first.trials == all_of_it.trials[: own.num_trials]
    assert (own.num_steps, own.seed) == (every.num_steps, every.seed)
