"""Find the checkpoints of a run, and its configuration. Imports torch only to look into a checkpoint's files."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from megamem.config.identity import Role
from parallel.machine.atomic_write import atomic_write
from pretrain.checkpoint.folder import SavedState, list_checkpoints, read_state, step_folder, step_named
from pretrain.checkpoint.newest import damaged_files, newest_complete, no_damage, refuse_damage, the_newest
from pretrain.checkpoint.safe_metadata import files_with_weights
from pretrain.config.keys import role_of
from pretrain.config.loader import config_changes, from_dict
from pretrain.config.schema import ParallelConfig, RunConfig
from pretrain.config.stages import StartingPoint, load_config
from pretrain.config.suggest import did_you_mean_path
from pretrain.errors import CheckpointError, ConfigError
from pretrain.run.folder import RunFolder
from pretrain.run.not_a_run import refuse_checkpoint, refuse_configuration
from pretrain.run.started_ranks import started_ranks
from pretrain.run.trained_data import known_path
from pretrain.state import RunState

_MOST_STEPS_LISTED = 20
# Keys that decide how a saved model is evaluated or generates.
_READ_WITH_THE_WEIGHTS = ("model.", "data.datasets", "train.sequence_length", "train.precision")


def find_checkpoint(
    folder: RunFolder,
    step: int | None,
    *,
    before: int | None = None,
    with_optimizer: bool = False,
    check_hashes: bool = True,
    pass_over: bool = True,
) -> SavedState:
    """A run's checkpoint of a step, or its newest complete one (of those from before a step).

    With `check_hashes`, contents are held against their hashes where the run's `checkpoint.check_hashes` says so; only
    those of the files that have weights, unless the optimizer's state is wanted too. Where torchrun or srun started the
    process, the ranks do that together when they load.

    With `pass_over`, an older checkpoint stands in for a newest one that is damaged, and stderr says so. Without, only
    the newest will do: for results that are made of it and outlive the message.

    Raises:
        CheckpointError: the run has no such checkpoint, or the one that is meant is damaged.
        ConfigError: a configuration or a checkpoint was given for the folder.
    """
    refuse_configuration(folder.path)
    refuse_checkpoint(folder.path)
    if not folder.path.is_dir():
        raise CheckpointError(
            f"{folder.path}: no such run folder{did_you_mean_path(folder.path)} Train one with `megamem train CONFIG "
            f"--run-dir {folder.path}`"
        )
    damage = partial(_damage, with_optimizer=with_optimizer) if check_hashes else no_damage
    if step is not None:
        path = step_folder(folder.checkpoints, step)
        if not path.exists():
            raise CheckpointError(f"{folder.path} has no checkpoint of step {step}: {_steps_there_are(folder)}")
        saved = read_state(path)
        refuse_damage(saved, damage(saved))
        return saved
    problems: list[str] = []
    if pass_over:
        newest, problems = newest_complete(folder.checkpoints, before=before, damage=damage)
    else:
        assert before is None
        newest = the_newest(folder.checkpoints, damage=damage)
    for problem in problems:
        print(f"passed over a damaged checkpoint: {problem}", file=sys.stderr)
    if newest is None and before is not None:
        raise CheckpointError(
            f"{folder.checkpoints} has no checkpoint from before step {before}: checkpoint.every_steps and "
            "checkpoint.keep_last say which ones a run keeps"
        )
    if newest is None:
        raise CheckpointError(f"{folder.path} has no checkpoint yet. Train it first with `megamem train`")
    return newest


def _damage(saved: SavedState, *, with_optimizer: bool) -> list[str]:
    """Damage that this process finds in the contents of a checkpoint that it is to use."""
    check_hashes = saved.config.get("checkpoint", {}).get("check_hashes", True)
    if not check_hashes or ranks_were_started():
        return []
    if with_optimizer:
        return damaged_files(saved.path)
    return damaged_files(saved.path, files_with_weights(saved))


def ranks_were_started() -> bool:
    """True if torchrun or srun started this process among others, which check contents together.

    Raises:
        ConfigError: the environment contradicts itself.
    """
    ranks = started_ranks()
    return ranks is not None and not ranks.are_watched


def _steps_there_are(folder: RunFolder) -> str:
    steps = [int(path.name.removeprefix("step_")) for path in list_checkpoints(folder.checkpoints)]
    if not steps:
        return "it has none yet"
    listed = ", ".join(map(str, steps[-_MOST_STEPS_LISTED:]))
    return f"there are {'..., ' if len(steps) > _MOST_STEPS_LISTED else ''}{listed}"


def saved_config(saved: SavedState, parallel: ParallelConfig | None, overrides: Sequence[str] = ()) -> RunConfig:
    """The configuration of a checkpoint, on its own layout or another, with overrides laid over it."""
    config = from_dict(saved.config, f"the configuration in {saved.path}", overrides)
    return config if parallel is None else replace(config, parallel=parallel)


def note_edited_config(folder: RunFolder, saved: SavedState) -> None:
    """Say on stderr where `config.yaml` differs from the configuration in a checkpoint, which counts."""
    try:
        edited = load_config(folder.config)
    except ConfigError as error:
        print(f"note: {folder.config} is not read, as the checkpoint holds the configuration: {error}", file=sys.stderr)
        return
    changes = config_changes(saved_config(saved, None), edited)
    told = [text for key, text in changes.items() if key.startswith(_READ_WITH_THE_WEIGHTS)]
    if told:
        print(
            f"note: {folder.config} differs from the configuration in {saved.path}, which is what counts here: "
            + "; ".join(told),
            file=sys.stderr,
        )


def check_resumable(config: RunConfig, saved: SavedState, *, as_new_run: bool = False) -> list[str]:
    """Differences between the configuration of a checkpoint and the one to go on with.

    Args:
        config: configuration to go on with.
        saved: the checkpoint.
        as_new_run: go on in another folder, with another seed too unless rows are found by it.

    Returns:
        "key: before -> now" of every difference, but for the place of a stage.

    Raises:
        CheckpointError: the two differ in what makes the model (`megamem.config.identity.Role`): this would be another run.
    """
    before = saved_config(saved, None)
    changes = config_changes(before, config)
    if _stage_name(before) != _stage_name(config):
        changes = {key: text for key, text in changes.items() if not key.startswith("stage")}
    # A section that one of the two does not have says nothing of the keys below it.
    fatal = {
        key: text for key, text in changes.items() if Role.IDENTITY in (role_of(key, before), role_of(key, config))
    }
    if as_new_run:
        seed = fatal.pop("seed", None)
        if seed is not None and any(memory.is_ordered_by_seed for memory in before.model.memories):
            raise CheckpointError(
                f"{saved.path} has a memory whose keys find their rows by the run's seed (model.memory.shuffle: keyed), which "
                f"changes ({seed}): they would find others. Set seed: {before.seed}; data.seed is free"
            )
        if fatal:
            raise CheckpointError(
                f"{saved.path} is of another model: {'; '.join(fatal.values())}. Take the model's keys from "
                "its configuration: `megamem checkpoint inspect` names it"
            )
    elif fatal:
        raise CheckpointError(
            f"{saved.path} is of another run: {'; '.join(fatal.values())}. Set it back, or start a new run in another "
            "--run-dir"
        )
    return list(changes.values())


def lost_of_tables(saved: SavedState, config: RunConfig) -> Iterator[str]:
    """Losses of the state of tables by another `optimizer.tables` than the checkpoint's, in a sentence; none if alike."""
    before, now = saved_config(saved, None).optimizer.tables, config.optimizer.tables
    if (before, now) == ("adamw", "row_wise"):
        yield (
            "optimizer.tables is row_wise now: each row goes on with the mean of its second moments; the tables' first "
            "moments are dropped, and bf16 tables go on without what their main weights had beyond bf16"
        )
    elif (before, now) == ("row_wise", "adamw"):
        yield (
            "optimizer.tables is adamw now: each element goes on with its row's second moment, and the tables' first "
            "moments start at zero"
        )


