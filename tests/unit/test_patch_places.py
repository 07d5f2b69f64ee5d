"""Rows of tables overwritten in a checkpoint's files: all bytes of theirs, no others, and checksums that hold."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from in_memory import InMemory
from torch import Tensor

from pretrain.checkpoint.index import StoredItem
from pretrain.checkpoint.index_writer import pickled_index
from pretrain.checkpoint.store.files import WrittenFile, write_files
from pretrain.checkpoint.store.tensors import Region, TensorInfo
from pretrain.checkpoint.store.torch_dist import open_torch_dist
from pretrain.checkpoint.store.torch_dist_writer import pack, parts_of, write_index
from pretrain.checkpoint.store.torch_zip import renew_checksum
from pretrain.checkpoint.store.torch_zip_writer import TensorPlaceholder, write_zip
from pretrain.convert.format import OpenedCheckpoint
from pretrain.convert.names import NATIVE, RELEASED
from pretrain.convert.resources import Resources
from pretrain.errors import CheckpointError
from pretrain.patch.file import About, Patch, PatchRows, read_patch, write_patch
from pretrain.patch.places import TablePlaces, places_of
from pretrain.patch.state import PatchState, state_of

TABLE, MAIN = "banks.0.values", "optimizer.state.param.banks.0.values"
RESOURCES = cast(Resources, SimpleNamespace(piece_bytes=400, num_workers=1))


def write_folder(
    folder: Path, tensors: dict[str, Tensor], column_parts: int, max_file_bytes: int = 1500, without: int = 0
) -> None:
    """A checkpoint's files of items; `without` leaves some out of the index."""
    reader = InMemory(tensors)
    parts = [part for name, info in reader.tensors.items() for part in parts_of(name, info, column_parts)]
    files = pack("__0", parts, reader.tensors, max_file_bytes)
    written = write_files(
        files, folder, reader, request={}, num_workers=1, max_piece_bytes=1 << 20, on_bytes=lambda _: None
    )
    if without:
        files = [type(file)(file.name, file.parts[:-without], file.num_bytes) for file in files]
        written = [
            WrittenFile(each.name, each.num_bytes, {**each.notes, "items": each.notes["items"][:-without]})
            for each in written
        ]
    write_index(folder, reader.tensors, files, written)


def opened(format_name: str = NATIVE, path: Path = Path("run")) -> OpenedCheckpoint:
    return cast(OpenedCheckpoint, SimpleNamespace(format_name=format_name, path=path))


def overwrite(table: TablePlaces, ids: np.ndarray, rows: Tensor) -> set[str]:
    """Overwrite rows, and name the files that have them."""
    records, names = table.records(rows), set()
    for part, start, stop in table.within(ids):
        with part.path.open("r+b") as file:
            part.write(file.fileno(), ids[start:stop], part.cut(records[start:stop]))
        part.finish()
        names.add(part.path.name)
    return names


def assert_sound(folder: Path) -> None:
    """Every item is one that zipfile and torch take."""
    reader = open_torch_dist(folder)
    for name in reader.tensors:
        for item in reader.parts(name):
            content = (folder / item.file).read_bytes()[item.start : item.start + item.num_bytes]
            assert zipfile.ZipFile(io.BytesIO(content)).testzip() is None
            assert tuple(torch.load(io.BytesIO(content)).shape) == item.region.shape


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("shape", "column_parts"), [((91, 12), 4), ((91, 12), 1), ((7, 5), 1), ((50, 1), 1)])
def test_rows_are_overwritten_wherever_their_parts_are(
    tmp_path: Path, dtype: torch.dtype, shape: tuple[int, int], column_parts: int
) -> None:
    numbers = torch.Generator().manual_seed(3)
    stored = {name: torch.randn(shape, generator=numbers).to(dtype) for name in (TABLE, MAIN, "banks.1.values")}
    write_folder(tmp_path, stored, column_parts)
    before = contents(tmp_path)
    table, main = places_of(opened(), tmp_path, [TABLE])[TABLE][::-1]
    assert (table.name, main.name) == (TABLE, MAIN)
    for ids in ([0], [shape[0] - 1], [0, 1, 2, 5, shape[0] - 2, shape[0] - 1], list(range(shape[0]))):
        ids = np.unique(np.array(ids))
        rows = torch.randn(len(ids), shape[1], generator=numbers)
        names = overwrite(table, ids, rows)
        expected = stored[TABLE].clone()
        expected[ids] = rows.to(dtype)
        reader = open_torch_dist(tmp_path)
        assert torch.equal(reader.read(reader.tensors[TABLE].whole(TABLE)), expected)
        for other in (MAIN, "banks.1.values"):
            assert torch.equal(reader.read(reader.tensors[other].whole(other)), stored[other])
        assert_sound(tmp_path)
        now = contents(tmp_path)
        assert {name for name in now if now[name] != before[name]} == names
        overwrite(table, ids, stored[TABLE][ids])
        assert contents(tmp_path) == before


