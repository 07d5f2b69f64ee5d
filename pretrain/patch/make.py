"""Making a patch: the rows of tables in which two checkpoints differ, if they differ in nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from pretrain.checkpoint.derived import main_name
from pretrain.checkpoint.folder import SavedState
from pretrain.checkpoint.store.tensors import Region, TensorReader, pieces
from pretrain.convert.compare import Counter
from pretrain.convert.format import OpenedCheckpoint
from pretrain.convert.resources import OnStart, Resources
from pretrain.errors import CheckpointError
from pretrain.patch.file import About, Origin, PatchRows, slices, write_patch
from pretrain.patch.identity import WeightHash, other_weights, tables_of

_MOST_NAMED = 3
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class MadePatch:
    """Result of making or merging patches.

    Attributes:
        num_bytes: bytes of the file.
        rows: number of rows of each table that are in it, by name.
        shapes: shapes of these tables, by name.
    """

    num_bytes: int
    rows: Mapping[str, int]
    shapes: Mapping[str, tuple[int, int]]


def make_patch(
    before: OpenedCheckpoint,
    after: OpenedCheckpoint,
    output: Path,
    *,
    max_bytes: int,
    resources: Resources,
    on_start: OnStart,
) -> MadePatch:
    """Write the patch that turns one checkpoint's tables into another's.

    Two rows differ if any bit does, once both are cast to the coarser of their dtypes: 0 and -0 differ, and so do a
    number and NaN. Rows come from main weights where there are any.

    Args:
        max_bytes: largest size of the file, about.
        on_start: told of a phase's name and bytes when it begins; returns what is told of its progress.

    Raises:
        CheckpointError: the two differ in more than rows of tables, or in no row, or in too many.
        OSError: the disk refuses.
    """
    shapes = _shapes_of_both(before, after)
    identity = _identity_of_both(before, after, resources, on_start)
    names = {table: (_source(before, table), _source(after, table)) for table in shapes}
    total = sum(before.reader.tensors[first].num_bytes for first, _ in names.values())
    tell = on_start("tables", total)
    changed: dict[str, PatchRows] = {}
    left = max_bytes
    with ExitStack() as stack, ThreadPoolExecutor(resources.num_workers) as pool:
        for table, (first, second) in names.items():
            dtypes = before.reader.tensors[first].dtype, after.reader.tensors[second].dtype
            rows = stack.enter_context(PatchRows(output.absolute().parent, shapes[table][1], *dtypes))
            read = 0
            for stop, found in _changed_rows(before.reader, after.reader, first, second, pool, resources):
                rows.add(*found)
                if rows.num_rows * rows.row_bytes > left:
                    raise CheckpointError(_too_many(table, rows.num_rows, stop, max_bytes))
                tell((stop - read) * shapes[table][1] * dtypes[0].itemsize)
                read = stop
            left -= rows.num_rows * rows.row_bytes
            if rows.num_rows:
                changed[table] = rows
        if not changed:
            raise CheckpointError(
                f"{before.path} and {after.path} differ in no row of a table: there is nothing to make a patch of. Name "
                "the checkpoint before training, and the one after it"
            )
        kept = {table: shapes[table] for table in sorted(changed)}
        num_bytes = write_patch(output, changed, About(identity, kept, [Origin(_said(before), _said(after))]))
        return MadePatch(num_bytes, {table: changed[table].num_rows for table in kept}, kept)


def coarser(first: torch.dtype, second: torch.dtype) -> torch.dtype:
    """The one of two floating dtypes that both can be rounded to."""
    if torch.bfloat16 in (first, second):
        return torch.bfloat16
    return min(first, second, key=lambda dtype: dtype.itemsize)


def as_bits(tensor: Tensor) -> Tensor:
    """Elements as whole numbers of their bits."""
    return tensor.contiguous().view(_BITS[tensor.dtype.itemsize])


def _shapes_of_both(before: OpenedCheckpoint, after: OpenedCheckpoint) -> dict[str, tuple[int, int]]:
    """Shapes of the tables, which both have."""
    shapes = tables_of(before)
    if not shapes:
        raise CheckpointError(f"{before.path} has no memory tables, and a patch has rows of tables alone")
    for table, shape in {**tables_of(after), **shapes}.items():
        others = [tables_of(opened).get(table) for opened in (before, after)]
        if others != [shape, shape]:
            raise CheckpointError(
                f"{before.path} and {after.path} are of different models: {table} has the shape {others[0]} in the first, "
                f"and {others[1]} in the second"
            )
    return shapes


def _identity_of_both(
    before: OpenedCheckpoint, after: OpenedCheckpoint, resources: Resources, on_start: OnStart
) -> dict[str, str]:
    """Hashes of the weights that are no tables, which must be equal in the coarser dtype of the two."""
    first, second = other_weights(before), other_weights(after)
    odd = [name for name in {**first, **second} if first.get(name) != second.get(name)]
    regions = {name: region for name, region in first.items() if name not in odd}
    sizes = {name: before.reader.tensors[name].dtype.itemsize for name in regions}
    tell = Counter(on_start("other weights", sum(sizes[name] * each.numel for name, each in regions.items())))

    def hashed(region: Region) -> str | None:
        found, size = WeightHash(region), sizes[region.name]
        for piece in pieces(region, max(1, resources.piece_bytes // size)):
            values = before.reader.read(piece)
            if not _are_equal(values, after.reader.read(piece)):
                return None
            found.update(values)
            tell(piece.numel * size)
        return found.text()

    with ThreadPoolExecutor(resources.num_workers) as pool:
        hashes = dict(zip(regions, pool.map(hashed, regions.values()), strict=True))
    odd += [name for name, text in hashes.items() if text is None]
    if odd:
        more = f" and {len(odd) - _MOST_NAMED:,} more" if len(odd) > _MOST_NAMED else ""
        raise CheckpointError(
            f"{before.path} and {after.path} differ in {', '.join(odd[:_MOST_NAMED])}{more}, and a patch has rows of tables "
            "alone: train with optimizer.trained_rows, which leaves all other weights as they are"
        )
    return {name: text for name, text in hashes.items() if text is not None}


def _are_equal(first: Tensor, second: Tensor) -> bool:
    if first.is_floating_point() and second.is_floating_point():
        common = coarser(first.dtype, second.dtype)
        return torch.equal(as_bits(first.to(common)), as_bits(second.to(common)))
    return first.dtype == second.dtype and torch.equal(first, second)


def _source(opened: OpenedCheckpoint, table: str) -> str:
    """Name of the tensor that has a table's rows with the most bits."""
    main = main_name(table)
    return main if main in opened.reader.tensors else table


