"""`megamem patch apply` and `megamem patch revert`."""

from __future__ import annotations

import argparse

from pretrain.convert.paths import check_destination, config_at
from pretrain.convert.resources import Resources
from tools.checkpoint.phases import Phases
from tools.common.words import plural
from tools.patch.paths import check_patch


def run(args: argparse.Namespace) -> int:
    """Apply or revert a patch, and say what was changed."""
    applies = args.action == "apply"
    resources = Resources(args.workers, args.max_memory)
    check_patch(args.patch)
    if args.output is not None:
        check_destination(args.output)
    config_at(args.folder, args.step)

    # These import torch.
    from pretrain.patch.apply import change
    from pretrain.patch.file import read_patch

    patch = read_patch(args.patch)
    with Phases() as phases:
        changed = change(
            patch,
            args.folder,
            args.step,
            to="after" if applies else "before",
            output=args.output,
            resources=resources,
            on_start=phases.start,
        )
    if changed is None:
        state = "is already applied to" if applies else "is not applied to"
        print(f"{args.patch} {state} {args.folder}: nothing was written")
        return 0
    done = "applied" if applies else "reverted"
    print(
        f"{done}: {plural(changed.num_rows, 'row')} in {plural(len(changed.files), 'file')}\n"
        f"{'written' if args.output else 'changed'}: {changed.path}"
    )
    return 0
