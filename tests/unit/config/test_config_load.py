"""Files, bases, overrides and types: what a correct configuration turns into."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pretrain.config.loader import from_dict, to_dict, to_yaml
from pretrain.config.schema import DatasetEntry, RunConfig
from pretrain.config.stages import load_config
from pretrain.errors import ConfigError
from tests.plain_config import parse_config


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_what_a_file_leaves_out_has_its_default(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, "a.yaml", "model: {num_layers: 6}"))
    assert config.model.num_layers == 6
    assert config.model.memory is None
    assert config.train == RunConfig().train


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e-3", 1e-3), ("3E+2", 300.0), ("1", 1.0), ("-0.5e1", None), (".5", 0.5), ("2.", 2.0), ("1_000.5", 1000.5)],
)
def test_numbers_follow_yaml_1_2(text: str, value: float | None) -> None:
    from pretrain.config.source import Layer, parse_yaml

    parsed = parse_yaml(text, "x", Layer.FILE).value
    assert parsed == (-5.0 if value is None else value)
    assert type(parsed) in (int, float)


@pytest.mark.parametrize("text", ["on", "yes", "No", "2024-01-01", "1:30", "0x10", "007", "v1e3", "e3", "<<"])
def test_what_yaml_1_1_would_convert_stays_text(tmp_path: Path, text: str) -> None:
    from pretrain.config.source import Layer, parse_yaml

    assert parse_yaml(text, "x", Layer.FILE).value == text


@pytest.mark.parametrize(
    ("override", "section", "field", "value"),
    [
        ("optimizer.lr=1e-3", "optimizer", "lr", 0.001),
        ("optimizer.lr=1", "optimizer", "lr", 1.0),
        ("train.num_steps=1e6", "train", "num_steps", 1_000_000),
        ("train.num_steps=1_000", "train", "num_steps", 1000),
        ("logging.tensorboard=true", "logging", "tensorboard", True),
        ("evaluation.max_sequences=null", "evaluation", "max_sequences", None),
        ("evaluation.max_sequences=", "evaluation", "max_sequences", None),
        (
            "data.datasets=[{path: /x}, {path: /y, weight: 2}]",
            "data",
            "datasets",
            (DatasetEntry("/x"), DatasetEntry("/y", 2.0)),
        ),
        ("data.datasets=[]", "data", "datasets", ()),
        ("data.datasets.0.path=/a=b", "data", "datasets", (DatasetEntry("/a=b"),)),
    ],
)
def test_an_override_is_yaml(tmp_path: Path, override: str, section: str, field: str, value: Any) -> None:
    config = load_config(write(tmp_path, "a.yaml", "seed: 3"), [override])
    loaded = getattr(getattr(config, section), field)
    assert loaded == value
    assert type(loaded) is type(value)
    assert config.seed == 3


def test_overrides_reach_into_lists_and_append(tmp_path: Path) -> None:
    path = write(tmp_path, "a.yaml", "data: {datasets: [{path: /x}, {path: /y}]}")
    config = load_config(path, ["data.datasets.1.weight=3", "data.datasets.2.path=/z"])
    assert config.data.datasets == (DatasetEntry("/x"), DatasetEntry("/y", 3.0), DatasetEntry("/z"))


@pytest.mark.parametrize("section", ["data", "evaluation"])
@pytest.mark.parametrize(
    ("named", "path"), [("~/x", "/home/me/x"), ("x/../y", "/work/here/y"), ("/z", "/z"), ("a~b", "/work/here/a~b")]
)
def test_folders_are_found_from_anywhere_once_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, section: str, named: str, path: str
) -> None:
    """The path is so in a file and in an override, and so in what is written of it."""
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setattr("os.getcwd", lambda: "/work/here")
    file = write(tmp_path, "a.yaml", f"{section}: {{datasets: [{{path: {named!r}}}]}}")
    for overrides in ([], [f"{section}.datasets.0.path={named}"]):
        config = load_config(file, overrides)
        (entry,) = getattr(config, section).datasets
        assert entry.path == path
        assert from_dict(to_dict(config)) == config


def test_a_base_may_stand_in_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    write(tmp_path, "home/b.yaml", "seed: 4")
    assert load_config(write(tmp_path, "a.yaml", "base: ~/b.yaml")).seed == 4


def test_later_overrides_win(tmp_path: Path) -> None:
    assert load_config(write(tmp_path, "a.yaml", "seed: 3"), ["seed=4", "seed=5"]).seed == 5


def test_bases_merge_mappings_and_replace_lists(tmp_path: Path) -> None:
    write(
        tmp_path,
        "root.yaml",
        "seed: 7\nmodel: {num_layers: 8, memory: {top_k: 4}}\ndata: {datasets: [{path: a}, {path: b}]}",
    )
    write(tmp_path, "sub/middle.yaml", "base: ../root.yaml\nmodel: {memory: {num_keys: 32}}")
    path = write(
        tmp_path, "leaf.yaml", "base: sub/middle.yaml\ndata: {datasets: [{path: /c}]}\nmodel: {hidden_size: 64}"
    )
    config = load_config(path)
    assert (config.seed, config.model.num_layers, config.model.hidden_size) == (7, 8, 64)
    assert config.model.memory is not None
    assert (config.model.memory.top_k, config.model.memory.num_keys) == (4, 32)
    assert config.data.datasets == (DatasetEntry("/c"),)


def test_several_bases_later_wins(tmp_path: Path) -> None:
    write(tmp_path, "a.yaml", "seed: 1\nname: a")
    write(tmp_path, "b.yaml", "seed: 2")
    config = load_config(write(tmp_path, "c.yaml", "base: [a.yaml, b.yaml]"))
    assert (config.seed, config.name) == (2, "a")


def test_two_ways_to_the_same_base_are_no_cycle(tmp_path: Path) -> None:
    write(tmp_path, "root.yaml", "seed: 9")
    write(tmp_path, "a.yaml", "base: root.yaml\nname: a")
    write(tmp_path, "b.yaml", "base: root.yaml")
    assert load_config(write(tmp_path, "c.yaml", "base: [a.yaml, b.yaml]")).seed == 9


def test_null_removes_a_section_and_a_mapping_over_null_starts_afresh(tmp_path: Path) -> None:
    write(tmp_path, "big.yaml", "model: {memory: {num_keys: 256, top_k: 32}}")
    dense = write(tmp_path, "dense.yaml", "base: big.yaml\nmodel: {memory: null}")
    assert load_config(dense).model.memory is None
    again = load_config(write(tmp_path, "again.yaml", "base: dense.yaml\nmodel: {memory: {num_keys: 100}}"))
    assert again.model.memory is not None
    assert (again.model.memory.num_keys, again.model.memory.top_k) == (100, 16)
    overridden = load_config(dense, ["model.memory.num_keys=100"])
    assert overridden == again
    emptied = load_config(dense, ["model.memory={}"])
    assert emptied.model.memory is not None


def test_an_alias_repeats_a_value(tmp_path: Path) -> None:
    text = "data:\n  datasets:\n  - &first {path: /x, weight: 2}\n  - *first"
    assert load_config(write(tmp_path, "a.yaml", text)).data.datasets == (DatasetEntry("/x", 2.0),) * 2


def test_stored_configurations_come_back_equal(tmp_path: Path) -> None:
    config = load_config(
        write(
            tmp_path,
            "a.yaml",
            "model: {memory: {sharing: {pattern: block, group: 2}}}\noptimizer: {schedule: wsd, decay_steps: 5}",
        )
    )
    assert from_dict(to_dict(config)) == config
    assert parse_config(to_dict(config), RunConfig) == config
    assert load_config(write(tmp_path, "b.yaml", to_yaml(config))) == config


@pytest.mark.parametrize("chosen", ["null", "torch"])
def test_a_section_of_a_former_version_is_refused_in_a_file_where_it_says_something(
    tmp_path: Path, chosen: str
) -> None:
    stored = to_dict(RunConfig())
    stored["train"]["kernel_overrides"] = {"gather_sum": None if chosen == "null" else chosen, "tucker_topk": None}
    assert from_dict(stored) == RunConfig(), "a checkpoint that was written with it is read"
    text = f"train: {{num_steps: 7, kernel_overrides: {{gather_sum: {chosen}, tucker_topk: null}}}}\n"
    file = write(tmp_path, "config.yaml", text)
    if chosen == "null":
        assert load_config(file).train.num_steps == 7
    else:
        with pytest.raises(
            ConfigError, match=r"train\.kernel_overrides is no longer read: remove it: train\.kernels chooses"
        ):
            load_config(file)


def test_a_stored_configuration_may_hold_options_without_effect() -> None:
    import dataclasses

    run = RunConfig()
    odd = dataclasses.replace(run, optimizer=dataclasses.replace(run.optimizer, decay_steps=5))
    assert from_dict(to_dict(odd)) == odd


def test_the_dictionary_is_plain_and_leaves_silent_defaults_out() -> None:
    import json

    stored = to_dict(RunConfig())
    assert json.loads(json.dumps(stored)) == stored
    assert "decay_steps" not in stored["optimizer"]
    assert "min_lr" in stored["optimizer"]
    assert "value_lr_multiplier" not in stored["optimizer"]
