"""Common parts of drawings of runs: losses against tokens, and how the memory is read.

Matplotlib takes a while to import, and most commands do not draw: it is imported where it is used.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from io import StringIO
from typing import TYPE_CHECKING

from pretrain.train.health.memories import COLLAPSED
from tools.common.metrics import Curves, Point, binned, means

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NUM_BINS = 32
"""Parts of the longest run over which the losses of all are averaged."""
_FEWEST_BINS = 8
"""Parts of the shortest run, of which there would be too few to see."""


def token_axes(axes: Axes) -> None:
    """Make it a panel over tokens."""
    model_colours(axes)
    axes.grid(alpha=0.4)
    axes.xaxis.set_major_formatter(lambda tokens, _: f"{tokens / 1e6:g}")
    axes.set_xlabel("million tokens")


def model_colours(axes: Axes) -> None:
    """Colours that colour-blind readers can tell apart, then the same ones dashed and dotted."""
    from cycler import cycler
    from matplotlib import color_sequences

    axes.set_prop_cycle(cycler(linestyle=["-", "--", ":"]) * cycler(color=color_sequences["okabe_ito"]))


def draw_losses(axes: Axes, runs: Mapping[str, Sequence[Curves]], *, start: float = 0.0) -> list[tuple[Point, ...]]:
    """A line of training losses per model, with dots where it was evaluated; means over the runs of each. Lines that
    end before the longest do so with an upright stroke.

    Args:
        axes: axes that are drawn on.
        runs: curves of the runs of each model; models without runs are left out.
        start: share of the tokens before which losses may lie above the panel, as they fall steeply from ln(vocabulary).

    Returns:
        The lines that were drawn.
    """
    axes.set_ylabel("loss in nats per token")
    lines: list[tuple[Point, ...]] = []
    longest = max((run.training[-1][0] for of_model in runs.values() for run in of_model if run.training), default=0.0)
    for name, of_model in runs.items():
        training = [point for run in of_model for point in run.training]
        if not training:
            continue
        # Parts of one size are equally noisy.
        end = max(tokens for tokens, _ in training)
        lines.append(binned(training, NUM_BINS, min(longest, end * NUM_BINS / _FEWEST_BINS)))
        (drawn,) = axes.plot(*zip(*lines[-1], strict=True), label=name)
        if end < longest:
            axes.plot(end, lines[-1][-1][1], "|", markersize=10, color=drawn.get_color())
        if validation := means([point for run in of_model for point in run.validation]):
            axes.plot(*zip(*validation, strict=True), "o", markersize=4, color=drawn.get_color())
    if lines:
        late = [y for line in lines for x, y in line if x >= start * line[-1][0]]
        low, high = axes.dataLim.y0, max(late)
        margin = (high - low) * 0.04 or 0.5
        axes.set_ylim(low - margin, high + margin)
        axes.set_xlim(left=0)
    return lines


def draw_usage(axes: Axes, label: str, of_blocks: Mapping[int, Iterable[Point]], names: Mapping[int, str]) -> None:
    """A line per block with a memory."""
    axes.set_ylabel(label)
    for block, points in of_blocks.items():
        axes.plot(*zip(*points, strict=True), label=names[block])
    axes.set_ylim(bottom=0)


def draw_collapse(axes: Axes, even_coverage: Mapping[int, tuple[Point, ...]]) -> bool:
    """Shade where coverage says that keys have collapsed; whether there is such a range."""
    for course in set(even_coverage.values()):
        tokens, even = zip(*course, strict=True)
        axes.fill_between(tokens, [COLLAPSED * share for share in even], color="tab:red", alpha=0.12, linewidth=0)
    return bool(even_coverage)


def svg(figure: Figure) -> str:
    """The figure as SVG text, the same for the same figure: without a date, and with text as text."""
    from matplotlib import rc_context

    text = StringIO()
    with rc_context({"svg.hashsalt": "megamem", "svg.fonttype": "none"}):
        figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()
