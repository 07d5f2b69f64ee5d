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
from pretrain.checkpoint.pickle_budget import check_budget
from pretrain.errors import CheckpointError


def files_with_weights(saved: SavedState) -> list[str]:
    """Names of a checkpoint's files without those in which only the optimizer's moments are.

    Raises:
        CheckpointError: the index cannot be read, as `read_index` says.
    """
    files: dict[bool, set[str]] = {False: set(), True: set()}
    for name, items in read_index(saved.path).items.items():
        files[is_moment(name)].update(item.file for item in items)
    return sorted(saved.files.keys() - (files[True] - files[False]))


def check_small_files(folder: Path) -> Index:
    """Read the index, which is returned, and the two files that Megatron keeps beside it.

    Raises:
        CheckpointError: a file is missing or damaged, or refers to anything but an index's classes, or plain values.
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
        (entry,) = (entry for entry in archive.infolist() if PurePath(entry.filename).name == "data.pkl")
        if entry.compress_type != zipfile.ZIP_STORED or entry.file_size > path.stat().st_size:
            # A few megabytes can be compressed ones of many gigabytes.
            raise zipfile.BadZipFile(f"{entry.filename} is compressed")
        # Reading checks the sum of the whole member.
        content = archive.read(entry)
    check_budget(content)
    _PlainUnpickler(io.BytesIO(content)).load()


def _read_format(path: Path) -> None:
    json.loads(path.read_bytes())["sharded_backend"]
