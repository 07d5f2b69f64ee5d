"""The folder of a run. It imports nothing, so that a command can look into it at once."""

from __future__ import annotations

from pathlib import Path


class RunFolder:
    """Where a run keeps what."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.yaml"
        self.metrics = path / "metrics.jsonl"
        self.checkpoints = path / "checkpoints"
        self.logs = path / "logs"
        self.data_cache = path / "data_cache"
        self.tokenizer = path / "tokenizer"
        self.tensorboard = path / "tensorboard"
