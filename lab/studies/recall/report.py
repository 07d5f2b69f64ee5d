"""The report of a study of facts: a table, a picture, and the text around them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, TypeAlias

from lab.facts import GUESS_NATS
from lab.studies.compare.rules import ModelFigures, inequalities
from lab.studies.recall.told import MOST_ASKED
from pretrain.config.schema import RunConfig
from tools.common.drawing import model_colours
from tools.parameter_table import markdown_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from lab.studies.recall.asking import Recall

Recalls: TypeAlias = Mapping[str, Mapping[int, "Sequence[Recall]"]]
"""Recalls by model and number of facts, seed by seed."""


def table(figures: Sequence[ModelFigures], found: Recalls) -> str:
    """Markdown: a row per model, and per number of facts the share that it knows and the nats of a value; of several
    seeds means, with the lowest and the highest share."""
    numbers = sorted({number for of_model in found.values() for number in of_model})
    rows = []
    for model in figures:
        unequal = inequalities(model, figures[0]).get("flops")
        cells = [model.name, f"{model.total / 1e6:.3f}M"]
        cells.append(f"{model.forward_flops_per_token / 1e6:.3f}" + (f" (**{unequal:+.1%}**)" if unequal else ""))
        cells += [_cell(found[model.name].get(number, ())) for number in numbers]
        rows.append(tuple(cells))
    head = ("model", "parameters", "forward MFLOPs per token", *(f"{number:,} facts" for number in numbers))
    return markdown_table(head, rows)


def _cell(recalled: Sequence[Recall]) -> str:
    if not recalled:
        return "not run"
    shares = [of_seed.accuracy for of_seed in recalled]
    among = f" ({min(shares):.1%} to {max(shares):.1%})" if len(shares) > 1 else ""
    return f"{fmean(shares):.1%}{among}, {fmean(of_seed.nats for of_seed in recalled):.2f}"


def report(
    config: RunConfig,
    figures: Sequence[ModelFigures],
    found: Recalls,
    *,
    notes: Sequence[str],
    seeds: Sequence[int],
    plot_name: str,
    command: str,
) -> str:
    """The part of a report between its marks.

    Args:
        config: configuration of any of the models, which train alike.
        notes: sentences on models that are not in the table.
    """
    train = config.train
    on_others = "".join(f"- {note}\n" for note in notes) + "\n" * bool(notes)
    of_seeds = f"seed {seeds[0]}" if len(seeds) == 1 else f"seeds {', '.join(map(str, seeds))}, in means"
    return f"""\
{len(figures)} models, each trained on {train.num_steps * train.tokens_per_step:,} bytes of documents that state so many facts: \
{train.num_steps} steps of {train.global_batch_size} x {train.sequence_length}, weights and facts from {of_seeds}. \
Then they are asked for the values of at most {MOST_ASKED:,} of them: the share whose value they know, and the nats that a value costs \
(guessing its two letters costs {GUESS_NATS:.2f}).

{table(figures, found)}

{on_others}![Facts known]({plot_name})

Made by

```
{command}
```
"""


def plot(found: Recalls) -> Figure:
    """Share of facts known, and nats of a value, against the number of facts: a line per model, of means over seeds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), layout="constrained")
    known, nats = figure.subplots(1, 2)
    for axes in (known, nats):
        model_colours(axes)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda number, _: f"{number:,.0f}")
        axes.set_xlabel("facts")
        axes.grid(alpha=0.4)
    for name, of_model in found.items():
        if of_model:
            numbers = sorted(of_model)
            shares = [fmean(of_seed.accuracy for of_seed in of_model[number]) for number in numbers]
            costs = [fmean(of_seed.nats for of_seed in of_model[number]) for number in numbers]
            known.plot(numbers, shares, marker="o", markersize=4, label=name)
            nats.plot(numbers, costs, marker="o", markersize=4)
    known.set_ylabel("share of facts known")
    known.set_ylim(0, 1)
    nats.set_ylabel("nats per value")
    nats.axhline(GUESS_NATS, color="grey", linestyle=":")
    nats.set_ylim(bottom=0)
    figure.legend(loc="outside lower center", ncols=4, frameon=False)
    return figure
