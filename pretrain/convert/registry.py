"""Formats of checkpoints, by name."""

from __future__ import annotations

from pathlib import Path

from pretrain.config.schema import RunConfig
from pretrain.convert.format import CheckpointFormat, OpenedCheckpoint, SourceFormat
from pretrain.convert.huggingface.format import HuggingFaceFormat
from pretrain.convert.megatron.format import MegatronFormat
from pretrain.convert.native.format import NativeFormat
from pretrain.convert.paths import check_source
from pretrain.convert.released.format import ReleasedFormat
from pretrain.errors import CheckpointError, ConfigError

_EVERY: tuple[CheckpointFormat, ...] = (NativeFormat(), HuggingFaceFormat(), ReleasedFormat())
FORMATS = {each.name: each for each in _EVERY}
"""Formats that are written, by name."""
_SOURCES: tuple[SourceFormat, ...] = (*_EVERY, MegatronFormat())
"""In the order in which a path is tried."""


def open_checkpoint(path: Path, step: int | None = None, config: RunConfig | None = None) -> OpenedCheckpoint:
    """Open a checkpoint of whatever format.

    Args:
        step: step of a run's checkpoint; None: the newest one, which must be whole.
        config: configuration of a checkpoint that has none with it.

    Raises:
        CheckpointError: no checkpoint is there, or it cannot be opened.
        ConfigError: the checkpoint needs a configuration that was not given, or has its own.
    """
    check_source(path)
    for each in _SOURCES:
        if each.is_at(path):
            if config is not None and not each.takes_config:
                raise ConfigError(f"--config: {path} has a configuration of its own ({each.name}): leave it out")
            return each.open(path, step, config)
    raise CheckpointError(
        f"{path} is no checkpoint of a known format ({', '.join(each.name for each in _SOURCES)}): name a run's folder, one of its "
        "checkpoints, or a folder of another format"
    )