def _changed_rows(
    before: TensorReader,
    after: TensorReader,
    first: str,
    second: str,
    pool: ThreadPoolExecutor,
    resources: Resources,
) -> Iterator[tuple[int, tuple[Tensor, Tensor, Tensor]]]:
    """Rows that differ in portions of a table, each with the end of its portion: numbers, as they were, as they became."""
    num_rows, width = before.tensors[first].shape
    widest = max(before.tensors[first].dtype.itemsize, after.tensors[second].dtype.itemsize)
    common = coarser(before.tensors[first].dtype, after.tensors[second].dtype)

    def compare(start: int, stop: int) -> tuple[Tensor, Tensor, Tensor]:
        old = before.read(Region(first, (start, 0), (stop - start, width)))
        new = after.read(Region(second, (start, 0), (stop - start, width)))
        found = (as_bits(old.to(common)) != as_bits(new.to(common))).any(1).nonzero().flatten()
        return found + start, old[found], new[found]

    portions = list(slices(num_rows, resources.piece_bytes // (widest * max(1, width))))
    for group, end in slices(len(portions), resources.num_workers):
        chosen = portions[group:end]
        for (_, stop), found in zip(chosen, pool.map(lambda each: compare(*each), chosen), strict=True):
            yield stop, found


def _too_many(table: str, num_changed: int, num_read: int, max_bytes: int) -> str:
    return (
        f"{num_changed:,} of the first {num_read:,} rows of {table} differ ({num_changed / num_read:.1%}), and the patch "
        f"would be larger than --max-size, {max_bytes:,} bytes: give a larger one, or train fewer rows with "
        "optimizer.trained_rows"
    )


def _said(opened: OpenedCheckpoint) -> str:
    """A checkpoint's name for people, and its step where it has one."""
    saved: SavedState | None = opened.saved
    if saved is None:
        return opened.path.resolve().name
    return f"{saved.path.resolve().parent.parent.name}, step {saved.step}"
