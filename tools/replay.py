"""`megamem replay`: take the last steps of a run again, on another layout, and hold the losses against the first ones.

A layout that splits a model wrongly still trains, a little worse. Whoever is about to move a run to other ranks can see
beforehand that its steps stay the same.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pretrain.config.schema import RunConfig
from pretrain.config.stages import load_config
from pretrain.config.validate import validate
from pretrain.errors import CheckpointError
from pretrain.run.folder import RunFolder
from tools.common.metrics import read_metrics
from tools.common.ranks import add_nproc, default_num_ranks, run_on_ranks, started_world_size

if TYPE_CHECKING:
    from pretrain.checkpoint.folder import SavedState

_MAX_ROUNDING = 1e-4
"""Difference of two losses, in nats per token, that other orders of additions explain, with a last entry of a retrieval here
and there that is another one."""
_EPILOG = """\
examples:
  megamem replay runs/quickstart parallel.tensor=2 parallel.pipeline=2
  megamem replay runs/quickstart --step 600 train.kernels=naive --nproc 2

The replay writes into RUN/replay alone, and no checkpoint. Layouts round differently, so losses agree to about 1e-6.
Where two candidates of a retrieval are closer than that, another one is read, and from that step on the losses differ
a little more.
"""


def add_parser(subparsers: Any) -> None:
    """Adds `replay` to the commands of `megamem`."""
    parser = subparsers.add_parser(
        "replay",
        help="take a run's last steps again, on another layout, and compare the losses",
        description="Take a run's last steps again from one of its checkpoints, with other settings, and print both losses "
        "of every step.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", metavar="RUN", type=Path, help="a run's folder")
    parser.add_argument(
        "overrides",
        metavar="key=value",
        nargs="*",
        default=[],
        help="a key to change, as in parallel.tensor=2; the model cannot change",
    )
    parser.add_argument(
        "--step",
        type=int,
        metavar="N",
        help="the checkpoint to go on from (default: the newest one with steps of the run after it)",
    )
    add_nproc(parser, "one per GPU, or as few as the layout needs")
    parser.set_defaults(func=run_replay)


def run_replay(args: argparse.Namespace) -> int:
    """Takes the steps, and prints the two losses of each."""
    folder = RunFolder(args.run)
    losses = {row["step"]: row["loss"] for row in read_metrics(folder.metrics) if row.get("loss") is not None}
    start = _start(folder, args.step, max(losses, default=0))
    config = load_config(folder.config, args.overrides)
    num_ranks = started_world_size() or args.nproc or default_num_ranks(config.parallel)
    config = validate(config, num_ranks)
    return run_on_ranks(lambda: replay_rank(config, folder, start, losses), num_ranks)


def _start(folder: RunFolder, step: int | None, last_step: int) -> SavedState:
    """The checkpoint of a step, or the newest complete one before the last step.

    Raises:
        CheckpointError: no such checkpoint is there, or no step of the run follows it.
    """
    from pretrain.run.saved_run import find_checkpoint

    saved = find_checkpoint(folder, step, before=last_step, with_optimizer=True)
    if saved.step >= last_step:
        raise CheckpointError(
            f"{folder.metrics} has no step after {step}, so there is nothing to compare with: choose an earlier --step"
        )
    return saved


def replay_rank(config: RunConfig, folder: RunFolder, start: SavedState, losses: Mapping[int, float]) -> None:
    """Replay steps on one rank.

    Args:
        config: the run's, on the layout of the replay.
        folder: the run's folder.
        start: the checkpoint to go on from.
        losses: losses of the run in nats per token, by step.
    """
    from pretrain.engine.session import session
    from pretrain.train.loop import take_step
    from pretrain.train.run import open_run

    with session(config) as groups:
        run = open_run(config, RunFolder(folder.path / "replay"), groups, start)
        batches = run.batches()
        differences: dict[int, float] = {}
        if groups.is_main:
            print("   step         loss   in the run   difference", flush=True)
        while run.state.step < max(losses):
            result, _ = take_step(run, batches)
            step = run.state.step
            if step in losses:
                differences[step] = result.loss.mean - losses[step]
                if groups.is_main:
                    print(
                        f"{step:7}  {result.loss.mean:11.7f}  {losses[step]:11.7f}  {differences[step]:11.1e}",
                        flush=True,
                    )
        if groups.is_main:
            print(_conclusion(differences))


def _conclusion(differences: Mapping[int, float]) -> str:
    """The largest difference of the steps, and where the losses part, if they do."""
    worst = max(differences, key=lambda step: abs(differences[step]))
    found = f"largest difference of {len(differences)} steps: {abs(differences[worst]):.1e}, in step {worst}"
    parted = next((step for step in differences if abs(differences[step]) > _MAX_ROUNDING), None)
    if parted is None:
        return f"{found}: the losses stay"
    return (
        f"{found}. The losses part in step {parted}: from there on rounding has changed which rows a token retrieves, "
        "or the replay trains in another way"
    )
