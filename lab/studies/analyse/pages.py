"""Tables and pages of analyses: one HTML file that needs nothing else."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from tools.common.drawing import model_colours, svg
from tools.common.words import aligned
from tools.templates import render

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Found: TypeAlias = Mapping[str, Any]
"""Findings of a run: the content of its file."""


def table_and_page(name: str, found: Sequence[Found]) -> tuple[str, str]:
    """The table of an analysis as text, and its page."""
    about, head, rows, figure = _PAGES[name](found)
    names = ", ".join(str(of_run["name"]) for of_run in found)
    values = {"head": head, "rows": rows, "figure": _inline(svg(figure))}
    text = render("analysis.html", Path(__file__).parent, title=f"{names}: {about}", names=names, about=about, **values)
    return "\n".join(aligned([head, *rows], right=True)), text


def _inline(text: str) -> str:
    """The `<svg>` element of an SVG file."""
    return text[text.index("<svg") :]


_Page: TypeAlias = "tuple[str, list[str], list[list[str]], Figure]"


def frequency_page(found: Sequence[Found]) -> _Page:
    """Losses by bin, side by side, and what later runs gain over the first."""
    head = ["bin", "counts", "types", "tokens", *(str(of_run["name"]) for of_run in found)]
    head += [f"{of_run['name']} gains" for of_run in found[1:]]
    rows = []
    for of_bin in zip(*(of_run["bins"] for of_run in found), strict=True):
        first = of_bin[0]
        counts = f"{first['lowest_count']:,}-{first['highest_count']:,}"
        row = [str(first["bin"]), counts, f"{first['types']:,}", f"{first['tokens']:,}"]
        row += [_nats(each["nats"]) for each in of_bin]
        row += [_gain(first["nats"], each["nats"]) for each in of_bin[1:]]
        rows.append(row)
    others = [of_run["in_no_bin"] for of_run in found]
    row = ["none", "-", "-", f"{others[0]['tokens']:,}", *(_nats(each["nats"]) for each in others)]
    rows.append([*row, *(_gain(others[0]["nats"], each["nats"]) for each in others[1:])])
    figure, (axes,) = _panels(1)
    model_colours(axes)
    for of_run in found:
        points = [(each["bin"], each["nats"]) for each in of_run["bins"] if each["nats"] is not None]
        axes.plot(*zip(*points, strict=True), marker="o", label=of_run["name"])
    axes.set_xlabel("bin of equally many kinds of tokens, the rarest first")
    axes.set_ylabel("nats per token")
    axes.set_xticks(range(len(found[0]["bins"])))
    axes.legend(frameon=False)
    return "Loss by how often a token comes in training", head, rows, figure


def _nats(nats: float | None) -> str:
    return "-" if nats is None else f"{nats:.4f}"


def _gain(before: float | None, after: float | None) -> str:
    return "-" if before is None or after is None else f"{before - after:+.4f} ({(before - after) / before:+.1%})"


def layers_page(found: Sequence[Found]) -> _Page:
    """Page on the worth of each layer's memory."""
    (of_run,) = found
    whole = of_run["nats"]
    rows = [["none", f"{whole:.4f}", "", f"{_exp(whole):.4g}", ""]]
    changes = []
    for layer in of_run["layers"]:
        more = layer["nats"] - whole
        changes.append(100 * (_exp(more) - 1))
        change = f"{changes[-1]:+.2f}%"
        rows.append(
            [
                _label(layer, of_run["layers"]),
                f"{layer['nats']:.4f}",
                f"{more:+.4f}",
                f"{_exp(layer['nats']):.4g}",
                change,
            ]
        )
    figure, (axes,) = _panels(1)
    axes.bar(range(len(changes)), changes)
    # A layer may be worth a thousand others.
    axes.set_yscale("symlog", linthresh=1)
    axes.set_xticks(range(len(changes)), [_label(layer, of_run["layers"]) for layer in of_run["layers"]])
    axes.set_xlabel("block whose memory adds nothing")
    axes.set_ylabel("change of perplexity in %")
    head = ["left out", "nats per token", "more nats", "perplexity", "change"]
    return "What each layer's memory is worth", head, rows, figure


