"""Refuse changes to stages that are trained: a run's stages are checked against `stages.yaml`, which has those that it
was trained with. Imports no torch.

Otherwise an edit of a past stage's data would move the present stage in its data, where it goes on in the same, and the
record would name data that nothing was trained on.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from pretrain.checkpoint.folder import newest_readable
from pretrain.config.loader import config_changes
from pretrain.config.schema import RunConfig
from pretrain.config.stages import read_run
from pretrain.data.manifest import open_dataset
from pretrain.errors import ConfigError, DataError
from pretrain.run.folder import RunFolder
from pretrain.run.saved_run import recorded_start, starting_point

# Keys that decide the weights of a stage; the others concern how it runs, and may change every day.
_DECIDES = (
    *("model.", "optimizer.", "stage.optimizer_state"),
    *("data.datasets", "data.seed", "data.documents", "data.shuffle"),
    *("train.global_batch_size", "train.batch_ramp", "train.sequence_length", "train.precision"),
)
_ONLY_RUNS = ("model.implementation", "optimizer.value_offload")


def decides_weights(key: str) -> bool:
    """Tell whether a stage's weights depend on a key; by the others it runs in another way."""
    return key.startswith(_DECIDES) and key not in _ONLY_RUNS


@dataclass(frozen=True)
class _Trained:
    """The part of a stage that a run has behind itself: its last step, and whether the stage ends there or before."""

    config: RunConfig
    last_step: int
    is_over: bool

    @property
    def name(self) -> str:
        assert self.config.stage is not None
        return self.config.stage.name


def refuse_edited_past(stages: Sequence[RunConfig], folder: RunFolder) -> None:
    """Refuse stages that are trained already and have changed since.

    Lengths of trained stages stay too, but the last stage that was begun may end where the run stands, or later. The
    name of a stage, its layout, and how often it evaluates, saves and logs may change at any time.

    Args:
        stages: configurations of the run's stages; one without a place is no stage.
        folder: folder of the run, which may be new.

    Raises:
        ConfigError: a trained stage has changed; the message names stage, keys and remedy.
    """
    saved = newest_readable(folder.checkpoints)
    if saved is None or stages[0].stage is None or not folder.stages.exists():
        return
    start = starting_point(recorded_start(folder))
    try:
        recorded = read_run(folder.stages).stages(start)
    except ConfigError as error:
        raise ConfigError(
            f"{folder.stages} tells what the run was trained with, and cannot be read: {error}. Mend it, or remove it if "
            "you know that the stages of the past are as they were"
        ) from error
    read = {dataset.path: dataset.sha256 for part in saved.run.trained_on for dataset in part.datasets}
    before, now = _trained(recorded, saved.step), _trained(stages, saved.step)
    if [part.last_step for part in before] != [part.last_step for part in now]:
        raise ConfigError(
            f"{folder.path} has trained {_describe(before)}, and as its stages are written now it would have trained "
            f"{_describe(now)}. {_what_to_do(folder)}"
        )
    for old, new in zip(before, now, strict=True):
        if new.is_over and (changes := list(_changes(old.config, new.config, read))):
            raise ConfigError(
                f"stage {new.name} of {folder.path} is trained, and edited now: {'; '.join(changes)}. {_what_to_do(folder)}"
            )


def _what_to_do(folder: RunFolder) -> str:
    return (
        f"Set it back to what {folder.stages} says (in the stage's own entry, where the run's sections changed). To train "
        "with something else, add a stage, or start another run with --from"
    )


def _trained(stages: Sequence[RunConfig], step: int) -> list[_Trained]:
    """The stages that a run has begun by a step."""
    return [
        _Trained(config, min(step, config.train.num_steps), config.train.num_steps <= step)
        for config in stages
        if config.stage is not None and config.stage.steps_before < step
    ]


def _describe(parts: Sequence[_Trained]) -> str:
    return ", ".join(f"{part.name} to step {part.last_step}" for part in parts)


def _changes(before: RunConfig, now: RunConfig, read: Mapping[str, str]) -> Iterator[str]:
    """Differences that affect the weights, as "key: before -> now".

    Args:
        read: hashes of the data sets that were trained on, by the absolute paths that they had.
    """
    old, new = before.data.datasets, now.data.datasets
    if len(old) == len(new):
        known = tuple(
            replace(entry, path=was.path) if _is_same_data(was.path, entry.path, read) else entry
            for was, entry in zip(old, new, strict=True)
        )
        now = replace(now, data=replace(now.data, datasets=known))
    for key, change in config_changes(before, now).items():
        if decides_weights(key):
            yield change


def _is_same_data(before: str, now: str, read: Mapping[str, str]) -> bool:
    """True if two paths are of one data set, which may have been moved or copied."""
    if os.path.realpath(before) == os.path.realpath(now):
        return True
    try:
        trained_on = read.get(os.path.abspath(before)) or open_dataset(before).manifest.content_fingerprint
        return open_dataset(now).manifest.content_fingerprint == trained_on
    except DataError:
        return False
