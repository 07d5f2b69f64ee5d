"""Converting a checkpoint: written beside its final place, read back and compared there, and renamed if it is equal."""

from __future__ import annotations

import fcntl
import hashlib
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parallel.machine.atomic_write import sync
from parallel.machine.refusals import describe_error
from pretrain.checkpoint.folder import STATE_FILE
from pretrain.checkpoint.newest import damaged_files, naming_older_ones, refuse_damage
from pretrain.checkpoint.store.files import JOURNAL_FILE, finished_files, write_files
from pretrain.config.loader import to_dict
from pretrain.convert.compare import Counter, TensorDifference, differences
from pretrain.convert.format import CheckpointFormat, ConversionTarget, OpenedCheckpoint, as_values
from pretrain.convert.paths import check_destination
from pretrain.convert.resources import Resources
from pretrain.errors import CheckpointError, ConfigError

_LOCK_FILE = ".lock"


@dataclass(frozen=True)
class Converted:
    """Result of a conversion, which was read back.

    Attributes:
        path: path of the new checkpoint.
        num_tensors: tensors that it holds.
        num_bytes: bytes of its tensors.
        num_kept_files: files that an earlier start had finished.
    """

    path: Path
    num_tensors: int
    num_bytes: int
    num_kept_files: int


def convert(
    source: OpenedCheckpoint,
    kind: CheckpointFormat,
    destination: Path,
    target: ConversionTarget,
    resources: Resources,
    *,
    on_start: Callable[[str, int], Callable[[int], None]],
) -> Converted:
    """Convert, check, and give the result its name.

    A conversion that was killed goes on where it was when the same one is started again.

    Args:
        on_start: told of a phase's name and bytes when it begins; returns what is told of its progress.

    Raises:
        ConfigError: the destination is there already, or the format lacks what is asked for.
        CheckpointError: the source is damaged, the disk refuses, or what was read back differs.
    """
    check_destination(destination)
    _refuse_damage(source, on_start)
    conversion = kind.convert(source, target)
    request = {"source": _identity(source), "format": kind.name, "target": as_values(target)}
    try:
        with _staged(destination, request) as folder:
            num_kept = len(finished_files(folder, request))
            total = sum(file.num_bytes for file in conversion.files)
            written = write_files(
                conversion.files,
                folder,
                conversion.reader,
                request=request,
                num_workers=resources.num_workers,
                max_piece_bytes=resources.piece_bytes,
                on_bytes=Counter(on_start("convert", total)),
            )
            conversion.finish(folder, written)
            tensors = conversion.reader.tensors
            num_bytes = sum(info.num_bytes for info in tensors.values())
            found = differences(
                conversion.reader,
                conversion.reopen(folder),
                list(tensors),
                labels=(str(source.path), str(destination)),
                num_workers=resources.num_workers,
                max_piece_bytes=resources.piece_bytes,
                on_bytes=Counter(on_start("read back", num_bytes)),
            )
            if found:
                raise CheckpointError(_unequal(destination, found))
    except OSError as error:
        raise CheckpointError(
            f"{destination} was not made: {describe_error(error)}. The same command goes on where it was"
        ) from error
    return Converted(destination, len(tensors), num_bytes, num_kept)


def _refuse_damage(source: OpenedCheckpoint, on_start: Callable[[str, int], Callable[[int], None]]) -> None:
    """Hold a checkpoint of ours against the hashes of its contents: its conversion would hide any damage."""
    if source.saved is not None:
        total = sum(file.num_bytes for file in source.saved.files.values())
        damage = damaged_files(source.path, on_bytes=Counter(on_start("check", total)))
        try:
            refuse_damage(source.saved, damage)
        except CheckpointError as error:
            raise naming_older_ones(error, source.path) from error


def _identity(source: OpenedCheckpoint) -> Any:
    """Values that tell one source from another, and from itself at a later step."""
    state = None if source.saved is None else hashlib.sha256((source.path / STATE_FILE).read_bytes()).hexdigest()
    path, notes = str(source.path.absolute()), dict(source.notes or {})
    config = to_dict(source.config)
    return {"path": path, "format": source.format_name, "state": state, "config": config, "notes": notes}


def _unequal(destination: Path, found: list[TensorDifference]) -> str:
    named = "; ".join(f"{each.name} {each.text}" for each in found[:5])
    return (
        f"what was read back from {destination} is not what was to be written: {named}"
        f"{f', and {len(found) - 5} more' if len(found) > 5 else ''}. It was not given its name: start again, and if it "
        "stays so, check the disk"
    )


@contextmanager
def _staged(destination: Path, request: Any) -> Iterator[Path]:
    """A folder beside the destination, which gets its name when the block ends without an error."""
    staging = destination.with_name(f".{destination.name}.converting")
    staging.mkdir(parents=True, exist_ok=True)
    with (staging / _LOCK_FILE).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"{destination} is being written by another conversion: wait for it, or name another folder"
            ) from None
        if not finished_files(staging, request):
            for path in staging.iterdir():
                if path.is_dir():
                    shutil.rmtree(path)
                elif path.name != _LOCK_FILE:
                    path.unlink()
        yield staging
        (staging / JOURNAL_FILE).unlink()
        for path in [*staging.rglob("*"), staging]:
            sync(path)
        if destination.is_dir():
            destination.rmdir()
        staging.rename(destination)
        (destination / _LOCK_FILE).unlink()
        sync(destination.parent)
