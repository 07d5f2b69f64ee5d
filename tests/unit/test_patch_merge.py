"""Several patches as one: rows of all, in their order, and rows that several have."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pretrain.errors import CheckpointError
from pretrain.patch.file import About, Origin, Patch, PatchRows, read_patch, write_patch
from pretrain.patch.merge import merge_patches

Changes = dict[str, dict[int, tuple[float, float]]]
SHAPES = {"banks.0.values": (100, 3), "banks.1.values": (40, 2)}


def row(value: float, width: int) -> list[float]:
    """A row that a number names."""
    return [value + column / 8 for column in range(width)]


def write(
    path: Path, changes: Changes, identity: str = "a", dtypes: Sequence[torch.dtype] = (torch.float32,) * 2
) -> Patch:
    """A patch of rows that are named by numbers, before and after."""
    with ExitStack() as stack:
        tables = {}
        for table, rows in changes.items():
            width = SHAPES[table][1]
            sides = zip(*(rows[number] for number in sorted(rows)), strict=True)
            old, new = (
                torch.tensor([row(value, width) for value in side]).to(dtype)
                for side, dtype in zip(sides, dtypes, strict=True)
            )
            tables[table] = stack.enter_context(PatchRows(path.parent, width, *dtypes))
            tables[table].add(torch.tensor(sorted(rows)), old, new)
        shapes = {table: SHAPES[table] for table in changes}
        write_patch(path, tables, About({"weight": identity}, shapes, [Origin(path.name, "after")]))
    return read_patch(path)


def found(patch: Patch, table: str) -> dict[int, tuple[list[float], list[float]]]:
    """Rows of a patch by number."""
    old, new = (patch.read(side, table, 0, patch.num_rows(table)).float().tolist() for side in ("before", "after"))
    return {number: (old[place], new[place]) for place, number in enumerate(patch.row_ids(table).tolist())}


def expected(rows: dict[int, tuple[float, float]], width: int) -> dict[int, tuple[list[float], list[float]]]:
    return {number: (row(old, width), row(new, width)) for number, (old, new) in rows.items()}


def test_patches_of_other_rows_are_joined(tmp_path: Path) -> None:
    first = write(tmp_path / "a", {"banks.0.values": {n: (n, -n) for n in range(1, 90, 7)}})
    second = write(
        tmp_path / "b",
        {"banks.0.values": {n: (n, 2 * n) for n in (0, 2, 3, 99)}, "banks.1.values": {5: (1, 2)}},
    )
    merged = merge_patches([first, second], tmp_path / "c", "refuse")
    patch = read_patch(tmp_path / "c")
    assert merged.shared == {}
    assert merged.written.rows == {"banks.0.values": 17, "banks.1.values": 1}
    assert merged.written.num_bytes == patch.num_bytes
    assert found(patch, "banks.0.values") == {
        **expected({n: (n, -n) for n in range(1, 90, 7)}, 3),
        **expected({n: (n, 2 * n) for n in (0, 2, 3, 99)}, 3),
    }
    assert found(patch, "banks.1.values") == expected({5: (1, 2)}, 2)
    assert [origin.before for origin in patch.about.made_of] == ["a", "b"]
    assert patch.about.identity == {"weight": "a"}
    assert patch.about.shapes == SHAPES


OVERLAPPING: list[Changes] = [
    {"banks.0.values": {1: (10, 11), 2: (20, 22), 7: (70, 71)}},
    {"banks.0.values": {2: (20, 25), 3: (30, 33)}},
    {"banks.0.values": {2: (20, 10), 3: (30, 31), 9: (90, 99)}, "banks.1.values": {0: (0, 1)}},
]


def overlapping(folder: Path) -> list[Patch]:
    return [write(folder / f"{number}", changes) for number, changes in enumerate(OVERLAPPING)]


def test_shared_rows_are_counted_and_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"several patches have 2 of 5 rows of banks\.0\.values: give --overlap"):
        merge_patches(overlapping(tmp_path), tmp_path / "new", "refuse")
    assert not (tmp_path / "new").exists()


def test_the_last_one_counts(tmp_path: Path) -> None:
    merged = merge_patches(overlapping(tmp_path), tmp_path / "new", "last")
    assert merged.shared == {"banks.0.values": 2}
    rows = {1: (10, 11), 2: (20, 10), 3: (30, 31), 7: (70, 71), 9: (90, 99)}
    assert found(read_patch(tmp_path / "new"), "banks.0.values") == expected(rows, 3)


def test_changes_are_added(tmp_path: Path) -> None:
    merge_patches(overlapping(tmp_path), tmp_path / "new", "add")
    # 20 + 2 + 5 - 10, and 30 + 3 + 1.
    rows = {1: (10, 11), 2: (20, 17), 3: (30, 34), 7: (70, 71), 9: (90, 99)}
    assert found(read_patch(tmp_path / "new"), "banks.0.values") == expected(rows, 3)


def test_a_row_of_one_patch_is_never_computed(tmp_path: Path) -> None:
    """before + (after - before) would be another number."""
    first = write(tmp_path / "a", {"banks.0.values": {1: (1e8, 0.1), 5: (1.0, 2.0)}})
    second = write(tmp_path / "b", {"banks.0.values": {5: (1.0, 3.0)}})
    merge_patches([first, second], tmp_path / "new", "add")
    rows = found(read_patch(tmp_path / "new"), "banks.0.values")
    assert rows[1] == found(first, "banks.0.values")[1]
    assert rows[5][1] == row(4.0, 3)


def test_a_chain_begins_with_the_first_and_ends_with_the_last(tmp_path: Path) -> None:
    chain = [write(tmp_path / f"{n}", {"banks.0.values": {4: (n, n + 1), 10 + n: (0, 1)}}) for n in range(3)]
    merge_patches(chain, tmp_path / "new", "last")
    rows = found(read_patch(tmp_path / "new"), "banks.0.values")
    assert rows == expected({4: (0, 3), 10: (0, 1), 11: (0, 1), 12: (0, 1)}, 3)
    text = r"1 of 3 rows of banks\.0\.values from row 4 on were not the same before .* \(the first is row 4\)"
    with pytest.raises(CheckpointError, match=text):
        merge_patches(chain, tmp_path / "sum", "add")


def test_the_dtype_has_the_bits_of_all(tmp_path: Path) -> None:
    half = write(tmp_path / "a", {"banks.0.values": {1: (1, 2)}}, dtypes=(torch.bfloat16, torch.bfloat16))
    full = write(
        tmp_path / "b", {"banks.0.values": {2: (1 + 2**-20, 2 + 2**-20)}}, dtypes=(torch.bfloat16, torch.float32)
    )
    merge_patches([half, full], tmp_path / "new", "refuse")
    patch = read_patch(tmp_path / "new")
    assert (patch.dtype("before", "banks.0.values"), patch.dtype("after", "banks.0.values")) == (
        torch.bfloat16,
        torch.float32,
    )
    assert found(patch, "banks.0.values") == {**found(half, "banks.0.values"), **found(full, "banks.0.values")}


def test_patches_of_other_models_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = write(tmp_path / "a", {"banks.0.values": {1: (1, 2)}})
    with pytest.raises(CheckpointError, match="made on different models: weight is another there"):
        merge_patches([first, write(tmp_path / "b", {"banks.0.values": {2: (1, 2)}}, "b")], tmp_path / "c", "last")
    monkeypatch.setitem(SHAPES, "banks.0.values", (101, 3))
    with pytest.raises(CheckpointError, match=r"made on different models: banks\.0\.values is another there"):
        merge_patches([first, write(tmp_path / "b", {"banks.0.values": {2: (1, 2)}})], tmp_path / "c", "last")


def test_signs_of_zero_tell_rows_apart(tmp_path: Path) -> None:
    def patch(name: str, before: Tensor) -> Patch:
        with PatchRows(tmp_path, 3, torch.float32, torch.float32) as rows:
            rows.add(torch.tensor([1]), before, torch.ones(1, 3))
            write_patch(tmp_path / name, {"banks.0.values": rows}, About({}, {"banks.0.values": (100, 3)}, []))
        return read_patch(tmp_path / name)

    zero, nan = torch.zeros(1, 3), torch.full((1, 3), float("nan"))
    with pytest.raises(CheckpointError, match="were not the same"):
        merge_patches([patch("a", zero), patch("b", -zero)], tmp_path / "c", "add")
    merge_patches([patch("a", nan), patch("b", nan)], tmp_path / "c", "add")
