"""A controlled comparison: what its models must have in common, what each costs, and the report of what came out."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from io import StringIO
from operator import attrgetter
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, TypeAlias

from pretrain.config.schema import RunConfig
from pretrain.costs.formulas import count_parameters, forward_flops_per_token
from pretrain.errors import ConfigError
from tools.parameter_table import markdown_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Point: TypeAlias = tuple[float, float]

SAME = (
    "train.num_steps",
    "train.global_batch_size",
    "train.sequence_length",
    "data.datasets",
    "data.seed",
    "evaluation.max_sequences",
)
"""Keys that all models share: which tokens, in which order, sequences and steps, and which are held out."""

TOLERANCE = 0.02
"""Active parameters and FLOPs per token may differ by this much before the report marks them."""

BEGIN, END = "<!-- comparison -->", "<!-- end of comparison -->"
"""Around the part of a report that is written anew; a page may say more before and after."""

_NUM_BINS = 32
# The plot reaches as high as the losses after this share of the tokens: before, they fall steeply from ln(vocabulary).
_STEEP_START = 0.25


@dataclass(frozen=True)
class ModelFigures:
    """What a model costs, by the closed formulas."""

    name: str
    total: int
    active: int
    forward_flops_per_token: float
    table_bytes_per_token: int


@dataclass(frozen=True)
class RunResult:
    """What a finished run left in its metrics.

    Attributes:
        validation_loss: of the last evaluation, in nats per token.
        bits_per_byte: of the same.
        training: (tokens seen, loss of the step's batch).
        validation: (tokens seen, validation loss).
    """

    validation_loss: float
    bits_per_byte: float
    training: tuple[Point, ...]
    validation: tuple[Point, ...]


def with_seed(config: RunConfig, seed: int) -> RunConfig:
    """The configuration with a seed for its weights; the order of the data stays what the file alone would give."""
    return replace(config, seed=seed, data=replace(config.data, seed=config.data_seed))


def check_comparable(configs: Mapping[str, RunConfig]) -> None:
    """Refuse models that would not see the same tokens.

    Args:
        configs: by the path of their file.

    Raises:
        ConfigError: naming the key and the values, or the name that two of them share.
    """
    (reference, first), *others = configs.items()
    for path, config in others:
        for key in SAME:
            expected, found = (c.data_seed if key == "data.seed" else attrgetter(key)(c) for c in (first, config))
            if expected != found:
                raise ConfigError(
                    f"{key} is {_shown(expected)} in {reference} and {_shown(found)} in {path}: models are compared on "
                    f"the same tokens, so set both alike (an override, as in {key}=..., holds for all)"
                )
    paths: dict[str, str] = {}
    for path, config in configs.items():
        if config.name in paths:
            raise ConfigError(
                f"{paths[config.name]} and {path} have the name {config.name}, which names the folder of their runs: "
                "give each its own"
            )
        paths[config.name] = path


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return ", ".join(f"{entry.path} (weight {entry.weight:g})" for entry in value) or "empty"
    return "null" if value is None else str(value)


def model_figures(config: RunConfig, vocab_size: int) -> ModelFigures:
    """The closed formulas' figures of a configuration's model with so many token ids."""
    model = replace(config.model, vocab_size=vocab_size)
    counts = count_parameters(model)
    return ModelFigures(
        name=config.name,
        total=counts.total,
        active=counts.active,
        forward_flops_per_token=forward_flops_per_token(model, config.train.sequence_length),
        table_bytes_per_token=counts.read_values * config.train.element_bytes,
    )


def inequalities(figures: ModelFigures, reference: ModelFigures) -> dict[str, float]:
    """By how much a model departs from the reference, as a fraction, where that is more than `TOLERANCE`."""
    departures = {
        "active": figures.active / reference.active - 1,
        "flops": figures.forward_flops_per_token / reference.forward_flops_per_token - 1,
    }
    return {name: value for name, value in departures.items() if abs(value) > TOLERANCE}


def read_result(metrics: Path, config: RunConfig) -> RunResult | None:
    """What a run reached; None if it has not been evaluated after its last step."""
    rows = read_metrics(metrics)
    tokens_per_step = config.train.tokens_per_step
    evaluations = [row for row in rows if row.get("validation_loss") is not None]
    steps = [row for row in rows if row.get("loss") is not None]
    if not evaluations or not steps or evaluations[-1]["step"] < config.train.num_steps:
        return None
    last = evaluations[-1]
    return RunResult(
        validation_loss=last["validation_loss"],
        bits_per_byte=last["bits_per_byte"],
        training=tuple((row["step"] * tokens_per_step, row["loss"]) for row in steps),
        validation=tuple((row["step"] * tokens_per_step, row["validation_loss"]) for row in evaluations),
    )


def read_metrics(metrics: Path) -> list[dict[str, Any]]:
    """The rows of a run's `metrics.jsonl`; none if there is no such file."""
    return [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()] if metrics.exists() else []


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
    )
    return markdown_table(head, (_cells(model, figures[0], results.get(model.name, ())) for model in figures))


def _cells(model: ModelFigures, reference: ModelFigures, runs: Sequence[RunResult]) -> Iterator[str]:
    unequal = {name: f" (**{value:+.1%}**)" for name, value in inequalities(model, reference).items()}
    yield model.name
    yield f"{model.total / 1e6:.3f}M"
    yield f"{model.active / 1e6:.3f}M{unequal.get('active', '')}"
    yield f"{model.forward_flops_per_token / 1e6:.3f}{unequal.get('flops', '')}"
    yield f"{model.table_bytes_per_token:,}"
    if not runs:
        yield from ("not run",) * 2
        return
    losses = [run.validation_loss for run in runs]
    spread = f" ({min(losses):.4f} to {max(losses):.4f})" if len(losses) > 1 else ""
    yield f"{fmean(losses):.4f}{spread}"
    yield f"{fmean(run.bits_per_byte for run in runs):.4f}"


