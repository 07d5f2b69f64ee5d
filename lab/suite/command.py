"""`megamem data synthetic`: documents of the tasks, in a data set."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from lab.suite.tasks import TASKS
from pretrain.errors import ConfigError
from tools.common.parsers import add_command, command_groups
from tools.common.words import plural

_EPILOG = """\
examples:
  megamem data synthetic data/stdlib --output data/stdlib-synthetic
  megamem data synthetic data/stdlib --output data/retrieval --tasks needle,kv --lengths 256,1024 --documents 8000

Documents of the tasks that `megamem study probe` asks, in the text and with the tokenizer of a prepared data set, to
be blended with it. None of them holds a name that `megamem study probe` asks for.
"""


def add_parser(subparsers: Any) -> None:
    """Adds `synthetic` to the commands of `megamem data`, which are there already."""
    (commands,) = command_groups(subparsers.choices["data"])
    parser = add_command(commands, "synthetic", "documents that reward looking back, to train on", _EPILOG)
    parser.add_argument(
        "source", type=Path, metavar="DIR", help="prepared data set, whose training documents fill the text"
    )
    parser.add_argument("--output", required=True, type=Path, metavar="DIR", help="folder to make")
    parser.add_argument(
        "--tasks", default=",".join(TASKS), metavar="T,T", help="tasks of `megamem study probe` (default: all)"
    )
    parser.add_argument(
        "--lengths", default="256,512,1024", metavar="N,N", help="tokens of a document, about (default: 256,512,1024)"
    )
    parser.add_argument("--documents", type=int, default=3000, metavar="N", help="documents in all (default: 3000)")
    parser.add_argument("--seed", type=int, default=1, help="seed of the documents (default: 1)")
    parser.add_argument("--overwrite", action="store_true", help="replace the data set that is in the output folder")
    parser.set_defaults(func=run_synthetic)


def run_synthetic(args: argparse.Namespace) -> int:
    """`megamem data synthetic`. Raises DataError, or ConfigError for a length that is too short."""
    from lab.suite.documents import prepare_documents
    from tools.data.inspect import summary

    tasks = tuple(dict.fromkeys(args.tasks.split(",")))
    if unknown := [task for task in tasks if task not in TASKS]:
        raise ConfigError(f"there is no task {unknown[0]!r}: name some of {', '.join(TASKS)}")
    try:
        lengths = sorted({int(part) for part in args.lengths.split(",")})
    except ValueError as error:
        raise ConfigError(f"--lengths is {args.lengths}: give numbers with commas between them") from error
    if min(lengths) < 1 or args.documents < 2:
        raise ConfigError("--lengths must be at least 1, and --documents at least 2, of which one is held out")
    dataset = prepare_documents(
        args.source, args.output, tasks, lengths, args.documents, seed=args.seed, overwrite=args.overwrite
    )
    print(f"Prepared {args.output}: {plural(args.documents, 'document')} of {', '.join(tasks)}.")
    print(summary(dataset))
    return 0
