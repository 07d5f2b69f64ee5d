"""The report of a comparison: table, order, trials and plot."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import TYPE_CHECKING

from lab.studies.compare.rules import TOLERANCE, ModelFigures, inequalities
from lab.studies.compare.runs import RunResult
from lab.studies.compare.tuning import Trial, Tuning
from pretrain.config.schema import RunConfig
from pretrain.config.source import dump_inline
from tools.common.drawing import NUM_BINS, draw_losses, token_axes
from tools.common.metrics import Point
from tools.parameter_table import markdown_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def table(figures: Sequence[ModelFigures], results: Mapping[str, Sequence[RunResult]]) -> str:
    """Markdown: a row per model, the first being the one that the others are held against."""
    head = (
        "model",
        "parameters",
        "active",
        "forward MFLOPs per token",
        "table bytes per token",
        "validation loss",
        "bits per byte",
        "rows read in a step",
        "nats from even",
    )
    return markdown_table(head, (_cells(model, figures[0], results.get(model.name, ())) for model in figures))


def _cells(model: ModelFigures, reference: ModelFigures, runs: Sequence[RunResult]) -> Iterator[str]:
    unequal = {name: f" (**{value:+.1%}**)" for name, value in inequalities(model, reference).items()}
    yield model.name
    yield f"{model.total / 1e6:.3f}M"
    yield f"{model.active / 1e6:.3f}M{unequal.get('active', '')}"
    yield f"{model.forward_flops_per_token / 1e6:.3f}{unequal.get('flops', '')}"
    yield f"{model.table_bytes_per_token:,}"
    yield from reached(runs)
    if not runs:
        yield from ("not run",) * 2
        return
    yield _by_layer([_last_values(run.curves.coverage) for run in runs], "{:.0%}")
    yield _by_layer([_last_values(run.curves.kl_to_uniform) for run in runs], "{:.1f}")


def _last_values(of_blocks: Mapping[int, Sequence[Point]]) -> list[float]:
    """Per block, the newest value."""
    return [points[-1][1] for points in of_blocks.values()]


def reached(runs: Sequence[RunResult]) -> tuple[str, str]:
    """The cells of the last validation loss and of bits per byte: means over runs."""
    if not runs:
        return ("not run",) * 2
    losses = [run.validation_loss for run in runs]
    spread = f" ({min(losses):.4f} to {max(losses):.4f})" if len(losses) > 1 else ""
    return f"{fmean(losses):.4f}{spread}", f"{fmean(run.bits_per_byte for run in runs):.4f}"


def _by_layer(of_runs: Sequence[Sequence[float]], pattern: str) -> str:
    """Means over runs, layer after layer."""
    return " ".join(pattern.format(fmean(of_layer)) for of_layer in zip(*of_runs, strict=True))


def order(results: Mapping[str, Sequence[RunResult]]) -> str:
    """The models from best to worst: `a < b` if every run of a is better than every one of b, else `a ~ b`."""
    ranked = sorted((fmean(losses), losses, name) for name, losses in _losses(results).items())
    words = [ranked[0][2]] if ranked else []
    for (_, better, _), (_, worse, name) in pairwise(ranked):
        words += ["<" if max(better) < min(worse) else "~", name]
    return " ".join(words)


def _losses(results: Mapping[str, Sequence[RunResult]]) -> dict[str, list[float]]:
    return {name: [run.validation_loss for run in runs] for name, runs in results.items() if runs}


def trials_table(searches: Mapping[str, Sequence[Trial]]) -> str:
    """Markdown: every trial of every model, the best of each in bold."""
    rows = []
    for name, trials in searches.items():
        best = min(trials, key=lambda trial: trial.loss)
        for number, trial in enumerate(trials, start=1):
            settings = ", ".join(f"{key}={dump_inline(value)}" for key, value in trial.changes.items()) or "as shipped"
            mark = "**" if trial is best else ""
            rows.append((name, str(number), settings, f"{mark}{trial.loss:.4f}{mark}"))
    return markdown_table(("model", "trial", "settings", "validation loss"), rows)


@dataclass(frozen=True)
class Tuned:
    """Search for the settings of the models.

    Attributes:
        tuning: settings that were tried.
        trials: trials of every model so far, by its name.
    """

    tuning: Tuning
    trials: Mapping[str, Sequence[Trial]]


def report(
    configs: Sequence[RunConfig],
    figures: Sequence[ModelFigures],
    results: Mapping[str, Sequence[RunResult]],
    *,
    seeds: Sequence[int],
    plot_name: str,
    command: str,
    tuned: Tuned | None = None,
) -> str:
    """The part of a report between its marks.

    Args:
        configs: configurations of the models.
        figures: figures of the same models.
        results: results of the finished runs, by the model's name.
        seeds: seeds of the weights.
        plot_name: the plot's file, as seen from the report.
        command: command that makes the report again.
        tuned: search that found their settings, if there was one.
    """
    train, num_done = configs[0].train, sum(map(len, results.values()))
    steps = f"{train.num_steps} steps of {train.global_batch_size} x {train.sequence_length}"
    paths = ", ".join(entry.path for entry in configs[0].data.datasets)
    num_runs = len(configs) * len(seeds)
    state = "" if num_done == num_runs else f" {num_done} of {num_runs} runs are done."
    departing = [model.name for model in figures if inequalities(model, figures[0])]
    balance = f"active parameters and FLOPs per token within {TOLERANCE:.0%} of {figures[0].name}" + (
        f", but for {', '.join(departing)} (departures in brackets)" if departing else ""
    )
    return f"""\
{len(configs)} models on {train.num_steps * train.tokens_per_step:,} tokens of {paths}: {steps}, {train.precision}, in the same order \
(seed {configs[0].data_seed}).
{describe_seeds(seeds)} \
{balance[0].upper() + balance[1:]}.{state}

