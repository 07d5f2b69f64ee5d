"""The checkpoint that a run goes on from: the newest that is complete and, where contents are read, whole."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pretrain.checkpoint.folder import SavedState, is_complete, list_checkpoints, read_state, step_of
from pretrain.checkpoint.hashes import RecordedFile, record
from pretrain.checkpoint.safe_metadata import check_small_files
from pretrain.errors import CheckpointError

READING_THREADS = 4
"""Files that one process reads at a time; hashing and reading leave Python's lock."""
_MOST_OLDER_NAMED = 5


def no_damage(saved: SavedState) -> Sequence[str]:
    """Report no damage, for callers that do not check contents."""
    return ()


def newest_complete(
    folder: Path, *, before: int | None = None, damage: Callable[[SavedState], Sequence[str]] = no_damage
) -> tuple[SavedState | None, list[str]]:
    """The newest complete checkpoint (of those from before a step), and why newer ones were passed over.

    Args:
        folder: the run's checkpoints.
        before: a step; None: any.
        damage: finds damage in the contents of a checkpoint whose files have the right sizes, in words.

    Raises:
        CheckpointError: the run has checkpoints, and none of them is complete.
    """
    problems: list[str] = []
    for path in reversed(list_checkpoints(folder)):
        if before is not None and step_of(path) >= before:
            continue
        try:
            saved = read_state(path)
            check_small_files(path)
            refuse_damage(saved, damage(saved))
            return saved, problems
        except CheckpointError as error:
            problems.append(str(error))
    if problems:
        raise nothing_complete(folder, problems)
    return None, []


def the_newest(folder: Path, *, damage: Callable[[SavedState], Sequence[str]] = no_damage) -> SavedState | None:
    """The newest checkpoint, to be used outside of its run: no older one stands in for it; None if there is none.

    Raises:
        CheckpointError: the newest one is incomplete or damaged; the message has the older ones that can be taken
            instead.
    """
    paths = list_checkpoints(folder)
    if not paths:
        return None
    try:
        saved = read_state(paths[-1])
        check_small_files(paths[-1])
        refuse_damage(saved, damage(saved))
    except CheckpointError as error:
        raise naming_older_ones(error, paths[-1]) from error
    return saved


def naming_older_ones(error: CheckpointError, path: Path) -> CheckpointError:
    """Add the run's older checkpoints to the error of its newest one; any other error is returned as it is."""
    *others, newest = list_checkpoints(path.parent) or [path]
    if newest != path:
        return error
    older = [each for each in reversed(others) if is_complete(each)]
    if not older:
        return CheckpointError(f"{error}. Its run has no older one that is whole")
    steps = ", ".join(str(step_of(each)) for each in older[:_MOST_OLDER_NAMED])
    return CheckpointError(
        f"{error}. It is the newest of its run. To take an older one, name its folder ({older[0]}) or its step (--step); "
        f"whole as far as files and their sizes tell: {steps}"
    )


def refuse_damage(saved: SavedState, damage: Sequence[str]) -> None:
    """Refuse a damaged checkpoint.

    Raises:
        CheckpointError: the checkpoint is damaged; the message names it and its damage.
    """
    if damage:
        raise CheckpointError(f"{saved.path} is damaged: {'; '.join(damage)}")


def nothing_complete(folder: Path, problems: Sequence[str]) -> CheckpointError:
    """Error to raise where every checkpoint of a run has a problem."""
    return CheckpointError(
        "no checkpoint of this run can be read: "
        + "; ".join(problems)
        + f". Restore one of them, or start over in another --run-dir, or delete {folder}"
    )


def damaged_files(
    path: Path, names: Iterable[str] | None = None, on_bytes: Callable[[int], None] | None = None
) -> list[str]:
    """Read files of a checkpoint, and hold them against what its `state.json` says.

    Args:
        path: the checkpoint's folder.
        names: names of the files to read; None: all that are recorded.
        on_bytes: told how many bytes each portion had that was read, in any of several threads.

    Returns:
        The damage, a sentence per file that names it, in the order of their names. Files that were recorded without
        a hash (format 1) are held against their sizes alone.

    Raises:
        CheckpointError: `state.json` cannot be read, or a file that it lists is missing or has another size.
    """
    recorded = read_state(path).files
    chosen = sorted(recorded if names is None else set(names))
    with ThreadPoolExecutor(READING_THREADS) as threads:
        found = threads.map(lambda name: _damage(path / name, recorded.get(name), on_bytes), chosen)
        return [problem for problem in found if problem is not None]


def _damage(file: Path, expected: RecordedFile | None, on_bytes: Callable[[int], None] | None) -> str | None:
    """Damage of a file, in words; None if there is none."""
    if expected is None:
        return f"{file.name} is not among the files that were written"
    if expected.sha256 is None:
        return None
    try:
        found = record(file, on_bytes)
    except OSError as error:
        return f"{file.name} cannot be read ({error.strerror or error})"
    if found != expected:
        return f"{file.name} has other contents than were written (SHA-256 {_short(found)}, written {_short(expected)})"
    return None


def _short(file: RecordedFile) -> str:
    return f"{(file.sha256 or '')[:12]}..."
