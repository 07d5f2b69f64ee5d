"""One owner of a run folder at a time, on one machine or many.

Two runs in one folder overwrite each other's checkpoints and metrics. So a run puts down a claim and beats: a thread
counts up in it as long as the run lives. A run that finds a claim asks whether its owner is alive. Where the process
can be looked for (same machine, same container) that is certain and immediate; elsewhere the claim is watched with the
watcher's own clock, and lapses when it has not moved for `LAPSE_S`. No file lock is trusted, as network file systems
keep them for one node, or not at all; this relies only on the rule that one of many can make a file of a given name.

Claims are numbered, `owner/000001.json` and on, and the highest number owns. A run that finds the highest dead or ended
makes the next one, which only one of many can, and owns if there is still no higher one: there is, if others came and
went since it looked. Only the owner removes claims, those before its own; the last one stays, marked as ended, so that
no number is given out twice. Hence there is no moment at which a claim that counts is away, and nothing to put back.

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
from pretrain.run.folder import RunFolder

BEAT_S = 10.0
"""Seconds between two beats of an owner."""

LAPSE_S = 60.0
"""Seconds without a beat after which an owner that cannot be looked for counts as dead."""
_WATCH_EVERY_S = 1.0
_ENDED = "ended"
_IN_USE = (
    "{folder} is in use by {owner}: two runs would overwrite each other's checkpoints. Wait until it has ended, stop it, "
    "or use another --run-dir"
)


@dataclass(frozen=True)
class Claim:
    """Claim on a folder by its owner.

    Attributes:
        token: no other claim has it.
        host: machine on which the owner runs, for people.
        machine: the kernel that it runs under and its namespace of process numbers; empty where they are unknown.
        pid, started: its number there, and its start in ticks of that kernel; numbers are given out again.
        job, attempt: Slurm's job, and the number of times that it had been requeued; empty and 0 outside of one.
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
        """True if the owner is alive; None if that cannot be told from where `seen_by` runs."""
        if self.job and self.job == seen_by.job and self.attempt < seen_by.attempt:
            # Slurm starts a job again when nothing of it runs any more.
            return False
        if not self.machine or self.machine != seen_by.machine:
            return None
        return _start_of(self.pid) == self.started


@dataclass(frozen=True)
class _Found:
    """A claim's file as it was read: its bytes, the claim if they can be understood, and whether that has ended."""

    path: Path
    content: bytes
    claim: Claim | None
    ended: bool

    def is_alive(self, seen_by: Claim) -> bool:
        if self.ended:
            return False
        alive = self.claim.is_alive(seen_by) if self.claim else None
        return self._moves() if alive is None else alive

    def _moves(self) -> bool:
        """True if the claim changes while it is watched."""
        print(
            f"{self.path.parent.parent} was claimed by {self.claim or 'somebody'}, who cannot be seen from here: watching "
            f"for up to {LAPSE_S:.0f} s whether that run is alive",
            flush=True,
        )
        until = time.monotonic() + LAPSE_S
        while time.monotonic() < until:
            time.sleep(min(_WATCH_EVERY_S, LAPSE_S / 10))
            now = _read(self.path)
            if now is None or now.content != self.content:
                return now is not None and not now.ended
        return False


@dataclass(frozen=True)
class Presence:
    """Owner of a folder, as far as one look tells.

    Attributes:
        claim: the one that counts; None if it cannot be read.
        ended: its owner said that it has ended.
        alive: the owner is alive; None if its process cannot be looked for from here.
        beat_age_s: seconds since its last beat, by this machine's clock and the file system's.
    """

    claim: Claim | None
    ended: bool
    alive: bool | None
    beat_age_s: float