def report(
    configs: Sequence[RunConfig],
    figures: Sequence[ModelFigures],
    results: Mapping[str, Sequence[RunResult]],
    *,
    seeds: Sequence[int],
    plot_name: str,
    command: str,
) -> str:
    """The part of a report between its marks.

    Args:
        configs: of the models.
        figures: of the same.
        results: of the finished runs, by the model's name.
        seeds: of the weights.
        plot_name: the plot's file, as seen from the report.
        command: what makes it again.
    """
    train, num_done = configs[0].train, sum(map(len, results.values()))
    steps = f"{train.num_steps} steps of {train.global_batch_size} x {train.sequence_length}"
    paths = ", ".join(entry.path for entry in configs[0].data.datasets)
    state = (
        "" if num_done == len(configs) * len(seeds) else f" {num_done} of {len(configs) * len(seeds)} runs are done."
    )
    departing = [model.name for model in figures if inequalities(model, figures[0])]
    balance = f"active parameters and FLOPs per token within {TOLERANCE:.0%} of {figures[0].name}" + (
        f", but for {', '.join(departing)} (departures in brackets)" if departing else ""
    )
    return f"""\
{len(configs)} models on {train.num_steps * train.tokens_per_step:,} tokens of {paths}: {steps}, {train.precision}, in the same order \
(seed {configs[0].data_seed}).
Weights from seeds {", ".join(map(str, seeds))}: losses are means over them, with the lowest and the highest. \
{balance[0].upper() + balance[1:]}.{state}

{table(figures, results)}

![Loss against tokens]({plot_name})

Lines are training losses (means over seeds and over {_NUM_BINS} parts of the run), dots validation losses. Made by

```
{command}
```
"""


def plot(figures: Sequence[ModelFigures], results: Mapping[str, Sequence[RunResult]]) -> Figure:
    """Loss against tokens: a line per model with a finished run, and dots where it was evaluated."""
    # Here, because matplotlib takes a while to import and no other command draws.
    from cycler import cycler
    from matplotlib import color_sequences
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    # Colours that colour-blind readers can tell apart, then the same ones dashed and dotted.
    axes.set_prop_cycle(cycler(linestyle=["-", "--", ":"]) * cycler(color=color_sequences["okabe_ito"]))
    lines = {
        model.name: binned([point for run in results[model.name] for point in run.training])
        for model in figures
        if results.get(model.name)
    }
    for name, line in lines.items():
        (drawn,) = axes.plot(*zip(*line, strict=True), label=name)
        validation = _means([point for run in results[name] for point in run.validation], lambda tokens: tokens)
        axes.plot(*zip(*validation, strict=True), "o", markersize=4, color=drawn.get_color())
    axes.xaxis.set_major_formatter(lambda tokens, _: f"{tokens / 1e6:g}")
    axes.set_xlabel("million tokens")
    axes.set_ylabel("loss in nats per token")
    axes.grid(alpha=0.4)
    if lines:
        late = [y for line in lines.values() for x, y in line if x >= _STEEP_START * line[-1][0]]
        low, high = axes.dataLim.y0, max(late)
        margin = (high - low) * 0.04 or 0.5
        axes.set_ylim(low - margin, high + margin)
        axes.set_xlim(left=0)
        figure.legend(loc="outside right upper", frameon=False)
    return figure


def svg(figure: Figure) -> str:
    """The figure as SVG text, the same for the same figure: without a date, and with text as text."""
    from matplotlib import rc_context

    text = StringIO()
    with rc_context({"svg.hashsalt": "megamem", "svg.fonttype": "none"}):
        figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()


def binned(points: Sequence[Point], num_bins: int = _NUM_BINS) -> tuple[Point, ...]:
    """Means of the points in equal ranges of tokens, which smooths a noisy curve."""
    end = max((x for x, _ in points), default=0.0)
    return _means(points, lambda tokens: math.ceil(tokens / end * num_bins))


def _means(points: Sequence[Point], group: Callable[[float], float]) -> tuple[Point, ...]:
    """The mean of each group of points; which one a point is in follows from its tokens."""
    groups: dict[float, list[Point]] = {}
    for point in points:
        groups.setdefault(group(point[0]), []).append(point)
    return tuple((fmean(x for x, _ in held), fmean(y for _, y in held)) for _, held in sorted(groups.items()))


def check_report(path: Path) -> None:
    """Refuse to write over a page that is none of ours.

    Raises:
        ConfigError: the file is there and lacks the marks.
    """
    if path.suffix != ".md":
        raise ConfigError(f"--report is {path}: name a markdown file (.md); the plot goes beside it")
    if path.exists() and END not in path.read_text(encoding="utf-8").partition(BEGIN)[2]:
        raise ConfigError(
            f"--report is {path}, which is there and has no lines {BEGIN} and {END} to write between: put them in, or "
            "name another file"
        )


def write_report(path: Path, text: str, svg: str) -> None:
    """Put the text between the page's marks (or make a page of it) and the plot beside the page."""
    page = path.read_text(encoding="utf-8") if path.exists() else f"# Comparison\n\n{BEGIN}\n{END}\n"
    before, _, rest = page.partition(BEGIN)
    after = rest.partition(END)[2]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".svg").write_text(svg, encoding="utf-8")
    path.write_text(f"{before}{BEGIN}\n{text}{END}{after}", encoding="utf-8")
