"""Refusals of a comparison, and how its table, plot and report come out."""

from __future__ import annotations

import argparse
import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from lab.studies.compare.arguments import seed_list
from lab.studies.compare.report import (
    Tuned,
    order,
    plot,
    report,
    table,
    trials_table,
)
from lab.studies.compare.rules import ModelFigures, check_comparable, inequalities, load_configs, with_seed
from lab.studies.compare.runs import RunResult, read_result, time_left
from lab.studies.compare.tuning import Trial, Tuning
from pretrain.config.schema import DataConfig, DatasetEntry, RunConfig, TrainConfig
from pretrain.errors import ConfigError
from tools.common.drawing import svg
from tools.common.metrics import Curves

CONFIG = RunConfig(
    name="a", train=TrainConfig(num_steps=4, global_batch_size=8), data=DataConfig((DatasetEntry("data/x"),))
)
REFERENCE = ModelFigures("a", 2_000_000, 1_000_000, 2.5e6, 0)
OTHER = ModelFigures("b", 3_000_000, 1_019_000, 2.6e6, 4096)


def result(loss: float) -> RunResult:
    training = tuple((256.0 * step, loss + 4 / step) for step in range(1, 41))
    validation = ((5120.0, loss + 1), (10240.0, loss))
    coverage = {1: ((2560.0, 0.1), (5120.0, loss / 10)), 3: ((2560.0, 0.5),)}
    kl_to_uniform = {1: ((5120.0, loss),), 3: ((2560.0, 1.0),)}
    return RunResult(loss, loss / 2, Curves(training, validation, coverage, kl_to_uniform, loss / 2))


RESULTS = {"a": [result(3.0), result(3.5)]}


