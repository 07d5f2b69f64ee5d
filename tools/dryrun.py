"""`megamem dryrun`: one rank of a run of any size, built and stepped once without GPUs or other ranks."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from typing import TYPE_CHECKING, Any

from parallel.machine.devices import hide_gpus
from pretrain.config.stages import load_stage
from pretrain.config.table_gradients import chosen
from pretrain.config.validate import validate
from pretrain.errors import ConfigError
from pretrain.planning.bytes.memory import stage_bytes
from pretrain.planning.bytes.memory_parts import MemoryPart, StageBytes
from pretrain.run.preflight import gigabytes
from tools.common.parsers import add_command, add_config, add_stage
from tools.common.vocabulary import with_vocabulary_of_data

if TYPE_CHECKING:
    from pretrain.planning.dryrun.rank import RankReport
    from pretrain.planning.dryrun.recorder import Snapshot

_EPILOG = """\
examples:
  megamem dryrun configs/ultramemv2/2.5b_120b_top256.yaml --world-size 512
  megamem dryrun configs/ultramemv2/2.5b_120b_top256.yaml --world-size 512 --all-stages parallel.memory=16
  megamem dryrun configs/ultramemv2/227m_1.2b.yaml --world-size 8 --as-gpu

Takes some 0.2 s per memory layer and microbatch. Its limits are in docs/planning.md.
"""


def add_parser(subparsers: Any) -> None:
    """Adds `dryrun` to the commands of `megamem`."""
    parser = add_command(
        subparsers,
        "dryrun",
        "count bytes and messages of one rank of a run of any size, without GPUs",
        _EPILOG,
        "Build one rank of a run of N ranks and take one optimizer step on tensors without data, on one CPU core, "
        "whatever the model. Prints bytes held and at the peak, by part, and every collective's calls and bytes.",
    )
    add_config(parser)
    add_stage(parser)
    parser.add_argument("--world-size", type=int, required=True, metavar="N", help="ranks of the run")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--rank", type=int, default=0, metavar="R", help="the rank to build (default: 0)")
    which.add_argument(
        "--all-ranks", action="store_true", help="every rank, one after the other, and whether their calls match"
    )
    which.add_argument(
        "--all-stages",
        action="store_true",
        help="the first rank of every pipeline stage, one after the other, and whether their calls match",
    )
    parser.add_argument(
        "--as-gpu",
        action="store_true",
        help="take a GPU's branches, with the scratch of its kernels and the pools of its streams",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.set_defaults(func=run_dryrun)


def run_dryrun(args: argparse.Namespace) -> int:
    """Runs the ranks and prints."""
    config = with_vocabulary_of_data(load_stage(args.config, args.overrides, args.stage), args.config)
    if args.world_size < 1 or not 0 <= args.rank < args.world_size:
        raise ConfigError(f"--rank is {args.rank}, and --world-size {args.world_size}: ranks are 0 to N - 1")
    choice, config = chosen(config), validate(config, args.world_size)
    if choice is not None and not args.json:
        print(f"{choice.text}.")
    # The stand-in for CUDA wants a machine without, and nothing is computed.
    hide_gpus()
    from pretrain.planning.dryrun.peers import mismatches
    from pretrain.planning.dryrun.rank import dry_run, first_ranks_of_stages

    ranks = first_ranks_of_stages(config, args.world_size) if args.all_stages else range(args.rank, args.rank + 1)
    ranks = range(args.world_size) if args.all_ranks else ranks
    reports, predicted = [], stage_bytes(config, args.world_size, on_gpu=args.as_gpu)
    # On a GPU, calls of the second step stand in another order.
    next_step = args.as_gpu and len(ranks) > 1
    for report in dry_run(config, args.world_size, ranks, as_gpu=args.as_gpu, next_step=next_step):
        reports.append(report)
        if not args.json:
            print("\n".join(_lines(report, predicted[report.stage])), flush=True)
    problems = mismatches(reports)
    if args.json:
        print(
            json.dumps(
                {"ranks": [as_json(report, predicted[report.stage]) for report in reports], "mismatches": problems},
                indent=2,
            )
        )
    elif len(reports) > 1 and not problems:
        whose = "ranks" if args.all_ranks else "stages"
        print(f"\nThe calls of {len(reports)} {whose} match, in order and size.")
    if problems:
        print("\n".join(problems), file=sys.stderr)
        raise ConfigError("ranks would wait for each other: " + problems[0])
    return 0


def _lines(report: RankReport, predicted: StageBytes) -> list[str]:
    lines = [
        f"rank {report.rank} of {report.world_size}, stage {report.stage}: {report.num_parameters:,} parameters, of "
        f"which {report.num_table_parameters:,} in tables; {report.num_microbatches} microbatches per step",
        f"  {'':28}{'held':>10}{'at peak':>10}{'predicted':>11}",
    ]
    parts = {**report.held.by_part, **report.peak_of_step.by_part}
    for part in sorted(parts, key=list(type(next(iter(parts)))).index):
        held, peak = report.held.by_part.get(part, 0), report.peak_of_step.by_part.get(part, 0)
        if max(held, peak) >= 1e6 or len(parts) < 4:
            lines.append(f"  {part.value:28}{_gb(held)}{_gb(peak)} {_gb(predicted.by_part.get(part, 0.0))}")
    lines.append(f"  {'in all':28}{_gb(report.held.total)}{_gb(report.peak_of_step.total)} {_gb(predicted.total)}  GB")
    if report.held.files:
        lines.append(
            f"  {MemoryPart.FILES.value:28}{_gb(report.held.files)}{_gb(report.held.files)} {_gb(predicted.files)}"
        )
    lines.append(f"  while it is built: {gigabytes(report.peak_of_building.total)}")
    lines.append(f"  {'collective':16}{'group':18}{'ranks':>6}{'calls':>8}{'sent, MB':>14}")
    for (op, axis, size), (calls, num_bytes) in collectives_by_group(report).items():
        lines.append(f"  {op:16}{axis:18}{size:>6}{calls:>8}{num_bytes / 1e6:>14,.3f}")
    lines.append(f"  about {report.num_kernels:,} kernels; the host reads {report.num_host_reads} values")
    return lines


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:>10.3f}"


def collectives_by_group(report: RankReport) -> dict[tuple[str, str, int], tuple[int, int]]:
    """Calls and bytes sent, by operation, group and its size."""
    calls: Counter[tuple[str, str, int]] = Counter()
    sent: Counter[tuple[str, str, int]] = Counter()
    for call in report.collectives:
        key = (call.op, call.axis, len(call.ranks))
        calls[key] += 1
        sent[key] += call.sent_bytes
    return {key: (calls[key], sent[key]) for key in sorted(calls)}


def as_json(report: RankReport, predicted: StageBytes) -> dict[str, Any]:
    """A rank's report and the predicted bytes of its stage as plain data."""
    return {
        "rank": report.rank,
        "stage": report.stage,
        "parameters": report.num_parameters,
        "table_parameters": report.num_table_parameters,
        "microbatches": report.num_microbatches,
        "held_bytes": _by_part(report.held),
        "file_bytes": report.held.files,
        "peak_bytes": _by_part(report.peak_of_step),
        "predicted_bytes": {part.value: num_bytes for part, num_bytes in predicted.by_part.items()},
        "building_bytes": report.peak_of_building.total,
        "collectives": [
            {"op": op, "group": axis, "ranks": size, "calls": calls, "sent_bytes": num_bytes}
            for (op, axis, size), (calls, num_bytes) in collectives_by_group(report).items()
        ],
        "host_reads": report.num_host_reads,
        "kernels": report.num_kernels,
    }


def _by_part(snapshot: Snapshot) -> dict[str, int]:
    return {part.value: num_bytes for part, num_bytes in snapshot.by_part.items()}
