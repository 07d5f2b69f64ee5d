"""The page of `megamem report`: what is read of a run, how it is thinned out, and that the page is whole by itself."""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pretrain.config.loader import to_yaml
from pretrain.config.optimizer import OptimizerConfig
from pretrain.config.schema import RunConfig, TrainConfig
from pretrain.data.manifest import save_tokenizer
from pretrain.data.tokenizer import ByteTokenizer
from pretrain.errors import ConfigError
from pretrain.run.folder import RunFolder
from pretrain.run.history import End, Incident, Start, write_event
from tools.cli import main
from tools.report.charts import ChartAxis, ChartLine, Mark, chart, in_short
from tools.report.page import page
from tools.report.reading import Column, RunRecord, binned, read_metrics_file, read_run, read_runs

VOID = {"meta"}


class Checker(HTMLParser):
    """Every tag is closed in its turn; what stands in the page by tag."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[tuple[str, str]] = []
        self.attributes: list[tuple[str, str, str | None]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, self.getpos()

    def handle_data(self, data: str) -> None:
        if self.open and data.strip():
            self.text.append((self.open[-1], data.strip()))

    def of(self, tag: str) -> list[str]:
        return [text for name, text in self.text if name == tag]


def parsed(html: str) -> Checker:
    checker = Checker()
    checker.feed(html)
    checker.close()
    assert checker.open == []
    return checker


def step_row(step: int, loss: float | None, **more: Any) -> dict[str, Any]:
    row = {"step": step, "loss": loss, "consumed_tokens": 10 * step, "grad_norm": 0.5, "lr": 1e-3, "value_lr": 2e-3}
    return {**row, "num_skipped": 0, "step_s": 2.0, "tokens_per_s": 5.0, "tflops_per_gpu": 0.1, **more}


MEMORY = {
    "10": {"coverage": 0.5, "topk_score": 1.0, "singular_values": [[3.0, 1.0, 0.5], [5.0, 2.0, 0.5]]},
    "2": {"coverage": 0.25, "topk_score": None},
}
ROWS = [
    step_row(1, 5.0),
    step_row(2, None, num_skipped=1, memory=MEMORY),
    {"step": 2, "validation_loss": 4.0, "bits_per_byte": 2.0, "validation_tokens": 3, "validation_bytes": 4},
    step_row(3, 3.0, num_skipped=1, moe={"2": {"load_balancing": 1.5}}),
    step_row(4, 2.5, num_skipped=3),
    {"step": 3, "save_stall_s": 0.5, "save_s": 2.0, "save_bytes": 1000},
]


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Path]:
    """Makes a run's folder."""

    def make(name: str, rows: list[dict[str, Any]] = ROWS, config: RunConfig | None = None, tail: str = "") -> Path:
        folder = RunFolder(tmp_path / name)
        folder.make()
        folder.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows) + tail)
        folder.config.write_text(to_yaml(config or RunConfig(name=name)))
        save_tokenizer(ByteTokenizer(), folder.tokenizer)
        return folder.path

    return make


def test_columns_of_a_run(make: Callable[..., Path]) -> None:
    """A row that is being written does not count; a save stands at its own step."""
    found = read_metrics_file(make("a", tail='{"step": 5, "lo') / "metrics.jsonl")
    assert (found.step, found.tokens) == (4, 40)
    points = {name: (list(column.tokens), list(column.values)) for name, column in found.figures.items()}
    assert points["loss"] == ([10, 30, 40], [5.0, 3.0, 2.5])
    assert points["validation_loss"] == ([20], [4.0])
    assert points["save_s"] == ([30], [2.0])
    assert found.skipped == ((20, 1), (40, 2))
    blocks = {
        name: {block: list(column.values) for block, column in columns.items()}
        for name, columns in found.of_blocks.items()
    }
    assert blocks == {
        "coverage": {2: [0.25], 10: [0.5]},
        "topk_score": {10: [1.0]},
        "singular_value_1": {10: [4.0]},
        "singular_value_2": {10: [1.5]},
        "load_balancing": {2: [1.5]},
    }
    assert list(found.of_blocks["coverage"]) == [2, 10]


