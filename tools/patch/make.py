"""`megamem patch make`."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import TYPE_CHECKING

from pretrain.convert.paths import config_at
from pretrain.convert.resources import Resources
from pretrain.printable import printable
from tools.checkpoint.command import opened
from tools.checkpoint.phases import Phases
from tools.common.words import describe_size, plural
from tools.patch.paths import check_output

if TYPE_CHECKING:
    from pretrain.patch.make import MadePatch


def run(args: argparse.Namespace) -> int:
    """Write a patch, and say what is in it."""
    resources = Resources(args.workers, args.max_memory)
    check_output(args.output)
    config_at(args.before, None)
    config_at(args.after, None)
    before, after = opened(args.before), opened(args.after)

    # It imports torch.
    from pretrain.patch.make import make_patch

    with Phases() as phases:
        made = make_patch(
            before, after, args.output, max_bytes=args.max_size, resources=resources, on_start=phases.start
        )
    print("\n".join([*describe(made), f"written: {args.output}, {describe_size(made.num_bytes)}"]))
    return 0


def describe(written: MadePatch) -> Iterator[str]:
    """A line for each table of a patch that was written."""
    for table, num_rows in written.rows.items():
        total = written.shapes[table][0]
        yield printable(f"{table}: {plural(num_rows, 'row')} of {total:,} ({num_rows / total:.3%})")