def look(folder: RunFolder) -> Presence | None:
    """One look at who owns a folder, without a claim and without waiting; None if nobody ever did."""
    found = _highest(folder.owner)
    if found is None:
        return None
    alive: bool | None = False
    if not found.ended:
        alive = found.claim.is_alive(Claim.of_this_process()) if found.claim else None
    try:
        age_s = time.time() - found.path.stat().st_mtime
    except FileNotFoundError:
        # Its successor has removed it since: look at that one.
        return look(folder)
    return Presence(found.claim, found.ended, alive, max(0.0, age_s))


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
        """Check that this process still owns the folder; call it before anything is written.

        Raises:
            ConfigError: somebody else owns the folder now.
        """
        found = _highest(self._path.parent)
        if found is None or found.claim is None or found.claim.token != self._claim.token:
            folder = self._path.parent.parent
            now = f"{found.claim or 'somebody'} owns it now" if found else f"somebody removed {self._path}"
            raise ConfigError(
                f"{folder} no longer belongs to this run: {now}. This run was held up for so long that it "
                "counted as dead, and stops without writing; its checkpoints are intact"
            )

    def release(self) -> None:
        """End the claim."""
        self._ended.set()
        self._thread.join()
        self._write(_ENDED)
        os.close(self._descriptor)

    def _beat(self) -> None:
        while not self._ended.wait(BEAT_S):
            self._beats += 1
            self._write(str(self._beats))

    def _write(self, life: str) -> None:
        # In place, not by a rename: that would put this claim back when its successor has removed it. A full disk or a
        # server that is away is no reason to end a run.
        with contextlib.suppress(OSError):
            os.pwrite(self._descriptor, _content(self._claim, life), 0)
            os.fsync(self._descriptor)


@contextlib.contextmanager
def owned(folder: RunFolder, refusal: str = _IN_USE) -> Iterator[Owner]:
    """Own a folder, which is made if it is missing, until the block ends.

    Args:
        refusal: the message where another run owns it; {owner} and {folder} stand for them.

    Raises:
        ConfigError: somebody who is alive owns the folder, or it cannot be written.
    """
    folder.make()
    folder.owner.mkdir(exist_ok=True)
    owner = _claim(folder.owner, refusal)
    try:
        yield owner
    finally:
        owner.release()


def _claim(claims: Path, refusal: str) -> Owner:
    mine = Claim.of_this_process()
    while True:
        theirs = _highest(claims)
        if theirs and theirs.is_alive(mine):
            raise ConfigError(refusal.format(owner=theirs.claim or "somebody", folder=claims.parent))
        path = claims / f"{_number(theirs.path) + 1 if theirs else 1:06d}.json"
        if not _put_down(path, mine):
            continue
        numbers = {_number(other): other for other in _numbered(claims)}
        if max(numbers) == _number(path):
            for number, older in numbers.items():
                if number < _number(path):
                    older.unlink(missing_ok=True)
            return Owner(path, mine)
        path.unlink(missing_ok=True)


def _put_down(path: Path, claim: Claim) -> bool:
    """Make the claim's file, whole; False if there is one."""
    temporary = path.with_name(f".{claim.token}")
    try:
        with temporary.open("xb") as stream:
            stream.write(_content(claim, "0"))
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
                    stream.write(_content(claim, "0"))
            except FileExistsError:
                return False
        return True
    finally:
        temporary.unlink(missing_ok=True)


def _numbered(claims: Path) -> list[Path]:
    """The files of claims, in any order."""
    return [claims / name for name in os.listdir(claims) if name.endswith(".json") and name[:-5].isdecimal()]


def _number(path: Path) -> int:
    return int(path.stem)


def _highest(claims: Path) -> _Found | None:
    """The claim that counts; None if there is none."""
    while True:
        try:
            numbered = _numbered(claims)
        except FileNotFoundError:
            return None
        if not numbered:
            return None
        # Gone between the two: the owner that removed it has a higher one.
        if found := _read(max(numbered, key=_number)):
            return found


def _content(claim: Claim, life: str) -> bytes:
    """The claim's file: of one length whatever its life, so that it can be written in place."""
    return json.dumps({**asdict(claim), "life": f"{life:>12}"}, indent=1).encode()


def _read(path: Path) -> _Found | None:
    """A claim's file; None if there is none."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    try:
        fields = json.loads(content)
        ended = fields.pop("life").strip() == _ENDED
        return _Found(path, content, Claim(**fields), ended)
    except (ValueError, TypeError, AttributeError, KeyError):
        return _Found(path, content, None, False)


def _machine() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _start_of(pid: int) -> int | None:
    """Start of a process of this machine, in ticks since the machine's own; None if there is no such process."""
    try:
        # The name, in parentheses, may hold anything.
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    state, started = fields[0], int(fields[19])
    return None if state in "ZX" else started
