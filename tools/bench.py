"""`megamem bench`: training speed of configurations, side by side; or of the memory kernels (`megamem bench kernels`)."""

from __future__ import annotations

import argparse
from typing import Any

from pretrain.config.loader import load_config
from pretrain.config.schema import RunConfig
from pretrain.config.validate import validate
from pretrain.errors import ConfigError
from tools.kernel_bench import add_arguments, run_kernel_bench, unread_options
from tools.ranks import default_num_ranks, run_on_ranks, started_world_size

_EPILOG = """\
examples:
  megamem bench configs/quickstart.yaml configs/quickstart_dense.yaml
  megamem bench configs/quickstart.yaml configs/quickstart_dense.yaml parallel.tensor=1 parallel.pipeline=1 --nproc 2
  megamem bench kernels --tokens 2048 --dtypes bf16

The configurations take turns on the same ranks and see random tokens. Overrides apply to each. Ratios are to the first configuration.
`kernels` in place of the configurations times the memory kernels beside PyTorch's own operations and a copy, after checking them against their twins.
"""


def add_parser(subparsers: Any) -> None:
    """Adds `bench` to the commands of `megamem`."""
    parser = subparsers.add_parser(
        "bench",
        help="training speed of configurations, side by side",
        description="Time optimizer steps of one or more configurations on the same ranks, taking turns; or the memory kernels.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "configs",
        metavar="CONFIG",
        nargs="+",
        help="YAML files, of one layout; then key=value overrides; or the word kernels",
    )
    parser.add_argument("--nproc", type=int, metavar="N", help="ranks to start here (default: as `megamem train`)")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="figures per configuration (default: 5)")
    parser.add_argument("--steps", type=int, default=2, metavar="N", help="optimizer steps per figure (default: 2)")
    parser.add_argument(
        "--vocab-size",
        type=int,
        default=4096,
        metavar="N",
        help="token ids where model.vocab_size is not set (default: 4096)",
    )
    add_arguments(parser)
    parser.set_defaults(func=run_bench)


def run_bench(args: argparse.Namespace) -> int:
    """Measures and prints."""
    if args.configs == ["kernels"]:
        if args.rounds < 1:
            raise ConfigError("nothing to measure: use --rounds of at least 1")
        return run_kernel_bench(args)
    if unread := list(unread_options(args)):
        raise ConfigError(f"{', '.join(unread)} has no effect without `kernels`: megamem bench kernels {unread[0]} ...")
    overrides = [word for word in args.configs if "=" in word]
    paths = [word for word in args.configs if "=" not in word]
    if not paths or args.rounds < 1 or args.steps < 1:
        raise ConfigError("nothing to measure: name at least one CONFIG, and use --rounds and --steps of at least 1")
    configs = [load_config(path, overrides) for path in paths]
    for path, config in zip(paths, configs, strict=True):
        if config.parallel != configs[0].parallel:
            raise ConfigError(
                f"{path} has another layout than {paths[0]}: give both the same `parallel` section, by overrides if need be"
            )
    num_ranks = started_world_size() or args.nproc or default_num_ranks(configs[0].parallel)
    for config in configs:
        validate(config, num_ranks)
    return run_on_ranks(lambda: bench_rank(configs, paths, args.vocab_size, args.rounds, args.steps), num_ranks)


def bench_rank(configs: list[RunConfig], paths: list[str], vocab_size: int, rounds: int, steps: int) -> None:
    """What one rank does."""
    from megamem.formulas import count_parameters
    from parallel.layout import padded_size
    from pretrain.session import session
    from pretrain.throughput import measure

    with session(configs[0]) as groups:
        results = measure(
            configs, groups, vocab_size=configs[0].model.vocab_size or vocab_size, rounds=rounds, steps_per_round=steps
        )
        if groups.is_main:
            print(
                f"{groups.world_size} ranks, {rounds} rounds of {steps} steps each, in turns; tokens/s as median (lowest .. highest)"
            )
            for path, config, result in zip(paths, configs, results, strict=True):
                rows = padded_size(config.model.vocab_size or vocab_size, config.model.vocab_size_multiple)
                counts = count_parameters(config.model, rows)
                print(
                    f"  {path:36} {result.median:12,.0f} ({min(result.tokens_per_s):,.0f} .. {max(result.tokens_per_s):,.0f})"
                    f"  {result.median / results[0].median:5.2f}x  {counts.total / 1e6:.2f}M parameters, {counts.active / 1e6:.2f}M active"
                )
