"""`megamem bench`: training speed of configurations, side by side; where a step's time goes (`bench step`); the memory
kernels (`bench kernels`)."""

from __future__ import annotations

import argparse
from collections.abc import Collection
from dataclasses import replace
from typing import Any

from pretrain.config.loader import load_config
from pretrain.config.schema import RunConfig
from pretrain.config.validate import validate
from pretrain.errors import ConfigError
from tools.ranks import add_nproc, default_num_ranks, run_on_ranks, started_world_size

_EPILOG = """\
examples:
  megamem bench configs/quickstart.yaml configs/quickstart_dense.yaml
  megamem bench configs/quickstart.yaml configs/quickstart_dense.yaml parallel.tensor=1 parallel.pipeline=1 --nproc 2
  megamem bench configs/quickstart.yaml parallel.tensor=1 parallel.pipeline=1 --vary parallel.memory=1,2,4 --nproc 4
  megamem bench step configs/quickstart.yaml parallel.tensor=1 parallel.pipeline=1 --nproc 1 --pair
  megamem bench kernels --tokens 2048 --dtypes bf16

Configurations of one layout take turns on the same ranks; layouts follow one another. All see random tokens. Overrides
apply to each. Ratios are to the first line. What a rank sends is for the lookups in split tables (parallel.memory) and
for attention across cut sequences (parallel.context, but for Transformer Engine's), per optimizer step.
`step` before the configurations says where the time of a step goes: its phases, and each part of the memory.
`kernels` in place of the configurations times the memory kernels beside PyTorch's own operations and a copy, after
checking them against their twins.
"""

_READ_BY = {
    "step": ("pair", "peak_tflops"),
    "kernels": ("shapes", "tokens", "rows", "dtypes", "kernels", "compile_naive"),
}
"""Options that have an effect with one of these words alone."""


def add_parser(subparsers: Any) -> None:
    """Adds `bench` to the commands of `megamem`."""
    parser = subparsers.add_parser(
        "bench",
        help="training speed of configurations, side by side",
        description="Time optimizer steps of one or more configurations on the same ranks, taking turns; "
        "or the parts of a step; or the memory kernels.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "configs",
        metavar="CONFIG",
        nargs="+",
        help="YAML files; then key=value overrides; the word step before them; or the word kernels alone",
    )
    parser.add_argument("--vary", metavar="KEY=A,B,...", help="measure each configuration with each of these values")
    add_nproc(parser, "as `megamem train`")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="figures per configuration (default: 5)")
    parser.add_argument("--steps", type=int, default=2, metavar="N", help="optimizer steps per figure (default: 2)")
    parser.add_argument(
        "--vocab-size",
        type=int,
        default=4096,
        metavar="N",
        help="token ids where model.vocab_size is not set (default: 4096)",
    )
    _add_step_options(parser)
    _add_kernel_options(parser)
    parser.set_defaults(func=run_bench)


def _add_step_options(parser: argparse.ArgumentParser) -> None:
    options = parser.add_argument_group("megamem bench step")
    options.add_argument(
        "--pair",
        action="store_true",
        help="also measure, for each configuration, a dense model of equal forward FLOPs per token, and a mixture of "
        "experts of as many active and all parameters",
    )
    options.add_argument(
        "--peak-tflops",
        type=float,
        metavar="X",
        help="the device's peak in the run's precision, for MFU (default: known for bf16 on A100, H100, H200, B200)",
    )


def _add_kernel_options(parser: argparse.ArgumentParser) -> None:
    options = parser.add_argument_group("megamem bench kernels")
    options.add_argument(
        "--shapes",
        nargs="+",
        choices=("227m", "1b", "shard"),
        metavar="NAME",
        help="tables and retrievals of models: 227m, 1b, shard (default: 227m)",
    )
    options.add_argument(
        "--tokens", nargs="+", type=int, metavar="N", help="tokens per call (default: 1 2048; 32768 too on a GPU)"
    )
    options.add_argument("--rows", type=int, metavar="N", help="rows of the table, instead of the shape's own")
    options.add_argument("--dtypes", nargs="+", choices=["bf16", "fp32"], help="of the table (default: both)")
    options.add_argument(
        "--kernels",
        choices=("auto", "triton", "cpu", "torch"),
        help="implementation, as for train.kernels (default: auto)",
    )
    options.add_argument(
        "--compile-naive", action="store_true", help="also time the naive twin under torch.compile (minutes on a CPU)"
    )


