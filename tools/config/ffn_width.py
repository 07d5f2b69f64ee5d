"""`megamem config ffn-width`: the feed-forward that pays for a memory."""

from __future__ import annotations

import argparse
import math
from typing import Any

from pretrain.config.stages import load_config
from pretrain.errors import ConfigError
from pretrain.planning.counts.equal_compute import Measure, active_measure, core_measure, flops_measure, solve_ffn_width
from tools.common.parsers import add_config

_MEASURES = {
    "flops": "forward FLOPs per token",
    "active": "active parameters",
    "core": "active parameters without embeddings and values read",
}


def add_ffn_width(actions: Any) -> None:
    """Adds `ffn-width` to the actions of `megamem config`."""
    width = actions.add_parser(
        "ffn-width",
        help="solve for the feed-forward width at equal cost",
        description="Print the model.ffn_hidden_size at which CONFIG costs what another configuration costs, or a "
        "given figure. Keys, top-K and sharing can thus be compared at equal computation: set them, and let the "
        "feed-forward pay.",
    )
    add_config(width)
    target = width.add_mutually_exclusive_group(required=True)
    target.add_argument("--like", metavar="OTHER", help="YAML file of the model to equal")
    target.add_argument("--target", type=float, metavar="N", help="the figure to meet instead, as in 2.5e9")
    width.add_argument(
        "--match",
        choices=("flops", "active", "core"),
        default="flops",
        help="figure to equal: forward FLOPs per token at the sequence length of CONFIG (default), active "
        "parameters, or active parameters without embeddings and values read, as the paper counts its larger models",
    )
    width.add_argument(
        "--multiple", type=int, default=64, metavar="M", help="round to a multiple of M, and of parallel.tensor (64)"
    )
    width.set_defaults(func=run_ffn_width)


def run_ffn_width(args: argparse.Namespace) -> int:
    """Prints the width, and as a YAML comment how well it meets the target."""
    if args.multiple < 1:
        raise ConfigError(f"--multiple is {args.multiple}: it must be at least 1")
    config = load_config(args.config, args.overrides)
    flops = flops_measure(config.train.sequence_length)
    measures: dict[str, Measure] = {"flops": flops, "active": active_measure, "core": core_measure}
    measure = measures[args.match]
    if args.like is not None:
        other = load_config(args.like)
        if (other.model.vocab_size is None) != (config.model.vocab_size is None):
            raise ConfigError(
                f"only one of {args.config} and {args.like} has model.vocab_size, which they need to be compared: give "
                "it in both, or in neither"
            )
        target, source = measure(other.model), args.like
    elif args.target <= 0:
        raise ConfigError(f"--target is {args.target}: it must be above 0")
    else:
        target, source = args.target, "--target"
    multiple = math.lcm(args.multiple, config.parallel.tensor)
    try:
        solved = solve_ffn_width(config.model, measure, target, multiple=multiple)
    except ValueError as error:
        raise ConfigError(f"{args.config}: {error}") from error
    print(f"model.ffn_hidden_size: {solved.width}")
    print(
        f"# {_MEASURES[args.match]}: {solved.value:,.0f}, {100 * solved.residual:+.3f} % of {solved.target:,.0f} "
        f"({source})"
    )
    print(f"# the multiple of {multiple} nearest to {solved.exact:.1f}")
    return 0
