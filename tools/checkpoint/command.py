"""`megamem checkpoint`: inspect, verify, diff and convert checkpoints of every format, without ranks or GPUs."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tools.common.parsers import add_command, positive, run_of

if TYPE_CHECKING:
    from pretrain.convert.format import OpenedCheckpoint

_WHAT = "a run's folder (its newest checkpoint), or a checkpoint of any format that `convert` knows"
_WHAT_IS_VERIFIED = "a run's folder (all its checkpoints), or a checkpoint of any format that `convert` knows"

_INSPECT_EPILOG = """\
examples:
  megamem checkpoint inspect runs/quickstart
  megamem checkpoint inspect runs/quickstart/checkpoints/step_00000640 --json

A line for every tensor of the model, with the bytes of its optimizer state beside it. No tensor is read.
"""

_VERIFY_EPILOG = """\
examples:
  megamem checkpoint verify runs/quickstart
  megamem checkpoint verify runs/quickstart --step 320 --finite

Reads all checkpoints of a run, or the one that is named. Every file must have the hash that it was written with, every
part of every tensor must be where the index says, and every element must be there exactly once. Exit code 4 if
anything is wrong.
"""

_DIFF_EPILOG = """\
examples:
  megamem checkpoint diff runs/a runs/b
  megamem checkpoint diff runs/a exported/ --weights-only
  megamem checkpoint diff runs/a runs/b --tolerance 1e-5

Tensor by tensor, whatever layouts and formats the two are in. Exit code 0 if they are equal, else 1.
"""

_CONVERT_EPILOG = """\
examples:
  megamem checkpoint convert runs/a runs/b --tensor 4 --pipeline 2 --memory 8
  megamem checkpoint convert runs/a exported --format huggingface --dtype bf16
  megamem checkpoint convert Llama-3.2-1B runs/llama
  megamem checkpoint convert megatron/checkpoints runs/theirs --step 50000

