"""Paths of a run's configuration or checkpoint that were given for its folder, and what to give instead."""

from __future__ import annotations

from pathlib import Path

from pretrain.checkpoint.folder import step_named
from pretrain.config.stages import load_config
from pretrain.errors import ConfigError
from pretrain.run.folder import RunFolder, default_run_folder

_ENDINGS = (".yaml", ".yml")


def refuse_configuration(path: Path) -> None:
    """Refuse a configuration's file, and name the folder of its run.

    Raises:
        ConfigError: the path is a configuration's file.
    """
    if path.suffix not in _ENDINGS or not path.is_file():
        return
    around = RunFolder(path.parent)
    if path.name == around.config.name and around.checkpoints.is_dir():
        meant = path.parent
    else:
        try:
            meant = default_run_folder(load_config(path).name)
        except ConfigError:
            meant = default_run_folder("<name of the configuration>")
    advice = f"give {meant}" if meant.is_dir() else f"give what `megamem train {path}` makes, {meant} or its --run-dir"
    raise ConfigError(f"{path} is a configuration, and a run's folder is wanted: {advice}")


def refuse_checkpoint(path: Path) -> None:
    """Refuse one of a run's checkpoints, and name the run's folder.

    Raises:
        ConfigError: the path is a checkpoint of a run.
    """
    whole = path.resolve()
    step, run = step_named(whole), RunFolder(whole.parent.parent)
    if step is not None and whole.parent.name == run.checkpoints.name and whole.is_dir():
        raise ConfigError(
            f"{path} is a checkpoint, and a run's folder is wanted: give {path.parent.parent}, and --step {step}"
        )
