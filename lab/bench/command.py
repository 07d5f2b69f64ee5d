"""`megamem bench`: training speed of configurations, side by side; where a step's time goes (`bench step`); the memory
kernels (`bench kernels`); long sequences cut over ranks (`bench context`); updates of tables by the tables' size (`bench
updates`); figures of this machine for `megamem plan` (`bench hardware`); generation of models (`bench generate`), and of
tables that it reads from memory or disk (`bench tables`); training with tables in files (`bench files`)."""

from __future__ import annotations

import argparse
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

from lab.bench.arguments import (
    add_configs,
    add_rounds,
    add_steps,
    add_vocabulary,
    load_configs,
    numbers,
    with_given_vocabulary,
)
from lab.bench.files_command import add_files_parser
from lab.bench.generation_command import add_generation_parsers
from lab.bench.updates_command import add_updates_parser
from parallel.machine.devices import num_visible_gpus
from parallel.machine.refusals import check_can_write
from pretrain.config.schema import RunConfig
from pretrain.config.settled import settled
from pretrain.config.stages import load_stage
from pretrain.config.validate import validate
from pretrain.errors import ConfigError
from pretrain.planning.seconds.hardware import hardware_file, load_hardware
from tools.common.parsers import add_command, add_config, add_stage
from tools.common.ranks import (
    add_nproc,
    current_rank_is_first,
    default_num_ranks,
    fewest_ranks,
    run_on_ranks,
    started_world_size,
)

_EPILOG = """\
examples:
  megamem study bench configs/quickstart.yaml configs/quickstart_dense.yaml
  megamem study bench configs/quickstart.yaml configs/quickstart_dense.yaml parallel.tensor=2 --nproc 2
  megamem study bench configs/quickstart.yaml --vary parallel.memory=1,2,4 --nproc 4
  megamem study bench runs/growth/{continued,memory,llama-pro}/seed_2/config.yaml --memory --nproc 2
  megamem study bench step --help
  megamem study bench kernels --help
  megamem study bench hardware --help
  megamem study bench context --help
  megamem study bench generate --help
  megamem study bench tables --help
  megamem study bench updates --help
  megamem study bench files --help

Configurations of one layout take turns on the same ranks; layouts follow one another. All see random tokens. Overrides
apply to each. Ratios are to the first line. Sent bytes are those of a rank per optimizer step, by lookups in split tables
(parallel.memory) and by attention across cut sequences (parallel.context, but for Transformer Engine's).
"""
_STEP_EPILOG = """\
examples:
  megamem study bench step configs/quickstart.yaml --nproc 1
  megamem study bench step configs/quickstart.yaml parallel.memory=2 --nproc 2 --pair
  megamem study bench hardware --write mine.yaml --nproc 2
  megamem study bench step configs/quickstart.yaml --nproc 2 --gpu mine.yaml
"""
_HARDWARE_EPILOG = """\
examples:
  megamem study bench hardware --write mine.yaml
  megamem plan configs/ultramemv2/2.5b_25b.yaml --gpus 64 --gpu mine.yaml

Measures copies, products of matrices, gathers, launches, and all-to-all and all-reduce between the ranks of one node:
products and gathers in bf16 on GPUs, in fp32 on CPUs, as runs there compute. Figures that one node cannot show (the
network between nodes, the link to the host) are those of --like.
"""
_KERNELS_EPILOG = """\
examples:
  megamem study bench kernels
  megamem study bench kernels --shapes 227m 1b --tokens 2048 --dtypes bf16
"""
_CONTEXT_EPILOG = """\
examples:
  megamem study bench context configs/quickstart_dense.yaml --lengths 2048,8192 --sizes 1,2,4 --nproc 4
  megamem study bench context configs/quickstart_dense.yaml train.recompute=full --lengths 32768 --sizes 2,4 --nproc 4

Every length is trained on with every number of context-parallel ranks and every way of parallel.context_attention that
the heads allow, on the same ranks, with random tokens and one sequence per microbatch.
"""