The format of SOURCE is detected. One process, without GPUs, within --max-memory whatever the size of the tables. The
result is written beside DESTINATION, read back and compared, and gets its name when it is equal; after a kill the same
command continues. Checkpoints of runs fit every layout as they are: converting one to another layout packs it so that
each rank of that layout reads little more than its own part.
"""

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def add_parser(subparsers: Any) -> None:
    """Adds `checkpoint` to the commands of `megamem`."""
    parser = subparsers.add_parser("checkpoint", help="inspect, verify, compare and convert checkpoints")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_inspect(commands)
    _add_verify(commands)
    _add_diff(commands)
    _add_convert(commands)


def _add_inspect(commands: Any) -> None:
    parser = add_command(commands, "inspect", "say what a checkpoint holds", _INSPECT_EPILOG)
    _add_path(parser, "path", _WHAT)
    parser.add_argument("--json", action="store_true", help="print one JSON object, with every tensor in it")
    parser.set_defaults(func=run_of("tools.checkpoint.inspect"))


def _add_verify(commands: Any) -> None:
    parser = add_command(commands, "verify", "read checkpoints and say what is damaged", _VERIFY_EPILOG)
    _add_path(parser, "path", _WHAT_IS_VERIFIED)
    parser.add_argument("--finite", action="store_true", help="also look for NaN and infinities")
    add_workers(parser)
    parser.set_defaults(func=run_of("tools.checkpoint.verify"))


def _add_diff(commands: Any) -> None:
    parser = add_command(commands, "diff", "compare two checkpoints, whatever their formats and layouts", _DIFF_EPILOG)
    parser.add_argument("first", type=Path, metavar="A", help=_WHAT)
    parser.add_argument("second", type=Path, metavar="B", help="the other one")
    parser.add_argument(
        "--tolerance",
        type=_share,
        default=0.0,
        metavar="X",
        help="largest distance of two elements, relative to the larger one (default: 0, the same values)",
    )
    parser.add_argument("--weights-only", action="store_true", help="leave out the optimizer's state")
    parser.add_argument("--any-dtype", action="store_true", help="compare values of different dtypes")
    add_workers(parser)
    parser.set_defaults(func=run_of("tools.checkpoint.diff"))


def _add_convert(commands: Any) -> None:
    from pretrain.convert.names import FORMAT_NAMES

    parser = add_command(
        commands, "convert", "write a checkpoint in another format, or packed for another layout", _CONVERT_EPILOG
    )
    _add_path(parser, "source", _WHAT)
    parser.add_argument("destination", type=Path, metavar="DESTINATION", help="folder to make")
    parser.add_argument("--format", choices=FORMAT_NAMES, default=FORMAT_NAMES[0], help="default: %(default)s")
    for name, help_text in (
        ("tensor", "tensor-parallel size of the layout to write for"),
        ("pipeline", "pipeline stages"),
        ("virtual-pipeline", "model chunks per pipeline stage"),
        ("memory", "G: ranks over which tables and experts are split"),
    ):
        parser.add_argument(f"--{name}", type=positive, default=1, metavar="N", help=f"{help_text} (default: 1)")
    contents = parser.add_mutually_exclusive_group()
    contents.add_argument("--weights-only", action="store_true", help="leave out the optimizer's state")
    contents.add_argument(
        "--with-optimizer",
        action="store_true",
        help="keep the optimizer's state (the default where source and format can have it; an error where they cannot)",
    )
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="the model's configuration, for a SOURCE that has none (released, megatron-lm)",
    )
    parser.add_argument("--dtype", choices=("fp32", "bf16"), help="dtype of the written weights (default: as they are)")
    parser.add_argument(
        "--tables",
        choices=("int8", "int4"),
        help="integers of a memory's tables in huggingface, with a scale per row (default: floats, as weights)",
    )
    parser.add_argument(
        "--max-file-size",
        type=size_in_bytes,
        default="4GiB",
        metavar="SIZE",
        help="bytes of tensors per file, about (default: %(default)s)",
    )
    add_workers(parser)
    parser.set_defaults(func=run_of("tools.checkpoint.convert"))


def _add_path(parser: argparse.ArgumentParser, name: str, help_text: str) -> None:
    parser.add_argument(name, type=Path, metavar=name.upper(), help=help_text)
    parser.add_argument("--step", type=int, metavar="N", help="the run's checkpoint of this step")


def add_workers(parser: argparse.ArgumentParser) -> None:
    """Adds what a command may use of the machine that reads or writes whole checkpoints."""
    parser.add_argument("--workers", type=positive, default=2, metavar="N", help="threads (default: 2)")
    parser.add_argument(
        "--max-memory",
        type=size_in_bytes,
        default="4GiB",
        metavar="SIZE",
        help="memory of this process at most (default: %(default)s)",
    )


def opened(path: Path, step: int | None = None, config: Path | None = None) -> OpenedCheckpoint:
    """A checkpoint of whatever format; `config` is the file with the configuration of one that has none."""
    from pretrain.config.stages import load_config
    from pretrain.convert.paths import config_at

    # What is missing is told before torch is imported, which takes seconds.
    config_at(path, step)
    given = None if config is None else load_config(config)

    from pretrain.convert.registry import open_checkpoint

    return open_checkpoint(path, step, given)


def size_in_bytes(text: str) -> int:
    """The value of an option: "512MiB", "4G", "2.5GB"; all are powers of 1,024."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) *([KMGT]?)(?:i?B)?", text, re.IGNORECASE)
    if not found or not float(found[1]):
        raise argparse.ArgumentTypeError(f"{text} is no size: write 512MiB, or 4GiB")
    return int(float(found[1]) * _UNITS[found[2].upper()])


def _share(text: str) -> float:
    number = float(text)
    if not 0 <= number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not from 0 to below 1")
    return number
