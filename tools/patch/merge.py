"""`megamem patch merge`."""

from __future__ import annotations

import argparse

from pretrain.errors import ConfigError
from pretrain.printable import printable
from tools.common.words import describe_size, plural
from tools.patch.make import describe
from tools.patch.paths import check_output, check_patch


def run(args: argparse.Namespace) -> int:
    """Write one patch for several, and say what is in it."""
    if len(args.patches) < 2:
        raise ConfigError(f"{args.patches[0]} is the only patch: name two or more to merge")
    check_output(args.output)
    for path in args.patches:
        check_patch(path)

    # These import torch.
    from pretrain.patch.file import read_patch
    from pretrain.patch.merge import merge_patches

    merged = merge_patches([read_patch(path) for path in args.patches], args.output, args.overlap)
    for table, num_rows in merged.shared.items():
        print(printable(f"{table}: {plural(num_rows, 'row')} in several patches ({args.overlap})"))
    written = merged.written
    print("\n".join([*describe(written), f"written: {args.output}, {describe_size(written.num_bytes)}"]))
    return 0