def test_a_bad_row_does_not_end_a_report(make: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    path = make("a", tail='[4]\n{"loss": 1.0}\n{"step": 5, "loss": 2.0, "consumed_tokens": 50}\n') / "metrics.jsonl"
    assert read_metrics_file(path).step == 5
    assert capsys.readouterr().err.count(f"note: {path}, line ") == 2


def test_bins_keep_the_mean_and_the_extremes() -> None:
    column = Column(array("d", range(100, 200)), array("d", [float(x % 10) for x in range(100)]))
    found = binned(column, 10)
    assert len(found.mean) == 10
    assert found.mean == pytest.approx(4.5)
    assert (found.low.min(), found.high.max()) == (0.0, 9.0)
    assert found.tokens == pytest.approx(np.arange(104.5, 200, 10), abs=1)


def test_bins_of_few_or_uneven_values() -> None:
    few = Column(array("d", [1.0, 2.0]), array("d", [5.0, 7.0]))
    assert binned(few, 2).mean.tolist() == [5.0, 7.0]
    gaps = Column(array("d", [0.0, 1.0, 99.0, 100.0, 2.0]), array("d", [1.0, 2.0, 3.0, 5.0, 3.0]))
    found = binned(gaps, 4)
    assert found.mean.tolist() == [2.0, 4.0]
    assert found.tokens.tolist() == [1.0, 99.5]
    assert (found.low.tolist(), found.high.tolist()) == ([1.0, 3.0], [3.0, 5.0])
    at_once = Column(array("d", [7.0] * 5), array("d", [1.0, 2.0, 3.0, 4.0, 5.0]))
    assert binned(at_once, 2).mean.tolist() == [3.0]


@pytest.mark.parametrize(
    ("axis", "ticks"),
    [
        (ChartAxis(0, 10), [0, 2, 4, 6, 8, 10]),
        (ChartAxis(-0.3, 0.71), [-0.2, 0, 0.2, 0.4, 0.6]),
        (ChartAxis(0, 1.7e12), [0, 0.5e12, 1e12, 1.5e12]),
        (ChartAxis(1e-3, 20, logarithmic=True), [1e-3, 1e-2, 1e-1, 1, 10]),
        (ChartAxis(0.25, 4, logarithmic=True), [0.3, 1, 3]),
        (ChartAxis(2.1, 2.4, logarithmic=True), [2.1, 2.15, 2.2, 2.25, 2.3, 2.35, 2.4]),
    ],
)
def test_ticks_are_round_and_within(axis: ChartAxis, ticks: list[float]) -> None:
    assert axis.ticks() == pytest.approx(ticks)


def test_numbers_in_short() -> None:
    assert list(map(in_short, (0, 0.02, 1e-5, 12.5, 1500, 2.5e8, 1.5e12))) == [
        "0", "0.02", "1e-05", "12.5", "1.5k", "250M", "1.5T",
    ]  # fmt: skip


def coordinates(svg: str, kind: str) -> list[tuple[float, float]]:
    path = re.search(rf'class="{kind}"[^>]* d="M([^"]*)"', svg)
    assert path is not None
    numbers = [float(number) for number in path[1].split()]
    return list(zip(numbers[::2], numbers[1::2], strict=True))


def test_a_line_stands_where_its_values_are() -> None:
    """The left edge is at no tokens, the last value at 1 / 1.02 of the width; higher values are above, by the ticks."""
    points = binned(Column(array("d", [0.0, 50.0, 100.0]), array("d", [0.0, 10.0, 5.0])), 9)
    svg = chart("a", "", [ChartLine("a", "red", points)], from_zero=True)
    (left, bottom), (middle, top), (right, half) = coordinates(svg, "line")
    assert (left, middle, right) == (0, pytest.approx(207 / 1.02, abs=0.1), pytest.approx(414 / 1.02, abs=0.1))
    assert bottom > half > top > 0
    assert half == pytest.approx((top + bottom) / 2, abs=0.11)
    ticks = {text: float(y) for y, text in re.findall(r'y="([\d.]+)" text-anchor="end">([\d.]+)</text>', svg)}
    # Labels stand 4 units below their values' heights, and the plot 12 below the chart's edge.
    assert ticks["10"] == pytest.approx(top + 12 + 4, abs=0.11)
    assert ticks["0"] == pytest.approx(bottom + 12 + 4, abs=0.11)


def test_marks_in_one_place_are_one_with_the_words_of_all() -> None:
    points = binned(Column(array("d", [0.0, 1000.0]), array("d", [0.0, 1.0])), 9)
    marks = [Mark("skip", tokens, f"at {tokens}", "red") for tokens in (500.0, 500.1, 900, 1021)]
    marks += [Mark("start", 500.0, "go", "red"), *(Mark("save", 10, f"<{number}>", "red") for number in range(9))]
    svg = chart("a", "", [ChartLine("a", "red", points)], marks)
    titles = parsed(svg).of("title")
    assert titles == ["at 500.0; at 500.1", "at 900", "go", "<0>; <1>; <2>; <3>; <4>; and 4 more", "a"]
    assert svg.count('class="skip"') == 2
    # 58 to the left of the plot of 414, which ends at 1020 tokens.
    assert re.search(r'class="start"[^>]* d="M260\.9 ', svg)


def test_a_chart_shows_the_whole_course_or_the_end_of_it() -> None:
    """Points before the start are left of the edge, and set no height."""
    values = array("d", [100.0, 3.0, 2.0, 1.0])
    points = binned(Column(array("d", [1.0, 20.0, 50.0, 100.0]), values), 9)
    line = ChartLine("a", "red", points)
    whole = coordinates(chart("a", "", [line]), "line")
    assert min(y for _, y in whole) >= 0
    marks = [Mark("save", tokens, f"at {tokens:g}", "red") for tokens in (20, 75)]
    svg = chart("a", "", [line], marks, start=0.5)
    (before, _), *_, (middle, top), (end, bottom) = coordinates(svg, "line")
    # Half of the plot of 414, without the room of 1 % behind the last point.
    assert (before < 0, middle, end) == (True, 0, pytest.approx(414 / 1.02, abs=0.1))
    # Between 1 and 2, with a margin of a twentieth on each side, over a height of 222.
    assert (top, bottom) == (pytest.approx(222 * 0.05 / 1.1, abs=0.1), pytest.approx(222 * 1.05 / 1.1, abs=0.1))
    assert [text for text in parsed(svg).of("title") if text.startswith("at")] == ["at 75"]


@pytest.mark.parametrize("num_evaluations", [1, 3, 4])
def test_few_evaluations_are_figures_and_many_are_charts(make: Callable[..., Path], num_evaluations: int) -> None:
    rows: list[dict[str, Any]] = []
    for step in range(1, 5):
        rows.append(step_row(step, 5.0))
        if step > 4 - num_evaluations:
            domains = {name: {"bits_per_byte": factor * step} for name, factor in (("web", 1.0), ("code", 0.5))}
            rows.append({"step": step, "validation_loss": step / 8, "bits_per_byte": step / 16, "domains": domains})
    checker = parsed(page([read_run(make("a", rows=rows))]))
    captions, cells = checker.of("figcaption"), checker.of("td")
    evaluations = ["Validation loss (nats per token)", "Bits per byte", "Bits per byte, domain by domain"]
    assert [caption for caption in captions if caption in evaluations] == (evaluations if num_evaluations > 3 else [])
    if num_evaluations > 3:
        assert cells == []
    else:
        steps = range(5 - num_evaluations, 5)
        figures = [["a", str(10 * step), f"{step / 8:.4f}", f"{step / 16:.4f}"] for step in steps]
        of_domains = [["web", *(f"{step:.4f}" for step in steps)], ["code", *(f"{step / 2:.4f}" for step in steps)]]
        assert cells == [cell for row in figures + of_domains for cell in row]
    # Dots in the charts of training show them all the same.
    assert captions[:2] == [
        f"Training loss; dots: validation{end} (nats per token)" for end in ("", "; the second half")
    ]


def test_the_page_is_whole_by_itself(make: Callable[..., Path]) -> None:
    first = make("a & <b>", config=RunConfig(name="a", train=TrainConfig(num_steps=4)))
    second = make("'c\"", config=RunConfig(name="<script>alert(1)</script>", train=TrainConfig(num_steps=8)))
    html = page(read_runs([first, second]))
    checker = parsed(html)
    assert "http" not in html
    assert not [name for _, name, _ in checker.attributes if name in ("src", "href", "xmlns") or name.startswith("on")]
    assert "<script" not in html
    assert "url(" not in html
    assert "@import" not in html
    assert "a & <b>" in " ".join(checker.of("h1"))
    assert ("meta", "content", "width=device-width, initial-scale=1") in checker.attributes
    assert "prefers-color-scheme: dark" in html
    assert "max-width: 600px" in html


def test_incidents_are_counted_and_the_last_one_told(make: Callable[..., Path]) -> None:
    path = make("a", config=RunConfig(train=TrainConfig(num_steps=4)))
    for kind, step in (("spike", 2), ("non-finite", 3), ("spike", 4)):
        write_event(RunFolder(path), Incident(step, kind, f"<{kind} of {step}>", "2026-11-22T10:00:00+00:00"))
    checker = parsed(page([read_run(path)]))
    said = dict(zip(checker.of("dt"), checker.of("dd"), strict=True))
    assert said["incidents"] == "spike 2, non-finite 1; the last one at step 4: <spike of 4>"
    # They end nothing.
    assert said["state"] == "finished"


def test_what_a_page_of_one_run_shows(make: Callable[..., Path]) -> None:
    path = make("a", config=RunConfig(train=TrainConfig(num_steps=4)))
    checker = parsed(page([read_run(path)]))
    said = dict(zip(checker.of("dt"), checker.of("dd"), strict=True))
    assert said["state"] == "finished"
    assert said["step"] == "4 of 4"
    assert said["tokens"] == "40"
    assert said["loss"] == "2.5000 nats per token"
    assert said["validation loss"] == "4.0000 nats, 2.0000 bits per byte"
    assert said["skipped"] == "3 steps"
    assert said["saves"] == "1 save, the last of 1.00 kB; stalled 0 s"
    assert said["model"].startswith("dense, ")
    assert "time left" not in said
    captions = " ".join(checker.of("figcaption"))
    for title in (
        "Training loss",
        "Tables",
        "Gradient norm",
        "Throughput",
        "Coverage",
        "Written in",
    ):
        assert title in captions
    assert "Gradient norm of the tables" not in captions
    assert "Second singular value of the cores (mean over heads)" in captions
    assert "Load balancing" in captions
    assert checker.of("title").count("block 10") == 4
    # In the chart of the whole course, and in that of its second half.
    skipped = ["a: 1 step skipped", "a: 2 steps skipped"]
    assert [text for text in checker.of("title") if "skipped" in text] == [*skipped, *skipped]


def test_starts_are_marked_and_a_running_run_says_how_long_it_takes(make: Callable[..., Path]) -> None:
    path = make("a", config=RunConfig(train=TrainConfig(num_steps=94)))
    for event in (
        Start(0, 0, "2026-01-01T00:00:00+00:00", "x", 4),
        End(2, 20, "2026-01-01T01:00:00+00:00"),
        Start(2, 20, "2026-01-02T00:00:00+00:00", "x", 8),
    ):
        write_event(RunFolder(path), event)
    record = read_run(path)
    assert record.standing is not None
    assert record.standing.state == "failed"
    html = page([record])
    titles = parsed(html).of("title")
    assert "a: start 2 at step 2, 2026-01-02T00:00:00+00:00, 8 ranks" in titles
    assert not any("start 1" in title for title in titles)
    assert "time left" not in html
    running = replace(record, standing=replace(record.standing, state="running"))
    assert "<dt>time left</dt><dd>3 min for 90 steps</dd>" in page([running])


def test_stages_are_marked_where_they_begin(make: Callable[..., Path]) -> None:
    """A line has the stage's name; the start that a run makes there by itself has none."""
    path = make("a")
    folder = RunFolder(path)
    rows = [
        {"step": step, "stage": "short" if step < 3 else "long", "loss": 2.0, "consumed_tokens": 100 * step}
        for step in range(1, 5)
    ]
    folder.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    folder.history.unlink(missing_ok=True)
    for step in (0, 2, 3):
        write_event(folder, Start(step, 100 * step, "2026-11-22T00:00:00+00:00", "host", 2))
    record = read_run(path)
    assert record.metrics.stages == ((0, "short"), (200, "long"))
    shown = parsed(page([record]))
    # In the chart of the whole course, and in that of its second half.
    assert shown.of("text").count("long") == 2
    assert ("start 2 at step 3" in " ".join(shown.of("title"))) is True
    assert "start 3" not in " ".join(shown.of("title"))
    assert shown.of("dd")[shown.of("dt").index("started")] == "2 times"
    assert shown.of("dd")[shown.of("dt").index("stage")] == "long"


def test_several_runs_share_their_charts_and_show_what_differs(make: Callable[..., Path]) -> None:
    trained = OptimizerConfig(trained_layers=(1,))
    short = make("short", config=RunConfig(train=TrainConfig(num_steps=4), optimizer=trained))
    long = make("long", config=RunConfig(train=TrainConfig(num_steps=8)))
    dense = make("dense", rows=[row for row in ROWS if "memory" not in row], config=RunConfig(seed=7))
    html = page(read_runs([short, long, dense]))
    checker = parsed(html)
    losses, _ = re.findall(r"<figure><figcaption>Training loss.*?</figure>", html)
    # A line each, and dots for the evaluations.
    assert [losses.count(f"<title>{name}</title>") for name in ("short", "long", "dense")] == [2, 2, 2]
    assert len(set(re.findall(r'class="line" style="stroke:([^"]*)"', losses))) == 3
    (coverage, *of_runs) = re.findall(r"<figure><figcaption>Coverage.*?</figure>", html)
    assert "<title>dense</title>" not in coverage
    assert "<title>short</title>" in coverage
    assert len(of_runs) == 2
    cells = checker.of("td")
    assert checker.of("th")[-4:] == ["key", "short", "long", "dense"]
    at = cells.index("train.num_steps")
    assert cells[at : at + 4] == ["train.num_steps", "4", "8", "100"]
    assert "train.sequence_length" not in cells
    assert "seed" in cells
    # As a configuration has them.
    at = cells.index("optimizer.trained_layers")
    assert cells[at : at + 4] == ["optimizer.trained_layers", "[1]", "null", "null"]


def test_runs_of_one_name_go_by_their_paths(make: Callable[..., Path]) -> None:
    paths = [make("a/seed_1"), make("b/seed_1"), make("c")]
    assert [run.name for run in read_runs(paths)] == [str(paths[0]), str(paths[1]), "c"]
    with pytest.raises(ConfigError, match="named twice"):
        read_runs([paths[0], paths[0]])


def test_a_configuration_of_another_version_is_told(make: Callable[..., Path]) -> None:
    path = make("a")
    (path / "config.yaml").write_text("train: {speed: 3}\n")
    record = read_run(path)
    assert record.config is None
    said = parsed(page([record])).of("dd")
    assert any("cannot be read by this version" in text and "train.speed" in text for text in said)


def test_a_long_run_with_many_blocks_makes_a_small_page(tmp_path: Path) -> None:
    """The metrics are as many as 400,000 steps of 60 blocks leave, after binning to the most that a page keeps."""
    metrics = read_metrics_file(_written(tmp_path / "m.jsonl", ROWS))
    noise = np.random.default_rng(1).normal(10, 1, 20_000)

    def column() -> Column:
        return Column(array("d", np.linspace(1, 1e12, len(noise))), array("d", noise))

    full = replace(
        metrics,
        figures={name: column() for name in metrics.figures},
        of_blocks={f"figure {number}": {block: column() for block in range(60)} for number in range(7)},
    )
    html = page([RunRecord("long", full)])
    assert 100_000 < len(html.encode()) < 2_000_000
    longest = max(path.count(" ") for path in re.findall(r' d="([^"]*)"', html))
    assert longest <= 2 * 1000


def _written(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["nowhere"], "nowhere: no such folder"),
        (["empty"], "empty has no metrics.jsonl"),
        (["started.jsonl"], "has no row of a step yet"),
        (["bad.jsonl"], "bad.jsonl, line 2, is no row of a run"),
        (["list.jsonl"], "list.jsonl has no row of a step yet"),
        (["good.jsonl", "--output", "good.jsonl/page.html"], "good.jsonl cannot be made (File exists)"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], problem: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    Path("started.jsonl").touch()
    _written(Path("good.jsonl"), ROWS[:1])
    Path("bad.jsonl").write_text(json.dumps(ROWS[0]) + '\n{"step": 2, "lr": "low"}\n')
    Path("list.jsonl").write_text("[1]\n")
    assert main(["report", *words]) == ConfigError.exit_code
    assert problem in " ".join(capsys.readouterr().err.split())


def test_the_command_writes_the_page_into_the_first_run(
    make: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = make("a"), make("b")
    assert main(["report", str(first), str(second)]) == 0
    assert capsys.readouterr().out.startswith(f"report: {first / 'report.html'} (")
    assert parsed((first / "report.html").read_text()).of("h1") == ["a, b"]
    assert not (second / "report.html").exists()


def test_domains_have_a_line_or_a_row_each_and_their_last_figure(tmp_path: Path) -> None:
    def evaluation(step: int, **bits: float | None) -> dict[str, Any]:
        domains = {name: {"validation_loss": 1.0, "bits_per_byte": value} for name, value in bits.items()}
        return {"step": step, "validation_loss": 4.0, "bits_per_byte": 2.0, "domains": domains}

    rows = [step_row(1, 5.0), evaluation(1, web=3.0, code=None), step_row(2, 4.0), evaluation(2, web=2.5, code=1.25)]
    path = tmp_path / "named.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    domains = read_metrics_file(path).domains
    assert {name: (list(column.tokens), list(column.values)) for name, column in domains.items()} == {
        "web": ([10.0, 20.0], [3.0, 2.5]),
        "code": ([20.0], [1.25]),
    }
    checker = parsed(page(read_runs([path])))
    assert "Domains" in checker.of("h2")
    assert checker.of("td")[-6:] == ["web", "3.0000", "2.5000", "code", "-", "1.2500"]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows + 2 * rows))
    checker = parsed(page(read_runs([path])))
    assert "Domains" in checker.of("h2")
    assert {"web: 2.5000", "code: 1.2500"} <= set(checker.of("span"))
    assert "Bits per byte, domain by domain" in checker.of("figcaption")
    path.write_text("".join(json.dumps(row) + "\n" for row in rows if "domains" not in row))
    assert "Domains" not in parsed(page(read_runs([path]))).of("h2")
