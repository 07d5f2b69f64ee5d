"""Applying a patch to a checkpoint, and reverting it: rows are overwritten in copies of the files that have them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from parallel.machine.atomic_write import sync
from parallel.machine.refusals import check_can_write, naming
from pretrain.checkpoint.folder import STATE_FILE, sealed, step_folder
from pretrain.checkpoint.hashes import RecordedFile, record
from pretrain.checkpoint.newest import damaged_files
from pretrain.config.loader import to_yaml
from pretrain.convert.compare import Counter
from pretrain.convert.format import OpenedCheckpoint
from pretrain.convert.huggingface.sums import SUMS_FILE, changed_files
from pretrain.convert.listing import is_native, native_at
from pretrain.convert.paths import check_destination
from pretrain.convert.registry import open_checkpoint
from pretrain.convert.resources import OnStart, Resources
from pretrain.data.manifest import save_tokenizer
from pretrain.errors import CheckpointError, ConfigError
from pretrain.patch.file import Patch, Side, slices
from pretrain.patch.folders import (
    check_exchange,
    copy,
    exchange,
    link_or_copy,
    locked,
    mirror,
    remove_leftover,
    staged,
    sync_folder,
)
from pretrain.patch.places import RowPart, TablePlaces, places_of
from pretrain.patch.state import OTHER, PatchState, other_model, rows_at_once, state_of
from pretrain.run.folder import RunFolder
from pretrain.run.owner import Owner, owned

_IN_USE = (
    "{folder} is in use by {owner}, and its checkpoints are not changed meanwhile: wait until it has ended, stop it, or "
    "have a new folder written with --output DIR"
)
_Tables = Mapping[str, tuple[TablePlaces, ...]]


@dataclass(frozen=True)
class Changed:
    """Result of applying or reverting a patch.

    Attributes:
        path: the checkpoint that was changed or made.
        num_rows: rows that were overwritten, those of main weights and weights each.
        files: names of the files that have them.
    """

    path: Path
    num_rows: int
    files: tuple[str, ...]


def change(
    patch: Patch,
    path: Path,
    step: int | None,
    *,
    to: Side,
    output: Path | None,
    resources: Resources,
    on_start: OnStart,
) -> Changed | None:
    """Give the rows of a patch the values of one of its sides, in a checkpoint or a copy of it.

    Args:
        path: a run's folder, a checkpoint of one, or an exported folder.
        step: step of a run's checkpoint; None: the newest one.
        to: side of the patch: "after" applies it, "before" reverts it.
        output: folder to make; None: `path` is changed.
        on_start: told of a phase's name and bytes when it begins; returns what is told of its progress.

    Returns:
        The changed checkpoint; None: all rows had these values already, and nothing was written.

    Raises:
        CheckpointError: the patch is not for this checkpoint as it is, or the checkpoint is damaged.
        ConfigError: somebody uses the folder, or the output is there already.
        OSError: the disk refuses.
    """
    path = path.resolve()
    if output is not None:
        check_destination(output)
        check_can_write(output / STATE_FILE)
    with ExitStack() as stack:
        owner = stack.enter_context(_alone(path, step)) if output is None else None
        opened = open_checkpoint(path, step)
        if step is not None and (opened.saved is None or opened.saved.step != step):
            found = "no run's checkpoint" if opened.saved is None else f"the checkpoint of step {opened.saved.step}"
            raise ConfigError(f"--step is {step}, and {path} is {found}: leave it out")
        folder = opened.path.resolve()
        if output is None:
            stack.enter_context(locked(folder, folder))
            remove_leftover(folder)
        stored = places_of(opened, folder, [table for table in patch.tables if table in opened.reader.tensors])
        if (problem := other_model(patch, opened, resources, on_start)) is not None:
            raise CheckpointError(f"{patch.path} was made on another model: {problem}. Nothing was changed")
        state = state_of(patch, stored, resources, on_start)
        if state.is_at(to):
            return None
        if not state.is_at(OTHER[to]):
            raise CheckpointError(_refused(patch, opened.path, state, OTHER[to]))
        names = _files_with_rows(patch, stored)
        _refuse_damage(opened, names, on_start)
        if output is not None:
            _write_beside(patch, opened, names, output, to, resources, on_start)
            return Changed(output, _num_rows(patch, stored), names)
        check_exchange(folder)
        with staged(folder) as staging:
            mirror(folder, staging, lambda old, new: copy(old, new) if old.name in names else link_or_copy(old, new))
            _patch_files(patch, opened, staging, names, to, resources, on_start)
            sync_folder(staging)
            if owner is not None:
                owner.check()
            exchange(staging, folder)
        return Changed(opened.path, _num_rows(patch, stored), names)


def status_text(patch: Patch, opened: OpenedCheckpoint, resources: Resources, on_start: OnStart) -> str:
    """Words on whether a patch is applied to a checkpoint, or could be."""
    tables = [table for table in patch.tables if table in opened.reader.tensors]
    try:
        stored = places_of(opened, opened.path, tables)
    except CheckpointError as error:
        return f"cannot be applied: {error}"
    if (problem := other_model(patch, opened, resources, on_start)) is not None:
        return f"of another model: {problem}"
    state = state_of(patch, stored, resources, on_start)
    if state.is_at("after"):
        return "applied"
    return "not applied" if state.is_at("before") else f"cannot be applied: {state.why_not(state.nearest)}"


@contextmanager
def _alone(path: Path, step: int | None) -> Iterator[Owner | None]:
    """Own the run that a checkpoint is of, until the block ends; None: it is of no run's folder."""
    folder = native_at(path, step)[1] if is_native(path) else None
    # Somebody may have copied the checkpoint out of its run.
    if folder is None or (folder.path != path and folder.checkpoints != path.parent):
        yield None
        return
    with owned(folder, _IN_USE) as owner:
        yield owner


