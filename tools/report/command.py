"""`megamem report`: a page about runs, for a browser."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from parallel.machine.atomic_write import atomic_write
from tools.common.parsers import add_command
from tools.common.words import describe_size

_EPILOG = """\
examples:
  megamem report runs/quickstart
  megamem report runs/quickstart runs/dense docs/quickstart_dense.jsonl --output both.html

One HTML file that needs no network, for a screen or a phone: how far each run is, losses, learning rates, gradients,
speed, saves, starts and skipped steps against tokens, and block by block how the memory is read. Several runs share
their charts, with a table of the keys in which their configurations differ. A RUN may also be a file of metrics. A run
that is still running can be reported at any time.
"""


def add_parser(subparsers: Any) -> None:
    """Adds `report` to the commands of `megamem`."""
    parser = add_command(subparsers, "report", "a page about runs, for a browser", _EPILOG)
    parser.add_argument("runs", metavar="RUN", type=Path, nargs="+", help="run folders, or metrics.jsonl files")
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="page to write (default: report.html in the first run's folder)"
    )
    parser.set_defaults(func=run_report)


def run_report(args: argparse.Namespace) -> int:
    """Reads, writes, and says where the page is."""
    # NumPy, which `--help` need not wait for.
    from tools.report.page import page
    from tools.report.reading import read_runs

    runs = read_runs(args.runs)
    first: Path = args.runs[0]
    output: Path = args.output or (first if first.is_dir() else first.parent) / "report.html"
    text = page(runs).encode()
    with atomic_write(output) as stream:
        stream.write(text)
    print(f"report: {output} ({describe_size(len(text))})", flush=True)
    return 0
