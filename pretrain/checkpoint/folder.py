"""The folder of a run's checkpoints: names, completeness, and which ones to keep.

A checkpoint is written into `.writing_step_XXXXXXXX` and renamed to `step_XXXXXXXX` when every rank's files are on
disk. It is complete if its `state.json`, which is written last, lists files that are all there at the size they had.
Format 2 also says the SHA-256 of every file, against which `pretrain.checkpoint.hashes` holds the contents; format 1
knows sizes alone, and is read as before. The newest checkpoint is the one of the highest step; no clock decides.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import platform
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from parallel.machine.atomic_write import sync
from pretrain.checkpoint.hashes import RecordedFile, record
from pretrain.checkpoint.taken_names import refuse_if_taken
from pretrain.errors import CheckpointError
from pretrain.state import RunState

STATE_FILE = "state.json"
_FORMAT = 2
_READABLE_FORMATS = (1, 2)
_SEAL = "sha256"
_STEP_NAME = re.compile(r"step_(\d{8,})")
_WRITING_PREFIX = ".writing_"
_PACKAGES = ("megamem", "torch", "megatron-core", "numpy", "triton", "transformer-engine")


@dataclass(frozen=True)
class SavedState:
    """Contents of a checkpoint besides its tensors.

    Attributes:
        path: the checkpoint's folder.
        run: counters of the run at its step.
        config: the resolved config, as plain values.
        files: the files that were written, by name; without hashes in format 1.
        weights_dtype: dtype of the weights that are not written because fp32 main weights determine them, as "bfloat16"
            (see `pretrain.checkpoint.derived`); None in format 1, which writes all of them.
    """

    path: Path
    run: RunState
    config: dict[str, Any]
    files: Mapping[str, RecordedFile]
    weights_dtype: str | None

    @property
    def step(self) -> int:
        return self.run.step


def step_folder(folder: Path, step: int) -> Path:
    """Folder of the complete checkpoint of a step."""
    return folder / f"step_{step:08d}"


def step_named(path: Path) -> int | None:
    """Step in the name of a checkpoint's folder; None if the path is not named like one."""
    match = _STEP_NAME.fullmatch(path.name)
    return None if match is None else int(match[1])


def writing_folder(folder: Path, step: int) -> Path:
    """Folder of the checkpoint of a step while it is being written."""
    return folder / f"{_WRITING_PREFIX}step_{step:08d}"


def start_writing(folder: Path, step: int) -> Path:
    """An empty folder to write into; what an interrupted save left is removed."""
    folder.mkdir(parents=True, exist_ok=True)
    for leftover in folder.glob(f"{_WRITING_PREFIX}*"):
        shutil.rmtree(leftover)
    path = writing_folder(folder, step)
    path.mkdir()
    return path


def complete(
    folder: Path, step: int, files: Mapping[str, RecordedFile] | None = None, **content: dict[str, Any] | str
) -> Path:
    """Write `state.json`, of this content, into a step's writing folder, and give the folder its name.

    An older checkpoint of the step is replaced.

    Args:
        folder: the run's checkpoints.
        step: a step whose files are all written.
        files: the files that were written, by name; None: all that is there, which is read for its hashes.
        content: `run`, `rng`, `config`, `versions` and `weights_dtype`, see `SavedState`.
    """
    path, final = writing_folder(folder, step), step_folder(folder, step)
    write_state(path, files if files is not None else {file.name: record(file) for file in path.iterdir()}, content)
    publish(path, final)
    return final


def write_state(path: Path, files: Mapping[str, RecordedFile], content: Mapping[str, Any]) -> None:
    """Write a checkpoint's `state.json`, and wait until it is on disk."""
    listed = {name: {"bytes": file.num_bytes, "sha256": file.sha256} for name, file in sorted(files.items())}
    state = sealed({"format": _FORMAT, **content, "files": listed})
    (path / STATE_FILE).write_text(json.dumps(state, indent=1), encoding="utf-8")
    sync(path / STATE_FILE)
    sync(path)


def sealed(state: Mapping[str, Any]) -> dict[str, Any]:
    """Add to the contents of `state.json` their hash, which reveals a later change."""
    content = {key: value for key, value in state.items() if key != _SEAL}
    # As JSON gives it back: lists for tuples, text for keys.
    text = json.dumps(json.loads(json.dumps(content)), sort_keys=True)
    return {**content, _SEAL: hashlib.sha256(text.encode()).hexdigest()}


def publish(path: Path, final: Path) -> None:
    """Give a folder whose `state.json` is on disk its name, in place of an older checkpoint that has it.

    Raises:
        CheckpointError: something else has the name.
    """
    refuse_if_taken(final, STATE_FILE)
    if final.exists():
        shutil.rmtree(final)
    path.rename(final)
    sync(final.parent)


