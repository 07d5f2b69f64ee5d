"""Memories that drop out of a model are found, told once while it trains, and named wherever the run is shown."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megamem.families.ultramem_v2.config import UltraMemV2Config
from pretrain.config.loader import to_yaml
from pretrain.config.schema import LoggingConfig, RunConfig, TrainConfig
from pretrain.run.folder import RunFolder
from pretrain.run.history import Incident
from pretrain.train.callback import Callback, Callbacks
from pretrain.train.callbacks import MemoryWatch
from pretrain.train.health.memories import MemoryFault, describe_faults, figures_by_block, find_faults
from tools.cli import main
from tools.common.metrics import curves
from tools.plot import draw

EVEN = 0.908


def figures(coverage: float, output_std: float = 1.0, even: float | None = EVEN) -> dict[str, float]:
    found = {"coverage": coverage, "kl_to_uniform": 1.0, "output_std": output_std}
    return found if even is None else {**found, "even_coverage": even}


def observed(*steps: dict[str, dict[str, float]]) -> list[MemoryFault]:
    return find_faults(figures_by_block(steps))


def test_keys_collapse_below_a_fifth_of_the_rows_of_the_quickstart() -> None:
    assert observed(*[{"0": figures(0.201), "2": figures(0.199)}] * 3) == [
        MemoryFault("collapsed keys", 2, pytest.approx(0.199), pytest.approx(EVEN))
    ]
    # A step that reads few rows of many covers few of them, however even its reads.
    assert not observed(*[{"0": figures(0.09, even=0.1)}] * 3)
    # Rows that the token chooses are as uneven as the text.
    assert not observed(*[{"0": figures(0.01, even=None)}] * 3)


def test_a_memory_is_judged_by_the_mean_of_its_last_three_steps() -> None:
    low, high = {"0": figures(0.15)}, {"0": figures(0.32)}
    assert not observed(low, low)
    assert not observed(high, low, high)
    assert [found.share for found in observed(high, low, low, low)] == [pytest.approx(0.15)]
    assert not observed({"0": figures(0.5)}, {"0": {"coverage": None, "key_balance": 2.0}}, low)  # type: ignore[dict-item]


def test_a_memory_is_silent_below_a_hundredth_of_the_loudest() -> None:
    steps = [{"10": figures(0.5, 0.0099), "2": figures(0.5, 0.0101), "3": figures(0.5, 1.0)}] * 3
    assert observed(*steps) == [MemoryFault("silent memory", 10, pytest.approx(0.0099), 3)]
    # Inserted blocks begin with tables of zeros.
    assert not observed(*[{"0": figures(0.5, 0.0), "1": figures(0.5, 0.0)}] * 3)


def test_words_name_blocks_figures_and_what_to_do() -> None:
    one = describe_faults([MemoryFault("collapsed keys", 2, 0.177, EVEN)])["collapsed keys"]
    assert one.startswith(
        "the keys of block 2 (counted from 0) have collapsed: a step reads 18% of the rows, where even reads would "
        "cover 91%. What to do: raise model.memory.key_balance_weight tenfold"
    )
    several = describe_faults([MemoryFault("silent memory", 1, 4e-6, 0), MemoryFault("silent memory", 2, 1e-15, 0)])
    assert several["silent memory"].startswith(
        "the memories of blocks 1, 2 (counted from 0) are silent: they add at most 4e-06 of what block 0's adds. "
        "What to do: "
    )
    keys = describe_faults([MemoryFault("collapsed keys", 1, 0.1, 0.9), MemoryFault("collapsed keys", 2, 0.2, 0.8)])[
        "collapsed keys"
    ]
    assert "blocks 1, 2 (counted from 0) have collapsed: a step reads 10% to 20% of the rows" in keys
    assert describe_faults([]) == {}


class Listener(Callback):
    def __init__(self) -> None:
        self.told: list[tuple[int, str]] = []

    def on_incident(self, run: Any, incident: Incident) -> None:
        self.told.append((incident.step, incident.kind))


def test_a_run_tells_of_each_memory_once_and_of_observed_steps_alone() -> None:
    config = RunConfig(logging=LoggingConfig(memory_every_steps=2))
    config = RunConfig(**{**vars(config), "model": SimpleNamespace(memory=UltraMemV2Config())})
    listener = Listener()
    watch = MemoryWatch()
    Callbacks([watch, listener])
    run: Any = SimpleNamespace(config=config, state=SimpleNamespace(step=0))
    for step in range(1, 25):
        run.state.step = step
        row: dict[str, Any] = {"memory": {"0": {"key_balance": 2.0}, "1": {"key_balance": 2.0}}}
        if step % 2 == 0:
            row["memory"] = {"0": figures(0.1), "1": figures(0.1 if step > 12 else 0.9, 1e-4 if step > 12 else 1.0)}
        watch.on_step(run, row)
    # The mean of block 1's outputs needs three silent steps, that of its coverage too.
    assert listener.told == [(6, "collapsed keys"), (18, "collapsed keys"), (18, "silent memory")]


ROWS = [
    {
        "step": step,
        "loss": 5.0 - step / 10,
        "consumed_tokens": 100 * step,
        "memory": {"0": figures(0.5), "2": figures(0.177)},
    }
    for step in range(1, 13)
]
SAID = "the keys of block 2 (counted from 0) have collapsed: a step reads 18% of the rows"


def test_every_command_that_shows_a_run_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.make()
    folder.config.write_text(to_yaml(RunConfig(name="run", train=TrainConfig(num_steps=12))))
    folder.metrics.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    for command in ("status", "plot"):
        assert main([command, str(folder.path)]) == 0
        assert SAID in capsys.readouterr().out
    assert main(["status", str(folder.path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["dropped_out"][0].startswith(SAID)
    assert main(["report", str(folder.path)]) == 0
    page = (folder.path / "report.html").read_text()
    assert SAID in page
    assert "block 2 (collapsed keys)</span>" in page
    assert "block 2, if reads were even" in page


def test_the_picture_names_the_block_and_shades_where_keys_collapse() -> None:
    _, coverage, evenness = draw({"run": curves(ROWS)}).axes
    for axes in (coverage, evenness):
        assert [line.get_label() for line in axes.lines] == ["block 0", "block 2 (collapsed keys)"]
    (shaded,) = coverage.collections
    assert shaded.get_paths()[0].get_extents().y1 == pytest.approx(0.2, abs=0.001)
    assert [text.get_text() for text in coverage.texts] == ["shaded: keys collapse"]
