"""Fits of families, and their report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lab.studies.fit.law import Law, fit, lacking
from lab.studies.fit.points import RESOURCES, Point, largest
from pretrain.errors import ConfigError
from tools.parameter_table import markdown_table


@dataclass(frozen=True)
class Fit:
    """A family's models, and the law of those that it may see.

    Attributes:
        family: its name.
        seen: models that the law is fitted to.
        held: models that it is to predict.
        law: None: these models do not settle one.
        lack: missing things, in words.
    """

    family: str
    seen: tuple[Point, ...]
    held: tuple[Point, ...]
    law: Law | None
    lack: tuple[str, ...]


def fits(points: Sequence[Point], hold_out: Sequence[str] | None = None) -> list[Fit]:
    """A fit of each family.

    Args:
        hold_out: names of models that fits do not see; None: the one of each family with most compute.

    Raises:
        ConfigError: a name is of no model.
    """
    if unknown := sorted(set(hold_out or ()) - {point.name for point in points}):
        raise ConfigError(
            f"--hold-out names {', '.join(unknown)}, which has no finished run; there are "
            f"{', '.join(sorted({point.name for point in points}))}"
        )
    families = dict.fromkeys(point.family for point in points)
    return [_fit(family, [point for point in points if point.family == family], hold_out) for family in families]


def _fit(family: str, points: Sequence[Point], hold_out: Sequence[str] | None) -> Fit:
    held = tuple(p for p in points if p.name in hold_out) if hold_out else (largest(points),)
    seen = tuple(p for p in points if p not in held)
    amounts, lack = _resources(family, seen)
    law = None
    try:
        law = fit(amounts, [p.loss for p in seen])
    except ValueError as error:
        lack.append(f"{family}, no fit: {error}")
    else:
        lack += [f"{family}: more {name} do not lower these losses" for name in law.useless]
        lack += [f"{family}: these losses leave the exponent of {name} open" for name in law.unsettled]
    return Fit(family, seen, held, law, tuple(lack))


def _resources(family: str, points: Sequence[Point]) -> tuple[dict[str, list[float]], list[str]]:
    """Amounts of the resources that a fit of these models has a term for, and what keeps out the others, in words.

    Compute always has one. A resource of which all have as much is a part of E, and nothing is said of it elsewhere.
    """
    amounts: dict[str, list[float]] = {"compute": [p.amounts["compute"] for p in points]}
    missing = []
    for name in ("rows", "reads"):
        if not all(name in p.amounts for p in points) or not points:
            continue
        values = [p.amounts[name] for p in points]
        if (more := lacking({name: values}).get(name, 0)) == 0:
            amounts[name] = values
        else:
            there = ", ".join(f"{value:,.0f}" for value in sorted(set(values)))
            missing.append(
                f"{family}: {name} have no term, for there are models of {there} alone: train {more} other amounts"
            )
    return amounts, missing


def report(found: Sequence[Fit]) -> str:
    """Markdown: laws, what they miss by, and which models are lacking."""
    laws, predictions = [], []
    for each in found:
        if each.law is None:
            continue
        laws.append((each.family, ", ".join(p.name for p in each.seen), formula(each.law), f"{each.law.residual:.4f}"))
        nearest = largest(each.seen)
        for point in each.held:
            predicted = each.law.predict(point.amounts)
            predictions.append(
                (
                    point.name,
                    f"{point.amounts['compute'] / nearest.amounts['compute']:.1f}",
                    f"{point.loss:.4f}",
                    f"{predicted:.4f}",
                    f"{predicted - point.loss:+.4f}",
                    f"{nearest.loss - point.loss:+.4f}",
                )
            )
    head = (
        "held out",
        "compute over the largest fitted",
        "loss",
        "predicted",
        "off by",
        "largest fitted one is off by",
    )
    parts = [_amounts_table(found)]
    if laws:
        parts.append(markdown_table(("family", "fitted to", "law", "misses them by"), laws))
        parts.append(markdown_table(head, predictions))
    if lack := [f"- {text}" for each in found for text in each.lack]:
        parts.append("\n".join(lack))
    return "\n\n".join(parts)


def _amounts_table(found: Sequence[Fit]) -> str:
    return markdown_table(
        ("model", "family", *RESOURCES.values(), "seeds", "validation loss"),
        [
            (
                p.name,
                p.family,
                *(f"{p.amounts[name]:.6g}" if name in p.amounts else "" for name in RESOURCES),
                str(p.num_seeds),
                f"{p.loss:.4f}",
            )
            for each in found
            for p in sorted((*each.seen, *each.held), key=lambda point: point.name)
        ],
    )


def formula(law: Law) -> str:
    """The law in the resources' own units."""
    symbols = {"compute": "C", "rows": "N", "reads": "K"}
    terms = [
        f"{factor * law.means[name] ** law.exponents[name]:.4g} / {symbols[name]}^{law.exponents[name]:.3f}"
        for name, factor in law.factors.items()
        if factor > 0
    ]
    return " + ".join([f"{law.floor:.3f}", *terms])
