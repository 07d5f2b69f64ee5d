"""A folder in place of another, in one step: made beside it of hard links and copies, and exchanged with it.

Files are never rewritten. Who has mapped an old one goes on with it, and after a kill the folder is as it was before, or
as it is to be.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from parallel.machine.atomic_write import sync
from parallel.machine.refusals import naming
from pretrain.errors import CheckpointError, ConfigError

_PREFIX = ".patching_"
_HERE, _EXCHANGE = -100, 2
_CANNOT_EXCHANGE = (errno.EINVAL, errno.ENOSYS, errno.EXDEV, errno.EOPNOTSUPP, errno.EBUSY)
_CANNOT_LINK = (errno.EPERM, errno.EXDEV, errno.EOPNOTSUPP, errno.EMLINK, errno.ENOSYS)
_CANNOT_SHARE = (errno.EXDEV, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.EPERM, errno.EBADF)

PlaceFile = Callable[[Path, Path], None]


def staging_folder(path: Path) -> Path:
    """Folder beside a path, in which its contents are made."""
    return path.with_name(f"{_PREFIX}{path.name}")


@contextmanager
def staged(path: Path) -> Iterator[Path]:
    """The staging folder of a path, empty and locked; nothing has its name after the block.

    Raises:
        ConfigError: another patch is making it.
        OSError: the disk refuses.
    """
    remove_leftover(path)
    staging = staging_folder(path)
    staging.mkdir(parents=True)
    # Held to the end: once exchanged, it is the folder that has the name.
    with locked(staging, path):
        try:
            yield staging
        finally:
            _remove(staging)


@contextmanager
def locked(folder: Path, named: Path) -> Iterator[None]:
    """Keep other patches from a folder until the block ends, where the file system has locks.

    Args:
        named: path for the message.

    Raises:
        ConfigError: another patch has it.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        is_free = True
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            is_free = False
        except OSError:
            # Some network file systems have none.
            pass
        # It may have been exchanged before it was locked.
        if not is_free or not os.path.samestat(os.fstat(descriptor), folder.stat()):
            raise ConfigError(f"another patch is being applied to {named}: wait for it, or name another --output")
        yield
    finally:
        os.close(descriptor)


def mirror(folder: Path, target: Path, place: PlaceFile) -> None:
    """Make a folder like another one, unless it is there and empty, in which `place` puts every file.

    Raises:
        OSError: the disk refuses.
    """
    target.mkdir(exist_ok=True)
    with os.scandir(folder) as entries:
        found = sorted(entries, key=lambda entry: entry.name)
    for entry in found:
        if entry.is_dir(follow_symlinks=False):
            mirror(Path(entry.path), target / entry.name, place)
        else:
            place(Path(entry.path), target / entry.name)
    shutil.copymode(folder, target)


def link_or_copy(source: Path, target: Path) -> None:
    """Give a file that does not change a second name; where the file system cannot, copy it."""
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError as error:
        if error.errno not in _CANNOT_LINK:
            raise
        if source.is_symlink():
            target.symlink_to(os.readlink(source))
        else:
            copy(source, target)


def copy(source: Path, target: Path) -> None:
    """Copy a file's contents, which share their place on disk where the file system can have it so."""
    with source.open("rb") as there, target.open("xb") as here, naming(target):
        left = os.fstat(there.fileno()).st_size
        try:
            while left and (count := os.copy_file_range(there.fileno(), here.fileno(), left)):
                left -= count
        except OSError as error:
            if error.errno not in _CANNOT_SHARE:
                raise
        if left:
            here.seek(0)
            here.truncate()
            there.seek(0)
            shutil.copyfileobj(there, here, 1 << 22)


def sync_folder(folder: Path) -> None:
    """Wait until all names in a folder, and the contents of files that have no other name, are on disk."""
    for path in [*folder.rglob("*"), folder]:
        if not path.is_symlink() and (path.is_dir() or path.stat().st_nlink == 1):
            sync(path)


def check_exchange(folder: Path) -> None:
    """See whether folders beside one could be exchanged, before hours are spent on it.

    Raises:
        CheckpointError: the file system cannot.
        OSError: nothing may be made beside it.
    """
    with staged(folder) as staging:
        for name in ("a", "b"):
            (staging / name).mkdir()
        _exchange(staging / "a", staging / "b", folder)


def exchange(staging: Path, folder: Path) -> None:
    """Give a finished folder its name, and the one that had it the other's.

    Raises:
        CheckpointError: the file system cannot.
        OSError: the disk refuses.
    """
    _exchange(staging, folder, folder)
    sync(folder.parent)


def _exchange(first: Path, second: Path, folder: Path) -> None:
    """Exchange two folders in one step of the system; `folder` is named if it cannot."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    number = errno.ENOSYS
    if rename is not None:
        if not rename(_HERE, os.fsencode(first), _HERE, os.fsencode(second), ctypes.c_uint(_EXCHANGE)):
            return
        number = ctypes.get_errno()
    if number in _CANNOT_EXCHANGE:
        raise CheckpointError(
            f"{folder} cannot be exchanged with another folder in one step ({os.strerror(number)}), and a kill could leave "
            "half of a patch there: have a new folder written with --output DIR"
        )
    raise OSError(number, os.strerror(number), str(folder))


def remove_leftover(path: Path) -> None:
    """Remove a path's staging folder, which a killed patch leaves: of what it made, or of what it replaced.

    Raises:
        ConfigError: no kill has left it: another patch is at work.
        OSError: the disk refuses.
    """
    staging = staging_folder(path)
    if staging.is_dir() and not staging.is_symlink():
        with locked(staging, path):
            _remove(staging)
    else:
        _remove(staging)


def _remove(staging: Path) -> None:
    if staging.is_symlink() or staging.is_file():
        staging.unlink()
    elif staging.is_dir():
        shutil.rmtree(staging)
