"""Contents of a checkpoint, as it states them. No tensor is read; for our own checkpoints PyTorch is not imported."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pretrain.checkpoint.derived import SCALE_PREFIX, derived_weights
from pretrain.checkpoint.folder import STATE_FILE, SavedState, read_state, step_named
from pretrain.checkpoint.index import StoredTensor, read_index
from pretrain.config.schema import RunConfig
from pretrain.convert.names import NATIVE
from pretrain.errors import CheckpointError
from pretrain.run.folder import RunFolder
from pretrain.run.saved_run import find_checkpoint, saved_config

if TYPE_CHECKING:
    from pretrain.convert.format import OpenedCheckpoint


@dataclass(frozen=True)
class Listing:
    """A checkpoint of any format, as far as its index and its state tell.

    Attributes:
        path: path of the checkpoint.
        format_name: name of its format.
        tensors: shapes and dtypes of the model's tensors and the optimizer's, under our global names.
        config: configuration of the run.
        facts: versions of packages and state of the run, of a checkpoint of ours.
    """

    path: Path
    format_name: str
    tensors: Mapping[str, StoredTensor]
    config: RunConfig
    facts: Mapping[str, Any]


def listing_of(opened: OpenedCheckpoint) -> Listing:
    """Listing of a checkpoint that has been opened."""
    return Listing(
        opened.path,
        opened.format_name,
        {
            name: StoredTensor(info.shape, str(info.dtype).removeprefix("torch."))
            for name, info in opened.reader.tensors.items()
        },
        opened.config,
        {} if opened.saved is None else _facts(opened.saved),
    )


def native_listing(path: Path, step: int | None) -> Listing:
    """Listing of a checkpoint of ours.

    Args:
        path: folder of a run, or of one of its checkpoints.
        step: step of a run's checkpoint; None: the newest one.

    Raises:
        CheckpointError: the checkpoint is missing or damaged.
    """
    saved, _ = native_at(path, step)
    # Readers have what scales are of.
    tensors = read_index(saved.path).stored
    stored = {name: tensor for name, tensor in tensors.items() if not name.startswith(SCALE_PREFIX)}
    dtype = saved.weights_dtype or "float32"
    derived = {name: StoredTensor(stored[main].shape, dtype) for name, main in derived_weights(stored).items()}
    return Listing(saved.path, NATIVE, {**stored, **derived}, saved_config(saved, None), _facts(saved))


def is_native(path: Path) -> bool:
    """Tell whether a path looks like a run's folder, or a checkpoint of ours."""
    return _is_checkpoint(path) or RunFolder(path).checkpoints.is_dir()


def native_at(path: Path, step: int | None) -> tuple[SavedState, RunFolder]:
    """A checkpoint of ours and the run's folder that it is in; see `native_listing`."""
    if _is_checkpoint(path):
        return read_state(path), RunFolder(path.parent.parent)
    folder = RunFolder(path)
    return find_checkpoint(folder, step, check_hashes=False, pass_over=False), folder


def _is_checkpoint(path: Path) -> bool:
    """Tell whether a folder is a checkpoint of ours, by its contents or by its name and place: it may be damaged."""
    whole = path.resolve()
    place = RunFolder(whole.parent.parent).checkpoints
    # As `os.path` sees it: whatever may not be looked into is none.
    if os.path.isfile(path / STATE_FILE):
        return True
    return os.path.isdir(whole) and whole.parent == place and step_named(whole) is not None


def _facts(saved: SavedState) -> dict[str, Any]:
    """Facts that a checkpoint of ours states besides its tensors."""
    content = json.loads((saved.path / STATE_FILE).read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise CheckpointError(f"{saved.path / STATE_FILE} holds no object")
    return {"versions": content.get("versions", {}), **asdict(saved.run)}
