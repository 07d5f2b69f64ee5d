"""`megamem data package`, `codes` and `synthetic`: documents that come from elsewhere than text files."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from pretrain.errors import ConfigError, DataError
from pretrain.evaluation.suite.tasks import TASKS
from tools.data.inspect import summary
from tools.parsers import add_command
from tools.words import plural

_PACKAGE_EPILOG = """\
examples:
  megamem data package Django==5.2.8 --files 'docs/*.txt' --output data/django.jsonl
  megamem data prepare data/django.jsonl --output data/django --validation-fraction 0.05

Manuals in source archives are prose that every mirror of PyPI has. pip fetches the archive, with its own settings of
mirrors and proxies, and runs the package's build as at an installation.
"""

_CODES_EPILOG = """\
examples:
  megamem data codes digits.npz --patch 2 --codes 64 --output digits-codes.npz
  megamem data prepare digits-codes.npz --tokenizer codes:64,10 --output data/digits

Patches are clustered by k-means, the same way every time, and a patch's code is its nearest mean. For images of more than
a few colours use the codes of a trained quantiser, in the same arrays.
"""

_SYNTHETIC_EPILOG = """\
examples:
  megamem data synthetic data/stdlib --output data/stdlib-synthetic
  megamem data synthetic data/stdlib --output data/retrieval --tasks needle,kv --lengths 256,1024 --documents 8000

Documents of the tasks that `megamem study probe` asks, in the text and with the tokenizer of a prepared data set, to
be blended with it. None of them holds a name that `megamem study probe` asks for.
"""


def add_package(commands: Any) -> None:
    """Adds `package` to the commands of `megamem data`."""
    parser = add_command(commands, "package", "texts of a package's source archive, from PyPI", _PACKAGE_EPILOG)
    parser.add_argument("package", metavar="NAME==VERSION", help="package, with an exact version")
    parser.add_argument(
        "--files",
        required=True,
        action="append",
        metavar="PATTERN",
        help="files to take, by their paths in the archive; * matches / too; may be repeated",
    )
    parser.add_argument("--output", required=True, type=Path, metavar="FILE", help=".jsonl to write: a line per file")
    parser.set_defaults(func=run_package)


def add_codes(commands: Any) -> None:
    """Adds `codes` to the commands of `megamem data`."""
    parser = add_command(commands, "codes", "cut images into patches and quantise them", _CODES_EPILOG)
    parser.add_argument(
        "images",
        type=Path,
        metavar="FILE",
        help=".npz with arrays 'images' [N, H, W] or [N, H, W, C], and 'classes' [N]",
    )
    parser.add_argument(
        "--output", required=True, type=Path, metavar="FILE", help=".npz to write: 'codes', 'classes' and 'means'"
    )
    parser.add_argument("--patch", type=int, default=2, metavar="N", help="side of a patch, in pixels (default: 2)")
    parser.add_argument("--codes", type=int, default=64, metavar="N", help="codes of the quantiser (default: 64)")
    parser.set_defaults(func=run_codes)


def add_synthetic(commands: Any) -> None:
    """Adds `synthetic` to the commands of `megamem data`."""
    parser = add_command(commands, "synthetic", "documents that reward looking back, to train on", _SYNTHETIC_EPILOG)
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
    parser.add_argument("--seed", type=int, default=1, help="of the documents (default: 1)")
    parser.add_argument("--overwrite", action="store_true", help="replace the data set that is in the output folder")
    parser.set_defaults(func=run_synthetic)


def run_package(args: argparse.Namespace) -> int:
    """`megamem data package`. Raises DataError."""
    from pretrain.data.archives import write_package_texts

    if args.output.exists():
        raise DataError(f"{args.output} exists. Choose another --output, or remove it.")
    print(f"pip fetches the source archive of {args.package} ...", flush=True)
    fetched = write_package_texts(args.package, args.files, args.output)
    print(f"Wrote {args.output}: {plural(fetched.num_documents, 'document')}, {fetched.num_bytes:,} bytes of text.")
    return 0


def run_codes(args: argparse.Namespace) -> int:
    """`megamem data codes`. Raises DataError."""
    from pretrain.data.quantise import quantise_file

    codes = quantise_file(args.images, args.output, patch=args.patch, num_codes=args.codes)
    print(f"Wrote {args.output}: {plural(codes.shape[0], 'image')} of {codes.shape[1]} codes, below {codes.max() + 1}.")
    return 0


def run_synthetic(args: argparse.Namespace) -> int:
    """`megamem data synthetic`. Raises DataError, or ConfigError for a length that is too short."""
    from pretrain.evaluation.suite.documents import prepare_documents

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