def refuse_taken_names(folder: Path, after_step: int) -> None:
    """Look whether checkpoints of later steps can have their names.

    Raises:
        CheckpointError: a file, a link or a folder of somebody's is in the way.
    """
    for path in list_checkpoints(folder):
        if step_of(path) > after_step:
            refuse_if_taken(path, STATE_FILE)
    for path in folder.glob(f"{_WRITING_PREFIX}*"):
        if path.is_symlink() or not path.is_dir():
            raise CheckpointError(f"{path} is no folder, and checkpoints are written under such names: move it away")


def read_state(path: Path) -> SavedState:
    """Read and check a checkpoint's `state.json`.

    Raises:
        CheckpointError: `state.json` is missing or unreadable, or a file that it lists is missing or has another size.
    """
    try:
        content = json.loads((path / STATE_FILE).read_text(encoding="utf-8"))
        format_version, versions = content["format"], content["versions"]
        files = {str(name): _recorded(entry) for name, entry in content["files"].items()}
        weights_dtype = content["weights_dtype"] if format_version == _FORMAT else None
        saved = SavedState(path, RunState(**content["run"]), content["config"], files, weights_dtype)
        name_of_step = step_folder(path.parent, saved.step).name
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{path} is not a complete checkpoint: its {STATE_FILE} cannot be read "
            f"({(isinstance(error, OSError) and error.strerror) or error})"
        ) from error
    if format_version not in _READABLE_FORMATS:
        raise CheckpointError(
            f"{path} has checkpoint format {format_version}, and this version reads the formats "
            f"{' and '.join(map(str, _READABLE_FORMATS))}: use the version that wrote it ({versions})"
        )
    if format_version == _FORMAT and sealed(content) != content:
        raise CheckpointError(f"{path} is damaged: its {STATE_FILE} has other contents than were written")
    if name_of_step != path.name:
        raise CheckpointError(f"{path} is damaged: its {STATE_FILE} says that it is of step {saved.step}")
    for name, recorded in files.items():
        if name != Path(name).name:
            raise CheckpointError(f"{path} is damaged: its {STATE_FILE} lists {name!r}, which is no file of its folder")
        file, size = path / name, recorded.num_bytes
        actual = file.stat().st_size if file.is_file() else None
        if actual != size:
            found = "is missing" if actual is None else f"has {actual} bytes"
            raise CheckpointError(f"{path} is damaged: {name} {found}, and {size} bytes were written")
    return saved


def _recorded(entry: Any) -> RecordedFile:
    """An entry of `files`: a size in format 1, a size and a hash in format 2."""
    if isinstance(entry, dict):
        return RecordedFile(int(entry["bytes"]), str(entry["sha256"]))
    return RecordedFile(int(entry), None)


def list_checkpoints(folder: Path) -> list[Path]:
    """Folders named as finished checkpoints, oldest step first."""
    if not folder.is_dir():
        return []
    found = [(step, path) for path in folder.iterdir() if (step := step_named(path)) is not None]
    return [path for _, path in sorted(found)]


def newest_readable(folder: Path) -> SavedState | None:
    """The newest checkpoint whose files are all there, as far as their names and sizes tell; None without one."""
    for path in reversed(list_checkpoints(folder)):
        try:
            return read_state(path)
        except CheckpointError:
            continue
    return None


def remove_superseded(folder: Path, newest_step: int, *, keep_last: int, keep_every_steps: int) -> list[Path]:
    """Delete checkpoints that the retention rules no longer keep; returns what was deleted.

    The last checkpoint of a stage is kept: other stages can be tried from it. Damaged ones do not count as kept. Nor do
    those of later steps: the run was resumed from before them, so they cannot be used, and are replaced when it reaches
    their steps.

    Args:
        folder: the run's checkpoints.
        newest_step: step of the checkpoint that was just completed.
        keep_last: newest ones to keep, that one included; 0: all.
        keep_every_steps: steps divisible by this are kept for good; 0: no such rule.
    """
    checkpoints = [path for path in list_checkpoints(folder) if step_of(path) <= newest_step]
    complete_ones = [path for path in checkpoints if is_complete(path)]
    if not keep_last or len(complete_ones) <= keep_last:
        return []
    candidates = checkpoints[: checkpoints.index(complete_ones[-keep_last])]
    removed = []
    for path in candidates:
        if not (keep_every_steps and step_of(path) % keep_every_steps == 0) and not _ends_stage(path):
            shutil.rmtree(path)
            removed.append(path)
    return removed


def package_versions() -> dict[str, str]:
    """Versions of Python, and of the installed packages that decide a checkpoint's contents."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step_"))


def _ends_stage(path: Path) -> bool:
    """True for a readable checkpoint of a stage's last step, in a run of stages."""
    try:
        saved = read_state(path)
    except CheckpointError:
        return False
    return saved.config.get("stage") is not None and saved.step == saved.config["train"]["num_steps"]


def is_complete(path: Path) -> bool:
    try:
        read_state(path)
    except CheckpointError:
        return False
    return True
