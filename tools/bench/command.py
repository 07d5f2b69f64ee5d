"""`megamem bench`: training speed of configurations, side by side; where a step's time goes (`bench step`); the memory kernels (`bench kernels`)."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from pretrain.config.loader import load_config
from pretrain.config.schema import ParallelConfig, RunConfig
from pretrain.config.validate import validate
from pretrain.errors import ConfigError
from tools.bench.kernels import add_arguments, run_kernel_bench, unread_options
from tools.bench.step import Contender, add_step_arguments, bench_steps_rank, unread_step_options, with_pairs
from tools.ranks import default_num_ranks, run_on_ranks, started_world_size

if TYPE_CHECKING:
    from tools.bench.throughput import Throughput

_EPILOG = """\
examples:
  megamem bench configs/quickstart.yaml configs/quickstart_dense.yaml
  megamem bench configs/quickstart.yaml configs/quickstart_dense.yaml parallel.tensor=1 parallel.pipeline=1 --nproc 2
  megamem bench configs/quickstart.yaml parallel.tensor=1 parallel.pipeline=1 --vary parallel.memory=1,2,4 --nproc 4
  megamem bench step configs/quickstart.yaml parallel.tensor=1 parallel.pipeline=1 --nproc 1 --pair
  megamem bench kernels --tokens 2048 --dtypes bf16

Configurations of one layout take turns on the same ranks; layouts follow one another. All see random tokens. Overrides apply to each.
Ratios are to the first line. What a rank sends is for the lookups in split tables (parallel.memory) and for attention across cut sequences (parallel.context, but for
Transformer Engine's), per optimizer step.
`step` before the configurations says where the time of a step goes: its phases, and each part of the memory.
`kernels` in place of the configurations times the memory kernels beside PyTorch's own operations and a copy, after checking them against their twins.
"""


def add_parser(subparsers: Any) -> None:
    """Adds `bench` to the commands of `megamem`."""
    parser = subparsers.add_parser(
        "bench",
        help="training speed of configurations, side by side",
        description="Time optimizer steps of one or more configurations on the same ranks, taking turns; or the parts of a step; or the memory kernels.",
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
    add_step_arguments(parser)
    add_arguments(parser)
    parser.set_defaults(func=run_bench)


def run_bench(args: argparse.Namespace) -> int:
    """Measures and prints."""
    action = args.configs[0]
    if action != "step" and (unread := list(unread_step_options(args))):
        raise ConfigError(
            f"{', '.join(unread)} has no effect without `step`: megamem bench step CONFIG {unread[0]} ..."
        )
    if args.configs == ["kernels"]:
        if args.rounds < 1:
            raise ConfigError("nothing to measure: use --rounds of at least 1")
        return run_kernel_bench(args)
    if unread := list(unread_options(args)):
        raise ConfigError(f"{', '.join(unread)} has no effect without `kernels`: megamem bench kernels {unread[0]} ...")
    if action == "step":
        return _run_step_bench(args, _contestants(args, args.configs[1:]))
    contestants = _contestants(args, args.configs)
    num_ranks = _num_ranks(args, list(contestants.values()))
    return run_on_ranks(lambda: bench_rank(contestants, args.vocab_size, args.rounds, args.steps), num_ranks)


def _run_step_bench(args: argparse.Namespace, configs: dict[str, RunConfig]) -> int:
    if args.peak_tflops is not None and args.peak_tflops <= 0:
        raise ConfigError(f"--peak-tflops is {args.peak_tflops:g}: it must be above 0")
    contenders = (
        with_pairs(configs, args.vocab_size)
        if args.pair
        else {name: Contender(config) for name, config in configs.items()}
    )
    num_ranks = _num_ranks(args, [contender.config for contender in contenders.values()])
    return run_on_ranks(
        lambda: bench_steps_rank(contenders, args.vocab_size, args.rounds, args.steps, args.peak_tflops), num_ranks
    )


def _contestants(args: argparse.Namespace, words: list[str]) -> dict[str, RunConfig]:
    """The configurations by name, with overrides and with each value of `--vary`."""
    overrides = [word for word in words if "=" in word]
    paths = [word for word in words if "=" not in word]
    if not paths or args.rounds < 1 or args.steps < 1:
        raise ConfigError("nothing to measure: name at least one CONFIG, and use --rounds and --steps of at least 1")
    return {
        f"{path} {change}".strip(): load_config(path, [*overrides, change] if change else overrides)
        for path in paths
        for change in _changes(args.vary)
    }


def _num_ranks(args: argparse.Namespace, configs: list[RunConfig]) -> int:
    """How many ranks there are or shall be; all configurations must be able to run on them."""
    num_ranks: int = started_world_size() or args.nproc or max(default_num_ranks(config.parallel) for config in configs)
    for config in configs:
        validate(config, num_ranks)
    return num_ranks


def _changes(vary: str | None) -> list[str]:
    """The overrides of `--vary`, one per value; one empty one without it."""
    if vary is None:
        return [""]
    key, separator, values = vary.partition("=")
    if not separator or not all(values.split(",")):
        raise ConfigError(f"--vary is {vary}: write a key and its values, as in parallel.memory=1,2,4")
    return [f"{key}={value}" for value in values.split(",")]


def bench_rank(contestants: dict[str, RunConfig], vocab_size: int, rounds: int, steps: int) -> None:
    """What one rank does: one layout after the other."""
    from pretrain.session import relaid, session
    from tools.bench.throughput import measure

    by_layout: dict[ParallelConfig, dict[str, RunConfig]] = {}
    for name, config in contestants.items():
        by_layout.setdefault(config.parallel, {})[name] = config
    results: dict[str, Throughput] = {}
    first = next(iter(contestants.values()))
    size = first.model.vocab_size or vocab_size
    with session(first) as groups:
        for configs in by_layout.values():
            of_layout = list(configs.values())
            if of_layout[0].parallel != first.parallel:
                groups = relaid(of_layout[0], groups)
            measured = measure(of_layout, groups, vocab_size=size, rounds=rounds, steps_per_round=steps)
            results |= dict(zip(configs, measured, strict=True))
        if groups.is_main:
            _print(contestants, results, groups.world_size, vocab_size, f"{rounds} rounds of {steps} steps each")


def _print(
    contestants: dict[str, RunConfig],
    results: dict[str, Throughput],
    num_ranks: int,
    vocab_size: int,
    amount: str,
) -> None:
    from parallel.layout import padded_size
    from pretrain.costs.formulas import count_parameters
    from pretrain.costs.traffic import attention_bytes, exchanged_bytes

    print(f"{num_ranks} ranks, {amount}; tokens/s as median (lowest .. highest)")
    reference = results[next(iter(contestants))].median
    for name, config in contestants.items():
        result = results[name]
        rows = padded_size(config.model.vocab_size or vocab_size, config.model.vocab_size_multiple)
        counts = count_parameters(config.model, rows)
        tokens = config.train.global_batch_size * config.train.sequence_length
        sent = exchanged_bytes(config, num_ranks) + attention_bytes(config, num_ranks)
        print(
            f"  {name:36} {result.median:12,.0f} ({min(result.tokens_per_s):,.0f} .. {max(result.tokens_per_s):,.0f})"
            f"  {result.median / reference:5.2f}x  {tokens / result.median:.3f} s/step  "
            f"{sent / 1e6:.2f} MB sent  "
            f"{counts.total / 1e6:.2f}M parameters, {counts.active / 1e6:.2f}M active"
        )
