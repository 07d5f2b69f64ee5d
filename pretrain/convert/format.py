"""Format of checkpoints: how one is found, opened, and written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from pretrain.checkpoint.derived import main_name
from pretrain.checkpoint.folder import SavedState
from pretrain.checkpoint.store.selected import Selected
from pretrain.config.schema import ParallelConfig, RunConfig
from pretrain.errors import CheckpointError
from pretrain.state import RunState

if TYPE_CHECKING:
    from pretrain.checkpoint.store.files import OutputFile, WrittenFile
    from pretrain.checkpoint.store.tensors import TensorReader
    from pretrain.data.tokenizer import Tokenizer

OPTIMIZER_PREFIX = "optimizer."
"""Prefix of the names of optimizer state, in our own checkpoints."""

BUFFERS = (".memory.u", ".memory.v", ".memory.permutation")
"""Ends of the names of tensors that are no weights: they follow from weights or from the seed."""


@dataclass(frozen=True)
class OpenedCheckpoint:
    """A checkpoint of any format, as ours.

    Attributes:
        path: path of the checkpoint.
        format_name: name of its format.
        reader: the model's tensors, and the optimizer's if they are there, under our global names and in our shapes.
        config: configuration of the run; of an imported model, the defaults around what is known of it. Its vocabulary
            is the one that the embedding was made for, before padding.
        state: counters of the run.
        saved: the rest of what a checkpoint of ours holds; None of another format.
        tokenizer: its own, if it has one.
        notes: words, by title, that tell it from another one of the same source besides its configuration.
        sums: SHA-256 of its files by name, where somebody wrote them down beside them; a checkpoint of ours has its own.
    """

    path: Path
    format_name: str
    reader: TensorReader
    config: RunConfig
    state: RunState = field(default_factory=RunState)
    saved: SavedState | None = None
    tokenizer: Tokenizer | None = None
    notes: Mapping[str, str] | None = None
    sums: Mapping[str, str] | None = None

    @property
    def weights(self) -> list[str]:
        """Names of the model's tensors."""
        return [name for name in self.reader.tensors if not name.startswith(OPTIMIZER_PREFIX)]

    @property
    def optimizer_state(self) -> list[str]:
        """Names of the optimizer's tensors."""
        return [name for name in self.reader.tensors if name.startswith(OPTIMIZER_PREFIX)]

    def weights_in(self, dtype: torch.dtype | None) -> Selected:
        """The model's tensors in another dtype, rounded from fp32 main weights where there are any; None: as they are.

        Tensors that are no weights stay as they are: permutations, and the singular vectors that retrieval selects by.
        """
        tensors = self.reader.tensors
        cast = [name for name in self.weights if dtype is not None and not name.endswith(BUFFERS)]
        main = {name: main_name(name) for name in cast if main_name(name) in tensors}
        names = {**{name: name for name in self.weights}, **main}
        return Selected(self.reader, names, {} if dtype is None else dict.fromkeys(cast, dtype))

    @property
    def vocab_size(self) -> int:
        """Token ids of the model, before padding.

        Raises:
            CheckpointError: nothing says how many.
        """
        if self.config.model.vocab_size is not None:
            return self.config.model.vocab_size
        if self.tokenizer is None:
            raise CheckpointError(f"{self.path} has no tokenizer, and its model.vocab_size is not set: copy the run's")
        return self.tokenizer.vocab_size


@dataclass(frozen=True)
class ConversionTarget:
    """Properties that the result of a conversion is to have.

    Attributes:
        layout: layout that it is for.
        with_optimizer: the result holds the optimizer's state.
        dtype: dtype of weights; None: as they are.
        max_file_bytes: bytes of tensors in a file, about.
        table_bits: bits of an element of a memory's tables; None: they have the dtype of weights.
    """

    layout: ParallelConfig
    with_optimizer: bool
    dtype: torch.dtype | None
    max_file_bytes: int
    table_bits: int | None = None


class Conversion(Protocol):
    """One checkpoint on its way into a format."""

    @property
    def files(self) -> Sequence[OutputFile]:
        """Files that threads write."""
        ...

    @property
    def reader(self) -> TensorReader:
        """Reader of the tensors that the files ask for."""
        ...

    def finish(self, folder: Path, written: Sequence[WrittenFile]) -> None:
        """Write the rest, once the files are complete."""
        ...

    def reopen(self, folder: Path) -> TensorReader:
        """Open the written tensors, which must be those of `reader`."""
        ...


class SourceFormat(Protocol):
    """A format of checkpoints that are read."""

    @property
    def name(self) -> str:
        """Name, as in `--format`."""
        ...

    @property
    def takes_config(self) -> bool:
        """Tell whether a person may name the configuration, which such a checkpoint may not have."""
        ...

    def is_at(self, path: Path) -> bool:
        """Tell whether a path looks like a checkpoint of this format."""
        ...

    def open(self, path: Path, step: int | None, config: RunConfig | None) -> OpenedCheckpoint:
        """Open a checkpoint.

        Args:
            step: step of a run's checkpoint; None: the newest complete one.
            config: configuration of a checkpoint that has none with it.

        Raises:
            CheckpointError: the checkpoint is damaged, or of something that cannot be represented.
            ConfigError: the checkpoint needs a configuration that was not given, or the given one is not of its model.
        """
        ...


class CheckpointFormat(SourceFormat, Protocol):
    """A format of checkpoints that are also written."""

    @property
    def holds_optimizer(self) -> bool:
        """Tell whether it can hold the optimizer's state."""
        ...

    def convert(self, source: OpenedCheckpoint, target: ConversionTarget) -> Conversion:
        """Prepare a conversion, without writing.

        Raises:
            ConfigError: the format does not have what is asked for.
        """
        ...


def as_values(target: ConversionTarget) -> dict[str, Any]:
    """A target as plain values, by which two of them are told apart."""
    return {**asdict(target), "dtype": str(target.dtype)}
