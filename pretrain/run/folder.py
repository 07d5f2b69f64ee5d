"""The folder of a run. It imports next to nothing, so that a command can look into it at once."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from parallel.machine.refusals import missing_target
from pretrain.errors import ConfigError


def default_run_folder(name: str) -> Path:
    """Folder of the run of a configuration of this name, unless --run-dir is given."""
    return Path("runs") / name


class RunFolder:
    """Paths of a run's files."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.yaml"
        self.metrics = path / "metrics.jsonl"
        self.stages = path / "stages.yaml"
        self.start = path / "start.json"
        self.history = path / "history.jsonl"
        self.checkpoints = path / "checkpoints"
        self.logs = path / "logs"
        self.data_cache = path / "data_cache"
        self.tokenizer = path / "tokenizer"
        self.tensorboard = path / "tensorboard"
        self.owner = path / "owner"
        self.wandb_id = path / "wandb_id"

    def check_writable(self) -> None:
        """See whether the folder could be made and written, without making it.

        Raises:
            ConfigError: the folder could not be made or written.
        """
        if (target := missing_target(self.path)) is not None:
            raise ConfigError(
                f"the run folder {self.path} cannot be made: it leads to {target}, which is not there. Make that, or use "
                "another --run-dir"
            )
        there = next(path for path in (self.path, *self.path.absolute().parents) if path.exists())
        if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
            reason = "is no folder" if not there.is_dir() else "cannot be written"
            raise ConfigError(f"the run folder {self.path} cannot be made: {there} {reason}. Use another --run-dir")

    def make(self) -> None:
        """Make the folder if it is missing, and see that it can be written.

        Raises:
            ConfigError: the folder cannot be made or written.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.path):
                pass
        except OSError as error:
            target = missing_target(self.path)
            reason = error.strerror if target is None else f"it leads to {target}, which is not there"
            raise ConfigError(
                f"the run folder {self.path} cannot be written ({reason}): use another --run-dir"
            ) from error
