"""Losses of a search of one number, drawn over it: whether models of other widths want the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING

from lab.studies.compare.tuning import Trial, Tuning
from tools.common.drawing import model_colours

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def swept_key(tuning: Tuning) -> str | None:
    """The key of a search that has no other, if its values are numbers above zero."""
    if len(tuning.values) != 1:
        return None
    ((key, values),) = tuning.values.items()
    return key if all(type(value) in (int, float) and value > 0 for value in values) else None


def sweep_picture(key: str, trials: Mapping[str, Sequence[Trial]]) -> Figure:
    """A line per model over the key's values, with the best marked."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    model_colours(axes)
    axes.grid(alpha=0.4)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xlabel(key)
    axes.set_ylabel("validation loss in nats per token")
    value_of = attrgetter(key)
    for name, of_model in trials.items():
        points = sorted((float(value_of(trial.config)), trial.loss) for trial in of_model)
        (line,) = axes.plot(*zip(*points, strict=True), label=name)
        best = min(points, key=lambda point: point[1])
        axes.plot(*best, "o", color=line.get_color())
    figure.legend(loc="outside right upper", frameon=False)
    return figure
