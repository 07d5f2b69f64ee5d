"""Answers of runs, as a table and as heat maps of lengths and depths."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lab.suite.plan import Answers, Cell
from parallel.machine.refusals import naming

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage


def table(answers: Answers) -> str:
    """A block per task: a line per length, and per depth the share of exact answers, with that of chosen ones."""
    told = f"with {' '.join(answers.overrides)}" if answers.overrides else ""
    chance = f" / chosen among {1 + answers.num_wrong}" if answers.num_wrong else ""
    lines = [f"{answers.checkpoint} {told}".rstrip(), f"exact answers{chance}, by length and depth:"]
    for task in _in_order(cell.task for cell in answers.cells):
        of_task = [cell for cell in answers.cells if cell.task == task]
        depths = sorted({cell.depth for cell in of_task})
        lines.append(f"  {task:<14}" + "".join(f"{f'depth {depth:g}':>14}" for depth in depths))
        for length in sorted({cell.length for cell in of_task}):
            row = [cell for cell in of_task if cell.length == length]
            lines.append(f"  {length:>14,}" + "".join(f"{_figures(cell):>14}" for cell in row))
    return "\n".join(lines)


def _figures(cell: Cell) -> str:
    return f"{cell.exact:.0%}" if cell.chosen is None else f"{cell.exact:.0%} / {cell.chosen:.0%}"


def draw(answers: Sequence[Answers], path: Path) -> None:
    """Write the picture.

    Raises:
        OSError: the file cannot be written.
    """
    with naming(path):
        picture(answers).savefig(path, dpi=150)


def picture(answers: Sequence[Answers]) -> Figure:
    """Heat maps of exact answers: a row per task, a column per run."""
    from matplotlib.figure import Figure

    tasks = _in_order(cell.task for of_run in answers for cell in of_run.cells)
    lengths = len({cell.length for of_run in answers for cell in of_run.cells})
    width = max(2.6, 0.75 * lengths + 1.2)
    figure = Figure(figsize=(width * len(answers) + 1, 2.3 * len(tasks) + 0.6), layout="constrained")
    panels = figure.subplots(len(tasks), len(answers), squeeze=False)
    for task, row in zip(tasks, panels, strict=True):
        for of_run, axes in zip(answers, row, strict=True):
            drawn = _heat(axes, [cell for cell in of_run.cells if cell.task == task])
            axes.set_title(f"{of_run.name}: {task}", fontsize="medium")
    figure.colorbar(drawn, ax=panels, label="share of exact answers", shrink=0.6)
    return figure


def _heat(axes: Axes, cells: Sequence[Cell]) -> AxesImage:
    lengths, depths = sorted({cell.length for cell in cells}), sorted({cell.depth for cell in cells})
    exact = {(cell.depth, cell.length): cell.exact for cell in cells}
    values = [[exact[depth, length] for length in lengths] for depth in depths]
    drawn = axes.imshow(values, vmin=0, vmax=1, cmap="viridis", aspect="auto")
    for y, of_depth in enumerate(values):
        for x, value in enumerate(of_depth):
            axes.text(
                x,
                y,
                f"{value:.0%}",
                ha="center",
                va="center",
                fontsize="small",
                color="black" if value > 0.6 else "white",
            )
    axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths])
    axes.set_yticks(range(len(depths)), [f"{depth:g}" for depth in depths])
    axes.set_xlabel("tokens")
    axes.set_ylabel("depth")
    return drawn


def _in_order(names: Iterator[str]) -> list[str]:
    return list(dict.fromkeys(names))
