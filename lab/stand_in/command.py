"""`megamem study watch`: what passes between host and GPU, and what has no order on its streams, without a GPU."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

from parallel.machine.devices import hide_gpus
from pretrain.config.stages import load_stage
from pretrain.config.validate import validate
from pretrain.errors import ConfigError
from tools.common.parsers import add_command, add_config, add_stage
from tools.common.vocabulary import with_vocabulary_of_data
from tools.common.words import aligned

if TYPE_CHECKING:
    from lab.stand_in.watched import WatchedRank

_EPILOG = """\
examples:
  megamem study watch configs/ultramemv2/227m_1.2b.yaml --world-size 8
  megamem study watch configs/ultramemv2/2.5b_120b_top256.yaml --world-size 64 --all-stages parallel.memory=16

Takes a few seconds per memory layer and microbatch. docs/planning.md says what is allowed, and what is not seen.
"""


def add_parser(subparsers: Any) -> None:
    """Adds `watch` to the studies of `megamem`."""
    parser = add_command(
        subparsers,
        "watch",
        "watch a rank on a stand-in for a GPU: traffic with its host, order of its streams",
        _EPILOG,
        "Dry-run a rank as on a GPU through two steps, an evaluation, a save, a restore and a generated text. Prints what "
        "passes between host and GPU, with the lines it comes through, and accesses without an order on the GPU's "
        "streams; exits with 2 if there are any, or more passes than is allowed.",
    )
    add_config(parser)
    add_stage(parser)
    parser.add_argument("--world-size", type=int, required=True, metavar="N", help="ranks of the run")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--rank", type=int, default=0, metavar="R", help="the rank to watch (default: 0)")
    which.add_argument("--all-stages", action="store_true", help="the first rank of every pipeline stage")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.set_defaults(func=run_watch)


def run_watch(args: argparse.Namespace) -> int:
    """Watch the ranks and print."""
    config = with_vocabulary_of_data(load_stage(args.config, args.overrides, args.stage), args.config)
    if args.world_size < 1 or not 0 <= args.rank < args.world_size:
        raise ConfigError(f"--rank is {args.rank}, and --world-size {args.world_size}: ranks are 0 to N - 1")
    config = validate(config, args.world_size)
    # The stand-in for CUDA wants a machine without, and nothing is computed.
    hide_gpus()
    from lab.stand_in.watched import watched_run
    from pretrain.planning.dryrun.rank import first_ranks_of_stages

    ranks = first_ranks_of_stages(config, args.world_size) if args.all_stages else range(args.rank, args.rank + 1)
    watched = []
    for rank in watched_run(config, args.world_size, ranks, in_order=True, all_commands=True):
        watched.append(rank)
        if not args.json:
            print("\n".join(_lines(rank)), flush=True)
    if args.json:
        print(json.dumps({"ranks": [as_json(rank) for rank in watched]}, indent=2))
    races = [str(race) for rank in watched for race in rank.races]
    beyond = [excess for rank in watched for excess in rank.excesses]
    if found := [*races, *beyond]:
        print("\n".join(found), file=sys.stderr)
    if races:
        raise ConfigError("accesses have no order on the GPU's streams: " + races[0])
    if beyond:
        raise ConfigError("host and GPU would wait for each other, or take each other's memory: " + beyond[0])
    return 0


def _lines(rank: WatchedRank) -> list[str]:
    table = [
        ("command", "traffic", "calls", "allowed", "MB", "operation", "allowed for", "line"),
        *(
            (
                each.command,
                found.kind.value,
                str(found.calls),
                str(each.allowed(found)),
                f"{found.num_bytes / 1e6:.3f}",
                found.what,
                each.reason(found),
                str(found.place),
            )
            for each in rank.traffic
            for found in each.findings
        ),
    ]
    counted = rank.counted
    return [
        f"rank {counted.rank} of {counted.world_size}, stage {counted.stage}; {counted.num_microbatches} microbatches per step",
        "  between host and GPU:",
        *(f"    {line}" for line in aligned(table)),
        f"  accesses without an order on the GPU's streams, of two steps and the rest: {len(rank.races)}",
    ]


def as_json(rank: WatchedRank) -> dict[str, Any]:
    """Observations of a rank as plain data."""
    return {
        "rank": rank.counted.rank,
        "stage": rank.counted.stage,
        "races": [str(race) for race in rank.races],
        "traffic": [
            {
                "command": each.command,
                "kind": found.kind.value,
                "operation": found.what,
                "line": found.place.line,
                "through": found.place.through,
                "calls": found.calls,
                "allowed": each.allowed(found),
                "bytes": found.num_bytes,
            }
            for each in rank.traffic
            for found in each.findings
        ],
    }
