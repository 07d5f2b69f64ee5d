"""Curves from the rows of a run, and pictures of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pretrain.errors import ConfigError
from tools.cli import main
from tools.common.metrics import Curves, binned, curves
from tools.plot import draw

ROWS: list[dict[str, Any]] = [
    {"step": 1, "loss": 5.0, "consumed_tokens": 10},
    {
        "step": 2,
        "loss": None,
        "consumed_tokens": 20,
        "memory": {"10": {"coverage": 0.5, "kl_to_uniform": 1.0}, "2": {"coverage": 0.25, "kl_to_uniform": 3.0}},
    },
    {"step": 2, "validation_loss": 4.0, "bits_per_byte": 2.0},
    {"step": 3, "loss": 3.0, "consumed_tokens": 30, "memory": {"2": {"key_balance_loss": 1.0}}},
    {"step": 3, "validation_loss": 3.5, "bits_per_byte": 1.75},
]


def test_curves_of_a_run() -> None:
    found = curves(ROWS)
    assert found == Curves(
        training=((10, 5.0), (30, 3.0)),
        validation=((20, 4.0), (30, 3.5)),
        coverage={2: ((20, 0.25),), 10: ((20, 0.5),)},
        kl_to_uniform={2: ((20, 3.0),), 10: ((20, 1.0),)},
        bits_per_byte=1.75,
    )
    assert list(found.coverage) == [2, 10]
    assert curves([]) == Curves((), (), {}, {}, None)


def test_bins_smooth_and_keep_the_mean() -> None:
    points = [(float(x), float(x % 2)) for x in range(1, 101)]
    assert binned(points, 4) == ((13.0, 0.52), (38.0, 0.48), (63.0, 0.52), (88.0, 0.48))
    assert binned(points[:3], 100) == tuple(points[:3])
    assert binned([], 32) == ()


def test_the_picture_shows_all_losses_and_the_first_memory() -> None:
    dense = curves([row for row in ROWS if "memory" not in row])
    losses, coverage, evenness = draw({"dense": dense, "memory": curves(ROWS), "other": curves(ROWS)}).axes
    assert [line.get_label() for line in losses.lines if not line.get_label().startswith("_")] == [
        "dense: 1.750 bits per byte",
        "memory: 1.750 bits per byte",
        "other: 1.750 bits per byte",
    ]
    assert coverage.get_title() == "memory: what one step reads of its tables"
    for axes, values in ((coverage, [0.25, 0.5]), (evenness, [3.0, 1.0])):
        assert [line.get_label() for line in axes.lines] == ["block 2", "block 10"]
        assert [line.get_ydata()[-1] for line in axes.lines] == values
    assert len(draw({"dense": dense}).axes) == 1


def test_the_picture_shows_the_whole_course_and_its_second_half_enlarged() -> None:
    """The first point of 32 is the mean of four steps: 8.3, 8.2, 8.1 and 8."""
    rows = [{"step": n, "loss": max(4.0, 8.4 - n / 10), "consumed_tokens": 10.0 * n} for n in range(1, 129)]
    (losses,) = draw({"run": curves(rows)}).axes
    (line,) = (line for line in losses.lines if line.get_label() == "run")
    assert line.get_ydata()[0] == pytest.approx(8.15)
    assert losses.get_ylim()[0] < 4 < 8.15 < losses.get_ylim()[1]
    (inset,) = losses.child_axes
    assert inset.get_xlim() == (pytest.approx(rows[-1]["consumed_tokens"] / 2, rel=0.02), losses.get_xlim()[1])
    assert inset.get_ylim()[0] < 4 < inset.get_ylim()[1] < 5
    (few,) = draw({"run": curves(rows[:4])}).axes
    assert not few.child_axes


def _course(num_steps: int, *, first: float = 8.4) -> Curves:
    return curves(
        [{"step": n, "loss": max(4.0, first - n / 10), "consumed_tokens": 10.0 * n} for n in range(1, num_steps + 1)]
    )


def test_runs_of_unlike_length_are_averaged_over_as_many_steps_and_end_with_a_stroke() -> None:
    (losses,) = draw({"whole": _course(640), "tenth": _course(64), "half": _course(330)}).axes
    lines = {line.get_label(): line for line in losses.lines}
    # The parts of 20 steps of the longest run, but for the shortest, which has eight.
    assert [len(lines[name].get_xdata()) for name in ("whole", "tenth", "half")] == [32, 8, 17]
    assert lines["half"].get_xdata()[0] == lines["whole"].get_xdata()[0] == 105
    strokes = [line for line in losses.lines if line.get_marker() == "|"]
    assert [float(line.get_xdata()[0]) for line in strokes] == [640.0, 3300.0]
    assert [line.get_color() for line in strokes] == [lines[name].get_color() for name in ("tenth", "half")]
    assert losses.get_xlim()[1] > 6300


def test_the_end_is_enlarged_where_runs_are_there_to_compare_and_nothing_is_hidden() -> None:
    def enlarged(**runs: Curves) -> bool:
        return bool(draw(runs).axes[0].child_axes)

    assert enlarged(a=_course(640), b=_course(400), c=_course(64))
    assert not enlarged(a=_course(640), b=_course(64))
    # A run that stays high would be behind it.
    assert not enlarged(a=_course(640), b=_course(640, first=70.0))


def test_a_picture_of_a_folder_and_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "".join(json.dumps(row) + "\n" for row in ROWS)
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").write_text(text)
    (tmp_path / "dense.jsonl").write_text(text)
    assert main(["plot", str(run), str(tmp_path / "dense.jsonl")]) == 0
    assert capsys.readouterr().out == f"picture: {run / 'plot.png'}\n"
    assert (run / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert main(["plot", str(tmp_path / "dense.jsonl"), "--output", str(tmp_path / "new" / "a.svg")]) == 0
    assert (tmp_path / "new" / "a.svg").read_text().startswith("<?xml")


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["nowhere"], "is no run. Name a folder"),
        (["bad.jsonl"], "does not hold the rows of a run"),
        (["list.jsonl"], "does not hold the rows of a run"),
        (["untold.jsonl"], "does not hold the rows of a run: they do not say after how many tokens"),
        (["good.jsonl", "again/good.jsonl"], "have one name"),
        (["good.jsonl", "--output", "picture.doc"], "picture.doc, and pictures end with"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], problem: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("bad.jsonl").write_text("{")
    Path("list.jsonl").write_text("[1]\n")
    Path("untold.jsonl").write_text('{"step": 1, "loss": 3.0}\n')
    Path("again").mkdir()
    for good in (Path("good.jsonl"), Path("again/good.jsonl")):
        good.write_text(json.dumps(ROWS[0]) + "\n")
    assert main(["plot", *words]) == ConfigError.exit_code
    assert problem in capsys.readouterr().err