@pytest.mark.parametrize(
    ("change", "key", "values"),
    [
        (lambda c: replace(c, train=replace(c.train, num_steps=5)), "train.num_steps", ("4", "5")),
        (lambda c: replace(c, train=replace(c.train, global_batch_size=16)), "train.global_batch_size", ("8", "16")),
        (lambda c: replace(c, train=replace(c.train, sequence_length=64)), "train.sequence_length", ("256", "64")),
        (lambda c: replace(c, data=DataConfig((DatasetEntry("y"),))), "data.datasets", ("data/x", "y (weight 1)")),
        (lambda c: replace(c, data=replace(c.data, seed=7)), "data.seed", ("1", "7")),
        (lambda c: replace(c, seed=9), "data.seed", ("1", "9")),
        (lambda c: replace(c, data=replace(c.data, shuffle="samples")), "data.shuffle", ("documents", "samples")),
        (lambda c: replace(c, data=replace(c.data, documents="separate")), "data.documents", ("joined", "separate")),
        (
            lambda c: replace(c, evaluation=replace(c.evaluation, max_sequences=3)),
            "evaluation.max_sequences",
            ("null", "3"),
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_models_on_other_tokens_are_refused(
    change: Callable[[RunConfig], RunConfig], key: str, values: tuple[str, str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        check_comparable({"a.yaml": CONFIG, "b.yaml": replace(change(CONFIG), name="b")})
    message = str(caught.value)
    assert message.startswith(f"{key} is ")
    assert all(value in message for value in (*values, "a.yaml", "b.yaml"))


def test_two_models_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"a\.yaml and b\.yaml have the name a,"):
        check_comparable({"a.yaml": CONFIG, "b.yaml": CONFIG})


def test_models_may_differ_in_anything_else() -> None:
    other = replace(CONFIG, name="b", train=replace(CONFIG.train, micro_batch_size=1, precision="bf16"))
    check_comparable({"a.yaml": CONFIG, "b.yaml": other})


def test_a_seed_moves_the_weights_and_not_the_data() -> None:
    seeded = with_seed(CONFIG, 5)
    assert (seeded.seed, seeded.data.seed) == (5, 1)
    assert with_seed(replace(CONFIG, data=replace(CONFIG.data, seed=3)), 5).data.seed == 3


def test_files_overrides_and_bases_among_the_words(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("train: {num_steps: 3}")
    for name in "ab":
        (tmp_path / f"{name}.yaml").write_text(f"base: base.yaml\nname: {name}")
    words = [str(tmp_path / f"{name}.yaml") for name in ("base", "a", "b")]
    configs = load_configs([*words, "train.sequence_length=32"], ["optimizer.lr=1e-2"])
    assert [config.name for config in configs.values()] == ["a", "b"]
    assert all(c.train.sequence_length == 32 and c.optimizer.lr == 1e-2 for c in configs.values())
    with pytest.raises(ConfigError, match="name at least one CONFIG"):
        load_configs(words[:1])
    with pytest.raises(ConfigError, match="--seeds"):
        load_configs([*words, "seed=3"])


def test_seeds() -> None:
    assert seed_list("1,20") == (1, 20)
    with pytest.raises(argparse.ArgumentTypeError, match="twice"):
        seed_list("1,2,1")
    with pytest.raises(ValueError):
        seed_list("1,")


@pytest.mark.parametrize(
    ("steps", "seconds", "to_go", "text"),
    [(0, 0.0, 9, "not known"), (10, 60.0, 100, "about 10 min"), (10, 1.0, 10, "less than a minute")],
)
def test_time_left(steps: int, seconds: float, to_go: int, text: str) -> None:
    assert text in time_left(steps, seconds, to_go)


def test_departures_above_2_percent_are_named() -> None:
    assert inequalities(OTHER, REFERENCE) == {"flops": pytest.approx(0.04)}
    assert inequalities(replace(OTHER, active=970_000), REFERENCE)["active"] == pytest.approx(-0.03)
    assert inequalities(REFERENCE, REFERENCE) == {}


def test_the_table() -> None:
    head, rule, first, second = table([REFERENCE, OTHER], RESULTS).splitlines()
    assert head.count("|") == rule.count("|") == first.count("|") == second.count("|") == 10
    assert first == "| a | 2.000M | 1.000M | 2.500 | 0 | 3.2500 (3.0000 to 3.5000) | 1.6250 | 32% 50% | 3.2 1.0 |"
    assert second == "| b | 3.000M | 1.019M | 2.600 (**+4.0%**) | 4,096 | not run | not run | not run | not run |"
    assert "| 3.0000 | 1.5000 |" in table([REFERENCE], {"a": [result(3.0)]})


def test_the_order_says_what_seeds_tell_apart() -> None:
    results = {
        "worst": [result(5.0), result(6.0)],
        "best": [result(1.0), result(2.0)],
        "second": [result(1.9), result(3.0)],
        "none": [],
    }
    assert order(results) == "best ~ second < worst"


TUNING = Tuning(2, 64, 9, {"optimizer.lr": (1e-3, 2e-3)})
TRIALS = [Trial({}, CONFIG, 4.5), Trial({"optimizer.lr": 2e-3}, CONFIG, 4.25)]


def test_every_trial_is_listed() -> None:
    _, _, first, second = trials_table({"a": TRIALS}).splitlines()
    assert first == "| a | 1 | as shipped | 4.5000 |"
    assert second == "| a | 2 | optimizer.lr=0.002 | **4.2500** |"


def test_the_report_says_what_is_missing_and_unequal() -> None:
    configs = [CONFIG, replace(CONFIG, name="b")]
    text = report(configs, [REFERENCE, OTHER], RESULTS, seeds=(1, 2), plot_name="c.svg", command="megamem compare x")
    for part in ("2 models on 8,192 tokens of data/x", "2 of 4 runs are done", "but for b (", "](c.svg)", "compare x"):
        assert part in text
    both = {**RESULTS, "b": [result(4.0), result(4.0)]}
    whole = report(
        configs,
        [REFERENCE, REFERENCE],
        both,
        seeds=(1, 2),
        plot_name="c.svg",
        command="megamem compare x",
        tuned=Tuned(TUNING, {"a": TRIALS}),
    )
    assert "runs are done" not in whole
    assert "but for" not in whole
    assert "a < b" in whole
    assert "up to 2 trials of 64 steps each, with weights from seed 9" in whole
    assert "| a | 1 | as shipped |" in whole
    assert "trials" not in text


def test_results_come_from_the_metrics(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    assert read_result(metrics, CONFIG) is None
    rows: list[dict[str, float | None]] = [
        {"step": step, "loss": 9.0 - step if step != 2 else None, "consumed_tokens": 2048 * step}
        for step in (1, 2, 3, 4)
    ]
    metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read_result(metrics, CONFIG) is None
    rows.append({"step": 4, "validation_loss": 5.5, "bits_per_byte": 2.0})
    metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = read_result(metrics, CONFIG)
    training, validation = ((2048, 8.0), (6144, 6.0), (8192, 5.0)), ((8192, 5.5),)
    assert found == RunResult(5.5, 2.0, Curves(training, validation, {}, {}, 2.0))
    assert read_result(metrics, replace(CONFIG, train=replace(CONFIG.train, num_steps=5))) is None


def test_the_plot_has_a_line_per_finished_model_and_dots_where_it_was_evaluated() -> None:
    axes, sizes = plot([REFERENCE, OTHER, replace(OTHER, name="c")], {**RESULTS, "c": [result(4)]}).axes
    line, dots, other_line, other_dots = axes.lines
    assert [drawn.get_label() for drawn in (line, other_line)] == ["a", "c"]
    assert line.get_color() == dots.get_color() != other_line.get_color() == other_dots.get_color()
    # The mean of the two runs, 3.0 and 3.5.
    assert list(map(tuple, dots.get_xydata())) == [(5120.0, 4.25), (10240.0, 3.25)]
    means = [container.lines[0].get_xydata().tolist() for container in sizes.containers]
    assert means == [[[2.0, 3.25]], [[3.0, 4.0]]]
    assert sizes.containers[0].lines[0].get_color() == line.get_color()
    assert tuple(line.get_xydata()[-1]) == pytest.approx((10112.0, 3.25 + (4 / 39 + 4 / 40) / 2))


def test_the_plot_shows_all_but_the_steep_start() -> None:
    axes, _ = plot([REFERENCE], {"a": [result(3.0)]}).axes
    low, high = axes.get_ylim()
    points = axes.lines[0].get_xydata()
    assert [x for x, y in points if low < y < high] == [x for x, _ in points if x >= 10112 / 4]
    assert low < 3.0 < high
    assert axes.get_xlim()[0] == 0


def test_the_same_figure_is_the_same_svg() -> None:
    texts = [svg(plot([REFERENCE, replace(OTHER, name="b & <c>")], {**RESULTS, "b & <c>": [result(4)]})) for _ in "12"]
    assert texts[0] == texts[1]
    shown = [element.text for element in ElementTree.fromstring(texts[0]).iter("{http://www.w3.org/2000/svg}text")]
    assert {"a", "b & <c>", "million tokens", "loss in nats per token"} <= set(shown)


def test_a_plot_without_runs_is_empty_axes() -> None:
    figure = plot([REFERENCE], {})
    assert not figure.axes[0].lines
    ElementTree.fromstring(svg(figure))
