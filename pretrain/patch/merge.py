"""Several patches of one model as one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from pretrain.errors import CheckpointError
from pretrain.patch.file import About, Patch, PatchRows, Side, slices, write_patch
from pretrain.patch.make import MadePatch, as_bits

Overlap = Literal["refuse", "last", "add"]

_ROWS_AT_ONCE = 2**12


@dataclass(frozen=True)
class Merged:
    """Result of a merge.

    Attributes:
        written: the patch.
        shared: number of rows that several patches have, of each table with some, by name.
    """

    written: MadePatch
    shared: Mapping[str, int]


def merge_patches(patches: Sequence[Patch], output: Path, overlap: Overlap) -> Merged:
    """Write one patch for several, which were made on one model.

    Args:
        patches: in the order in which they would be applied.
        overlap: treatment of rows that several have: "refuse" them; "last" takes a row as the first patch found it and
            as the last one left it; "add" adds the changes of all in fp32, each of which found the row alike.

    Raises:
        CheckpointError: the patches are of different models, or share rows that may not be merged.
        OSError: the disk refuses.
    """
    shapes = _shapes(patches)
    rows = {
        table: np.unique(np.concatenate(found), return_counts=True)
        for table in shapes
        if (found := [patch.row_ids(table) for patch in patches if table in patch.tables])
    }
    shared = {table: num for table, (_, counts) in rows.items() if (num := int((counts > 1).sum()))}
    if shared and overlap == "refuse":
        told = ", ".join(f"{num:,} of {len(rows[table][0]):,} rows of {table}" for table, num in shared.items())
        raise CheckpointError(
            f"several patches have {told}: give --overlap last, which leaves each row as the last patch has it, or "
            "--overlap add, which adds their changes"
        )
    with ExitStack() as stack:
        merged = {}
        for table, (ids, _) in rows.items():
            having = [patch for patch in patches if table in patch.tables]
            dtypes = [_common_dtype(having, side, table) for side in ("before", "after")]
            merged[table] = stack.enter_context(PatchRows(output.absolute().parent, shapes[table][1], *dtypes))
            for start, stop in slices(len(ids), _ROWS_AT_ONCE):
                merged[table].add(*_merged_rows(having, table, ids[start:stop], dtypes, overlap))
        origins = [origin for patch in patches for origin in patch.about.made_of]
        num_bytes = write_patch(output, merged, About(patches[0].about.identity, shapes, origins))
    return Merged(MadePatch(num_bytes, {table: len(ids) for table, (ids, _) in rows.items()}, shapes), shared)


def _shapes(patches: Sequence[Patch]) -> dict[str, tuple[int, int]]:
    """Shapes of all tables that the patches have, which are of one model."""
    first, *others = patches
    shapes = dict(first.about.shapes)
    for patch in others:
        odd = sorted(dict(first.about.identity.items() ^ patch.about.identity.items()))
        odd += [name for name, shape in patch.about.shapes.items() if shapes.setdefault(name, shape) != shape]
        if odd:
            raise CheckpointError(
                f"{first.path} and {patch.path} were made on different models: {odd[0]} is another there. Merge patches of "
                "one model"
            )
    return dict(sorted(shapes.items()))


def _common_dtype(patches: Sequence[Patch], side: Side, table: str) -> torch.dtype:
    """The dtype that has all bits of the rows of several patches."""
    return reduce(torch.promote_types, (patch.dtype(side, table) for patch in patches))


def _merged_rows(
    patches: Sequence[Patch], table: str, ids: np.ndarray, dtypes: Sequence[torch.dtype], overlap: Overlap
) -> tuple[Tensor, Tensor, Tensor]:
    """Numbers of some rows, and the rows as they were and as they became.

    Args:
        ids: their numbers, [n] ascending, each in one patch at least.
        dtypes: dtypes of the rows as they were, and as they became.
    """
    width = patches[0].about.shapes[table][1]
    before, after = (torch.empty(len(ids), width, dtype=dtype) for dtype in dtypes)
    change = torch.zeros(len(ids), width)
    seen, is_sum = torch.zeros(len(ids), dtype=torch.bool), torch.zeros(len(ids), dtype=torch.bool)
    for patch in patches:
        there = patch.row_ids(table)
        start, stop = np.searchsorted(there, (ids[0], ids[-1] + 1)).tolist()
        if start == stop:
            continue
        places = torch.from_numpy(np.searchsorted(ids, there[start:stop]))
        old = patch.read("before", table, start, stop).to(dtypes[0])
        new = patch.read("after", table, start, stop).to(dtypes[1])
        again = seen[places]
        if overlap == "add":
            differs = again & (as_bits(old) != as_bits(before[places])).any(1)
            if bool(differs.any()):
                raise CheckpointError(
                    f"{int(differs.sum()):,} of {len(ids):,} rows of {table} from row {ids[0]:,} on were not the same before "
                    f"{patch.path} as before the patches ahead of it (the first is row {ids[places[differs][0]]:,}), and "
                    "changes of one row are added if it began alike: give --overlap last"
                )
            change[places] += new.float() - old.float()
            is_sum[places[again]] = True
        before[places[~again]] = old[~again]
        after[places] = new
        seen[places] = True
    after[is_sum] = (before[is_sum].float() + change[is_sum]).to(dtypes[1])
    return torch.from_numpy(ids), before, after