def add_parser(subparsers: Any) -> None:
    """Adds `bench` and the commands that begin with it to the commands of `megamem`."""
    parser = add_command(
        subparsers,
        "bench",
        "training speed of configurations, side by side",
        _EPILOG,
        "Time optimizer steps of one or more configurations on the same ranks, taking turns.",
    )
    _add_trained(parser)
    parser.add_argument(
        "--memory",
        action="store_true",
        help="also count what rank 0 holds between steps and at the peak of one, as `megamem dryrun` does",
    )
    parser.set_defaults(func=run_bench)
    parser = add_command(
        subparsers,
        "bench step",
        "where the time of a step goes",
        _STEP_EPILOG,
        "Time the phases of an optimizer step, and each part of the memory.",
    )
    _add_trained(parser)
    _add_step_options(parser)
    parser.set_defaults(func=run_bench_step)
    parser = add_command(
        subparsers,
        "bench kernels",
        "the memory kernels beside PyTorch's own operations",
        _KERNELS_EPILOG,
        "Time the memory kernels beside PyTorch's own operations and a copy, after checking them against their twins.",
    )
    add_rounds(parser)
    _add_kernel_options(parser)
    parser.set_defaults(func=run_bench_kernels)
    _add_hardware_parser(subparsers)
    parser = add_command(
        subparsers,
        "bench context",
        "long sequences, cut over ranks and attended to in every way",
        _CONTEXT_EPILOG,
        "Time steps and measure peak memory by sequence length, context-parallel size and way of attention.",
    )
    _add_context_options(parser)
    parser.set_defaults(func=run_bench_context)
    add_generation_parsers(subparsers)
    add_updates_parser(subparsers)
    add_files_parser(subparsers)


def _add_trained(parser: argparse.ArgumentParser) -> None:
    """Adds the configurations whose steps are timed, and how."""
    add_configs(parser)
    add_nproc(parser, "as `megamem train`")
    add_steps(parser)


def _add_hardware_parser(subparsers: Any) -> None:
    parser = add_command(
        subparsers,
        "bench hardware",
        "figures of this machine for megamem plan",
        _HARDWARE_EPILOG,
        "Measure the figures of a machine that megamem plan needs, and write them as YAML.",
    )
    parser.add_argument("--write", type=Path, required=True, metavar="FILE.yaml", help="file for the figures")
    parser.add_argument(
        "--like", default="h100-80g", metavar="NAME", help="hardware that the rest is taken from (default: h100-80g)"
    )
    add_nproc(parser, "the GPUs of this machine, or 1")
    add_rounds(parser)
    parser.set_defaults(func=run_bench_hardware)


def _add_step_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--pair",
        action="store_true",
        help="also measure, for each configuration, a dense model of equal forward FLOPs per token, and a mixture of "
        "experts of as many active and all parameters",
    )
    parser.add_argument(
        "--peak-tflops",
        type=float,
        metavar="X",
        help="the device's peak in the run's precision, for MFU (default: known for bf16 on A100, H100, H200, B200)",
    )
    parser.add_argument(
        "--gpu",
        metavar="NAME",
        help="print what megamem plan predicts on it beside what was measured: a name that plan knows, or what "
        "`megamem bench hardware` wrote here",
    )


def _add_kernel_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--shapes",
        nargs="+",
        choices=("227m", "1b", "shard"),
        metavar="NAME",
        help="tables and retrievals of models: 227m, 1b, shard (default: 227m)",
    )
    parser.add_argument(
        "--tokens", nargs="+", type=int, metavar="N", help="tokens per call (default: 1 2048; 32768 too on a GPU)"
    )
    parser.add_argument("--rows", type=int, metavar="N", help="rows of the table, instead of the shape's own")
    parser.add_argument("--dtypes", nargs="+", choices=["bf16", "fp32"], help="dtypes of the table (default: both)")
    parser.add_argument(
        "--kernels",
        choices=("auto", "triton", "cpu", "torch"),
        help="implementation, as for train.kernels (default: auto)",
    )
    parser.add_argument(
        "--compile-naive", action="store_true", help="also time the naive twin under torch.compile (minutes on a CPU)"
    )


