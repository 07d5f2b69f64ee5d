"""A file of tensors under the names of UltraMemV2's public code, and of memory layers in other codes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megamem.config.model import ModelConfig
from megamem.families.registry import family_of
from megamem.releases.release import META_RELEASE, ULTRAMEMV2_RELEASE
from pretrain.checkpoint.store.files import WrittenFile
from pretrain.checkpoint.store.safetensors_store import open_safetensors
from pretrain.checkpoint.store.state_dict import StateDictFile, StateDictReader
from pretrain.checkpoint.store.tensors import TensorReader
from pretrain.config.schema import RunConfig
from pretrain.convert.format import ConversionTarget, OpenedCheckpoint
from pretrain.convert.names import RELEASED
from pretrain.convert.released.modules import are_modules, modules_as_ours, modules_as_released
from pretrain.convert.released.pairs import as_ours, as_released
from pretrain.errors import ConfigError

_FILE = "model.pt"
_ENDINGS = (".pt", ".pth", ".bin")


@dataclass(frozen=True)
class ReleasedFormat:
    """See `CheckpointFormat`."""

    name = RELEASED
    takes_config = True
    holds_optimizer = False

    def is_at(self, path: Path) -> bool:
        return path.suffix in _ENDINGS or (path / _FILE).is_file() or any(path.glob("*.safetensors"))

    def open(self, path: Path, step: int | None, config: RunConfig | None) -> OpenedCheckpoint:
        if config is None:
            raise ConfigError(
                f"{path} holds tensors under a release's names, but no configuration of its model: name it with --config FILE"
            )
        file = path if path.is_file() else path / _FILE
        source: TensorReader = StateDictReader(file) if file.is_file() else open_safetensors(path)
        release = _release_of(config.model)
        ours = modules_as_ours(source, config.model) if release is None else as_ours(source, config.model, release)
        return OpenedCheckpoint(path, self.name, ours, config)

    def convert(self, source: OpenedCheckpoint, target: ConversionTarget) -> ReleasedConversion:
        return ReleasedConversion(source, target)


class ReleasedConversion:
    """See `Conversion`."""

    def __init__(self, source: OpenedCheckpoint, target: ConversionTarget) -> None:
        config, weights = source.config, source.weights_in(target.dtype)
        release = _release_of(config.model)
        self.reader: TensorReader = (
            modules_as_released(weights, config.model)
            if release is None
            else as_released(weights, config.model, release, seed=config.seed)
        )
        self.files = [StateDictFile(_FILE, self.reader.tensors)]

    def finish(self, folder: Path, written: Sequence[WrittenFile]) -> None:
        """There is nothing besides the one file."""

    def reopen(self, folder: Path) -> TensorReader:
        return StateDictReader(folder / _FILE)


def _release_of(model: ModelConfig) -> str | None:
    """UltraMemV2's, which holds whole models, where it has the family; None: memories are modules of a code."""
    if len(model.memories) > 1:
        raise ConfigError(
            f"the model has memories of two kinds, {model.memory_kinds}, which no release has: convert it to another format"
        )
    if are_modules(model):
        return None
    released = family_of(model.memory).released if model.memory is not None else {ULTRAMEMV2_RELEASE: None}
    return ULTRAMEMV2_RELEASE if ULTRAMEMV2_RELEASE in released else META_RELEASE
