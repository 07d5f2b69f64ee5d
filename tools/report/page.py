"""The page of a report: one HTML file that needs nothing else, for a screen or a phone, light or dark."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from datetime import UTC, datetime
from statistics import median

import numpy as np

from pretrain.config.loader import flat, shown_at, to_dict
from pretrain.run.history import Start
from pretrain.train.health.memories import describe_faults
from tools.common.run_status import duration
from tools.common.words import count_in_millions, describe_size, plural
from tools.report.charts import ChartLine, Key, Mark, chart, colour_of, shade_of
from tools.report.reading import EVALUATION_FIGURES, Binned, Column, RunRecord, binned
from tools.templates import render

MOST_POINTS = 1000
"""Most points of a line."""
MEANS_OF_NOISE = 100
"""Points of a line that is noisy from step to step; the noise is the band around it."""
_MOST_DOTS = 40
_POINTS_OF_A_PAGE = 80_000
_FEWEST_POINTS = 20
# Evaluations that are a course: a chart of fewer says less than a table.
_FEWEST_DRAWN = 4
_STEPS_OF_SPEED = 100

_EVEN = "even_coverage"
_BLOCK_TITLES = {
    "coverage": ("Coverage", "share of rows that a step reads"),
    "kl_to_uniform": ("Distance from even reads", "nats"),
    "top1_score": ("Score of the best entry", ""),
    "topk_score": ("Mean score of what is read", ""),
    "output_std": ("Output", "standard deviation"),
    "singular_value_1": ("Largest singular value of the cores", "mean over heads"),
    "singular_value_2": ("Second singular value of the cores", "mean over heads"),
}


def page(runs: Sequence[RunRecord]) -> str:
    """The HTML of runs, the first of which comes first everywhere."""
    resolution = resolution_of(runs)
    names = ", ".join(run.name for run in runs)
    written = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    several = len(runs) > 1
    keys = [Key(run.name, *colour_of(number)) for number, run in enumerate(runs)]
    sections = [*_sections(runs, resolution), *([_differences(runs)] if several else [])]
    return render(
        "report.html",
        title=names,
        written=written,
        cards=[(key, list(_summary(run))) for key, run in zip(keys, runs, strict=True)],
        keys=keys if several else [],
        sections=[section for section in sections if any((*section.charts, section.rows, section.words))],
        resolution=resolution,
    )


@dataclass(frozen=True)
class Section:
    """A part of the page below a heading, which is left out if it has neither charts nor rows nor words.

    Attributes:
        title: its heading.
        charts: markup of each chart; an empty one is left out.
        note: words on what the charts show.
        keys: their legend.
        head, rows: a table.
        words: a paragraph.
    """

    title: str
    charts: Sequence[str] = ()
    note: str = ""
    keys: Sequence[Key] = ()
    head: Iterable[str] = ()
    rows: Sequence[Iterable[str]] = ()
    words: str = ""


def resolution_of(runs: Sequence[RunRecord]) -> int:
    """Points per line: fewer, the more lines there are, so that the page stays small."""
    blocks = sum(len(columns) for run in runs for columns in run.metrics.of_blocks.values())
    lines = blocks + sum(len(run.metrics.figures) for run in runs)
    return min(MOST_POINTS, max(_FEWEST_POINTS, _POINTS_OF_A_PAGE // max(1, lines)))


def _sections(runs: Sequence[RunRecord], resolution: int) -> Iterator[Section]:
    marks = [mark for number, run in enumerate(runs) for mark in _marks(run, colour_of(number)[0])]
    starts = [mark for mark in marks if mark.kind in ("start", "stage")]

    def of(title: str, unit: str, name: str, *, noisy: bool = False, logarithmic: bool = False) -> str:
        lines = _lines(runs, name, resolution, noisy=noisy)
        return chart(title, unit, lines, starts, logarithmic=logarithmic, from_zero=not logarithmic)

    losses = [
        *_lines(runs, "loss", resolution, noisy=True),
        *_lines(runs, "validation_loss", resolution, dots=True),
    ]
    training, validation = "Training loss; dots: validation", _lines(runs, "validation_loss", resolution)
    many = any(_is_course(line.points.tokens) for line in validation)
    loss_charts = [
        chart(training, "nats per token", losses, marks),
        chart(f"{training}; the second half", "nats per token", losses, marks, start=0.5),
    ]
    if many:
        loss_charts.append(chart("Validation loss", "nats per token", validation, starts))
        loss_charts.append(chart("Bits per byte", "", _lines(runs, "bits_per_byte", resolution), starts))
    note = (
        "Dashed: a start from a checkpoint. Lines with a name: a stage begins. Triangles: steps that were skipped, as "
        "their gradient was not finite. Ticks below: saves."
    )
    yield Section("Loss", loss_charts, note)
    if not many:
        yield _evaluations(runs)
    yield from _domain_sections(runs, resolution, starts)
    yield Section("Learning rates", (of("Backbone", "", "lr"), of("Tables", "", "value_lr")))
    gradients = (
        of("Gradient norm", "", "grad_norm", noisy=True, logarithmic=True),
        of("Gradient norm of the tables", "", "value_grad_norm", noisy=True, logarithmic=True),
    )
    yield Section("Gradients", gradients)
    speed = (
        of("Throughput", "tokens/s", "tokens_per_s", noisy=True),
        of("Operations of the model", "TFLOP/s per rank", "tflops_per_gpu", noisy=True),
    )
    yield Section("Speed", speed)
    saves = (
        of("Training stood still", "seconds", "save_stall_s", noisy=True),
        of("Written in", "seconds", "save_s", noisy=True),
    )
    yield Section("Saves", saves)
    yield from _block_sections(runs, resolution)


def _is_course(values: Sized) -> bool:
    """True if there are enough values for a line; fewer are told as figures."""
    return len(values) >= _FEWEST_DRAWN


def _evaluations(runs: Sequence[RunRecord]) -> Section:
    """A table of the evaluations."""
    rows = []
    for run in runs:
        figures = run.metrics.figures
        columns = [figures.get(name, Column()) for name in EVALUATION_FIGURES]
        for tokens, loss, bits_per_byte in zip(columns[0].tokens, *(column.values for column in columns), strict=True):
            rows.append((run.name, count_in_millions(int(tokens)), f"{loss:.4f}", f"{bits_per_byte:.4f}"))
    head = ("run", "tokens", "validation loss (nats per token)", "bits per byte")
    return Section("Evaluations", head=head, rows=rows)


def _lines(
    runs: Sequence[RunRecord], name: str, resolution: int, *, noisy: bool = False, dots: bool = False
) -> list[ChartLine]:
    lines = []
    for number, run in enumerate(runs):
        if column := run.metrics.figures.get(name):
            colour, dash = colour_of(number)
            num_bins = min(resolution, _MOST_DOTS if dots else MEANS_OF_NOISE if noisy else MOST_POINTS)
            lines.append(ChartLine(run.name, colour, binned(column, num_bins), dash, band=noisy, dots=dots))
    return lines


def _marks(run: RunRecord, colour: str) -> Iterator[Mark]:
    # The first start is where every run begins.
    for number, start in enumerate(_restarts(run), start=2):
        words = f"{run.name}: start {number} at step {start.step:,}, {start.at}, {plural(start.num_ranks, 'rank')}"
        yield Mark("start", start.consumed_tokens, words, colour)
    for tokens, stage in run.metrics.stages:
        yield Mark("stage", tokens, stage, colour)
    for tokens, steps in run.metrics.skipped:
        yield Mark("skip", tokens, f"{run.name}: {plural(steps, 'step')} skipped", colour)
    for tokens in run.metrics.figures.get("save_s", Column()).tokens:
        yield Mark("save", tokens, f"{run.name}: saved", colour)


def _domain_sections(runs: Sequence[RunRecord], resolution: int, starts: Sequence[Mark]) -> Iterator[Section]:
    """Losses of each domain of the held-out documents: a line per domain for each run."""
    for run in runs:
        domains = run.metrics.domains
        colours = {name: shade_of(place, len(domains)) for place, name in enumerate(domains)}
        title = f"Domains of {run.name}" if len(runs) > 1 else "Domains"
        if not any(_is_course(column) for column in domains.values()):
            times = sorted({tokens for column in domains.values() for tokens in column.tokens})
            head = ("bits per byte", *(f"after {count_in_millions(int(tokens))} tokens" for tokens in times))
            rows = []
            for name, column in domains.items():
                at = dict(zip(column.tokens, column.values, strict=True))
                rows.append((name, *(f"{at[tokens]:.4f}" if tokens in at else "-" for tokens in times)))
            yield Section(title, head=head, rows=rows)
            continue
        lines = [ChartLine(name, colours[name], binned(column, resolution)) for name, column in domains.items()]
        keys = [Key(f"{name}: {column.last:.4f}", colours[name]) for name, column in domains.items()]
        yield Section(title, (chart("Bits per byte, domain by domain", "", lines, starts),), keys=keys)


def _restarts(run: RunRecord) -> list[Start]:
    """The starts but the first, and but those at which a stage begins, which a run comes to by itself."""
    begins = {tokens for tokens, _ in run.metrics.stages}
    return [start for start in run.starts[1:] if start.consumed_tokens not in begins]


def _block_sections(runs: Sequence[RunRecord], resolution: int) -> Iterator[Section]:
    """Figures of memories and experts: a line per block for each run, and of several runs their means side by side."""
    with_blocks = [(number, run) for number, run in enumerate(runs) if run.metrics.of_blocks]
    names = sorted(
        {name for _, run in with_blocks for name in run.metrics.of_blocks} - {_EVEN},
        key=lambda name: (list(_BLOCK_TITLES).index(name) if name in _BLOCK_TITLES else len(_BLOCK_TITLES), name),
    )
    if len(runs) > 1:
        charts = []
        for name in names:
            lines = []
            for number, run in with_blocks:
                if columns := run.metrics.of_blocks.get(name):
                    colour, dash = colour_of(number)
                    lines.append(ChartLine(run.name, colour, _over_blocks(columns, resolution), dash, band=True))
            charts.append(chart(*_block_title(name), lines, from_zero=True))
        yield Section("Memory, mean over its blocks", charts, "Shaded: from the lowest to the highest block.")
    for _, run in with_blocks:
        blocks = sorted({block for columns in run.metrics.of_blocks.values() for block in columns})
        colours = {block: shade_of(place, len(blocks)) for place, block in enumerate(blocks)}
        charts = [
            chart(*_block_title(name), list(_lines_of_blocks(run, name, colours, resolution)), from_zero=True)
            for name in names
            if name in run.metrics.of_blocks
        ]
        found = {block: [each.kind for each in run.metrics.dropped_out if each.block == block] for block in blocks}
        keys = [
            Key(f"block {block}" + (f" ({', '.join(found[block])})" if found[block] else ""), colour)
            for block, colour in colours.items()
        ]
        title = f"Memory of {run.name}, block by block" if len(runs) > 1 else "Memory, block by block"
        note = "Dashed, of coverage: as many even reads." if _EVEN in run.metrics.of_blocks else ""
        yield Section(title, charts, note, keys)


def _lines_of_blocks(run: RunRecord, name: str, colours: Mapping[int, str], resolution: int) -> Iterator[ChartLine]:
    of_blocks = run.metrics.of_blocks
    for block, column in of_blocks[name].items():
        yield ChartLine(f"block {block}", colours[block], binned(column, resolution))
    if name == "coverage":
        for block, column in of_blocks.get(_EVEN, {}).items():
            yield ChartLine(f"block {block}, if reads were even", colours[block], binned(column, resolution), dash=1)


def _block_title(name: str) -> tuple[str, str]:
    return _BLOCK_TITLES.get(name, (name.replace("_", " ").capitalize(), ""))


def _over_blocks(columns: dict[int, Column], resolution: int) -> Binned:
    """Mean, least and most over blocks of the same observed steps."""
    binned_blocks = [binned(column, resolution) for column in columns.values()]
    length = min(len(block.tokens) for block in binned_blocks)
    table = np.stack([block.mean[:length] for block in binned_blocks])
    return Binned(binned_blocks[0].tokens[:length], table.mean(0), table.min(0), table.max(0))


def _summary(run: RunRecord) -> Iterator[tuple[str, str]]:
    metrics, config = run.metrics, run.config
    last = {name: column.values[-1] for name, column in metrics.figures.items()}
    if run.standing:
        yield "state", str(run.standing)
    if run.config_problem:
        yield "configuration", f"cannot be read by this version: {run.config_problem}"
    if config is not None:
        model = config.model
        yield "model", f"{model.memory_kinds}, {plural(model.num_layers, 'block')} of width {model.hidden_size:,}"
    if counts := run.parameters:
        tables = f", {count_in_millions(counts.tables)} in tables" if counts.tables else ""
        yield "parameters", f"{count_in_millions(counts.total)}{tables}, {count_in_millions(counts.active)} active"
    of = f" of {config.run_steps:,}" if config else ""
    yield "step", f"{metrics.step:,}{of}"
    yield "tokens", count_in_millions(metrics.tokens)
    if "loss" in last:
        yield "loss", f"{last['loss']:.4f} nats per token"
    if "validation_loss" in last:
        yield "validation loss", f"{last['validation_loss']:.4f} nats, {last['bits_per_byte']:.4f} bits per byte"
    if "tokens_per_s" in last:
        recent = metrics.figures["tokens_per_s"].values[-_STEPS_OF_SPEED:]
        yield "speed", f"{median(recent):,.0f} tokens/s (median of the last {plural(len(recent), 'row')})"
    if left := _time_left(run):
        yield "time left", left
    if run.starts:
        yield "started", plural(1 + len(_restarts(run)), "time")
    if run.metrics.stages:
        yield "stage", run.metrics.stages[-1][1]
    if num_skipped := sum(steps for _, steps in metrics.skipped):
        yield "skipped", plural(num_skipped, "step")
    yield from describe_faults(metrics.dropped_out).items()
    if run.incidents:
        last_one = run.incidents[-1]
        counts_of = Counter(incident.kind for incident in run.incidents)
        kinds = ", ".join(f"{kind} {times:,}" for kind, times in counts_of.items())
        yield "incidents", f"{kinds}; the last one at step {last_one.step:,}: {last_one.message}"
    if "save_bytes" in last:
        stalled_s = sum(metrics.figures["save_stall_s"].values)
        saves = plural(len(metrics.figures["save_bytes"]), "save")
        yield "saves", f"{saves}, the last of {describe_size(int(last['save_bytes']))}; stalled {duration(stalled_s)}"


def _time_left(run: RunRecord) -> str:
    """Time left at the pace of the last steps, without evaluations and saves; empty unless the run is running."""
    step_s = run.metrics.figures.get("step_s")
    if run.config is None or step_s is None or run.standing is None or run.standing.state != "running":
        return ""
    steps = run.config.run_steps - run.metrics.step
    return f"{duration(steps * median(step_s.values[-_STEPS_OF_SPEED:]))} for {plural(steps, 'step')}"


def _differences(runs: Sequence[RunRecord]) -> Section:
    """A table of the configuration's keys in which runs differ."""
    configured = [run for run in runs if run.config is not None]
    leaves = [flat(to_dict(run.config)) for run in configured]
    keys = sorted({name for of_run in leaves for name in of_run})
    rows = [(name, [shown_at(name, of_run) for of_run in leaves]) for name in keys]
    different = [(name, values) for name, values in rows if len(set(values)) > 1]
    if len(configured) > 1 and not different:
        return Section("Configurations", words="They are the same.")
    head = ["key", *(run.name for run in configured)]
    return Section("Where the configurations differ", head=head, rows=[(name, *values) for name, values in different])
