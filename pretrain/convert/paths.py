"""Paths of a conversion, looked at before anything slow is imported: this imports no torch."""

from __future__ import annotations

from pathlib import Path

from pretrain.config.schema import RunConfig
from pretrain.config.suggest import did_you_mean_path
from pretrain.convert.listing import is_native, native_at
from pretrain.errors import CheckpointError, ConfigError
from pretrain.run.not_a_run import refuse_configuration
from pretrain.run.saved_run import saved_config


def check_source(path: Path) -> None:
    """Refuse to read what is not there.

    Raises:
        CheckpointError: the path is not there.
        ConfigError: the path is the file of a configuration.
    """
    refuse_configuration(path)
    if not path.exists():
        raise CheckpointError(f"{path}: no such file or folder{did_you_mean_path(path)}")


def check_destination(path: Path) -> None:
    """Refuse to write where something is already; an empty folder is taken.

    Raises:
        ConfigError: something is there already.
    """
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ConfigError(f"{path} is there already: name a folder that is not, or remove it")


def config_at(path: Path, step: int | None) -> RunConfig | None:
    """The configuration of a checkpoint of ours; None of any other format, which torch has to be imported for.

    Raises:
        CheckpointError: no checkpoint is there, or none of this step, or its small files are damaged.
    """
    check_source(path)
    return saved_config(native_at(path, step)[0], None) if is_native(path) else None