def _label(layer: Mapping[str, Any], layers: Sequence[Mapping[str, Any]]) -> str:
    """A memory layer's block, and its family where the block has two."""
    block = layer["block"]
    return f"{block}, {layer['family']}" if sum(other["block"] == block for other in layers) > 1 else str(block)


def _exp(nats: float) -> float:
    return math.exp(nats) if nats < 700 else math.inf


def routing_page(found: Sequence[Found]) -> _Page:
    """Mean weights by layer and slot; of the last layer by bin and slot; of the last slot by layer and bin."""
    (of_run,) = found
    slots, layers = list(of_run["slots"]), of_run["layers"]
    blocks = [str(layer["block"]) for layer in layers]
    rows = [[f"block {layer['block']}", *(f"{weight:.4f}" for weight in layer["mean"])] for layer in layers]
    bins = [str(number) for number in range(len(layers[-1]["by_bin"]))]
    empty = [math.nan] * len(slots)
    last = [row or empty for row in layers[-1]["by_bin"]]
    rows += [[f"block {blocks[-1]}, bin {number}", *map(_weight, row)] for number, row in zip(bins, last, strict=True)]
    by_layer = [[(row or empty)[-1] for row in layer["by_bin"]] for layer in layers]
    figure, panels = _panels(3)
    _heat(panels[0], [layer["mean"] for layer in layers], blocks, slots, "block", "slot", "Mean over all tokens")
    _heat(panels[1], last, bins, slots, "bin, the rarest first", "slot", f"Block {blocks[-1]}, by frequency")
    title = f"Slot {slots[-1]}, by block and frequency"
    _heat(panels[2], by_layer, blocks, bins, "block", "bin, the rarest first", title)
    return "Weights of slots", ["", *slots], rows, figure


def _weight(weight: float) -> str:
    return "-" if math.isnan(weight) else f"{weight:.4f}"


def collapse_page(found: Sequence[Found]) -> _Page:
    """Distances by layer, of each category and run; relative to the states' lengths beside them."""
    kinds = [(of_run["name"], kind, figures) for of_run in found for kind, figures in of_run["categories"].items()]
    num_layers = max(len(figures["distance"]) for *_, figures in kinds)
    layers = ["embedding", *(f"after {block}" for block in range(num_layers - 1))]
    head = ["run", "tokens", "", *layers]
    rows = []
    for run, kind, figures in kinds:
        for key in ("distance", "relative"):
            cells = [f"{value:.4g}" for value in figures[key]]
            rows.append([run, kind, key, *cells, *[""] * (num_layers - len(cells))])
    figure, panels = _panels(2)
    for axes, key, label in zip(
        panels, ("distance", "relative"), ("distance", "distance / mean length of the states"), strict=True
    ):
        model_colours(axes)
        for run, kind, figures in kinds:
            axes.plot(range(len(figures[key])), figures[key], marker=".", label=f"{run}: {kind}")
        axes.set_ylim(bottom=0)
        axes.set_xlabel("blocks passed")
        axes.set_ylabel(label)
    panels[0].legend(frameon=False, fontsize="small")
    return "How far apart two tokens are in the same context", head, rows, figure


def heads_page(found: Sequence[Found]) -> _Page:
    """Importance by block and head, a panel per run; in the table also the mean and the variance of a block's heads."""
    nll = found[0]["nll"]
    readings = [of_run["readings"][nll] for of_run in found]
    most = max(len(scores) for reading in readings for scores in reading["scores"])
    rows = []
    for of_run, reading in zip(found, readings, strict=True):
        for block, scores in enumerate(reading["scores"]):
            place = f"{block} (memory)" if block in of_run["inserted"] else str(block)
            mean, variance = sum(scores) / len(scores), reading["variance_of_heads"][block]
            cells = [f"{score:.4g}" for score in scores]
            rows.append([of_run["name"], place, f"{mean:.4g}", f"{variance:.4g}", *cells, *[""] * (most - len(cells))])
    figure, panels = _panels(len(found))
    for axes, of_run, reading in zip(panels, found, readings, strict=True):
        scores = reading["scores"]
        blocks = [f"{block} M" if block in of_run["inserted"] else str(block) for block in range(len(scores))]
        _heat(axes, scores, blocks, [str(head) for head in range(len(scores[0]))], "block", "head", of_run["name"])
    head = ["run", "block", "mean", "variance", *(f"head {number}" for number in range(most))]
    return f"How much the loss, the {nll} over a window's tokens, hangs on each head", head, rows, figure


