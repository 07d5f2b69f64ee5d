"""A file is there whole, or as it was before."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from parallel.machine.atomic_write import atomic_write, sync


def test_the_file_appears_when_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "new" / "file"
    with atomic_write(path) as stream:
        stream.write(b"whole")
        assert not path.exists()
    assert path.read_bytes() == b"whole"
    assert os.listdir(path.parent) == ["file"]


def test_an_error_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"before")

    def write_half() -> None:
        with atomic_write(path) as stream:
            stream.write(b"half")
            raise OSError("full")

    with pytest.raises(OSError, match="full"):
        write_half()
    assert path.read_bytes() == b"before"
    assert os.listdir(tmp_path) == ["file"]


def test_others_may_read_it_as_they_may_read_any_file(tmp_path: Path) -> None:
    with atomic_write(tmp_path / "file") as stream:
        stream.write(b"")
    (tmp_path / "any").touch()
    assert (tmp_path / "file").stat().st_mode == (tmp_path / "any").stat().st_mode


def test_it_is_on_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[bytes] = []

    def fsync(descriptor: int) -> None:
        assert not (tmp_path / "file").exists()
        synced.append(Path(f"/proc/self/fd/{descriptor}").read_bytes())

    monkeypatch.setattr("parallel.machine.atomic_write.os.fsync", fsync)
    with atomic_write(tmp_path / "file") as stream:
        stream.write(b"whole")
    assert synced == [b"whole"]


def test_files_and_folders_are_waited_for_and_left_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(b"whole")
    synced: list[str] = []
    monkeypatch.setattr(
        "parallel.machine.atomic_write.os.fsync",
        lambda descriptor: synced.append(os.readlink(f"/proc/self/fd/{descriptor}")),
    )
    num_open = len(os.listdir("/proc/self/fd"))
    for path in (tmp_path / "file", tmp_path):
        sync(path)
    assert synced == [str(tmp_path / "file"), str(tmp_path)]
    assert len(os.listdir("/proc/self/fd")) == num_open
