"""Leads of memories over their controls, seed by seed, and a picture of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, TypeAlias

from lab.studies.compare.controls import MEANINGS, Controlled
from lab.studies.compare.runs import RunResult
from tools.common.drawing import model_colours

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Leads: TypeAlias = dict[str, dict[str, list[float]]]
"""Nats per token by which a control loses more, seed by seed, by model and control."""

_MARKERS = ("o", "s", "D", "^", "v", "P")


def leads(
    controlled: Sequence[Controlled],
    results: Mapping[str, Sequence[RunResult]],
    of_controls: Mapping[str, Sequence[RunResult]],
) -> Leads:
    """Leads with the seeds that a model and its control are both done with, in the seeds' order."""
    return {
        each.model.name: {
            name: [
                its.validation_loss - own.validation_loss
                for own, its in zip(results.get(each.model.name, ()), of_controls.get(control.name, ()), strict=False)
            ]
            for name, control in each.controls.items()
        }
        for each in controlled
    }


def leads_picture(found: Leads) -> Figure:
    """A row per model: a mark per control at the mean lead over it, with a line from the lowest to the highest."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 1.8 + 0.6 * len(found)), layout="constrained")
    axes = figure.subplots()
    model_colours(axes)
    axes.grid(alpha=0.4)
    axes.axvline(0, color="grey")
    axes.xaxis.set_major_formatter(lambda nats, _: f"{nats:+g}" if nats else "0")
    axes.set_xlabel("nats per token ahead of the control")
    names = [name for name in MEANINGS if any(of_model.get(name) for of_model in found.values())]
    for index, name in enumerate(names):
        # Controls of one model do not hide each other.
        shift = (index - (len(names) - 1) / 2) * 0.7 / len(names)
        rows = [(row + shift, of_model[name]) for row, of_model in enumerate(found.values()) if of_model.get(name)]
        means = [fmean(seeds) for _, seeds in rows]
        axes.errorbar(
            means,
            [row for row, _ in rows],
            xerr=[
                [mean - min(seeds) for mean, (_, seeds) in zip(means, rows, strict=True)],
                [max(seeds) - mean for mean, (_, seeds) in zip(means, rows, strict=True)],
            ],
            marker=_MARKERS[index % len(_MARKERS)],
            markersize=5,
            linestyle="none",
            label=name,
        )
    axes.set_yticks(range(len(found)), list(found))
    axes.set_ylim(len(found) - 0.5, -0.5)
    if names:
        figure.legend(loc="outside right upper", frameon=False)
    return figure
