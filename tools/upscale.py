"""`megamem upscale`: grow a pretrained model by blocks between its own."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parallel.machine.atomic_write import atomic_write
from parallel.machine.refusals import check_can_write
from pretrain.config.schema import ParallelConfig, RunConfig
from pretrain.config.source import dump_yaml
from pretrain.convert.names import NATIVE
from pretrain.convert.paths import check_destination, config_at
from pretrain.convert.resources import Resources
from pretrain.growth.config import check_keys, grown_config
from pretrain.growth.placement import PLACEMENTS
from pretrain.growth.plan import METHODS, GrownBlock, Method, grown_blocks
from tools.checkpoint.command import add_workers, opened, size_in_bytes
from tools.common.parsers import add_command, positive
from tools.common.words import describe_size, plural

if TYPE_CHECKING:
    from pretrain.growth.upscale import Grown

TRAINING_FILE = "train.yaml"
"""File in the folder: the configuration of a run that trains what the method's paper trains."""
_TRAINS_ALL: tuple[Method, ...] = ("solar",)

_EPILOG = """\
examples:
  megamem upscale Llama-3.2-1B --output runs/grown --blocks 8 model.memory.kind=midus model.memory.num_heads=32
  megamem upscale runs/dense --output runs/grown --blocks 4 --placement top-heavy model.memory.kind=midus
  megamem upscale runs/dense --output runs/copies --insert llama-pro --blocks 4

BASE is of any format that `megamem checkpoint convert` reads, and has no memory. Blocks of memory begin with tables of
zeros: the grown model gives the same logits to the bit. The result is a run's folder with weights alone, at step 0, and
a train.yaml that trains the new blocks and leaves the others as they are (with --insert solar it trains all):

  megamem train runs/grown/train.yaml --from runs/grown --run-dir runs/more 'data.datasets=[{path: data/mine}]'

One process, without GPUs, within --max-memory whatever the size of the model; read back and compared before it gets its
name.
"""


def add_parser(subparsers: Any) -> None:
    """Adds `upscale` to the commands of `megamem`."""
    parser = add_command(subparsers, "upscale", "grow a pretrained model by blocks between its own", _EPILOG)
    parser.add_argument("base", type=Path, metavar="BASE", help="a run's folder, or a checkpoint of any format")
    parser.add_argument(
        "overrides",
        metavar="key=value",
        nargs="*",
        default=[],
        help="keys of the inserted memory, as in model.memory.kind=midus, and the seed of its weights",
    )
    parser.add_argument(
        "--output", type=Path, required=True, metavar="DIR", help="the grown model's run folder, to make"
    )
    parser.add_argument("--step", type=int, metavar="N", help="the run's checkpoint of this step")
    parser.add_argument("--blocks", type=positive, required=True, metavar="D", help="blocks to insert")
    parser.add_argument(
        "--insert",
        choices=METHODS,
        default=METHODS[0],
        help="memory: blocks of memory; llama-pro: copies that add nothing at first; averaged: means of two blocks, "
        "between them; solar: the blocks in the middle once more (default: %(default)s)",
    )
    parser.add_argument(
        "--placement",
        choices=PLACEMENTS,
        help="distributed: one in each of D equal parts of the depth; top-heavy, bottom-heavy: one at each of the last, "
        "or first, D blocks (default: distributed)",
    )
    parser.add_argument(
        "--max-file-size",
        type=size_in_bytes,
        default="4GiB",
        metavar="SIZE",
        help="bytes of tensors per file, about (default: %(default)s)",
    )
    add_workers(parser)
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Grow a model, and say what was made."""
    resources = Resources(args.workers, args.max_memory)
    check_destination(args.output)
    check_can_write(args.output / TRAINING_FILE)
    check_keys(args.overrides, with_memory=args.insert == "memory")
    name = args.output.absolute().name
    if (known := config_at(args.base, args.step)) is not None:
        grown_config(known, _blocks(args, known), args.overrides, name=name, origin=str(args.base))

    # These import torch, which takes seconds: what can be wrong with the arguments has been told.
    from pretrain.convert.convert import convert
    from pretrain.convert.format import ConversionTarget
    from pretrain.convert.registry import FORMATS
    from pretrain.growth.upscale import upscale
    from pretrain.planning.counts.formulas import count_parameters
    from tools.checkpoint.phases import Phases

    base = opened(args.base, args.step)
    before = base.config.model
    grown = upscale(base, _blocks(args, base.config), args.overrides, name=name)
    target = ConversionTarget(ParallelConfig(), with_optimizer=False, dtype=None, max_file_bytes=args.max_file_size)
    started_s = time.monotonic()
    with Phases() as phases:
        made = convert(grown.checkpoint, FORMATS[NATIVE], args.output, target, resources, on_start=phases.start)
    training = args.output / TRAINING_FILE
    with atomic_write(training) as stream:
        stream.write(dump_yaml(_training(grown, args.insert)).encode())
    num_before, num_after = (count_parameters(model).total for model in (before, grown.checkpoint.config.model))
    print(
        f"{plural(before.num_layers, 'block')} + {args.blocks}: new ones are {', '.join(map(str, grown.inserted))}, "
        f"counted from 0\n"
        f"{num_before:,} parameters + {num_after - num_before:,}\n"
        f"equal, as read back: {plural(made.num_tensors, 'tensor')} of {describe_size(made.num_bytes)}, "
        f"{time.monotonic() - started_s:.1f} s\n"
        f"written: {made.path}\n"
        f"to train {'all of it' if args.insert in _TRAINS_ALL else 'the new blocks alone'}: megamem train {training} --from {args.output} --run-dir DIR"
    )
    return 0


def _blocks(args: argparse.Namespace, before: RunConfig) -> tuple[GrownBlock, ...]:
    """The blocks of the grown model."""
    return grown_blocks(
        args.insert, num_layers=before.model.num_layers, num_inserted=args.blocks, placement=args.placement
    )


def _training(grown: Grown, insert: Method) -> dict[str, Any]:
    """A configuration over that of the folder, for what the method's paper trains. In it blocks count from 1."""
    if insert in _TRAINS_ALL:
        return {"base": "config.yaml"}
    return {"base": "config.yaml", "optimizer": {"trained_layers": [number + 1 for number in grown.inserted]}}
