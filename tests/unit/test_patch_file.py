"""The file of a patch: read as it was written, by others as well, and refused when anything in it was changed."""

from __future__ import annotations

import json
import random
import struct
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from pretrain.errors import CheckpointError
from pretrain.patch import file as patch_file
from pretrain.patch.changes import change_of
from pretrain.patch.file import About, Origin, PatchRows, read_patch, slices, write_patch

Rows = tuple[Tensor, Tensor, Tensor]
ABOUT = About(
    identity={"decoder.layers.0.weight": "0" * 32, "output_layer.weight": "f" * 32},
    shapes={"banks.0.values": (1000, 7), "banks.1.pre_values": (50, 3)},
    made_of=[Origin("früher, step 3", "later")],
)


def some_rows(shape: tuple[int, int], number: int, before: torch.dtype, after: torch.dtype, seed: int = 0) -> Rows:
    numbers = torch.Generator().manual_seed(seed)
    ids = torch.randperm(shape[0], generator=numbers)[:number].sort().values
    old, new = (torch.randn(number, shape[1], generator=numbers) for _ in range(2))
    return ids, old.to(before), new.to(after)


TABLES: dict[str, Rows] = {
    "banks.0.values": some_rows((1000, 7), 23, torch.float32, torch.float32),
    "banks.1.pre_values": some_rows((50, 3), 50, torch.bfloat16, torch.float32, 1),
}


def write(path: Path, tables: dict[str, Rows], about: About = ABOUT) -> int:
    """A patch of these rows, which come in portions."""
    with ExitStack() as stack:
        rows = {}
        for table, (ids, before, after) in tables.items():
            new = PatchRows(path.parent, before.shape[1], before.dtype, after.dtype)
            rows[table] = stack.enter_context(new)
            for start, stop in slices(len(ids), 4):
                new.add(ids[start:stop], before[start:stop], after[start:stop])
        return write_patch(path, rows, about)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write(tmp_path / "facts.safetensors", TABLES)
    return tmp_path / "facts.safetensors"


def test_a_patch_is_read_as_it_was_written(path: Path) -> None:
    patch = read_patch(path)
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]
    assert (patch.about, patch.num_bytes) == (ABOUT, path.stat().st_size)
    assert patch.tables == list(TABLES)
    for table, (ids, before, after) in TABLES.items():
        assert patch.num_rows(table) == len(ids)
        assert patch.row_ids(table).tolist() == ids.tolist()
        assert (patch.dtype("before", table), patch.dtype("after", table)) == (before.dtype, after.dtype)
        for start, stop in ((0, len(ids)), (3, 9), (5, 5)):
            assert torch.equal(patch.read("before", table, start, stop), before[start:stop])
            assert torch.equal(patch.read("after", table, start, stop), after[start:stop])


def test_the_package_of_safetensors_reads_it(path: Path) -> None:
    with safe_open(path, "pt") as found:
        assert set(found.keys()) == {f"{part}.{table}" for table in TABLES for part in ("rows", "before", "after")}
        for table, rows in TABLES.items():
            for part, tensor in zip(("rows", "before", "after"), rows, strict=True):
                assert torch.equal(found.get_tensor(f"{part}.{table}"), tensor)
        metadata = found.metadata()
    assert (metadata["format"], metadata["version"]) == ("megamem-patch", "1")
    assert json.loads(metadata["shapes"]) == {"banks.0.values": [1000, 7], "banks.1.pre_values": [50, 3]}


def test_equal_patches_have_equal_files(tmp_path: Path, path: Path) -> None:
    write(tmp_path / "again", dict(reversed(TABLES.items())))
    assert (tmp_path / "again").read_bytes() == path.read_bytes()


