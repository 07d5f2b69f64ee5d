"""`megamem bench updates`: the updates of tables, by the tables' size."""

from __future__ import annotations

import argparse
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

from lab.bench.arguments import add_rounds, add_steps, add_vary, add_vocabulary, variations, with_given_vocabulary
from lab.pages import Page
from pretrain.config.schema import ParallelConfig, RunConfig
from pretrain.config.stages import load_stage
from pretrain.config.validate import validate
from pretrain.errors import ConfigError
from tools.common.parsers import add_command, add_config, add_stage
from tools.common.ranks import add_device, run_on_ranks

WAYS: dict[str, dict[str, Any]] = {
    "adamw": {"tables": "adamw", "table_gradients": "dense", "table_gradient_dtype": "fp32"},
    "row_wise": {"tables": "row_wise", "table_gradients": "dense", "table_gradient_dtype": "fp32"},
    "bf16 gradients": {"tables": "row_wise", "table_gradients": "dense", "table_gradient_dtype": "bf16"},
    "rows": {"tables": "row_wise", "table_gradients": "rows", "table_gradient_dtype": "fp32"},
}
"""Keys of `optimizer` in each way to update tables, by the names of a report."""

_EPILOG = """\
examples:
  megamem study bench updates configs/quickstart.yaml train.precision=bf16 --vary model.memory.num_keys=234,1024,2048,4096 --report docs/memory-parallel.md
  megamem study bench updates configs/laptop/4b.yaml --vary model.memory.rows_per_head=39200,392000,3920000

Each size is trained with AdamW's moments and with a moment per row (optimizer.tables); with the latter also with gradients
in bf16 (optimizer.table_gradient_dtype) and of the rows that were read (optimizer.table_gradients), on one rank and random tokens. Those of a size take turns where they have
room beside each other, so that other work on the machine meets all of them. What has no room alone is not run: its bytes
are those of the closed formulas.
"""


def add_updates_parser(subparsers: Any) -> None:
    """Adds the command to the commands of `megamem`."""
    parser = add_command(
        subparsers,
        "bench updates",
        "optimizers of tables, by the size of the tables",
        _EPILOG,
        "Measure training speed and memory of every way to update tables, by the size of the tables.",
    )
    add_config(parser, "YAML file of a model with tables")
    add_stage(parser)
    add_vary(parser, "the key that sets the size of the tables, and its values", is_needed=True)
    add_rounds(parser)
    add_steps(parser)
    parser.add_argument(
        "--report",
        type=Path,
        metavar="FILE",
        help="markdown file to write, or to fill between its marks; the plot goes beside it (default: print alone)",
    )
    add_vocabulary(parser)
    add_device(parser)
    parser.set_defaults(func=run_bench_updates)


def run_bench_updates(args: argparse.Namespace) -> int:
    """Measures every size in every way, prints, and writes the report."""
    if args.rounds < 1 or args.steps < 1:
        raise ConfigError("nothing to measure: use --rounds and --steps of at least 1")
    cases = [_load(args, change) for change in variations(args.vary)]
    page = None if args.report is None else Page(args.report, "updates of tables")
    if page is not None:
        page.check()
    from lab.bench.updates import bench_updates_rank

    command = _command_line(args)
    return run_on_ranks(lambda: bench_updates_rank(cases, args.rounds, args.steps, page, command), 1)


def _load(args: argparse.Namespace, change: list[str]) -> dict[str, RunConfig]:
    """The configuration with tables of one size, in every way: all without weight decay of tables, by which dense updates
    would touch every row."""
    config = load_stage(args.config, [*args.overrides, *change], args.stage)
    if config.model.memory is None:
        raise ConfigError(f"{args.config} has no memory, and so no tables: name a model that has one")
    config = replace(with_given_vocabulary(config, args.vocab_size), parallel=ParallelConfig())
    ways = {}
    for name, keys in WAYS.items():
        optimizer = replace(config.optimizer, **keys, value_weight_decay=0.0)
        ways[name] = replace(config, optimizer=optimizer)
        validate(ways[name], 1)
    return ways


def _command_line(args: argparse.Namespace) -> str:
    """The command that makes the report again."""
    words = ["megamem", "study", "bench", "updates", str(args.config), *args.overrides, "--vary", args.vary]
    words += ["--stage", args.stage] if args.stage else []
    words += ["--rounds", str(args.rounds), "--steps", str(args.steps), "--vocab-size", str(args.vocab_size)]
    words += ["--report", str(args.report)] if args.report else []
    return shlex.join(words)
