"""`megamem patch`: rows of memory tables that training changed, in a small file, for checkpoints to have and to give back."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from tools.checkpoint.command import add_workers, size_in_bytes
from tools.common.parsers import add_command, positive, run_of
from tools.common.ranks import add_nproc

_MAKE_EPILOG = """\
examples:
  megamem patch make runs/quickstart runs/facts --output facts.safetensors
  megamem patch make exported runs/facts --output facts.safetensors --max-size 16MiB

BEFORE and AFTER are a run's folder (its newest checkpoint), or a checkpoint of any format that `megamem checkpoint`
knows. They may differ in rows of memory tables alone, as after training with optimizer.trained_rows; a row is in the
patch if any bit of it differs, in the coarser dtype of the two. Rows come from fp32 main weights where there are any.
"""

_COUNTS_EPILOG = """\
examples:
  megamem patch counts runs/quickstart --output known.npz
  megamem patch counts runs/quickstart --data data/facts --output facts-read.npz

Counts how often a run's newest checkpoint reads each row of its memory's tables in training text: in how many sequences, and
how often in all, 16 bytes per row. optimizer.trained_rows takes the first file as its background, and chooses the rows that
new text reads more than that; the second as its text, by which rows are chosen once for a whole run.
"""

_SHOW_EPILOG = """\
examples:
  megamem patch show facts.safetensors
  megamem patch show facts.safetensors runs/quickstart exported

With folders it says of each whether the patch is applied there, and reads all of their weights but tables. Nothing is
written.
"""

_APPLY_EPILOG = """\
examples:
  megamem patch apply facts.safetensors exported
  megamem patch apply facts.safetensors runs/quickstart --step 640
  megamem patch apply facts.safetensors exported --output exported-with-facts

FOLDER is a run's folder (its newest checkpoint), one checkpoint, or an exported Hugging Face folder, also one with
int8 or int4 tables. It must be of the model that the patch was made on, and have each row of the patch as it was
before. Files are copied, changed and checked beside it; then the two folders are exchanged in one step, so that after
a kill the folder is as it was, or patched. Who has the old files open goes on with them. Moments of the optimizer
stay as they are.
"""

_REVERT_EPILOG = """\
examples:
  megamem patch revert facts.safetensors exported
  megamem patch revert facts.safetensors runs/quickstart --step 640

Each row of the patch must be as the patch left it. Afterwards all files are what they were before, to the bit.
"""

_MERGE_EPILOG = """\
examples:
  megamem patch merge facts.safetensors names.safetensors --output both.safetensors
  megamem patch merge facts.safetensors corrected.safetensors --output both.safetensors --overlap last

Patches of one model, in the order in which they would be applied. Rows that several of them have are counted, and
refused unless --overlap says what becomes of them: `last` takes a row as the first patch found it and as the last one
left it, which is right for patches on top of each other; `add` adds their changes in fp32, for patches that found the
row alike.
"""


def add_parser(subparsers: Any) -> None:
    """Adds `patch` to the commands of `megamem`."""
    parser = subparsers.add_parser("patch", help="make, apply, revert and merge changes of a memory's rows")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_counts(commands)
    _add_make(commands)
    _add_show(commands)
    _add_change(commands, "apply", "put a patch's rows into a checkpoint or an export", _APPLY_EPILOG)
    _add_change(commands, "revert", "take a patch's rows back, to the bit", _REVERT_EPILOG)
    _add_merge(commands)


def _add_counts(commands: Any) -> None:
    parser = add_command(commands, "counts", "count how often a text reads every row", _COUNTS_EPILOG)
    parser.add_argument("run", type=Path, metavar="RUN", help="a run's folder")
    parser.add_argument(
        "--data",
        metavar="DIR",
        action="append",
        help="read this prepared data set, of the run's tokenizer; may be repeated (default: what the run was trained on)",
    )
    parser.add_argument(
        "--sequences", type=positive, metavar="N", help="sequences to read (default: one pass, but 1,000 at most)"
    )
    parser.add_argument("--step", type=int, metavar="N", help="the checkpoint of this step (default: the newest one)")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="the file to write")
    add_nproc(parser, "one per GPU, or 2; or what --own-layout needs")
    parser.add_argument("--own-layout", action="store_true", help="use the layout that the run was trained on")
    parser.set_defaults(func=run_of("tools.patch.counts"))


def _add_make(commands: Any) -> None:
    parser = add_command(commands, "make", "write the rows in which two checkpoints differ", _MAKE_EPILOG)
    parser.add_argument("before", type=Path, metavar="BEFORE", help="the checkpoint that training began from")
    parser.add_argument("after", type=Path, metavar="AFTER", help="the checkpoint that it ended with")
    _add_output(parser)
    parser.add_argument(
        "--max-size",
        type=size_in_bytes,
        default="1GiB",
        metavar="SIZE",
        help="give up on a larger patch (default: %(default)s)",
    )
    add_workers(parser)
    parser.set_defaults(func=run_of("tools.patch.make"))


def _add_show(commands: Any) -> None:
    parser = add_command(commands, "show", "say what a patch holds, and where it is applied", _SHOW_EPILOG)
    _add_patch(parser)
    parser.add_argument(
        "folders", type=Path, nargs="*", metavar="FOLDER", help="runs, checkpoints and exports to look into"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_workers(parser)
    parser.set_defaults(func=run_of("tools.patch.show"))


def _add_change(commands: Any, name: str, summary: str, epilog: str) -> None:
    parser = add_command(commands, name, summary, epilog)
    _add_patch(parser)
    parser.add_argument(
        "folder", type=Path, metavar="FOLDER", help="a run's folder, a checkpoint, or an exported folder"
    )
    parser.add_argument("--step", type=int, metavar="N", help="the run's checkpoint of this step")
    parser.add_argument("--output", type=Path, metavar="DIR", help="folder to make instead: FOLDER stays as it is")
    add_workers(parser)
    parser.set_defaults(func=run_of("tools.patch.change"), action=name)


def _add_merge(commands: Any) -> None:
    parser = add_command(commands, "merge", "write one patch for several of one model", _MERGE_EPILOG)
    parser.add_argument("patches", type=Path, nargs="+", metavar="PATCH", help="two patches or more, in their order")
    _add_output(parser)
    parser.add_argument(
        "--overlap",
        choices=("refuse", "last", "add"),
        default="refuse",
        help="rows that several patches have (default: %(default)s)",
    )
    parser.set_defaults(func=run_of("tools.patch.merge"))


def _add_patch(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("patch", type=Path, metavar="PATCH", help="file that `megamem patch make` or `merge` wrote")


def _add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="the patch to write")
