"""Refusing pickled code, and damage, in what a checkpoint holds besides tensors.

`pretrain.checkpoint.index` reads the index. We store no objects: `common.pt`, Megatron's file for them, is empty, and may
hold plain values alone. PyTorch is not imported for either.
"""

from __future__ import annotations

import io
import json
import pickle
import zipfile
from pathlib import Path, PurePath
from typing import Any

from pretrain.checkpoint.derived import is_moment
from pretrain.checkpoint.folder import SavedState
from pretrain.checkpoint.index import Index, read_index
from pretrain.errors import CheckpointError


def files_with_weights(saved: SavedState) -> list[str]:
    """Names of a checkpoint's files without those in which only the optimizer's moments are.

    Raises:
        CheckpointError: see `read_index`.
    """
    files: dict[bool, set[str]] = {False: set(), True: set()}
    for name, items in read_index(saved.path).items.items():
        files[is_moment(name)].update(item.file for item in items)
    return sorted(saved.files.keys() - (files[True] - files[False]))


def check_small_files(folder: Path) -> Index:
    """Read the index, which is returned, and the two files that Megatron keeps beside it.

    Raises:
        CheckpointError: one is missing or damaged, or refers to anything but an index's classes, or plain values.
    """
    index = read_index(folder)
    for name, read in (("common.pt", _read_common), ("metadata.json", _read_format)):
        try:
            read(folder / name)
        # Damaged bytes make what reads them raise anything.
        except Exception as error:
            raise CheckpointError(
                f"{folder}/{name} is not a file of a checkpoint that can be trusted: it is damaged, or holds more than "
                "plain values"
            ) from error
    return index


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it wants {module}.{name}")


def _read_common(path: Path) -> None:
    # As `torch.save` packs an object. PyTorch itself takes longer to import than all the rest.
    with zipfile.ZipFile(path) as archive:
        (name,) = (name for name in archive.namelist() if PurePath(name).name == "data.pkl")
        # Reading checks the sum of the whole member.
        _PlainUnpickler(io.BytesIO(archive.read(name))).load()


def _read_format(path: Path) -> None:
    json.loads(path.read_bytes())["sharded_backend"]
