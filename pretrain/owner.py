"""One owner of a run folder at a time, on one machine or many.

Two runs in one folder overwrite each other's checkpoints and metrics. So a run puts down a claim, `owner.json`, and
beats: a thread counts up in it as long as the run lives. Whoever finds a claim asks whether its owner is alive. Where
the process can be looked for (same machine, same container) that is certain and immediate; elsewhere the claim is
watched with the watcher's own clock, and lapses when it has not moved for `LAPSE_S`. No file lock is trusted, as
network file systems keep them for one node, or not at all; what is trusted is that a link or a rename happens once.

An owner that was believed dead and was only held up (a machine asleep, a file system that hung) finds another's claim
before it writes the next time, and stops.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from pretrain.errors import ConfigError
from pretrain.folder import RunFolder

BEAT_S = 10.0
"""Seconds between two beats of an owner."""

LAPSE_S = 60.0
"""Seconds without a beat after which an owner that cannot be looked for counts as dead."""
_WATCH_EVERY_S = 1.0
_ASIDE_S = 1.0


@dataclass(frozen=True)
class Claim:
    """Who owns a folder.

    Attributes:
        token: no other claim has it.
        host: where the owner runs, for people.
        machine: the kernel that it runs under and its namespace of process numbers; empty where they are unknown.
        pid, started: its number there, and when it got it, in ticks of that kernel; numbers are given out again.
        job, attempt: of Slurm, or empty and 0.
        since: local time of the claim, for people.
    """

    token: str
    host: str
    machine: str
    pid: int
    started: int
    job: str
    attempt: int
    since: str

    @classmethod
    def of_this_process(cls) -> Claim:
        """A new claim."""
        pid = os.getpid()
        return cls(
            token=uuid.uuid4().hex,
            host=socket.gethostname(),
            machine=_machine(),
            pid=pid,
            started=_start_of(pid) or 0,
            job=os.environ.get("SLURM_JOB_ID", ""),
            attempt=int(os.environ.get("SLURM_RESTART_COUNT", "0")),
            since=time.strftime("%Y-%m-%d %H:%M:%S"),
        )

    def __str__(self) -> str:
        job = f", Slurm job {self.job}" if self.job else ""
        return f"process {self.pid} on {self.host} (since {self.since}{job})"

    def is_alive(self, seen_by: Claim) -> bool | None:
        """Whether the owner is alive; None if that cannot be told from where `seen_by` runs."""
        if self.job and self.job == seen_by.job and self.attempt < seen_by.attempt:
            # Slurm starts a job again when nothing of it runs any more.
            return False
        if not self.machine or self.machine != seen_by.machine:
            return None
        return _start_of(self.pid) == self.started


class Owner:
    """The claim of this process on a folder, as long as `owned` lasts."""

    def __init__(self, path: Path, claim: Claim) -> None:
        self._path, self._claim = path, claim
        self._descriptor = os.open(path, os.O_RDWR)
        self._beats = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="run folder's owner", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """To be called before anything is written.

        Raises:
            ConfigError: somebody else owns the folder now.
        """
        found, _ = _read(self._path)
        if found is None:
            # For a moment it may be aside, while somebody who meant the claim before it puts it back.
            time.sleep(_ASIDE_S)
            found, _ = _read(self._path)
        if found is None or found.token != self._claim.token:
            now = f"{found} owns it now" if found else f"somebody removed {self._path}"
            raise ConfigError(
                f"{self._path.parent} no longer belongs to this run: {now}. This run was held up for so long that it "
                "counted as dead, and stops without writing; its checkpoints are intact"
            )

    def release(self) -> None:
        """End the claim."""
        self._ended.set()
        self._thread.join()
        os.close(self._descriptor)
        found, _ = _read(self._path)
        if found is not None and found.token == self._claim.token:
            self._path.unlink(missing_ok=True)

    def _beat(self) -> None:
        while not self._ended.wait(BEAT_S):
            self._beats += 1
            # In place, not by a rename: that would put this claim back over one that has followed it. A full disk or a
            # server that is away is no reason to end a run.
            with contextlib.suppress(OSError):
                os.pwrite(self._descriptor, _content(self._claim, self._beats), 0)
                os.fsync(self._descriptor)


@contextlib.contextmanager
def owned(folder: RunFolder) -> Iterator[Owner]:
    """Own a folder, which is made if it is missing, until the block ends.

    Raises:
        ConfigError: somebody who is alive owns it, or it cannot be written.
    """
    folder.make()
    owner = _claim(folder.owner)
    try:
        yield owner
    finally:
        owner.release()


def _claim(path: Path) -> Owner:
    mine = Claim.of_this_process()
    while not _put_down(path, mine):
        theirs, content = _read(path)
        if not path.exists():
            continue
        alive = theirs.is_alive(mine) if theirs else None
        if alive is None:
            alive = _moves(path, theirs, content)
        if alive:
            raise ConfigError(
                f"{path.parent} is in use by {theirs or 'somebody'}: two runs would overwrite each other's checkpoints. Wait until it has "
                "ended, stop it, or use another --run-dir"
            )
        _take_away(path, content)
    return Owner(path, mine)


def _put_down(path: Path, claim: Claim) -> bool:
    """Make the claim's file, whole; False if there is one."""
    temporary = path.with_name(f".{path.name}.{claim.token}")
    try:
        with temporary.open("xb") as stream:
            stream.write(_content(claim, 0))
            stream.flush()
            os.fsync(stream.fileno())
        try:
            os.link(temporary, path)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.EMLINK):
                raise
            # A file system without hard links has at least exclusive creation.
            try:
                with path.open("xb") as stream:
                    stream.write(_content(claim, 0))
            except FileExistsError:
                return False
        return True
    finally:
        temporary.unlink(missing_ok=True)


def _moves(path: Path, theirs: Claim | None, content: bytes) -> bool:
    """Whether a claim changes while it is watched."""
    print(
        f"{path.parent} was claimed by {theirs or 'somebody'}, who cannot be seen from here: watching for up to "
        f"{LAPSE_S:.0f} s whether that run is alive",
        flush=True,
    )
    until = time.monotonic() + LAPSE_S
    while time.monotonic() < until:
        time.sleep(min(_WATCH_EVERY_S, LAPSE_S / 10))
        if _read(path)[1] != content:
            return path.exists()
    return False


def _take_away(path: Path, content: bytes) -> None:
    """Remove a claim that has lapsed, and no other one."""
    aside = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    if _read(path)[1] != content:
        return
    try:
        path.rename(aside)
    except FileNotFoundError:
        return
    if _read(aside)[1] != content:
        # Somebody was faster, and this is already the next claim: back with it, unless there is yet another.
        with contextlib.suppress(FileExistsError):
            os.link(aside, path)
    aside.unlink()


def _content(claim: Claim, beats: int) -> bytes:
    """As it is in the file: of one length whatever the beat, so that it can be written in place."""
    return json.dumps({**asdict(claim), "beats": f"{beats:012d}"}, indent=1).encode()


def _read(path: Path) -> tuple[Claim | None, bytes]:
    """The claim in a file and the file's bytes; None and what there is, if it is no claim."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None, b""
    try:
        fields = json.loads(content)
        fields.pop("beats")
        return Claim(**fields), content
    except (ValueError, TypeError, AttributeError, KeyError):
        return None, content


def _machine() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _start_of(pid: int) -> int | None:
    """When a process of this machine started, in ticks since the machine did; None if there is none."""
    try:
        # The name, in parentheses, may hold anything.
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    state, started = fields[0], int(fields[19])
    return None if state in "ZX" else started
