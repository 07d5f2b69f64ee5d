"""Losses of models and laws of families over compute."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from lab.studies.fit.fits import Fit
from lab.studies.fit.points import RESOURCES, largest
from tools.common.drawing import model_colours

if TYPE_CHECKING:
    from matplotlib.figure import Figure

IN_WORDS = (
    "Filled dots are models that a law was fitted to, hollow ones those that it did not see; lines are laws, with the "
    "rows and reads of their family's largest model."
)
_NUM_PARTS = 64


def picture(found: Sequence[Fit]) -> Figure:
    """A panel of losses over compute: dots per family, and a line where it has a law."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    model_colours(axes)
    axes.grid(alpha=0.4)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(lambda amount, _: f"{amount:g}")
    axes.xaxis.set_minor_formatter("")
    axes.set_xlabel(RESOURCES["compute"])
    axes.set_ylabel("validation loss in nats per token")
    for each in found:
        (line,) = axes.plot(*zip(*_course(each), strict=True), label=each.family, linestyle="-" if each.law else "")
        for points, filled in ((each.seen, True), (each.held, False)):
            axes.plot(
                [point.amounts["compute"] for point in points],
                [point.loss for point in points],
                "o",
                color=line.get_color(),
                fillstyle="full" if filled else "none",
            )
    figure.legend(loc="outside right upper", frameon=False)
    return figure


def _course(each: Fit) -> Iterator[tuple[float, float]]:
    """Compute and the law's loss from the family's smallest model to its largest; without a law, its largest alone."""
    points = (*each.seen, *each.held)
    top = largest(points)
    if each.law is None:
        yield top.amounts["compute"], top.loss
        return
    low, high = (limit(point.amounts["compute"] for point in points) for limit in (min, max))
    for part in range(_NUM_PARTS + 1):
        compute = low * (high / low) ** (part / _NUM_PARTS)
        yield compute, each.law.predict({**top.amounts, "compute": compute})
