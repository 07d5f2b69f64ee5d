"""Writing Megatron's `torch_dist` format without ranks: files of items, and the index last.

A tensor is cut into parts along the edges at which the ranks of a layout cut it, and into rows, so that each rank finds
its share in parts of its own: PyTorch reads a part whole, however little of it is wanted.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor

from pretrain.checkpoint.index import INDEX_FILE, StoredItem
from pretrain.checkpoint.index_writer import pickled_index
from pretrain.checkpoint.item_files import HashedFile
from pretrain.checkpoint.store.files import WrittenFile
from pretrain.checkpoint.store.tensors import Region, TensorInfo, pieces

FORMAT_FILE = "metadata.json"
COMMON_FILE = "common.pt"
_FORMAT = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
"""Megatron's `CheckpointingConfig`."""
MAX_PART_BYTES = 16 * 2**20
"""Most bytes of a part: a rank that wants one row of it reads all of it."""


@dataclass(frozen=True)
class TorchDistFile:
    """A file of items.

    Attributes:
        name: name of the file in the index's folder.
        parts: regions in the order in which they are written.
        num_bytes: bytes of the tensors in it.
    """

    name: str
    parts: tuple[Region, ...]
    num_bytes: int

    def write(self, path: Path, read: Callable[[Region], Tensor], max_piece_bytes: int) -> dict[str, Any]:
        """See `OutputFile`. The notes are the file's hash, and start and length of every item."""
        places = []
        with HashedFile(path) as file:
            for part in self.parts:
                start = file.num_bytes
                torch.save(read(part), cast(IO[bytes], file))
                places.append((start, file.num_bytes - start))
        return {"sha256": file.recorded.sha256, "items": places}


def cut_columns(region: Region, num_parts: int) -> Iterator[Region]:
    """A matrix as so many equal groups of columns, if it can be cut so; else whole."""
    if len(region.shape) < 2 or region.shape[1] % num_parts:
        yield region
        return
    rows, columns, *rest = region.shape
    width = columns // num_parts
    for part in range(num_parts):
        yield region.shifted((0, part * width, *[0] * len(rest)), (rows, width, *rest))


def parts_of(name: str, info: TensorInfo, num_column_parts: int) -> list[Region]:
    """The parts of a tensor.

    Args:
        num_column_parts: groups of columns that ranks hold apart.
    """
    limit = max(1, MAX_PART_BYTES // info.dtype.itemsize)
    groups = [list(pieces(columns, limit)) for columns in cut_columns(info.whole(name), num_column_parts)]
    # The same rows one after the other: they are next to each other where they come from.
    return [part for of_rows in zip(*groups, strict=True) for part in of_rows]


def pack(
    prefix: str, parts: Iterable[Region], tensors: Mapping[str, TensorInfo], max_file_bytes: int
) -> list[TorchDistFile]:
    """Files with these parts, in their order, of about so many bytes at most."""
    files: list[TorchDistFile] = []
    inside: list[Region] = []
    num_bytes = 0
    for part in parts:
        size = part.numel * tensors[part.name].dtype.itemsize
        if inside and num_bytes + size > max_file_bytes:
            files.append(TorchDistFile(f"{prefix}_{len(files)}.distcp", tuple(inside), num_bytes))
            inside, num_bytes = [], 0
        inside.append(part)
        num_bytes += size
    if inside:
        files.append(TorchDistFile(f"{prefix}_{len(files)}.distcp", tuple(inside), num_bytes))
    return files


def write_index(
    folder: Path,
    tensors: Mapping[str, TensorInfo],
    files: Sequence[TorchDistFile],
    written: Sequence[WrittenFile],
) -> None:
    """Write the index of finished files, and the two small files that Megatron expects beside it."""
    items = [
        StoredItem(Path(file.name).name, start, length, part)
        for file, done in zip(files, written, strict=True)
        for part, (start, length) in zip(file.parts, done.notes["items"], strict=True)
    ]
    (folder / INDEX_FILE).write_bytes(pickled_index(tensors, items))
    torch.save({}, folder / COMMON_FILE)
    (folder / FORMAT_FILE).write_text(json.dumps(_FORMAT), encoding="utf-8")
