"""A file of ways to grow a model: what it may say, what the shipped one makes, and how the report tells of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from lab.studies.compare.growth import Growth, planned, read_growth
from lab.studies.compare.growth_report import GrownFigures, report, table
from lab.studies.compare.rules import ModelFigures
from lab.studies.compare.runs import RunResult
from pretrain.config.stages import load_config
from pretrain.errors import ConfigError
from pretrain.planning.counts.formulas import count_parameters
from tools.common.metrics import Curves

FOLDER = Path(__file__).resolve().parents[2] / "configs" / "upscale"
WAY = {"insert": "solar", "blocks": 2, "trained": "all"}


def written(tmp_path: Path, content: Any) -> Path:
    path = tmp_path / "growth.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def read(tmp_path: Path, **way: Any) -> Growth:
    return read_growth(written(tmp_path, {"continued": {}, "ways": {"a": way}}))


def test_the_shipped_ways_add_alike_and_train_what_the_paper_trains() -> None:
    """Copies of blocks as many parameters as blocks of memory, but for 0.1 %."""
    base, growth = load_config(FOLDER / "small.yaml", ["model.vocab_size=4096"]), read_growth(FOLDER / "growth.yaml")
    before = count_parameters(base.model).total
    grown = {way.name: planned(base, growth, way, []) for way in growth.ways}
    added = {name: count_parameters(config.model).total - before for name, config in grown.items()}
    assert added.pop("continued") == 0
    memories = {name: added.pop(name) for name in ("memory", "memory-16x")}
    assert set(added.values()) == {369_280}
    assert set(memories.values()) == {369_536}
    trained = {name: config.optimizer.trained_layers for name, config in grown.items()}
    # A block of memory before its anchor, a copy after it, a mean of two between them.
    assert trained == {
        "continued": None,
        "memory": (2, 5),
        "memory-16x": (2, 5),
        "llama-pro": (3, 6),
        "averaged": (2, 5),
        "solar": None,
    }
    assert {config.model.num_layers for name, config in grown.items() if name != "continued"} == {6}
    assert len({(config.train, config.data, config.evaluation, config.optimizer.lr) for config in grown.values()}) == 1
    optimizer = grown["memory"].optimizer
    assert (optimizer.value_lr, optimizer.retrieval_lr) == (optimizer.lr, optimizer.lr)
    assert (optimizer.value_weight_decay, optimizer.retrieval_weight_decay) == (0, 0)
    faster = replace(grown["memory-16x"], name="memory", optimizer=replace(optimizer, value_lr=16 * optimizer.lr))
    assert faster == replace(grown["memory"], optimizer=faster.optimizer)
    assert grown["memory-16x"].optimizer == faster.optimizer


def test_the_second_file_changes_one_thing_at_a_time() -> None:
    """Tokens, and some of its ways, are those of the first file."""
    base = load_config(FOLDER / "small.yaml", ["model.vocab_size=4096"])
    files = [read_growth(FOLDER / f"{name}.yaml") for name in ("growth", "growth_memory")]
    assert files[0].continued == files[1].continued
    grown, more = ({way.name: planned(base, growth, way, []) for way in growth.ways} for growth in files)
    assert all(more[name] == grown[name] for name in ("continued", "llama-pro", "memory-16x"))
    memory = more["memory-16x"]
    placed = {name: more[f"memory-16x-{name}"].model.memory.placement.blocks for name in ("first", "last", "four")}
    assert placed == {"first": (0, 2), "last": (2, 4), "four": (0, 2, 4, 6)}
    for name in ("first", "last", "four"):
        # Which blocks are trained follows from which there are.
        free = replace(more[f"memory-16x-{name}"].optimizer, trained_layers=memory.optimizer.trained_layers)
        assert free == memory.optimizer
    for name, of in (
        ("memory-64x", "memory-16x"),
        ("memory-64x-keys-4x", "memory-16x"),
        ("memory-16x-all", "memory-16x"),
    ):
        assert more[name].model == more[of].model
    assert more["memory-64x"].optimizer == replace(memory.optimizer, value_lr=0.256)
    assert more["memory-16x-all"].optimizer.trained_layers is None
    assert more["llama-pro-all"].model == more["llama-pro"].model


def test_overrides_of_the_command_line_come_last() -> None:
    base, growth = load_config(FOLDER / "small.yaml"), read_growth(FOLDER / "growth.yaml")
    config = planned(base, growth, growth.ways[1], ["train.num_steps=40", "optimizer.value_lr=0.5"])
    assert (config.train.num_steps, config.optimizer.value_lr) == (40, 0.5)
    assert config.model.memory is not None


@pytest.mark.parametrize(
    ("way", "words"),
    [
        ({**WAY, "trained": "new"}, "trained of a is 'new', expected one of inserted, all"),
        ({**WAY, "insert": "copies"}, "insert of a is 'copies', expected one of memory, llama-pro"),
        ({**WAY, "placement": "middle"}, "placement of a is 'middle'"),
        ({**WAY, "blocks": 0}, "blocks of a is 0"),
        ({**WAY, "blocks": True}, "blocks of a is True"),
        ({"trained": "all", "blocks": 2}, "blocks of a is 2"),
        ({"trained": "inserted"}, "a inserts nothing"),
        ({"insert": "solar", "blocks": 2}, "expected a mapping with trained"),
        ({**WAY, "steps": 3}, "expected a mapping with trained"),
        ({**WAY, "keys": ["optimizer.lr"]}, r"keys of a is \['optimizer.lr'\]"),
    ],
    ids=str,
)
def test_a_wrong_way_is_refused(tmp_path: Path, way: dict[str, Any], words: str) -> None:
    assert read(tmp_path, **WAY).ways[0].num_blocks == 2
    with pytest.raises(ConfigError, match=words):
        read(tmp_path, **way)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"ways": {"a": WAY}}, "has the keys continued and ways"),
        ({"continued": {}, "ways": {}}, "ways one of names"),
        ({"continued": {"model.num_layers": 3}, "ways": {"a": WAY}}, "continued has model.num_layers"),
        ({"continued": {"seed": 3}, "ways": {"a": WAY}}, "continued has seed"),
    ],
    ids=str,
)
def test_a_wrong_file_is_refused(tmp_path: Path, content: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_growth(written(tmp_path, content))
    with pytest.raises(ConfigError, match="cannot be read"):
        read_growth(tmp_path / "none.yaml")


def test_the_report_tells_what_was_added_and_trained() -> None:
    base = load_config(FOLDER / "small.yaml")
    continued = replace(base, name="memory", train=replace(base.train, num_steps=2))
    curves = Curves(((256.0, 5.0), (512.0, 4.0)), ((512.0, 4.5),), {}, {}, 2.0)
    figures = [
        GrownFigures(ModelFigures("base", 1_000, 1_000, 2.5e6, 0), 0, 1_000),
        GrownFigures(ModelFigures("memory", 1_234, 1_000, 2.6e6, 16), 234, 234),
        GrownFigures(ModelFigures("solar", 1_240, 1_240, 3.6e6, 0), 240, 1_240),
    ]
    results = {
        "base": [RunResult(5.0, 2.0, curves), RunResult(5.2, 2.1, curves)],
        "memory": [RunResult(4.0, 1.5, curves), RunResult(4.5, 1.7, curves)],
        "solar": [RunResult(4.25, 1.6, curves)],
    }
    assert table(figures, {}).splitlines()[3] == "| memory | 1,234 | 234 | 234 | 2.600 | not run | not run |"
    text = report(
        base, [continued], figures, results, seeds=(2, 3), plot_name="growth.svg", command="megamem compare --grow"
    )
    assert "| memory | 1,234 | 234 | 234 | 2.600 | 4.2500 (4.0000 to 4.5000) | 1.6000 |" in text
    assert "base is trained on 1,048,576 tokens (256 steps of 16 x 256)" in text
    assert "on 8,192 tokens (2 steps of 16 x 256) in another order" in text
    assert "5 of 6 runs are done" in text
    # The compared models were trained on; the model as it was stands in the table alone.
    assert "memory ~ solar" in text
    assert "< base" not in text