{table(figures, results)}

Rows read in a step and nats from even reads: of the last observed step, layer by layer.

{describe_order(results, seeds)}
![Loss against tokens and against parameters]({plot_name})

On the left lines are training losses (means over seeds and over {NUM_BINS} parts of the run), dots validation losses; on the right the last of these, \
with the lowest and the highest. Made by

```
{command}
```
{"" if tuned is None else _describe_trials(tuned)}"""


def describe_seeds(seeds: Sequence[int]) -> str:
    """A sentence on whose weights they are."""
    if len(seeds) == 1:
        return f"Weights from seed {seeds[0]}."
    listed = ", ".join(map(str, seeds))
    return f"Weights from seeds {listed}: losses are means over them, with the lowest and the highest."


def describe_order(results: Mapping[str, Sequence[RunResult]], seeds: Sequence[int]) -> str:
    """A sentence on the order, where there are several seeds and models."""
    if len(seeds) < 2 or len(_losses(results)) < 2:
        return ""
    return f"""\
From best to worst, `<` where every seed of the one is better than every seed of the other, and `~` where not:
{order(results)}.
"""


def _describe_trials(tuned: Tuned) -> str:
    tuning = tuned.tuning
    return f"""
The settings of every model are the best of up to {tuning.num_trials} trials of {tuning.num_steps} steps each, with weights from seed {tuning.seed}. \
A trial sets what it names otherwise than the model's file, and goes on from the best before it.

{trials_table(tuned.trials)}
"""


def plot(figures: Sequence[ModelFigures], results: Mapping[str, Sequence[RunResult]]) -> Figure:
    """Plot loss against tokens on the left: a line per model with a finished run, and dots where it was evaluated.
    On the right are the last validation losses against the model's parameters: means, with the lowest and the highest.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 5), layout="constrained")
    course, sizes = figure.subplots(1, 2, width_ratios=(2, 1))
    token_axes(course)
    # Models differ by less than a tenth of what all of them fall by in the first quarter.
    draw_losses(
        course, {model.name: [run.curves for run in results.get(model.name, ())] for model in figures}, start=0.25
    )
    course.set_title("losses of the first quarter lie above the panel", fontsize="small")
    colours = {line.get_label(): line.get_color() for line in course.lines}
    losses = _losses(results)
    for model in figures:
        if of_seeds := losses.get(model.name):
            mean = fmean(of_seeds)
            spread = [[mean - min(of_seeds)], [max(of_seeds) - mean]]
            sizes.errorbar([model.total / 1e6], [mean], spread, fmt="o", markersize=4, color=colours[model.name])
    sizes.set_xscale("log")
    sizes.set_xlabel("million parameters")
    sizes.set_ylabel("last validation loss")
    sizes.grid(alpha=0.4)
    if colours:
        figure.legend(loc="outside right upper", frameon=False)
    return figure