def made_patch(path: Path, ids: np.ndarray, before: Tensor, after: Tensor, shape: tuple[int, int]) -> Patch:
    with PatchRows(path.parent, shape[1], before.dtype, after.dtype) as rows:
        rows.add(torch.from_numpy(ids), before, after)
        write_patch(path, {TABLE: rows}, About({}, {TABLE: shape}, []))
    return read_patch(path)


def state(patch: Patch, folder: Path) -> PatchState:
    return state_of(patch, places_of(opened(), folder, [TABLE]), RESOURCES, lambda *_: lambda _: None)


def test_the_state_is_told_by_bits(tmp_path: Path) -> None:
    shape, folder = (91, 12), tmp_path / "run"
    folder.mkdir()
    ids = np.array([0, 3, 4, 60, 90])
    rows = torch.randn(shape)
    rows[3, 2], rows[60] = 0.0, float("nan")
    after = rows[ids] + 1
    after[1, 2] = -0.0
    after[3] = float("nan")
    after[3, 7] = 1.0
    write_folder(folder, {TABLE: rows.bfloat16(), MAIN: rows}, 4)
    patch = made_patch(tmp_path / "patch", ids, rows[ids], after, shape)
    found = state(patch, folder)
    assert found.is_at("before")
    assert [(each.table, each.num_others, each.first) for each in found.others["after"]] == [
        (MAIN, 5, 0),
        (TABLE, 5, 0),
    ]
    places = places_of(opened(), folder, [TABLE])[TABLE]
    for each in places:
        overwrite(each, ids, after)
    assert state(patch, folder).is_at("after")
    for value, row, column in ((0.0, 3, 2), (float("nan"), 60, 7)):
        changed = after.clone()
        changed[list(ids).index(row), column] = value
        overwrite(places[0], ids, changed)
        now = state(patch, folder)
        assert not now.is_at("after")
        assert now.why_not("after") == f"1 of 5 rows of {MAIN} hold something else (the first is row {row})"
        overwrite(places[0], ids, after)


def test_a_patch_of_fewer_bits_is_told(tmp_path: Path) -> None:
    folder, ids = tmp_path / "run", np.array([1, 2])
    folder.mkdir()
    rows = torch.randn(9, 4)
    write_folder(folder, {MAIN: rows}, 1)
    found = state(made_patch(tmp_path / "patch", ids, rows[ids].bfloat16(), rows[ids] + 1, (9, 4)), folder)
    assert [each.is_rounded for each in (*found.others["before"], *found.others["after"])] == [True, False]


def test_missing_parts_are_damage(tmp_path: Path) -> None:
    folder, ids = tmp_path / "run", np.array([0, 90])
    folder.mkdir()
    rows = torch.randn(91, 12)
    write_folder(folder, {MAIN: rows}, 1, max_file_bytes=1 << 20, without=1)
    patch = made_patch(tmp_path / "patch", ids, rows[ids], rows[ids] + 1, (91, 12))
    with pytest.raises(CheckpointError, match="some of its elements are missing"):
        state(patch, folder)


