"""Documents that a command reads, and how."""

from __future__ import annotations

import argparse

from pretrain.errors import DataError

_INPUTS_HELP = (
    "files or directories, or the name python-stdlib (the sources of this Python's standard library) or python-packages "
    "(those of the packages that megamem needs, about 100 MB). Directories are read in full, sorted by path; names that "
    "start with a dot are left out. *.jsonl, *.ndjson and *.json are JSON lines, *.csv and *.tsv tables with a header, "
    "*.parquet and *.arrow tables (and so are folders that `datasets` has saved), *.npz arrays 'codes' [N, L] and "
    "'classes' [N], a document each row; every other file is one document of UTF-8 text. Text, lines and CSV are also read "
    "from .gz, .xz, .bz2 and .zst. HTML, PDF, archives and other files that hold no plain text are refused by name"
)
FIELD = "text"
"""Field of a document's text, unless `--field` names another."""


def add_input_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds INPUT, and how its documents are read."""
    parser.add_argument("inputs", nargs="+", metavar="INPUT", help=_INPUTS_HELP)
    parser.add_argument(
        "--field", default=FIELD, help="JSON field, or column of a table, with the text (default: text)"
    )
    parser.add_argument(
        "--text",
        action="store_true",
        help="read every file as one document of UTF-8 text as it is, HTML, JSON and CSV too",
    )
    parser.add_argument(
        "--max-bad",
        type=int,
        default=0,
        metavar="N",
        help="skip and count up to N bad documents (broken JSON, not UTF-8, a truncated archive counts once) before "
        "giving up (default: 0)",
    )


def reads_as_text(args: argparse.Namespace) -> bool:
    """True if every file is one document. Raises DataError for a field that none of them has."""
    if args.text and args.field != FIELD:
        raise DataError("--text takes files as they are, so --field has no effect: leave one out.")
    return bool(args.text)
