"""`megamem checkpoint verify`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from parallel.machine.refusals import describe_error
from pretrain.checkpoint.folder import list_checkpoints
from pretrain.convert.resources import Resources
from pretrain.errors import CheckpointError
from pretrain.printable import printable
from pretrain.run.folder import RunFolder
from tools.checkpoint.command import opened
from tools.checkpoint.phases import Phases
from tools.common.words import describe_size, plural

if TYPE_CHECKING:
    from pretrain.convert.format import OpenedCheckpoint

_MOST_TOLD = 20


def run(args: argparse.Namespace) -> int:
    """Read a checkpoint, or all of a run, and say what is damaged."""
    resources = Resources(args.workers, args.max_memory)
    of_run = list_checkpoints(RunFolder(args.path).checkpoints) if args.step is None else []
    if not of_run:
        _verify(opened(args.path, args.step), resources, finite=args.finite)
        return 0
    damaged = []
    for path in of_run:
        try:
            _verify(opened(path), resources, finite=args.finite)
        except (CheckpointError, OSError) as error:
            # A damaged one must not hide the others.
            print(describe_error(error), flush=True)
            damaged.append(path)
    if damaged:
        raise CheckpointError(
            f"{len(damaged)} of {plural(len(of_run), 'checkpoint')} of {args.path} "
            f"{'is' if len(damaged) == 1 else 'are'} damaged, see above: {_named(damaged)}"
        )
    return 0


def _verify(checkpoint: OpenedCheckpoint, resources: Resources, *, finite: bool) -> None:
    """Read one checkpoint, and say that it is whole.

    Raises:
        CheckpointError: the checkpoint is not whole; what is wrong was printed.
    """
    from pretrain.convert.verify import problems_of

    with Phases() as phases:
        problems = problems_of(checkpoint, resources, finite=finite, on_start=phases.start)
    if problems:
        for problem in problems[:_MOST_TOLD]:
            print(printable(problem))
        if len(problems) > _MOST_TOLD:
            print(f"... and {len(problems) - _MOST_TOLD:,} more")
        raise CheckpointError(f"{checkpoint.path} is damaged: {plural(len(problems), 'problem')}, see above")
    infos = checkpoint.reader.tensors.values()
    print(
        f"{checkpoint.path} is whole: {plural(len(infos), 'tensor')} of "
        f"{describe_size(sum(info.num_bytes for info in infos))}{', all finite' if finite else ''}",
        flush=True,
    )


def _named(paths: list[Path]) -> str:
    return ", ".join(path.name for path in paths)