def _stage_name(config: RunConfig) -> str | None:
    return None if config.stage is None else config.stage.name


def starting_checkpoint(path: Path | None, folder: RunFolder, *, check_hashes: bool = True) -> SavedState | None:
    """The checkpoint that a run goes on from in a folder of its own; None if it starts anew.

    Once the run has a checkpoint, the record of the other one in its folder is enough: that may be gone.

    Args:
        path: a run's folder, whose newest whole checkpoint it is, or a checkpoint's; None: what the folder says.
        folder: folder of the run that goes on.
        check_hashes: hold its contents against their hashes, as whoever reads them does.

    Raises:
        CheckpointError: the checkpoint is missing or damaged.
        ConfigError: the run in the folder has gone on from another one, or from none.
    """
    recorded, is_started = recorded_start(folder), bool(list_checkpoints(folder.checkpoints))
    if recorded is None:
        if path is not None and is_started:
            raise ConfigError(
                f"{folder.path} holds a run that did not start from a checkpoint: leave --from out to go on with it, or "
                "use another --run-dir"
            )
        return None if path is None else _checkpoint_at(path, check_hashes)
    if path is not None and path.resolve() not in (recorded.path.parent.parent, recorded.path):
        raise ConfigError(
            f"{folder.path} holds a run that started from {recorded.path}, and --from is {path}: leave --from out to go "
            "on with it, or use another --run-dir"
        )
    return recorded if is_started else _checkpoint_at(recorded.path, check_hashes)


def _checkpoint_at(path: Path, check_hashes: bool) -> SavedState:
    """The checkpoint of a folder that has the name of one, or the newest one of a run's folder."""
    step = step_named(path.resolve())
    folder = RunFolder(path if step is None else path.resolve().parent.parent)
    return find_checkpoint(folder, step, with_optimizer=True, check_hashes=check_hashes)


def recorded_start(folder: RunFolder) -> SavedState | None:
    """Record in a run's folder of the checkpoint that the run went on from; None if it started anew.

    Raises:
        CheckpointError: the record is damaged.
    """
    if not folder.start.exists():
        return None
    try:
        content = json.loads(folder.start.read_text(encoding="utf-8"))
        return SavedState(Path(content["path"]), RunState(**content["run"]), content["config"], {}, None)
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{folder.start} is damaged: {error}. Start the run again in another --run-dir"
        ) from error


def record_start(folder: RunFolder, start: SavedState) -> None:
    """Write into a run's folder the checkpoint that it goes on from."""
    content = {"path": str(start.path.resolve()), "run": asdict(start.run), "config": start.config}
    with atomic_write(folder.start) as stream:
        stream.write((json.dumps(content, indent=1) + "\n").encode())


def starting_point(start: SavedState | None) -> StartingPoint | None:
    """Starting point of the stages of a run that goes on from a checkpoint; None of one that starts anew."""
    if start is None:
        return None
    config = saved_config(start, None)
    return StartingPoint(start.path, start.run, config, partial(known_path, start.run, config))
