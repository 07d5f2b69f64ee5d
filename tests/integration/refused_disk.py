"""A folder on a full disk, or on one that cannot be written, for one process and what it starts; root or not."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commands import Result
from engine_stand_in import engine_stand_in

from tests.changed_rows import write_some_patch

REPOSITORY = Path(__file__).parents[2]

_CLONE_NEWNS, _CLONE_NEWUSER = 0x0002_0000, 0x1000_0000
_MS_RDONLY, _MS_REMOUNT, _MS_BIND, _MS_REC, _MS_PRIVATE = 1, 32, 4096, 16384, 1 << 18
_DISK_BYTES = 24 << 20


def own_mounts() -> None:
    """Give this process mounts of its own from here on.

    Raises:
        OSError: mounts of its own are not allowed here.
    """
    user, group = os.getuid(), os.getgid()
    _checked(_libc().unshare(_CLONE_NEWNS if user == 0 else _CLONE_NEWNS | _CLONE_NEWUSER))
    if user != 0:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    _mount(None, Path("/"), None, _MS_REC | _MS_PRIVATE)


def make_read_only(folder: Path) -> None:
    """Nothing in a folder can be changed any more, whoever asks. After `own_mounts`."""
    _mount(folder, folder, None, _MS_BIND)
    _mount(None, folder, None, _MS_REMOUNT | _MS_BIND | _MS_RDONLY)


def make_full(folder: Path, side: Path) -> None:
    """Put what a folder holds on a disk of its own, which has not a byte left. After `own_mounts`.

    Args:
        side: an empty folder.
    """
    _mount(Path("none"), side, "tmpfs", 0, f"size={_DISK_BYTES}")
    shutil.copytree(folder, side, dirs_exist_ok=True)
    with contextlib.suppress(OSError), (side / "filler").open("wb", buffering=0) as filler:
        while True:
            filler.write(bytes(1 << 16))
    with contextlib.suppress(OSError), (side / "filler").open("ab", buffering=0) as filler:
        while True:
            filler.write(b"x")
    _mount(side, folder, None, _MS_BIND)


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _mount(source: Path | None, target: Path, kind: str | None, flags: int, options: str | None = None) -> None:
    values = (None if each is None else str(each).encode() for each in (source, target, kind))
    _checked(_libc().mount(*values, ctypes.c_ulong(flags), None if options is None else options.encode()))


def _checked(code: int) -> None:
    if code:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _try_own_mounts(answer: Any) -> None:
    try:
        own_mounts()
        answer.put("")
    except OSError as error:
        answer.put(str(error))


@pytest.fixture(scope="session")
def own_mounts_are_allowed(warm: None) -> None:
    """Skips where they are not."""
    context = multiprocessing.get_context("fork")
    answer = context.SimpleQueue()
    process = context.Process(target=_try_own_mounts, args=(answer,))
    process.start()
    reason = answer.get()
    process.join()
    if reason:
        pytest.skip(f"this machine allows no mounts of one's own: {reason}")


@pytest.fixture(scope="module")
def place(own_mounts_are_allowed: None, tmp_path_factory: pytest.TempPathFactory, saved_run: Path) -> Path:
    """The folder that is refused, with a run in it."""
    path = tmp_path_factory.mktemp("place")
    shutil.copytree(saved_run, path / "run")
    return path


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory, place: Path, corpus: Path, config_file: Path) -> dict[str, Path]:
    """Texts for the names in braces, of `arguments`."""
    folder = tmp_path_factory.mktemp("inputs")
    (folder / "texts").mkdir()
    (folder / "texts" / "a.txt").write_text("def f(x):\n    return x\n" * 9)
    (folder / "texts" / "b.txt").write_text("print(1)\n" * 9)
    return {
        "place": place,
        "corpus": corpus,
        "config": config_file,
        "texts": folder / "texts",
        "repository": REPOSITORY,
        "patch": write_some_patch(place / "run", folder / "facts.safetensors", {"banks.0.values": (1,)}),
        "engine": engine_stand_in(folder / "engine", "vllm")[0],
    }


def _read_only(place: Path, side: Path) -> None:
    own_mounts()
    make_read_only(place)


def _full(place: Path, side: Path) -> None:
    own_mounts()
    make_full(place, side)


REFUSALS = {"Read-only file system": _read_only, "No space left on device": _full}


@pytest.fixture
def refused(place: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Callable[[], None]:
    """Run before a command: has the disk refuse the place, which is its current folder."""

    def before() -> None:
        REFUSALS[request.param](place, tmp_path)
        os.chdir(place)

    return before


def arguments(command: str, rest: str, words: dict[str, Path]) -> list[str]:
    """A command's words, with those in braces filled."""
    return [*command.split(), *(word.format_map(words) for word in rest.split())]


def assert_one_line(result: Result, place: Path, reason: str) -> None:
    """One error that names the place and the system's reason."""
    assert "Traceback" not in result.output, result.output
    assert result.code in (2, 3, 4), result.output
    assert result.last_line.startswith("megamem: error: "), result.output
    assert str(place) in result.last_line
    assert reason in result.last_line, result.output
