"""What a format of checkpoints is: how one is found, opened, and written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from pretrain.checkpoint.folder import SavedState
from pretrain.config.schema import ParallelConfig, RunConfig

if TYPE_CHECKING:
    import torch

    from pretrain.checkpoint.store.files import OutputFile, WrittenFile
    from pretrain.checkpoint.store.tensors import TensorReader

OPTIMIZER_PREFIX = "optimizer."
"""What the names of optimizer state start with, in our own checkpoints."""


@dataclass(frozen=True)
class OpenedCheckpoint:
    """A checkpoint of any format, as ours.

    Attributes:
        path: of the checkpoint.
        format_name: of its format.
        reader: the model's tensors, and the optimizer's if they are there, under our global names and in our shapes.
        config: of the run; of an imported model, the defaults around what is known of it. Its vocabulary is the one that
            the embedding was made for, before padding.
        saved: what else a checkpoint of ours holds.
        tokenizer: the folder of its tokenizer, if it has one.
        notes: what it says of itself, in words by title.
    """

    path: Path
    format_name: str
    reader: TensorReader
    config: RunConfig
    saved: SavedState | None = None
    tokenizer: Path | None = None
    notes: Mapping[str, str] | None = None

    @property
    def weights(self) -> list[str]:
        """Names of the model's tensors."""
        return [name for name in self.reader.tensors if not name.startswith(OPTIMIZER_PREFIX)]

    @property
    def optimizer_state(self) -> list[str]:
        """Names of the optimizer's tensors."""
        return [name for name in self.reader.tensors if name.startswith(OPTIMIZER_PREFIX)]


@dataclass(frozen=True)
class Target:
    """What a conversion is to make.

    Attributes:
        layout: that it is for.
        with_optimizer: whether it holds the optimizer's state.
        dtype: of weights; None: as they are.
        max_file_bytes: of tensors in a file, about.
    """

    layout: ParallelConfig
    with_optimizer: bool
    dtype: torch.dtype | None
    max_file_bytes: int


class Conversion(Protocol):
    """One checkpoint on its way into a format."""

    @property
    def files(self) -> Sequence[OutputFile]:
        """What is written by threads."""
        ...

    @property
    def reader(self) -> TensorReader:
        """Of what the files ask for."""
        ...

    def finish(self, folder: Path, written: Sequence[WrittenFile]) -> None:
        """Write the rest, once the files are complete."""
        ...

    def expected(self) -> TensorReader:
        """What must be read back from the folder when it is opened, under our names."""
        ...


class CheckpointFormat(Protocol):
    """A format."""

    @property
    def name(self) -> str:
        """As in `--format`."""
        ...

    @property
    def holds_optimizer(self) -> bool:
        """Whether it can hold the optimizer's state."""
        ...

    def is_at(self, path: Path) -> bool:
        """Whether a path looks like a checkpoint of this format."""
        ...

    def open(self, path: Path, step: int | None) -> OpenedCheckpoint:
        """Open one.

        Args:
            step: of a run's checkpoint; None: the newest complete one.

        Raises:
            CheckpointError: it is damaged, or of something that cannot be represented.
        """
        ...

    def convert(self, source: OpenedCheckpoint, target: Target) -> Conversion:
        """Prepare a conversion, without writing.

        Raises:
            ConfigError: the format does not have what is asked for.
        """
        ...


def as_values(target: Target) -> dict[str, Any]:
    """A target as plain values, by which two of them are told apart."""
    from dataclasses import asdict

    return {**asdict(target), "dtype": str(target.dtype)}
