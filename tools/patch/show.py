"""`megamem patch show`."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pretrain.convert.paths import config_at
from pretrain.convert.resources import Resources
from pretrain.printable import printable
from tools.checkpoint.command import opened
from tools.checkpoint.phases import Phases
from tools.common.words import describe_size, plural
from tools.patch.paths import check_patch

if TYPE_CHECKING:
    from pretrain.patch.file import Patch


def run(args: argparse.Namespace) -> int:
    """Say what a patch holds, and of each folder whether it is applied there."""
    resources = Resources(args.workers, args.max_memory)
    check_patch(args.patch)
    for folder in args.folders:
        config_at(folder, None)

    # It imports torch.
    from pretrain.patch.file import read_patch

    patch = read_patch(args.patch)
    states = _states(patch, args.folders, resources) if args.folders else {}
    if args.json:
        print(json.dumps({**_content(patch), "folders": states}, allow_nan=False))
    elif states:
        print("\n".join(printable(f"{folder}: {text}") for folder, text in states.items()))
    else:
        print("\n".join(map(printable, _lines(_content(patch)))))
    return 0


def _states(patch: Patch, folders: Sequence[Path], resources: Resources) -> dict[str, str]:
    """Words for each folder on whether a patch is applied there."""
    # It imports what reads every format.
    from pretrain.patch.apply import status_text

    with Phases() as phases:
        return {str(folder): status_text(patch, opened(folder), resources, phases.start) for folder in folders}


def _content(patch: Patch) -> dict[str, Any]:
    """Contents of a patch as plain values."""
    from pretrain.patch.changes import change_of

    tables = {}
    for table, (total, width) in patch.about.shapes.items():
        found = change_of(patch, table)
        tables[table] = {
            "rows": patch.num_rows(table),
            "rows_of_table": total,
            "columns": width,
            "before": str(patch.dtype("before", table)).removeprefix("torch."),
            "after": str(patch.dtype("after", table)).removeprefix("torch."),
            "bytes": found.num_bytes,
            # JSON has no numbers for these.
            "largest_change": found.largest if math.isfinite(found.largest) else None,
            "rms_change": found.rms if math.isfinite(found.rms) else None,
        }
    made_of = [{"before": origin.before, "after": origin.after} for origin in patch.about.made_of]
    return {"patch": str(patch.path), "bytes": patch.num_bytes, "made_of": made_of, "tables": tables}


def _lines(content: Mapping[str, Any]) -> Iterator[str]:
    yield f"{content['patch']}: a patch of {describe_size(content['bytes'])}"
    for origin in content["made_of"]:
        yield f"  made of {origin['before']} -> {origin['after']}"
    for table, found in content["tables"].items():
        dtypes = found["before"] if found["before"] == found["after"] else f"{found['before']} -> {found['after']}"
        change = (
            "not finite"
            if found["rms_change"] is None
            else f"largest change {found['largest_change']:.3g}, RMS {found['rms_change']:.3g}"
        )
        yield (
            f"  {table}: {plural(found['rows'], 'row')} of {found['rows_of_table']:,} x {found['columns']:,}, {dtypes}, "
            f"{describe_size(found['bytes'])}, {change}"
        )
