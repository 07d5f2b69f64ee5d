"""A folder that takes another one's place: its files linked or copied, exchanged in one step, and nothing left behind."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path
from typing import Any

import pytest

from pretrain.errors import CheckpointError, ConfigError
from pretrain.patch import folders
from pretrain.patch.folders import check_exchange, copy, exchange, link_or_copy, locked, mirror, remove_leftover, staged


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "folder"
    (path / "below").mkdir(parents=True)
    (path / "a").write_bytes(os.urandom(5_000_000))
    (path / "below" / "b").write_text("b")
    (path / "link").symlink_to("below/b")
    (path / "away").symlink_to("below")
    (path / "empty").touch()
    return path


def refusing(number: int, after: int = 0) -> Any:
    """A call of the system that is refused, after some that are not."""
    calls: list[int] = []

    def refused(*args: Any, **options: Any) -> int:
        if len(calls) < after:
            calls.append(0)
            os.sendfile(args[1], args[0], None, 1000)
            return 1000
        raise OSError(number, os.strerror(number))

    return refused


def assert_same(first: Path, second: Path) -> None:
    for path in (*first.rglob("*"), *(first / path.relative_to(second) for path in second.rglob("*"))):
        other = second / path.relative_to(first)
        assert path.is_symlink() == other.is_symlink()
        if path.is_symlink():
            assert os.readlink(path) == os.readlink(other)
        else:
            assert path.is_dir() if other.is_dir() else path.read_bytes() == other.read_bytes()


@pytest.mark.parametrize("number", [0, errno.EPERM, errno.EXDEV])
def test_files_are_linked_where_they_can_be(folder: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    if number:
        monkeypatch.setattr(os, "link", refusing(number))
    mirror(folder, folder.with_name("new"), link_or_copy)
    assert_same(folder, folder.with_name("new"))
    assert (folder.with_name("new") / "a").samefile(folder / "a") == (number == 0)


@pytest.mark.parametrize("number", [0, errno.EXDEV, errno.ENOSYS])
@pytest.mark.parametrize("after", [0, 2])
def test_files_are_copied_whole(folder: Path, monkeypatch: pytest.MonkeyPatch, number: int, after: int) -> None:
    if number:
        monkeypatch.setattr(os, "copy_file_range", refusing(number, after))
    for name in ("a", "empty"):
        copy(folder / name, folder / f"{name} copied")
        assert (folder / f"{name} copied").read_bytes() == (folder / name).read_bytes()
    # A link's contents, in a file of its own.
    copy(folder / "link", folder / "link copied")
    assert not (folder / "link copied").is_symlink()
    with pytest.raises(FileExistsError):
        copy(folder / "a", folder / "empty")


def test_a_full_disk_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "copy_file_range", refusing(errno.ENOSPC))
    with pytest.raises(OSError, match="No space") as caught:
        copy(folder / "a", folder / "new")
    assert caught.value.filename == str(folder / "new")
    monkeypatch.setattr(os, "link", refusing(errno.ENOSPC))
    with pytest.raises(OSError, match="No space"):
        link_or_copy(folder / "a", folder / "other")


def test_folders_are_exchanged_in_one_step(folder: Path) -> None:
    other = folder.with_name("other")
    other.mkdir()
    (other / "mine").touch()
    exchange(other, folder)
    assert [path.name for path in folder.iterdir()] == ["mine"]
    assert (other / "below" / "b").read_text() == "b"
    with pytest.raises(FileNotFoundError):
        exchange(folder.with_name("none"), folder)


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOSYS, errno.EBUSY])
def test_a_file_system_without_exchange_is_told_first(
    folder: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    check_exchange(folder)

    class Library:
        def __init__(self, *_: Any, **__: Any) -> None:
            if number != errno.ENOSYS:
                self.renameat2 = lambda *_: -1

    monkeypatch.setattr(folders.ctypes, "CDLL", Library)
    monkeypatch.setattr(folders.ctypes, "get_errno", lambda: number)
    text = rf"{folder} cannot be exchanged .* \({os.strerror(number)}\).*--output DIR"
    with pytest.raises(CheckpointError, match=text):
        check_exchange(folder)
    assert [path.name for path in folder.parent.iterdir()] == ["folder"]


def test_what_a_kill_leaves_is_removed(folder: Path) -> None:
    left = folder.with_name(".patching_folder")
    for make in (left.mkdir, left.touch, lambda: left.symlink_to(folder)):
        make()
        with staged(folder) as staging:
            assert staging == left
            assert not any(left.iterdir())
            assert not left.is_symlink()
    assert (folder / "a").exists()
    with contextlib.suppress(ValueError), staged(folder) as staging:
        mirror(folder, staging, link_or_copy)
        raise ValueError
    assert [path.name for path in folder.parent.iterdir()] == ["folder"]


def test_one_patch_at_a_time(folder: Path) -> None:
    refused = pytest.raises(ConfigError, match=f"another patch is being applied to {folder}: wait")
    with locked(folder, folder), refused, locked(folder, folder):
        pass
    with locked(folder, folder):
        pass
    with staged(folder), refused, staged(folder):
        pass
    # Once the two are exchanged, the new one is locked as well.
    with locked(folder, folder), staged(folder) as staging:
        (staging / "new").touch()
        exchange(staging, folder)
        with refused, locked(folder, folder):
            pass
        with refused:
            remove_leftover(folder)
    assert [path.name for path in folder.iterdir()] == ["new"]
    assert [path.name for path in folder.parent.iterdir()] == ["folder"]


def test_a_folder_that_was_exchanged_before_it_is_locked_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = folder.with_name("other")
    other.mkdir()

    def late(*_: object) -> None:
        exchange(other, folder)

    monkeypatch.setattr(folders.fcntl, "flock", late)
    with pytest.raises(ConfigError, match="another patch is being applied"), locked(folder, folder):
        pass
