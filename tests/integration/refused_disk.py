"""A folder on a full disk, or on one that cannot be written, for one process and what it starts; root or not."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
from pathlib import Path

_CLONE_NEWNS, _CLONE_NEWUSER = 0x0002_0000, 0x1000_0000
_MS_RDONLY, _MS_REMOUNT, _MS_BIND, _MS_REC, _MS_PRIVATE = 1, 32, 4096, 16384, 1 << 18
_DISK_BYTES = 24 << 20


def own_mounts() -> None:
    """Give this process mounts of its own from here on.

    Raises:
        OSError: that is not allowed here.
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