def test_a_scale_is_refused_but_one(tmp_path: Path) -> None:
    scale = f"optimizer.state.scale.{TABLE}"
    write_folder(tmp_path, {MAIN: torch.randn(9, 4), scale: torch.tensor(0.5)}, 1)
    with pytest.raises(CheckpointError, match=r"stored as rows times 0\.5.*apply the patch to an export"):
        places_of(opened(), tmp_path, [TABLE])
    (tmp_path / "one").mkdir()
    write_folder(tmp_path / "one", {MAIN: torch.randn(9, 4), scale: torch.tensor(1.0)}, 1)
    assert len(places_of(opened(), tmp_path / "one", [TABLE])[TABLE]) == 1


def test_columns_that_lie_one_after_the_other_are_refused(tmp_path: Path) -> None:
    tensor = torch.randn(4, 9).t()
    torch.save(tensor, tmp_path / "__0_0.distcp")
    item = StoredItem("__0_0.distcp", 0, (tmp_path / "__0_0.distcp").stat().st_size, Region(MAIN, (0, 0), (9, 4)))
    (tmp_path / ".metadata").write_bytes(pickled_index({MAIN: TensorInfo((9, 4), torch.float32)}, [item]))
    (table,) = places_of(opened(), tmp_path, [TABLE])[TABLE]
    with pytest.raises(CheckpointError, match=r"rows of .* do not lie one after the other"):
        overwrite(table, np.array([1]), torch.zeros(1, 4))


def test_other_formats_are_refused_by_name() -> None:
    with pytest.raises(
        CheckpointError, match="is of the format released, which patches are not applied to: convert it"
    ):
        places_of(opened(RELEASED), Path("run"), [TABLE])


def save_by_torch(path: Path, tensor: Tensor) -> None:
    torch.save(tensor, path)


def save_by_zipfile(path: Path, tensor: Tensor) -> None:
    info = TensorInfo(tuple(tensor.shape), tensor.dtype)
    write_zip(path, TensorPlaceholder("t", info), InMemory({"t": tensor}).read)


@pytest.mark.parametrize("save", [save_by_torch, save_by_zipfile])
@pytest.mark.parametrize("ahead", [0, 37])
def test_a_checksum_is_renewed_where_readers_look(tmp_path: Path, save: Any, ahead: int) -> None:
    path, tensor = tmp_path / "item", torch.randn(40, 11)
    save(path, tensor)
    whole = path.read_bytes()
    size = len(whole)
    path.write_bytes(b"x" * ahead + whole + b"y" * ahead)
    at = path.read_bytes().index(tensor.numpy().tobytes())
    content = bytearray(path.read_bytes())
    content[at + 5] ^= 255
    path.write_bytes(content)

    def archive() -> bytes:
        return path.read_bytes()[ahead : ahead + size]

    assert zipfile.ZipFile(io.BytesIO(archive())).testzip() is not None
    renew_checksum(path, ahead, size, at)
    assert zipfile.ZipFile(io.BytesIO(archive())).testzip() is None
    assert int((torch.load(io.BytesIO(archive())) != tensor).sum()) == 1
    content = bytearray(path.read_bytes())
    content[at + 5] ^= 255
    path.write_bytes(content)
    renew_checksum(path, ahead, size, at + tensor.nbytes - 1)
    assert path.read_bytes() == b"x" * ahead + whole + b"y" * ahead


def test_a_checksum_of_no_archive_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "item"
    path.write_bytes(b"nothing" * 99)
    with pytest.raises(CheckpointError, match=f"{path} is not a file of torch.save's zip format"):
        renew_checksum(path, 0, 99, 5)
    torch.save(torch.zeros(3), path)
    with pytest.raises(CheckpointError, match="byte 0 is in no entry"):
        renew_checksum(path, 0, path.stat().st_size, 0)