def _refused(patch: Patch, path: Path, state: PatchState, side: Side) -> str:
    rounded = [each for each in state.others[side] if each.is_rounded]
    if rounded:
        fix = (
            f"The patch has fewer bits of these rows than {path}: make it of the runs themselves, or apply it to an export "
            "with --dtype bf16"
        )
    else:
        fix = (
            "Another patch or further training changed them: revert that first, or make one patch of both with `megamem "
            "patch merge`"
        )
    return f"{patch.path} does not fit {path}: {state.why_not(side)}. {fix}. Nothing was changed"


def _files_with_rows(patch: Patch, stored: _Tables) -> tuple[str, ...]:
    parts = (part for _, _, part, _, _ in _parts(patch, stored))
    return tuple(sorted({part.path.name for part in parts}))


def _parts(patch: Patch, stored: _Tables) -> Iterator[tuple[str, TablePlaces, RowPart, int, int]]:
    """Parts of all tables that have rows of a patch, each with the places of these rows in the patch."""
    for table in patch.tables:
        ids = patch.row_ids(table)
        for each in stored[table]:
            for part, start, stop in each.within(ids):
                yield table, each, part, start, stop


def _num_rows(patch: Patch, stored: _Tables) -> int:
    return sum(patch.num_rows(table) * len(stored[table]) for table in patch.tables)


def _refuse_damage(opened: OpenedCheckpoint, names: tuple[str, ...], on_start: OnStart) -> None:
    """Hold the files that will change against their hashes: new hashes would hide any damage."""
    tell = Counter(on_start("check", sum((opened.path / name).stat().st_size for name in names)))
    damage: list[str] = []
    if opened.saved is not None:
        damage = damaged_files(opened.path, names, tell)
    elif opened.sums is not None:
        damage = changed_files(opened.path, {name: opened.sums[name] for name in names if name in opened.sums}, tell)
    if damage:
        raise CheckpointError(f"{opened.path} is damaged: {'; '.join(damage)}. Nothing was changed")