def test_every_changed_byte_is_refused(path: Path) -> None:
    content = path.read_bytes()
    header = 8 + struct.unpack("<Q", content[:8])[0]
    numbers = random.Random(0)
    # All of the header, of which some bytes are blanks, and a sample of what follows.
    places = [*range(header), *range(header, len(content), 7)]
    for place in places:
        for value in {content[place] ^ 1, numbers.randrange(256), ord("\t"), ord("0")} - {content[place]}:
            path.write_bytes(content[:place] + bytes([value]) + content[place + 1 :])
            with pytest.raises(CheckpointError):
                read_patch(path)
    for cut in (0, 7, 8, header, header + 1, len(content) - 1):
        path.write_bytes(content[:cut])
        with pytest.raises(CheckpointError):
            read_patch(path)
    path.write_bytes(content + b"\0")
    with pytest.raises(CheckpointError):
        read_patch(path)
    path.write_bytes(content)
    read_patch(path)


def test_a_file_that_is_no_patch_is_named(tmp_path: Path) -> None:
    other = tmp_path / "other.safetensors"
    save_file({"rows.banks.0.values": torch.arange(3)}, other)
    with pytest.raises(CheckpointError, match=f"{other} is no patch: give a file that `megamem patch make`"):
        read_patch(other)
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(CheckpointError, match=f"{path} cannot be read"):
            read_patch(path)


def test_a_later_version_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as later:
        later.setattr(patch_file, "_VERSION", "2")
        write(tmp_path / "new", TABLES)
    with pytest.raises(CheckpointError, match="a patch of version 2, and this program reads version 1"):
        read_patch(tmp_path / "new")


IDS, BEFORE, AFTER = TABLES["banks.0.values"]
CONTRADICTIONS: dict[str, tuple[dict[str, Rows], About]] = {
    "rows that descend": ({"banks.0.values": (IDS.flip(0), BEFORE, AFTER)}, ABOUT),
    "a row twice": ({"banks.0.values": (IDS // 100, BEFORE, AFTER)}, ABOUT),
    "a row before the first": ({"banks.0.values": (IDS - 1000, BEFORE, AFTER)}, ABOUT),
    "a row past the last": ({"banks.0.values": (IDS + 990, BEFORE, AFTER)}, ABOUT),
    "another width": ({"banks.0.values": (IDS, BEFORE[:, :6], AFTER[:, :6])}, ABOUT),
    "whole numbers": ({"banks.0.values": (IDS, BEFORE.int(), AFTER.int())}, ABOUT),
    "a table without a shape": ({"banks.9.values": (IDS, BEFORE, AFTER)}, ABOUT),
    "a shape without a table": ({"banks.0.values": (IDS, BEFORE, AFTER)}, ABOUT),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_a_sealed_contradiction_is_refused(tmp_path: Path, name: str) -> None:
    tables, about = CONTRADICTIONS[name]
    if name != "a shape without a table":
        about = replace(about, shapes={"banks.0.values": (1000, 7)})
    write(tmp_path / "odd", tables, about)
    with pytest.raises(CheckpointError, match=r"no patch that can be used: .* Make it anew"):
        read_patch(tmp_path / "odd")


def test_a_disk_that_refuses_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    with pytest.raises(IsADirectoryError):
        write(tmp_path / "there", TABLES)
    assert [entry.name for entry in tmp_path.iterdir()] == ["there"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_changes_are_measured_over_all_rows(tmp_path: Path, dtype: torch.dtype) -> None:
    ids, before, after = some_rows((1000, 7), 23, dtype, dtype, 2)
    about = replace(ABOUT, shapes={"banks.0.values": (1000, 7)})
    write(tmp_path / "facts", {"banks.0.values": (ids, before, after)}, about)
    found = change_of(read_patch(tmp_path / "facts"), "banks.0.values")
    apart = after.double() - before.double()
    assert found.num_bytes == 23 * (8 + 2 * 7 * dtype.itemsize)
    assert found.largest == float(apart.abs().max())
    assert found.rms == pytest.approx(float(apart.square().mean().sqrt()))
    for odd in (float("nan"), float("inf")):
        after[1, 3] = odd
        write(tmp_path / f"{odd}", {"banks.0.values": (ids, before, after)}, about)
        worst = change_of(read_patch(tmp_path / f"{odd}"), "banks.0.values")
        assert not torch.tensor([worst.largest, worst.rms]).isfinite().any()
