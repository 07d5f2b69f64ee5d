"""`megamem eval`: loss and bits per byte of a run on its held-out documents."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from parallel.devices import num_visible_gpus
from pretrain.config.schema import ParallelConfig, RunConfig
from pretrain.config.validate import validate
from pretrain.errors import ConfigError
from tools.ranks import add_nproc, fewest_ranks, run_on_ranks, started_world_size

_EPILOG = """\
examples:
  megamem eval runs/quickstart
  megamem eval runs/quickstart --without-memory
  megamem eval runs/quickstart --step 200 --nproc 2 --json

Every held-out token is predicted once; tokens that end a document count in the loss and have no bytes. gzip and xz
compress the same documents, one after the other. The ranks are data-parallel, whatever layout the model was trained on,
or with --own-layout have that one (for models that do not fit).
"""


def add_parser(subparsers: Any) -> None:
    """Adds `eval` to the commands of `megamem`."""
    parser = subparsers.add_parser(
        "eval",
        help="loss and bits per byte on held-out documents",
        description="Evaluate a run's newest checkpoint on the held-out documents of its data sets.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", metavar="RUN", type=Path, help="a run's folder")
    parser.add_argument(
        "--step", type=int, metavar="N", help="the checkpoint of this step (default: the newest complete one)"
    )
    add_nproc(parser, "ranks to start here (default: one per GPU, or 2, or what --own-layout needs)")
    parser.add_argument("--own-layout", action="store_true", help="use the layout that the run was trained on")
    parser.add_argument("--without-memory", action="store_true", help="switch the memory's output off in every block")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(func=run_eval)


def run_eval(args: argparse.Namespace) -> int:
    """Evaluates and prints."""
    from pretrain.restore import find_checkpoint, saved_config
    from pretrain.run import RunFolder

    saved = find_checkpoint(RunFolder(args.run), args.step)
    config = saved_config(saved, None if args.own_layout else ParallelConfig())
    if args.without_memory and config.model.memory is None:
        raise ConfigError(f"{args.run} is a dense model: leave --without-memory out")
    by_default = fewest_ranks(config.parallel) if args.own_layout else num_visible_gpus() or 2
    num_ranks = started_world_size() or args.nproc or by_default
    if args.own_layout:
        validate(config, num_ranks)
    return run_on_ranks(lambda: evaluate_rank(config, saved.path, args.without_memory, args.json), num_ranks)


def evaluate_rank(config: RunConfig, checkpoint: Path, without_memory: bool, as_json: bool) -> None:
    """What one rank does."""
    from pretrain.callbacks import evaluation_row
    from pretrain.data.dataset import check_blend
    from pretrain.data.held_out import HeldOutDataset, compression_baselines
    from pretrain.evaluate import evaluate
    from pretrain.restore import restore_model
    from pretrain.session import session

    with session(config) as groups:
        tokenizer = check_blend(config.data.datasets)
        chunks = restore_model(config, checkpoint, tokenizer, groups)
        for chunk in chunks:
            chunk.set_memory_enabled(not without_memory)
        held_out = HeldOutDataset(config.data.datasets, config.train.sequence_length)
        result = evaluate(
            chunks,
            held_out,
            groups,
            micro_batch_size=config.train.micro_batch_size,
            pipeline=config.parallel.pipeline,
            progress=not as_json,
        )
        if groups.is_main:
            baselines = compression_baselines(config.data.datasets)
            row = {
                "checkpoint": str(checkpoint),
                **evaluation_row(result),
                **{f"{name} bits_per_byte": value for name, value in baselines.items()},
            }
            print(json.dumps(row) if as_json else _table(row, without_memory, baselines), flush=True)


def _table(row: dict[str, Any], without_memory: bool, baselines: dict[str, float]) -> str:
    subject = "this model without its memory" if without_memory else "this model"
    lines = [
        f"{row['checkpoint']}: {row['validation_loss']:.4f} nats per token over {row['validation_tokens']:,} held-out "
        f"tokens ({row['validation_bytes']:,} bytes)",
        "bits per byte on the held-out documents:",
        f"  {subject:30} {row['bits_per_byte']:.4f}",
        *(f"  {name:30} {value:.4f}" for name, value in baselines.items()),
    ]
    return "\n".join(lines)