def ngrams_page(found: Sequence[Found]) -> _Page:
    """Loads of rows by layer and order; gates by how often an n-gram comes, and with rows of other tokens."""
    (of_run,) = found
    head = ["block", "order", "rows", "read", "n-grams", "per row", "most", "alone", "hottest row", "hottest 1 %"]
    rows = [
        [
            *(str(layer["block"]), str(load["order"]), f"{load['rows']:,}", f"{load['rows_read']:,}"),
            *(f"{load['ngrams']:,}", f"{load['ngrams_per_row']:.2f}", f"{load['most_ngrams']:,}"),
            *(f"{load[key]:.2%}" for key in ("alone", "hottest_row", "hottest_percent")),
        ]
        for layer in of_run["layers"]
        for load in layer["orders"]
    ]
    counts = [str(least) for least in of_run["counts"]]
    figure, (gates, per_row) = _panels(2)
    for layer in of_run["layers"]:
        for key, style in (("gates", "-"), ("gates_shuffled", ":")):
            points = [(at, gate) for at, gate in enumerate(layer[key]) if gate is not None]
            name = f"block {layer['block']}" + (", rows of others" if key != "gates" else "")
            gates.plot(*zip(*points, strict=True), style, marker="o", label=name)
        rows.append([f"gate, block {layer['block']}", *_gates(counts, layer["gates"])])
        orders = layer["orders"]
        per_row.plot(
            [load["order"] for load in orders],
            [load["ngrams_per_row"] for load in orders],
            marker="o",
            label=f"block {layer['block']}",
        )
    rows.append(["nats per token", f"{of_run['nats']:.4f}", "rows of others", f"{of_run['nats_shuffled']:.4f}"])
    gates.set_xticks(range(len(counts)), counts)
    gates.set_xlabel(f"times that an n-gram comes in {of_run['sampled']:,} tokens of training, at least")
    gates.set_ylabel("mean gate")
    gates.legend(frameon=False)
    per_row.set_xlabel("tokens of an n-gram")
    per_row.set_ylabel("n-grams of a row that is read")
    per_row.set_xticks(sorted({load["order"] for layer in of_run["layers"] for load in layer["orders"]}))
    per_row.legend(frameon=False)
    width = max(map(len, [head, *rows]))
    padded = [[*row, *[""] * (width - len(row))] for row in [head, *rows]]
    return "Rows of n-grams, and their gates", padded[0], padded[1:], figure


def _gates(counts: Sequence[str], gates: Sequence[float | None]) -> list[str]:
    return [f"{least}+: {gate:.3f}" for least, gate in zip(counts, gates, strict=True) if gate is not None]


def _panels(number: int) -> tuple[Figure, Sequence[Axes]]:
    """Panels above one another."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6 * number), layout="constrained")
    return figure, list(figure.subplots(number, squeeze=False)[:, 0])


def _heat(
    axes: Axes,
    values: Sequence[Sequence[float]],
    rows: Sequence[str],
    columns: Sequence[str],
    row_label: str,
    column_label: str,
    title: str,
) -> None:
    drawn = axes.imshow(values, cmap="viridis", aspect="auto", vmin=0)
    axes.set_title(title, fontsize="medium")
    axes.set_yticks(range(len(rows)), rows)
    axes.set_xticks(range(len(columns)), columns)
    axes.set_ylabel(row_label)
    axes.set_xlabel(column_label)
    axes.figure.colorbar(drawn, ax=axes, shrink=0.8)


_PAGES: Mapping[str, Callable[[Sequence[Found]], _Page]] = {
    "frequency": frequency_page,
    "layer-drop": layers_page,
    "routing": routing_page,
    "collapse": collapse_page,
    "heads": heads_page,
    "ngrams": ngrams_page,
}
