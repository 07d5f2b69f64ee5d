"""Building a folder under a temporary name, so that nobody ever sees half of it.

While it is being built the folder is `.NAME.preparing` beside its final place, with a lock inside it. A killed build
leaves only that folder. The next one empties it, unless the first has noted how far it had come (`PROGRESS_FILE`) with
the same work to do.
"""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from parallel.machine.atomic_write import sync
from parallel.machine.refusals import describe_error
from pretrain.errors import DataError

LOCK_FILE = ".lock"
"""Held while a folder is being built; one that is left over means nothing."""


PROGRESS_FILE = "progress.json"
"""Progress that a long build notes: a folder with it is kept when the build is cut off, and one without is removed."""


@contextmanager
def staged_folder(output: Path, *, can_go_on: Callable[[Path], bool] = lambda _: False) -> Iterator[Path]:
    """A folder to build in; it becomes `output`, replacing what is there, when the block ends without an error.

    Args:
        can_go_on: True for a folder that an earlier build has left, if it is this one's beginning.

    Raises:
        DataError: another process is building the same output, or the disk refuses (full, read-only).
    """
    staging = output.with_name(f".{output.name}.preparing")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with _locked(staging):
            if not can_go_on(staging):
                for path in staging.iterdir():
                    if path.name != LOCK_FILE:
                        path.unlink()
            try:
                yield staging
                # A rename can reach the disk before the contents do; after a power cut the name would then stand for
                # nothing.
                for path in [*staging.iterdir(), staging]:
                    sync(path)
                _replace(staging, output)
                # Only now: until the rename, a second build must find the lock.
                (output / LOCK_FILE).unlink()
            except BaseException:
                if not (staging / PROGRESS_FILE).exists():
                    shutil.rmtree(staging, ignore_errors=True)
                raise
    except OSError as error:
        raise DataError(
            f"{output}: the data set was not made: {describe_error(error)}. Nothing that was there before has changed."
        ) from error


def recover_replaced(output: Path) -> None:
    """Put back a data set whose replacement was cut off between its two renames."""
    displaced = _displaced(output)
    if displaced.is_dir():
        if output.exists():
            shutil.rmtree(displaced)
        else:
            displaced.rename(output)


def _displaced(output: Path) -> Path:
    """Path of a data set while another one takes its name."""
    return output.with_name(f".{output.name}.replaced")


@contextmanager
def _locked(staging: Path) -> Iterator[None]:
    staging.mkdir(exist_ok=True)
    with (staging / LOCK_FILE).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DataError(
                f"{staging} is in use: another process is preparing the same output. Wait for it, "
                "or choose another --output."
            ) from None
        yield


def _replace(staging: Path, output: Path) -> None:
    displaced = _displaced(output)
    if output.exists():
        output.rename(displaced)
    try:
        staging.rename(output)
    except OSError:
        if displaced.exists():
            displaced.rename(output)
        raise
    shutil.rmtree(displaced, ignore_errors=True)
