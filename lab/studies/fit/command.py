"""`megamem study fit`: fit the losses of finished runs against compute, rows and rows read, family by family."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import Any

from lab.pages import Page
from lab.studies.fit.fits import fits, report
from lab.studies.fit.picture import IN_WORDS, picture
from lab.studies.fit.points import read_points
from pretrain.errors import ConfigError
from tools.common.drawing import svg
from tools.common.parsers import add_command

_EPILOG = """\
examples:
  megamem study compare lab/configs/compare/widths/dense_*.yaml --nproc 1 --seeds 2 --run-dir runs/sizes
  megamem study fit runs/sizes
  megamem study fit runs/sizes --report lab/docs/laws.md
  megamem study fit runs/sizes runs/rows --hold-out dense_256,ultramemv2_256

Reads the runs NAME/seed_N of comparisons, whose models may have seen other numbers of tokens; a model's loss is the mean
over its seeds. For each family of memories, for mixtures and for dense models it fits E + A / C^a, with B / N^b and
D / K^c for families of which models have other rows N or read other numbers of them, K, and says by how much the
models that are held out were missed: by default the one of each family with most compute.
"""


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
    parser.add_argument(
        "--report",
        type=Path,
        metavar="FILE",
        help="markdown file to write, or to fill between its marks; the plot goes beside it",
    )
    parser.set_defaults(func=run_fit)


def run_fit(args: argparse.Namespace) -> int:
    """Print the fits, and write them where they are wanted."""
    page = None if args.report is None else Page(args.report, "fit")
    if page is not None:
        page.check()
    points = [point for folder in args.folders for point in read_points(folder)]
    if not points:
        raise ConfigError(
            f"{', '.join(map(str, args.folders))}: no finished run NAME/seed_N is there: name the --run-dir of a "
            "`megamem study compare`"
        )
    found = fits(points, args.hold_out)
    text = report(found)
    print(text)
    if page is not None:
        page.write(_page_text(text, page, args), svg(picture(found)))
        print(f"\nreport: {page.path}\nplot: {page.plot}")
    return 0


def _page_text(text: str, page: Page, args: argparse.Namespace) -> str:
    words = ["megamem", "study", "fit", *map(str, args.folders)]
    words += ["--hold-out", ",".join(args.hold_out)] if args.hold_out else []
    command = shlex.join([*words, "--report", str(args.report)])
    return f"{text}\n\n![Losses and laws over compute]({page.plot.name})\n\n{IN_WORDS} Made by\n\n```\n{command}\n```\n"