def run_bench(args: argparse.Namespace) -> int:
    """Measures and prints."""
    of_step, of_kernels = args.configs[0] == "step", args.configs == ["kernels"]
    if not of_step and (unread := _given(args, "step")):
        raise ConfigError(
            f"{', '.join(unread)} has no effect without `step`: megamem bench step CONFIG {unread[0]} ..."
        )
    if not of_kernels and (unread := _given(args, "kernels")):
        raise ConfigError(f"{', '.join(unread)} has no effect without `kernels`: megamem bench kernels {unread[0]} ...")
    if of_kernels:
        if args.rounds < 1:
            raise ConfigError("nothing to measure: use --rounds of at least 1")
        from tools.bench.kernels import run_kernel_bench

        return run_kernel_bench(args)
    configs = _load_configs(args, args.configs[of_step:])
    return _run_step_bench(args, configs) if of_step else _run_throughput_bench(args, configs)


def _given(args: argparse.Namespace, word: str) -> list[str]:
    """Those of a word's options that were given."""
    values = {f"--{name.replace('_', '-')}": getattr(args, name) for name in _READ_BY[word]}
    return [option for option, value in values.items() if value is not None and value is not False]


def _run_throughput_bench(args: argparse.Namespace, configs: dict[str, RunConfig]) -> int:
    num_ranks = _num_ranks(args, configs.values())
    from tools.bench.throughput import bench_rank

    return run_on_ranks(lambda: bench_rank(configs, args.rounds, args.steps), num_ranks)


def _run_step_bench(args: argparse.Namespace, configs: dict[str, RunConfig]) -> int:
    if args.peak_tflops is not None and args.peak_tflops <= 0:
        raise ConfigError(f"--peak-tflops is {args.peak_tflops:g}: it must be above 0")
    from tools.bench.step import Contender, bench_steps_rank, with_pairs

    if args.pair:
        contenders = with_pairs(configs)
    else:
        contenders = {name: Contender(config) for name, config in configs.items()}
    num_ranks = _num_ranks(args, [contender.config for contender in contenders.values()])
    return run_on_ranks(lambda: bench_steps_rank(contenders, args.rounds, args.steps, args.peak_tflops), num_ranks)


def _load_configs(args: argparse.Namespace, words: list[str]) -> dict[str, RunConfig]:
    """The configurations by name, with overrides and with each value of `--vary`."""
    overrides = [word for word in words if "=" in word]
    paths = [word for word in words if "=" not in word]
    if not paths or args.rounds < 1 or args.steps < 1:
        raise ConfigError("nothing to measure: name at least one CONFIG, and use --rounds and --steps of at least 1")
    if args.vocab_size < 1:
        raise ConfigError(f"--vocab-size is {args.vocab_size}: it must be at least 1")
    configs = {}
    for path in paths:
        for change in _changes(args.vary):
            config = load_config(path, [*overrides, *change])
            # Tokens are random: no tokenizer says how many there are.
            model = replace(config.model, vocab_size=config.model.vocab_size or args.vocab_size)
            configs[" ".join((path, *change))] = replace(config, model=model)
    return configs


def _changes(vary: str | None) -> list[list[str]]:
    """The overrides of each value of `--vary`; none, once, without it."""
    if vary is None:
        return [[]]
    key, separator, values = vary.partition("=")
    if not separator or not all(values.split(",")):
        raise ConfigError(f"--vary is {vary}: write a key and its values, as in parallel.memory=1,2,4")
    return [[f"{key}={value}"] for value in values.split(",")]


def _num_ranks(args: argparse.Namespace, configs: Collection[RunConfig]) -> int:
    """How many ranks there are or shall be; all configurations must be able to run on them."""
    num_ranks: int = started_world_size() or args.nproc or max(default_num_ranks(config.parallel) for config in configs)
    for config in configs:
        validate(config, num_ranks)
    return num_ranks
