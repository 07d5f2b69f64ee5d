"""`megamem data package` and `codes`: documents that come from elsewhere than text files."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from pretrain.errors import DataError
from tools.common.parsers import add_command
from tools.common.words import plural

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
