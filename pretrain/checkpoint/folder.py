"""The folder of a run's checkpoints: names, completeness, and which ones to keep.

A checkpoint is written into `.writing_step_XXXXXXXX` and renamed to `step_XXXXXXXX` when every rank's files are on
disk. It is complete if its `state.json`, which is written last, lists files that are all there at the size they had.
"""

from __future__ import annotations

import contextlib
import json
import platform
import re
import shutil
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from parallel.atomic_write import sync
from pretrain.errors import CheckpointError
from pretrain.state import RunState

STATE_FILE = "state.json"
_FORMAT = 1
_STEP_NAME = re.compile(r"step_(\d{8,})")
_WRITING_PREFIX = ".writing_"
_PACKAGES = ("megamem", "torch", "megatron-core", "numpy", "triton", "transformer-engine")


@dataclass(frozen=True)
class SavedState:
    """What a checkpoint holds besides tensors.

    Attributes:
        path: the checkpoint's folder.
        run: how far the run had come.
        config: the resolved config, as plain values.
    """

    path: Path
    run: RunState
    config: dict[str, Any]

    @property
    def step(self) -> int:
        return self.run.step


def step_folder(folder: Path, step: int) -> Path:
    """Where the checkpoint of a step is, once complete."""
    return folder / f"step_{step:08d}"


def writing_folder(folder: Path, step: int) -> Path:
    """Where it is while being written."""
    return folder / f"{_WRITING_PREFIX}step_{step:08d}"


def start_writing(folder: Path, step: int) -> Path:
    """An empty folder to write into; what an interrupted save left is removed."""
    folder.mkdir(parents=True, exist_ok=True)
    for leftover in folder.glob(f"{_WRITING_PREFIX}*"):
        shutil.rmtree(leftover)
    path = writing_folder(folder, step)
    path.mkdir()
    return path


def complete(folder: Path, step: int, **content: dict[str, Any]) -> Path:
    """Write `state.json`, of this content, into a step's writing folder, and give the folder its name.

    An older checkpoint of the step is replaced.
    """
    path, final = writing_folder(folder, step), step_folder(folder, step)
    files = {file.name: file.stat().st_size for file in sorted(path.iterdir())}
    (path / STATE_FILE).write_text(
        json.dumps({"format": _FORMAT, **content, "files": files}, indent=1), encoding="utf-8"
    )
    sync(path / STATE_FILE)
    sync(path)
    if final.exists():
        shutil.rmtree(final)
    path.rename(final)
    sync(folder)
    return final


def read_state(path: Path) -> SavedState:
    """Read and check a checkpoint's `state.json`.

    Raises:
        CheckpointError: it is missing or unreadable, or a file that it lists is missing or has another size.
    """
    try:
        content = json.loads((path / STATE_FILE).read_text(encoding="utf-8"))
        format_version, versions = content["format"], content["versions"]
        saved = SavedState(path, RunState(**content["run"]), content["config"])
        name_of_step = step_folder(path.parent, saved.step).name
        sizes = {str(name): int(size) for name, size in content["files"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{path} is not a complete checkpoint: its {STATE_FILE} cannot be read ({error})"
        ) from error
    if format_version != _FORMAT:
        raise CheckpointError(
            f"{path} has checkpoint format {format_version}, and this version reads format {_FORMAT}: "
            f"use the version that wrote it ({versions})"
        )
    if name_of_step != path.name:
        raise CheckpointError(f"{path} is damaged: its {STATE_FILE} says that it is of step {saved.step}")
    for name, size in sizes.items():
        file = path / name
        actual = file.stat().st_size if file.is_file() else None
        if actual != size:
            found = "is missing" if actual is None else f"has {actual} bytes"
            raise CheckpointError(f"{path} is damaged: {name} {found}, and {size} bytes were written")
    return saved


def list_checkpoints(folder: Path) -> list[Path]:
    """Folders named as finished checkpoints, oldest step first."""
    if not folder.is_dir():
        return []
    found = [(int(match[1]), path) for path in folder.iterdir() if (match := _STEP_NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found)]


def newest_complete(folder: Path, *, before: int | None = None) -> tuple[SavedState | None, list[str]]:
    """The newest complete checkpoint (of those from before a step), and why newer ones were passed over.

    Raises:
        CheckpointError: there are checkpoints, and none of them is complete.
    """
    from pretrain.checkpoint.safe_metadata import check_small_files  # imports torch

    problems: list[str] = []
    for path in reversed(list_checkpoints(folder)):
        if before is not None and _step_of(path) >= before:
            continue
        try:
            saved = read_state(path)
            check_small_files(path)
            return saved, problems
        except CheckpointError as error:
            problems.append(str(error))
    if problems:
        raise CheckpointError(
            "no checkpoint of this run can be read: "
            + "; ".join(problems)
            + f". Restore one of them, or start over in another --run-dir, or delete {folder}"
        )
    return None, []


def remove_superseded(folder: Path, newest_step: int, *, keep_last: int, keep_every_steps: int) -> list[Path]:
    """Delete checkpoints that the retention rules no longer keep; returns what was deleted.

    Damaged ones do not count as kept. Nor do those of later steps: the run was resumed from before them, so they cannot
    be used, and they are replaced when it comes to their steps.

    Args:
        folder: the run's checkpoints.
        newest_step: of the checkpoint that was just completed.
        keep_last: newest ones to keep, that one included; 0: all.
        keep_every_steps: steps divisible by this are kept for good; 0: no such rule.
    """
    checkpoints = [path for path in list_checkpoints(folder) if _step_of(path) <= newest_step]
    complete_ones = [path for path in checkpoints if _is_complete(path)]
    if not keep_last or len(complete_ones) <= keep_last:
        return []
    candidates = checkpoints[: checkpoints.index(complete_ones[-keep_last])]
    removed = []
    for path in candidates:
        if not (keep_every_steps and _step_of(path) % keep_every_steps == 0):
            shutil.rmtree(path)
            removed.append(path)
    return removed


def package_versions() -> dict[str, str]:
    """Versions of what is installed of the packages that decide a checkpoint's contents, and of Python."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def _step_of(path: Path) -> int:
    return int(path.name.removeprefix("step_"))


def _is_complete(path: Path) -> bool:
    try:
        read_state(path)
    except CheckpointError:
        return False
    return True
