"""The report of a study of teaching: a table and a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, TypeAlias

from lab.studies.teach.course import Course, Taught
from lab.studies.teach.ways import WAYS
from tools.common.drawing import model_colours
from tools.parameter_table import markdown_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Found: TypeAlias = Mapping[str, Mapping[tuple[str, float], "Sequence[Taught]"]]
"""Results of lessons by model, then by way and rate, seed by seed."""


def last_recall(taught: Taught) -> float:
    """Share of all facts that is known at the end."""
    return fmean(taught.recall[-1])


def table(found: Found, before: Mapping[str, float]) -> str:
    """Markdown: a row per model, way and rate."""
    several = any(
        len(each.known) > 1 for of_model in found.values() for lessons in of_model.values() for each in lessons
    )
    head = ("model", "way", "rate", "facts known", *(("of the first batch",) if several else ()))
    head += ("held-out loss", "seconds", "to be sent, MB")
    rows = []
    for model, of_model in found.items():
        for (way, rate), lessons in of_model.items():
            cells = [model, way, f"{rate:g}", _among([last_recall(each) for each in lessons], "{:.1%}")]
            cells += [_among([each.recall[-1][0] for each in lessons], "{:.1%}")] * several
            lost = fmean(each.known[-1] for each in lessons) - before[model]
            sizes = [each.patch_bytes for each in lessons if each.patch_bytes is not None]
            cells += [f"{lost:+.3f}", f"{fmean(each.seconds for each in lessons):.0f}"]
            rows.append((*cells, f"{fmean(sizes) / 1e6:.1f}" if sizes else "the model"))
    return markdown_table(head, rows)


def _among(values: Sequence[float], form: str) -> str:
    mean = form.format(fmean(values))
    return mean if len(values) == 1 else f"{mean} ({form.format(min(values))} to {form.format(max(values))})"


def report(
    found: Found, before: Mapping[str, float], course: Course, seeds: Sequence[int], plot_name: str, command: str
) -> str:
    """The part of a report between its marks."""
    of_seeds = f"seed {seeds[0]}" if len(seeds) == 1 else f"seeds {', '.join(map(str, seeds))}, in means"
    at_once = "at once" if course.num_batches == 1 else f"in {course.num_batches} batches, one after the other"
    known = "; ".join(f"{name} {nats:.4f}" for name, nats in before.items())
    ways = "\n".join(
        f"- `{name}`: {WAYS[name].what}" for name in dict.fromkeys(way for of in found.values() for way, _ in of)
    )
    return f"""\
{course.num_facts:,} facts (`badu_kepoHM`), taught {at_once}, {course.num_steps} steps of {course.batch_size} sequences each; \
{of_seeds}. A fact is known if every token of its answer is the likeliest. The held-out loss is that on {course.num_windows} windows of the \
models' own text, in nats per token more than before ({known}).

{ways}

{table(found, before)}

![Facts known against what is lost]({plot_name})

Made by

```
{command}
```
"""


def plot(found: Found, before: Mapping[str, float], course: Course) -> Figure:
    """A panel per model: facts known against the held-out loss, a line per way through its rates; of several batches what is known
    of the first one, as others follow, at each way's rate that knows most at the end."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5 * max(1, len(found)), 4.5), layout="constrained")
    panels = figure.subplots(1, len(found), sharey=True, squeeze=False)[0]
    for axes, (model, of_model) in zip(panels, found.items(), strict=True):
        model_colours(axes)
        axes.set_title(model)
        axes.grid(alpha=0.4)
        axes.set_ylim(-0.02, 1.02)
        for way in dict.fromkeys(way for way, _ in of_model):
            of_way = {rate: lessons for (name, rate), lessons in of_model.items() if name == way}
            label = way if axes is panels[0] else None
            if course.num_batches == 1:
                lost = [fmean(each.known[-1] for each in lessons) - before[model] for lessons in of_way.values()]
                known = [fmean(map(last_recall, lessons)) for lessons in of_way.values()]
                axes.plot(lost, known, marker="o", markersize=4, label=label)
            else:
                best = max(of_way.values(), key=lambda lessons: fmean(map(last_recall, lessons)))
                first = [fmean(each.recall[number][0] for each in best) for number in range(course.num_batches)]
                axes.plot(range(1, course.num_batches + 1), first, marker="o", markersize=4, label=label)
        axes.set_xlabel("held-out loss, nats more than before" if course.num_batches == 1 else "batches taught")
    panels[0].set_ylabel("facts known" if course.num_batches == 1 else "known of the first batch")
    figure.legend(loc="outside lower center", ncols=5, frameon=False)
    return figure