def _patch_files(
    patch: Patch,
    opened: OpenedCheckpoint,
    copied: Path,
    names: tuple[str, ...],
    to: Side,
    resources: Resources,
    on_start: OnStart,
) -> None:
    """Overwrite rows in copies of a checkpoint's files, look at them again, and bring recorded hashes up to date."""
    for name in names:
        (copied / name).chmod(0o600)
    stored = places_of(opened, copied, patch.tables)
    _write_rows(patch, stored, to, resources)
    if not state_of(patch, stored, resources, on_start).is_at(to):
        raise CheckpointError(f"rows that were read back from {copied} are not those that were written: check the disk")
    tell = on_start("hash", sum((copied / name).stat().st_size for name in names))
    recorded = {name: record(copied / name, tell) for name in names}
    for name in names:
        (copied / name).chmod((opened.path / name).stat().st_mode & 0o7777)
    if opened.saved is not None:
        _record_in_state(copied, recorded)
    elif opened.sums is not None:
        _record_in_sums(copied, recorded)


def _write_rows(patch: Patch, stored: _Tables, to: Side, resources: Resources) -> None:
    for table, each, part, start, stop in _parts(patch, stored):
        ids = patch.row_ids(table)
        with naming(part.path), part.path.open("r+b", buffering=0) as file:
            for first, last in slices(stop - start, rows_at_once(patch, table, resources)):
                records = each.records(patch.read(to, table, start + first, start + last))
                part.write(file.fileno(), ids[start + first : start + last], part.cut(records))
        part.finish()


def _record_in_state(copied: Path, recorded: Mapping[str, RecordedFile]) -> None:
    """Write new hashes into `state.json`; one of format 1 has none."""
    path = copied / STATE_FILE
    content = json.loads(path.read_text(encoding="utf-8"))
    if not any(isinstance(content["files"][name], dict) for name in recorded):
        return
    for name, file in recorded.items():
        content["files"][name]["sha256"] = file.sha256
    _write_anew(path, json.dumps(sealed(content), indent=1))


def _record_in_sums(copied: Path, recorded: Mapping[str, RecordedFile]) -> None:
    """Write new hashes into `SHA256SUMS`."""
    path = copied / SUMS_FILE
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    names = [line.rstrip("\n").partition("  ")[2] for line in lines]
    path_lines = [
        f"{recorded[name].sha256}  {name}\n" if name in recorded else line
        for name, line in zip(names, lines, strict=True)
    ]
    _write_anew(path, "".join(path_lines))


def _write_anew(path: Path, text: str) -> None:
    """Write a file that may be a second name of one that stays."""
    mode = path.stat().st_mode & 0o7777
    path.unlink()
    path.write_text(text, encoding="utf-8")
    path.chmod(mode)


def _write_beside(
    patch: Patch,
    opened: OpenedCheckpoint,
    names: tuple[str, ...],
    output: Path,
    to: Side,
    resources: Resources,
    on_start: OnStart,
) -> None:
    """Make a patched copy of a whole exported folder, or of a run with one checkpoint."""
    source, target = opened.path.resolve(), output.absolute()
    if target.resolve().is_relative_to(source):
        raise ConfigError(f"--output is {output}, inside of {source}, which is copied: name a folder outside of it")
    with staged(target) as staging:
        inside = staging
        if opened.saved is not None:
            run = RunFolder(staging)
            run.checkpoints.mkdir(parents=True)
            run.config.write_text(to_yaml(opened.config), encoding="utf-8")
            if opened.tokenizer is not None:
                save_tokenizer(opened.tokenizer, run.tokenizer)
            inside = step_folder(run.checkpoints, opened.saved.step)
        mirror(source, inside, copy)
        _patch_files(patch, opened, inside, names, to, resources, on_start)
        for path in [*staging.rglob("*"), staging]:
            sync(path)
        if target.is_dir():
            target.rmdir()
        os.rename(staging, target)
        sync(target.parent)
