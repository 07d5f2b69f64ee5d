"""The report of a comparison of ways to grow a model: table, order and plot."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lab.studies.compare import report as of_models
from lab.studies.compare.rules import ModelFigures
from lab.studies.compare.runs import RunResult
from pretrain.config.schema import RunConfig
from tools.common.drawing import NUM_BINS
from tools.parameter_table import markdown_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class GrownFigures:
    """Costs of a grown model.

    Attributes:
        model: figures of the whole model.
        num_added: parameters that the model it was grown from does not have.
        num_trained: parameters that are trained.
    """

    model: ModelFigures
    num_added: int
    num_trained: int


def table(figures: Sequence[GrownFigures], results: Mapping[str, Sequence[RunResult]]) -> str:
    """Markdown: a row per model, the first being the one that was grown."""
    head = ("model", "parameters", "added", "trained", "forward MFLOPs per token", "validation loss", "bits per byte")
    return markdown_table(head, (_cells(of_model, results.get(of_model.model.name, ())) for of_model in figures))


def _cells(figures: GrownFigures, runs: Sequence[RunResult]) -> Iterator[str]:
    yield figures.model.name
    yield f"{figures.model.total:,}"
    yield f"{figures.num_added:,}"
    yield f"{figures.num_trained:,}"
    yield f"{figures.model.forward_flops_per_token / 1e6:.3f}"
    yield from of_models.reached(runs)


def report(
    base: RunConfig,
    grown: Sequence[RunConfig],
    figures: Sequence[GrownFigures],
    results: Mapping[str, Sequence[RunResult]],
    *,
    seeds: Sequence[int],
    plot_name: str,
    command: str,
) -> str:
    """The part of a report between its marks.

    Args:
        base: configuration that the model was trained with.
        grown: configurations that train what was made of it.
        figures: figures of all of them, the model's own first.
        results: results of the finished runs, by the model's name.
        seeds: seeds of the weights.
        plot_name: the plot's file, as seen from the report.
        command: command that makes the report again.
    """
    num_runs, num_done = len(figures) * len(seeds), sum(map(len, results.values()))
    state = "" if num_done == num_runs else f" {num_done} of {num_runs} runs are done."
    paths = ", ".join(entry.path for entry in base.data.datasets)
    continued = {name: runs for name, runs in results.items() if name != base.name}
    return f"""\
{base.name} is trained on {_tokens(base)} of {paths}, and what is made of it on {_tokens(grown[0])} in another order, the same for all.
{of_models.describe_seeds(seeds)}{state}

{table(figures, results)}

{of_models.describe_order(continued, seeds)}
![Loss against tokens and against parameters]({plot_name})

On the left lines are training losses from where the model was grown (means over seeds and over {NUM_BINS} parts of the run), dots validation losses; on \
the right the last of these, with the lowest and the highest. Made by

```
{command}
```
"""


def _tokens(config: RunConfig) -> str:
    train = config.train
    return f"{train.num_steps * train.tokens_per_step:,} tokens ({train.num_steps} steps of {train.global_batch_size} x {train.sequence_length})"


def plot(figures: Sequence[GrownFigures], results: Mapping[str, Sequence[RunResult]]) -> Figure:
    """Plot the grown models as a comparison of models does."""
    return of_models.plot([of_model.model for of_model in figures[1:]], results)
