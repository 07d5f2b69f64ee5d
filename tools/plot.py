"""`megamem plot`: a picture of what runs reached, and of how their memory is read."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parallel.machine.refusals import naming
from pretrain.config.suggest import did_you_mean_path
from pretrain.errors import ConfigError
from pretrain.run.folder import RunFolder
from pretrain.run.not_a_run import refuse_configuration
from pretrain.train.health.memories import describe_faults
from tools.common.drawing import draw_collapse, draw_losses, draw_usage, token_axes
from tools.common.metrics import Curves, Point, curves, read_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_FEWEST_TO_ENLARGE = 8
"""Points of losses in the second half: with fewer there is little to see."""

_INSET = (0.42, 0.38, 0.57, 0.6)
"""Place of the enlarged second half: left, bottom, width and height as shares of the panel's."""

_EPILOG = """\
examples:
  megamem plot runs/quickstart
  megamem plot runs/quickstart runs/dense --output both.png
  megamem plot runs/quickstart docs/quickstart_dense.jsonl

Losses against tokens of every run named (a run's folder, or a file with the rows of one), with dots where it was
evaluated, and their second half enlarged. Below, for the first run that has a memory: the share of each table's rows
that one step reads, and how far its reads are from even (0 nats: every row as often as the others). Blocks whose keys
have collapsed, or whose memory is silent, are named as such.
"""


def add_parser(subparsers: Any) -> None:
    """Adds `plot` to the commands of `megamem`."""
    parser = subparsers.add_parser(
        "plot",
        help="draw the losses of runs, and how their memory is read",
        description="Draw the losses of runs, and how the memory of the first one is read.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("runs", metavar="RUN", type=Path, nargs="+", help="run folders, or metrics.jsonl files")
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="picture to write, in the format of its ending: png, svg, pdf (default: plot.png in the first run's "
        "folder)",
    )
    parser.set_defaults(func=run_plot)


def run_plot(args: argparse.Namespace) -> int:
    """Draws, and says where the picture is."""
    runs = {name_of(path): _read(path) for path in args.runs}
    if len(runs) < len(args.runs):
        raise ConfigError("two of the runs have one name: rename one of their folders, or of their files")
    first: Path = args.runs[0]
    output: Path = args.output or (first if first.is_dir() else first.parent) / "plot.png"
    if output.suffix.lstrip(".").lower() not in (endings := _endings()):
        raise ConfigError(f"--output is {output}, and pictures end with {', '.join(endings)}: name one of these")
    figure = draw(runs)
    try:
        with naming(output):
            output.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(output, dpi=150)
    except ValueError as error:
        raise ConfigError(f"--output is {output}, which cannot be written: {error}") from error
    print(f"picture: {output}", flush=True)
    for name, run in runs.items():
        for sentence in describe_faults(run.dropped_out).values():
            print(f"{name}: {sentence}", flush=True)
    return 0


def _endings() -> list[str]:
    """Endings of the files that pictures can be."""
    from matplotlib.backend_bases import FigureCanvasBase

    return sorted(FigureCanvasBase.get_supported_filetypes())


def name_of(path: Path) -> str:
    """Name of a run in the picture."""
    return path.resolve().name if path.suffix != ".jsonl" else path.stem


def _read(path: Path) -> Curves:
    refuse_configuration(path)
    file = RunFolder(path).metrics if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(
            f"{path} is no run{did_you_mean_path(path)} Name a folder of `megamem train`, or the file {RunFolder(path).metrics.name} of one"
        )
    try:
        rows = read_metrics(file)
        if not rows and file.stat().st_size:
            raise ValueError("it has none")
        found = curves(rows)
        if found.training and not found.training[-1][0]:
            raise ValueError("they do not say after how many tokens (consumed_tokens)")
        return found
    except (ValueError, AttributeError, TypeError, KeyError) as error:
        raise ConfigError(f"{file} does not hold the rows of a run: {error}") from error


def draw(runs: Mapping[str, Curves]) -> Figure:
    """The picture of the runs by name."""
    from matplotlib.figure import Figure

    observed = next(((name, run) for name, run in runs.items() if run.coverage), None)
    num_panels = 1 if observed is None else 3
    figure = Figure(figsize=(9, 2 + 3 * num_panels), layout="constrained")
    panels = figure.subplots(num_panels, sharex=True, squeeze=False)[:, 0]
    for axes in panels:
        token_axes(axes)
        axes.label_outer()
    named = {
        name if run.bits_per_byte is None else f"{name}: {run.bits_per_byte:.3f} bits per byte": [run]
        for name, run in runs.items()
    }
    lines = draw_losses(panels[0], named)
    # Above the panel, whose upper right corner is for the end of the curves.
    panels[0].legend(frameon=False, loc="lower left", bbox_to_anchor=(0, 1), ncols=2)
    _enlarge_the_end(panels[0], named, lines)
    if observed is not None:
        name, run = observed
        panels[1].set_title(f"{name}: what one step reads of its tables", fontsize="medium")
        draw_usage(panels[1], "share of rows read", run.coverage, _labels(run))
        draw_usage(panels[2], "nats from even reads", run.kl_to_uniform, _labels(run))
        if draw_collapse(panels[1], run.even_coverage):
            panels[1].text(
                0.995, 0.01, "shaded: keys collapse", fontsize="small", ha="right", transform=panels[1].transAxes
            )
        panels[2].legend(frameon=False, ncols=2)
    return figure


def _enlarge_the_end(axes: Axes, named: Mapping[str, Sequence[Curves]], lines: Sequence[Sequence[Point]]) -> None:
    """The second half of the losses again, where the panel is empty: there runs differ by less than a line is wide.

    Not where only one of several runs comes that far, or where a run is drawn in that place.
    """
    end = max((line[-1][0] for line in lines), default=0.0)
    drawn = [point for line in lines for point in line]
    drawn += [point for runs in named.values() for run in runs for point in run.validation]
    late = [loss for tokens, loss in drawn if tokens >= end / 2]
    num_late = sum(line[-1][0] > end / 2 for line in lines)
    if len(late) < _FEWEST_TO_ENLARGE or num_late < min(2, len(lines)) or any(map(_is_hidden(axes), drawn)):
        return
    inset = axes.inset_axes(_INSET)
    token_axes(inset)
    draw_losses(inset, named)
    margin = 0.04 * (max(late) - min(late)) or 0.5
    inset.set_xlim(end / 2, axes.get_xlim()[1])
    inset.set_ylim(min(late) - margin, max(late) + margin)
    inset.set(xlabel="", ylabel="")
    inset.tick_params(labelsize="small")
    axes.indicate_inset(inset.viewLim.bounds)


def _is_hidden(axes: Axes) -> Callable[[Point], bool]:
    """Tells whether a point would lie below the enlarged part, as shares of the panel's width and height."""
    (left, right), (low, high) = axes.get_xlim(), axes.get_ylim()
    from_left, from_below, width, height = _INSET

    def is_hidden(point: Point) -> bool:
        x, y = (point[0] - left) / (right - left), (point[1] - low) / (high - low)
        return from_left <= x <= from_left + width and from_below <= y <= from_below + height

    return is_hidden


def _labels(run: Curves) -> dict[int, str]:
    """Names of blocks, with what has become of their memories."""
    found: dict[int, list[str]] = {}
    for finding in run.dropped_out:
        found.setdefault(finding.block, []).append(finding.kind)
    return {
        block: f"block {block}" + (f" ({', '.join(found[block])})" if block in found else "") for block in run.coverage
    }
