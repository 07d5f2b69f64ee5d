"""A full disk, a folder that may not be written, a name that is too long: what the system refuses, in one line.

Python raises an `OSError` for it, often without the name of the file. The line names the thing, the reason and the fix.
An `OSError` that no person can mend (of a socket, of a wrong argument) is none of these, and stays a defect.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STANDARD_OUTPUT = "standard output"
_MAY_PASS_BY_ITSELF = 1
_MUST_BE_MENDED = 2
_LONGEST_NAME_SHOWN = 60


@dataclass(frozen=True)
class _Kind:
    """Meaning of an error number.

    Attributes:
        what: predicate of the thing: "cannot be written".
        fix: advice, as an imperative.
        exit_code: exit code of the command: one for what must be mended first, one for what may be over at the next
            start.
    """

    what: str
    fix: str
    exit_code: int = _MUST_BE_MENDED


_KINDS = {
    errno.ENOSPC: _Kind("cannot be written", "free some space there, or name another place"),
    errno.EDQUOT: _Kind("cannot be written", "free some of your space there, ask for more, or name another place"),
    errno.EFBIG: _Kind(
        "cannot be written",
        "raise the limit of your session (`ulimit -f`), or name a place whose files may be larger",
    ),
    errno.EROFS: _Kind("cannot be written", "name another place, or mount this one for writing"),
    errno.EACCES: _Kind("cannot be opened", "ask its owner for the right to, or name another place"),
    errno.EPERM: _Kind("cannot be changed", "ask its owner for the right to, or name another place"),
    errno.ENAMETOOLONG: _Kind("cannot be a file", "give a shorter name"),
    errno.ENOENT: _Kind("cannot be opened", "see that it is there, or name another place"),
    errno.ENOTDIR: _Kind("cannot be opened", "a file stands where a folder is meant: remove it, or name another place"),
    errno.EEXIST: _Kind("cannot be made", "something of that name is there: remove it, or name another place"),
    errno.EISDIR: _Kind("cannot be a file", "name a file, or remove the folder"),
    errno.ELOOP: _Kind("cannot be opened", "it is a link that leads back to itself: remove it, or name another place"),
    errno.EMFILE: _Kind("cannot be opened", "raise the limit of your session (`ulimit -n`)"),
    errno.ENFILE: _Kind("cannot be opened", "have the limit of the machine raised, or wait until others close theirs"),
    errno.ENOMEM: _Kind(
        "cannot be had", "end what else takes memory, or start fewer ranks and workers", _MAY_PASS_BY_ITSELF
    ),
    errno.EIO: _Kind(
        "cannot be read or written", "look after the disk or its server, and start again", _MAY_PASS_BY_ITSELF
    ),
    errno.ESTALE: _Kind("cannot be read or written", "its file server has lost it: start again", _MAY_PASS_BY_ITSELF),
}
_NAMELESS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EMFILE, errno.ENFILE, errno.EIO)
"""Error numbers, of those above, that come of files alone, of whichever file."""
_OF_DANGLING_LINKS = (errno.ENOENT, errno.EEXIST, errno.ENOTDIR)
_OF_TARGETS = (errno.EEXIST, errno.ENOTDIR, errno.EISDIR)
"""Error numbers that are said of what stands where something was to be moved to."""


@dataclass(frozen=True)
class Refusal:
    """A refusal of the system.

    Attributes:
        message: the thing, the reason and the fix, in a line.
        exit_code: exit code of the command that it ends.
    """

    message: str
    exit_code: int


def refusal(error: BaseException) -> Refusal | None:
    """The system's refusal that an error reports; None if it is no such error.

    Notes of the error (`BaseException.add_note`) follow as they are.
    """
    kind = _KINDS.get(error.errno or 0) if isinstance(error, OSError) else None
    if kind is None or not isinstance(error, OSError):
        return None
    thing = _thing(error)
    if thing is None:
        return None
    reason = error.strerror or type(error).__name__
    what, fix = kind.what, kind.fix
    if error.errno in _OF_DANGLING_LINKS and (target := missing_target(thing)) is not None:
        reason, fix = f"it is a link to {target}, which is not there", "make that, or remove the link"
    elif error.errno == errno.ENOENT and error.filename is None:
        return Refusal(f"{reason}: {fix}", kind.exit_code)
    elif error.errno == errno.EACCES and (closed := _closed_folder(thing)) is not None:
        reason = f"{reason} in {closed}"
    notes = "".join(f". {note}" for note in getattr(error, "__notes__", ()))
    return Refusal(f"{_shortened(thing)} {what} ({reason}): {fix}{notes}", kind.exit_code)


def describe_error(error: BaseException) -> str:
    """An error in a line: see `refusal`; of another one its own text."""
    found = refusal(error)
    return str(error) or type(error).__name__ if found is None else found.message


@contextmanager
def naming(thing: object) -> Iterator[None]:
    """Within the block, an `OSError` that names nothing names this."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            error.filename = str(thing)
        raise


