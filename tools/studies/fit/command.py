"""`megamem study fit`: fit the losses of finished runs against compute, rows and rows read, family by family."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from pretrain.config.stages import load_config
from pretrain.data.blend import model_vocab_size
from pretrain.data.manifest import open_saved_tokenizer
from pretrain.errors import ConfigError
from pretrain.planning.costs.formulas import training_flops_per_token
from pretrain.run.folder import RunFolder
from tools.parameter_table import markdown_table
from tools.parsers import add_command
from tools.studies.compare.runs import read_result
from tools.studies.fit.law import Law, fit, lacking

_EPILOG = """\
examples:
  megamem study compare configs/compare/widths/dense_*.yaml --nproc 1 --seeds 2 --run-dir runs/sizes
  megamem study fit runs/sizes
  megamem study fit runs/sizes runs/rows --hold-out dense_256,ultramemv2_256

Reads the runs NAME/seed_N of comparisons, whose models may have seen other numbers of tokens; a model's loss is the mean
over its seeds. For each family of memories, for mixtures and for dense models it fits E + A / C^a, with B / N^b and
D / K^c for families of which models have other rows N or read other numbers of them, K, and says by how much the
models that are held out were missed: by default the one of each family with most compute.
"""
_WORDS = {"compute": "C, TFLOPs", "rows": "N, rows", "reads": "K, rows read per token"}


@dataclass(frozen=True)
class Point:
    """One model of a comparison.

    Attributes:
        name: of the model.
        family: its kind of memory, `experts` or `dense`.
        amounts: of compute in a training (TFLOPs), of rows and of rows read per token, by the keys of `_WORDS`.
        loss: mean over seeds of the last validation loss.
        num_seeds: that there are.
    """

    name: str
    family: str
    amounts: dict[str, float]
    loss: float
    num_seeds: int


def add_parser(subparsers: Any) -> None:
    """Adds `fit` to the studies of `megamem`."""
    parser = add_command(
        subparsers,
        "fit",
        "fit losses of several sizes against compute, rows and rows read",
        _EPILOG,
        "Fit the losses of finished comparisons, and predict the models that are held out.",
    )
    parser.add_argument("folders", metavar="DIR", nargs="+", type=Path, help="the --run-dir of comparisons")
    parser.add_argument(
        "--hold-out",
        type=lambda text: tuple(text.split(",")),
        metavar="NAME,NAME",
        help="models that a fit does not see (default: the one of each family with most compute)",
    )
    parser.set_defaults(func=run_fit)


def run_fit(args: argparse.Namespace) -> int:
    """Print the fits."""
    points = [point for folder in args.folders for point in read_points(folder)]
    if not points:
        raise ConfigError(
            f"{', '.join(map(str, args.folders))}: no finished run NAME/seed_N is there: name the --run-dir of a "
            "`megamem study compare`"
        )
    print(report(points, args.hold_out))
    return 0


def read_points(folder: Path) -> list[Point]:
    """The models of a comparison that have a finished run.

    Raises:
        ConfigError: a run's configuration cannot be read.
    """
    points = []
    for model in sorted(path for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else ():
        runs = [RunFolder(path) for path in sorted(model.glob("seed_*"))]
        found = [point for run in runs if (point := _point(model.name, run)) is not None]
        if not found:
            continue
        if len({tuple(point.amounts.items()) for point in found}) > 1:
            raise ConfigError(f"{model} has runs of several models or lengths: give each its own folder")
        points.append(
            Point(found[0].name, found[0].family, found[0].amounts, fmean(each.loss for each in found), len(found))
        )
    return points


def _point(name: str, run: RunFolder) -> Point | None:
    if not run.config.exists():
        return None
    config = load_config(run.config)
    result = read_result(run.metrics, config)
    if result is None:
        return None
    model = config.model
    if model.vocab_size is None:
        sized = load_config(
            run.config, [f"model.vocab_size={model_vocab_size(model, open_saved_tokenizer(run.tokenizer))}"]
        )
        model = sized.model
    tokens = config.train.num_steps * config.train.tokens_per_step
    amounts = {"compute": tokens * training_flops_per_token(model, config.train.sequence_length) / 1e12}
    if model.memories:
        amounts["rows"] = float(sum(bank.num_rows for bank in model.memory_plan.banks))
        amounts["reads"] = float(sum(layer.memory.lookup.rows for layer in model.memory_layers))
    family = model.memory_kinds if model.memories or model.moe is None else "experts"
    return Point(name, family, amounts, result.validation_loss, 1)


def report(points: Sequence[Point], hold_out: Sequence[str] | None = None) -> str:
    """Markdown: laws, what they miss by, and which models are lacking.

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
    laws, predictions, lack = [], [], []
    for family in dict.fromkeys(point.family for point in points):
        of_family = [point for point in points if point.family == family]
        held = [p for p in of_family if p.name in hold_out] if hold_out else [largest(of_family)]
        seen = [p for p in of_family if p not in held]
        amounts, missing = _resources(seen)
        lack += [f"- {family}: {text}" for text in missing]
        try:
            law = fit(amounts, [p.loss for p in seen])
        except ValueError as error:
            lack.append(f"- {family}, no fit: {error}")
            continue
        lack += [f"- {family}: more {name} do not lower these losses" for name in law.useless]
        lack += [f"- {family}: these losses leave the exponent of {name} open" for name in law.unsettled]
        laws.append((family, ", ".join(p.name for p in seen), formula(law), f"{law.residual:.4f}"))
        nearest = largest(seen)
        for point in held:
            predicted = law.predict({name: point.amounts[name] for name in amounts})
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
    amounts_table = markdown_table(
        ("model", "family", *_WORDS.values(), "seeds", "validation loss"),
        [
            (
                p.name,
                p.family,
                *(f"{p.amounts[name]:.6g}" if name in p.amounts else "" for name in _WORDS),
                str(p.num_seeds),
                f"{p.loss:.4f}",
            )
            for p in points
        ],
    )
    head = (
        "held out",
        "compute over the largest fitted",
        "loss",
        "predicted",
        "off by",
        "largest fitted one is off by",
    )
    parts = [amounts_table]
    if laws:
        parts.append(markdown_table(("family", "fitted to", "law", "misses them by"), laws))
        parts.append(markdown_table(head, predictions))
    if lack:
        parts.append("\n".join(lack))
    return "\n\n".join(parts)


def largest(points: Sequence[Point]) -> Point:
    """The model with most compute."""
    return max(points, key=lambda point: point.amounts["compute"])


def _resources(points: Sequence[Point]) -> tuple[dict[str, list[float]], list[str]]:
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
            missing.append(f"{name} have no term, for there are models of {there} alone: train {more} other amounts")
    return amounts, missing


def formula(law: Law) -> str:
    """The law in the resources' own units."""
    symbols = {"compute": "C", "rows": "N", "reads": "K"}
    terms = [
        f"{factor * law.means[name] ** law.exponents[name]:.4g} / {symbols[name]}^{law.exponents[name]:.3f}"
        for name, factor in law.factors.items()
        if factor > 0
    ]
    return " + ".join([f"{law.floor:.3f}", *terms])
