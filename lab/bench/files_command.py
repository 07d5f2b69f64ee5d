"""`megamem bench files`: training with tables in files."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

from lab.bench.arguments import add_rounds, add_steps, add_vocabulary, with_given_vocabulary
from pretrain.config.schema import ParallelConfig
from pretrain.config.stages import load_stage
from pretrain.config.validate import validate
from pretrain.errors import ConfigError
from tools.common.parsers import add_command, add_config, add_stage
from tools.common.ranks import add_device, run_on_ranks

_EPILOG = """\
examples:
  megamem study bench files configs/laptop/4b.yaml model.memory.rows_per_head=1000000 --folders /scratch,/dev/shm

Trains on random tokens with the tables on the device, if they have room there, and in files of each folder
(optimizer.table_folder), one after the other on one rank. After the same steps all tables have to be the same.
"""


def add_files_parser(subparsers: Any) -> None:
    """Adds the command to the commands of `megamem`."""
    parser = add_command(
        subparsers,
        "bench files",
        "training with tables in files",
        _EPILOG,
        "Time steps with tables on the device and in files, and what of fetching rows hides behind them.",
    )
    add_config(parser, "YAML file of a model whose rows tokens know, with optimizer.table_gradients: rows")
    add_stage(parser)
    parser.add_argument(
        "--folders", required=True, metavar="DIR,..", help="folders for the files, on disks or in memory (/dev/shm)"
    )
    parser.add_argument(
        "--only-files",
        action="store_true",
        help="leave out tables on the device: where a limit that the system does not tell leaves them no room",
    )
    add_rounds(parser)
    add_steps(parser)
    add_vocabulary(parser)
    add_device(parser)
    parser.set_defaults(func=run_bench_files)


def run_bench_files(args: argparse.Namespace) -> int:
    """Measures every place and prints."""
    if args.rounds < 1 or args.steps < 1:
        raise ConfigError("nothing to measure: use --rounds and --steps of at least 1")
    config = load_stage(args.config, args.overrides, args.stage)
    if config.model.memory is None:
        raise ConfigError(f"{args.config} has no memory, and so no tables: name a model that has one")
    config = replace(with_given_vocabulary(config, args.vocab_size), parallel=ParallelConfig())
    on_device = replace(config, optimizer=replace(config.optimizer, table_folder=None))
    places = {
        folder: replace(config, optimizer=replace(config.optimizer, table_folder=folder))
        for folder in args.folders.split(",")
    }
    for each in (on_device, *places.values()):
        validate(each, 1)
    from lab.bench.files import bench_files_rank

    first = None if args.only_files else on_device
    return run_on_ranks(lambda: bench_files_rank(config, first, places, args.rounds, args.steps), 1)