def check_can_write(path: Path) -> None:
    """See whether a file could be written, so that nobody computes for it in vain. Nothing is made or changed.

    Raises:
        OSError: the file could not be written, and the error says why.
    """
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if path.exists():
            path.open("ab").close()
        folder = next(place for place in path.absolute().parents if place.exists())
        # A byte, as a full disk has room for names.
        probe = folder / f".{path.name}.probe-{os.getpid()}"
        try:
            probe.write_bytes(b"x")
        finally:
            probe.unlink(missing_ok=True)
    except OSError as error:
        error.filename = str(path)
        raise


def _thing(error: OSError) -> str | None:
    """The path that was refused, or other words for it; None if it is not of a file, nor of what files are made of."""
    if error.errno in _OF_TARGETS and isinstance(error.filename2, str | bytes | os.PathLike):
        return os.fsdecode(error.filename2)
    if isinstance(error.filename, str | bytes | os.PathLike):
        return os.fsdecode(error.filename)
    if error.errno in (errno.ENOENT, errno.ENOMEM):
        return "memory"
    if (stream := _stream_written(error)) is not None:
        return stream
    if stdout_refuses(with_more="\n"):
        return STANDARD_OUTPUT
    return "a file" if error.errno in _NAMELESS else None


def stdout_refuses(with_more: str = "") -> bool:
    """True if stdout cannot write its pending text and `with_more`: a stream may have lost what was refused."""
    try:
        sys.stdout.write(with_more)
        sys.stdout.flush()
    except (OSError, ValueError):
        return True
    return False


def _stream_written(error: OSError) -> str | None:
    """The file that was open where the error came from: a write that fails does not say to which file."""
    found = None
    trace = error.__traceback__
    while trace is not None:
        for value in trace.tb_frame.f_locals.values():
            if isinstance(value, io.IOBase) and isinstance(name := _name_of(value), str) and not name.startswith("<"):
                found = name
        trace = trace.tb_next
    return found


def _name_of(stream: Any) -> object:
    try:
        return stream.name
    # The stream is detached, or in memory.
    except (AttributeError, ValueError):
        return None


def missing_target(path: str | Path) -> str | None:
    """The target of a link that leads nowhere, if a path is one, or leads through one."""
    for place in (Path(path), *Path(path).parents):
        try:
            if place.is_symlink() and not place.exists():
                return os.readlink(place)
        except OSError:
            continue
    return None


def _closed_folder(path: str) -> Path | None:
    """The folder in which nothing may be made or opened, if that is why a path cannot be."""
    if os.path.lexists(path):
        return None
    folder = next((place for place in Path(path).absolute().parents if os.path.isdir(place)), None)
    return None if folder is None or os.access(folder, os.W_OK | os.X_OK) else folder


def _shortened(thing: str) -> str:
    if len(thing) <= 4 * _LONGEST_NAME_SHOWN:
        return thing
    return f"{thing[:_LONGEST_NAME_SHOWN]}...{thing[-_LONGEST_NAME_SHOWN:]} ({len(os.fsencode(thing))} bytes)"