def _add_context_options(parser: argparse.ArgumentParser) -> None:
    add_config(parser)
    add_stage(parser)
    for name, what, default in (("lengths", "tokens per sequence", [2048]), ("sizes", "parallel.context", [1, 2, 4])):
        shown = ",".join(map(str, default))
        parser.add_argument(
            f"--{name}", type=numbers, default=default, metavar="N,..", help=f"{what} (default: {shown})"
        )
    add_nproc(parser, "as many as the largest of --sizes needs")
    add_rounds(parser)
    add_steps(parser)
    add_vocabulary(parser)


def run_bench_kernels(args: argparse.Namespace) -> int:
    """Measures the kernels and prints."""
    if args.rounds < 1:
        raise ConfigError(f"--rounds is {args.rounds}: nothing is measured with less than 1")
    from lab.bench.kernels import run_kernel_bench

    return run_kernel_bench(args)


def run_bench_hardware(args: argparse.Namespace) -> int:
    """Measures the machine and writes."""
    if args.rounds < 1:
        raise ConfigError(f"--rounds is {args.rounds}: nothing is measured with less than 1")
    like = hardware_file(args.like)
    load_hardware(args.like)
    num_ranks = started_world_size() or args.nproc or num_visible_gpus() or 1
    from lab.bench.hardware import bench_hardware_rank

    if args.write is not None:
        check_can_write(args.write)
    return run_on_ranks(lambda: bench_hardware_rank(args.write, str(like.resolve()), args.rounds), num_ranks)


def run_bench(args: argparse.Namespace) -> int:
    """Measures training speed and prints."""
    configs = _load_trained(args)
    num_ranks = _num_ranks(args, configs.values())
    from lab.bench.throughput import bench_rank, memory_lines

    code = run_on_ranks(lambda: bench_rank(configs, args.rounds, args.steps), num_ranks)
    if code == 0 and args.memory and current_rank_is_first():
        print("\n".join(memory_lines(configs, num_ranks)), flush=True)
    return code


def run_bench_step(args: argparse.Namespace) -> int:
    """Measures the parts of a step and prints."""
    configs = _load_trained(args)
    if args.peak_tflops is not None and args.peak_tflops <= 0:
        raise ConfigError(f"--peak-tflops is {args.peak_tflops:g}: it must be above 0")
    hardware = None if args.gpu is None else load_hardware(args.gpu)
    from lab.bench.step import Contender, bench_steps_rank, with_pairs

    if args.pair:
        contenders = with_pairs(configs)
    else:
        contenders = {name: Contender(config) for name, config in configs.items()}
    num_ranks = _num_ranks(args, [contender.config for contender in contenders.values()])
    return run_on_ranks(
        lambda: bench_steps_rank(contenders, args.rounds, args.steps, args.peak_tflops, hardware), num_ranks
    )


def run_bench_context(args: argparse.Namespace) -> int:
    """Measures long sequences and prints."""
    if args.rounds < 1 or args.steps < 1:
        raise ConfigError("nothing to measure: use --rounds and --steps of at least 1")
    config = with_given_vocabulary(load_stage(args.config, args.overrides, args.stage), args.vocab_size)
    largest = replace(config.parallel, context=max(args.sizes))
    num_ranks = started_world_size() or args.nproc or fewest_ranks(largest)
    from lab.bench.context import bench_context_rank, context_cases

    cases = context_cases(config, args.lengths, args.sizes, num_ranks)
    cases = [validate(case, num_ranks) for case in cases]
    return run_on_ranks(lambda: bench_context_rank(cases, args.rounds, args.steps), num_ranks)


def _load_trained(args: argparse.Namespace) -> dict[str, RunConfig]:
    if args.steps < 1:
        raise ConfigError(f"--steps is {args.steps}: nothing is measured with less than 1")
    return {name: settled(config) for name, config in load_configs(args).items()}


def _num_ranks(args: argparse.Namespace, configs: Collection[RunConfig]) -> int:
    """Number of ranks that there are or shall be; all configurations must be able to run on them."""
    num_ranks = _most_ranks(args, configs)
    for config in configs:
        validate(config, num_ranks)
    return num_ranks


def _most_ranks(args: argparse.Namespace, configs: Collection[RunConfig]) -> int:
    started: int | None = started_world_size() or args.nproc
    return started or max(default_num_ranks(config.parallel) for config in configs)
