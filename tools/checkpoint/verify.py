"""`megamem checkpoint verify`."""

from __future__ import annotations

import argparse

from pretrain.checkpoint.formats.convert import Resources
from pretrain.checkpoint.formats.verify import problems_of
from pretrain.errors import CheckpointError
from tools.checkpoint.command import opened
from tools.checkpoint.phases import Phases
from tools.words import plural, size_in_words

_MOST_TOLD = 20


def run(args: argparse.Namespace) -> int:
    """Read a checkpoint, and say what is damaged."""
    resources = Resources(args.workers, args.max_memory)
    checkpoint = opened(args.path, args.step)
    with Phases() as phases:
        problems = problems_of(checkpoint, resources, finite=args.finite, on_start=phases.start)
    if problems:
        for problem in problems[:_MOST_TOLD]:
            print(problem)
        if len(problems) > _MOST_TOLD:
            print(f"... and {len(problems) - _MOST_TOLD:,} more")
        raise CheckpointError(f"{checkpoint.path} is damaged: {plural(len(problems), 'problem')}, see above")
    infos = checkpoint.reader.tensors.values()
    print(
        f"{checkpoint.path} is whole: {plural(len(infos), 'tensor')} of "
        f"{size_in_words(sum(info.num_bytes for info in infos))}{', all finite' if args.finite else ''}"
    )
    return 0
