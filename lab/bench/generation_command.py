"""`megamem bench generate` and `megamem bench tables`: what generation takes."""

from __future__ import annotations

import argparse
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from lab.bench.arguments import add_configs, add_vocabulary, load_configs, numbers, with_given_vocabulary
from pretrain.config.schema import ParallelConfig
from pretrain.config.stages import load_stage
from pretrain.config.validate import validate
from pretrain.errors import ConfigError
from tools.common.parsers import add_command, add_config, add_stage
from tools.common.ranks import add_device, run_on_ranks
from tools.tables import token_tables

_GENERATE_EPILOG = """\
examples:
  megamem study bench generate configs/quickstart.yaml configs/quickstart_dense.yaml
  megamem study bench generate runs/growth/{continued,memory,llama-pro}/seed_2/config.yaml --prompts 16,128 --expand-values

One text at a time with random weights, on one rank. Models take turns; overrides apply to each. Attention keeps a
cache, so a token costs a pass over it alone.
"""
_TABLES_EPILOG = """\
examples:
  megamem study bench tables lab/configs/compare/move.yaml --sizes 1,2,4,8,16 --dir /scratch

Tokens are generated with random weights. The table of the configuration is spread evenly over one of so many GiB, in
host memory and in a file in --dir (removed at the end), and its rows are fetched as tokens ask for them: the work per
token is the same for every size. Before tokens are timed on the file, the system is asked to drop its cache of it.
Sizes that do not fit into free memory are measured on disk alone. The generated tokens must be those of the resident
table, to the bit.
"""


def add_generation_parsers(subparsers: Any) -> None:
    """Adds both commands to the commands of `megamem`."""
    parser = add_command(
        subparsers,
        "bench generate",
        "generation of models, side by side",
        _GENERATE_EPILOG,
        "Time prompts and generated tokens of one or more models, taking turns.",
    )
    add_configs(parser)
    parser.add_argument(
        "--prompts", type=numbers, default=[16, 256], metavar="N,..", help="tokens of prompts (default: 16,256)"
    )
    parser.add_argument("--tokens", type=int, default=64, metavar="N", help="tokens to generate (default: 64)")
    parser.add_argument(
        "--expand-values",
        action="store_true",
        help="measure models whose heads expand what they read with every head's own values too (docs/upscale.md)",
    )
    add_device(parser)
    parser.set_defaults(func=run_bench_generate)
    _add_tables_parser(subparsers)


def _add_tables_parser(subparsers: Any) -> None:
    parser = add_command(
        subparsers,
        "bench tables",
        "generation with token tables in host memory and on disk",
        _TABLES_EPILOG,
        "Time generated tokens by the size of a token table that is fetched from host memory or disk.",
    )
    add_config(parser, "YAML file of a model whose memory the token addresses")
    add_stage(parser)
    parser.add_argument(
        "--sizes", type=_gibibytes, default=[1.0, 2.0, 4.0], metavar="N,..", help="GiB of the table (default: 1,2,4)"
    )
    parser.add_argument("--dir", type=Path, required=True, metavar="DIR", help="folder on the disk to measure")
    parser.add_argument("--tokens", type=int, default=128, metavar="N", help="tokens per figure (default: 128)")
    parser.add_argument("--context", type=int, default=32, metavar="N", help="tokens of context (default: 32)")
    add_vocabulary(parser)
    add_device(parser)
    parser.set_defaults(func=run_bench_tables)


def _gibibytes(text: str) -> list[float]:
    """Sizes of a list with commas, each above 0, in ascending order."""
    try:
        sizes = sorted({float(part) for part in text.split(",")})
    except ValueError:
        sizes = []
    if not sizes or not 0 < sizes[0] <= sizes[-1] < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of sizes above 0, as in 1,2,4")
    return sizes


def run_bench_generate(args: argparse.Namespace) -> int:
    """Measures generation of models and prints."""
    if args.tokens < 2:
        raise ConfigError(f"--tokens is {args.tokens}: the time of a token is that of the second and later ones")
    configs = {name: replace(config, parallel=ParallelConfig()) for name, config in load_configs(args).items()}
    for config in configs.values():
        validate(config, 1)
    from lab.bench.generation import bench_generation_rank, with_expanded

    contenders = with_expanded(configs, expanded=args.expand_values)
    return run_on_ranks(lambda: bench_generation_rank(contenders, args.prompts, args.tokens, args.rounds), 1)


def run_bench_tables(args: argparse.Namespace) -> int:
    """Measures generation and prints."""
    if args.tokens < 2 or args.context < 1:
        raise ConfigError("nothing to measure: use --tokens of at least 2, and --context of at least 1")
    config = with_given_vocabulary(load_stage(args.config, args.overrides, args.stage), args.vocab_size)
    config = replace(config, parallel=ParallelConfig())
    validate(config, 1)
    memory = token_tables(config, "megamem bench tables")
    from lab.bench.tables import bench_tables_rank, check_sizes

    sizes = [round(size * 2**30) for size in args.sizes]
    check_sizes(config, memory, sizes, args.dir)
    return run_on_ranks(lambda: bench_tables_rank(config, memory, sizes, args.dir, args.tokens, args.context), 1)
