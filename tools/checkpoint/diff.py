"""`megamem checkpoint diff`."""

from __future__ import annotations

import argparse

from pretrain.convert.paths import config_at
from pretrain.convert.resources import Resources
from pretrain.printable import printable
from tools.checkpoint.command import opened
from tools.checkpoint.phases import Phases
from tools.common.words import describe_size, plural

_DIFFERENT = 1


def run(args: argparse.Namespace) -> int:
    """Compare two checkpoints; 0 only if they are equal."""
    resources = Resources(args.workers, args.max_memory)
    config_at(args.second, None)
    first, second = opened(args.first), opened(args.second)

    # It imports torch.
    from pretrain.convert.compare import Counter, differences

    names = [*first.weights, *(name for name in second.weights if name not in first.reader.tensors)]
    if not args.weights_only:
        states = dict.fromkeys([*first.optimizer_state, *second.optimizer_state])
        names += states
    num_bytes = sum(first.reader.tensors[name].num_bytes for name in names if name in first.reader.tensors)
    with Phases() as phases:
        found = differences(
            first.reader,
            second.reader,
            names,
            tolerance=args.tolerance,
            labels=(str(args.first), str(args.second)),
            compare_dtypes=not args.any_dtype,
            num_workers=resources.num_workers,
            max_piece_bytes=resources.piece_bytes,
            on_bytes=Counter(phases.start("compare", num_bytes)),
        )
    for each in found:
        print(printable(f"{each.name} {each.text}"))
    kind = "equal" if not args.tolerance else f"equal within {args.tolerance:g}"
    compared = f"{plural(len(names), 'tensor')} of {describe_size(num_bytes)}"
    if found:
        print(f"{len(found):,} of {compared} differ")
        return _DIFFERENT
    print(f"{kind}: {compared}")
    return 0
