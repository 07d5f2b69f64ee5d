"""The file of a patch: a safetensors file of rows before and after, sealed by a hash of all that it says.

For every table that training changed, under the table's name in our own checkpoints:

    rows.<table>    int64 [n]   numbers of rows, ascending
    before.<table>  [n, W]      the rows as they were, in the dtype they were read in
    after.<table>   [n, W]      the rows as they became, likewise

The metadata says of which model they are. A byte that changes anywhere in the file is noticed when it is read.

Legend: n rows of a table in a patch, W columns of the table.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import IO, Literal

import numpy as np
import torch
from torch import Tensor

from parallel.machine.atomic_write import atomic_write
from parallel.machine.refusals import naming
from pretrain.checkpoint.store.lazy_tensor import memory_of
from pretrain.checkpoint.store.safetensors_store import SafetensorsReader, made_header, read_header
from pretrain.checkpoint.store.tensors import Region, TensorInfo
from pretrain.errors import CheckpointError

Side = Literal["before", "after"]

_FORMAT, _VERSION = "megamem-patch", "1"
_PARTS = ("rows", "before", "after")
_SEAL = "sha256"
# Stands for the hash where it is computed.
_UNSEALED = "0" * 64
_READ_BYTES = 1 << 22


@dataclass(frozen=True)
class Origin:
    """Checkpoints that a patch was made of, for people.

    Attributes:
        before: name and step of the first.
        after: name and step of the second.
    """

    before: str
    after: str


@dataclass(frozen=True)
class About:
    """Contents of a patch besides its rows.

    Attributes:
        identity: hashes of the model's other weights, by name (see `pretrain.patch.identity`).
        shapes: shapes of the tables that have rows in it, by name.
        made_of: pairs of checkpoints whose difference it is; several of a merged one.
    """

    identity: Mapping[str, str]
    shapes: Mapping[str, tuple[int, int]]
    made_of: Sequence[Origin]

    def as_metadata(self, seal: str) -> dict[str, str]:
        """Texts for the file's header."""
        return {
            "format": _FORMAT,
            "version": _VERSION,
            "shapes": json.dumps(self.shapes, sort_keys=True),
            "identity": json.dumps(self.identity, sort_keys=True),
            "made_of": json.dumps([asdict(origin) for origin in self.made_of]),
            _SEAL: seal,
        }


class PatchRows:
    """Rows of one table on their way into a patch. They wait in nameless files beside it, and take no memory."""

    def __init__(self, folder: Path, width: int, before: torch.dtype, after: torch.dtype) -> None:
        """Begin without rows.

        Args:
            folder: folder with room for them.
            width: W.
            before: dtype of the rows as they were.
            after: dtype of the rows as they became.
        """
        self._folder, self._width = folder, width
        self._dtypes = dict(zip(_PARTS, (torch.int64, before, after), strict=True))
        self._files: dict[str, IO[bytes]] = {}
        self.num_rows = 0

    def __enter__(self) -> PatchRows:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in self._files.values():
            file.close()

    @property
    def row_bytes(self) -> int:
        """Bytes of a row in the patch."""
        return sum(self.info(part).num_bytes for part in _PARTS) // max(1, self.num_rows)

    def add(self, rows: Tensor, before: Tensor, after: Tensor) -> None:
        """Add rows behind those that are there.

        Args:
            rows: their numbers, [n] int64, ascending and above those that are there.
            before: [n, W].
            after: [n, W].

        Raises:
            OSError: the disk refuses.
        """
        if not len(rows):
            return
        self.num_rows += len(rows)
        with naming(self._folder):
            for part, tensor in zip(_PARTS, (rows, before, after), strict=True):
                assert tensor.dtype == self._dtypes[part]
                if part not in self._files:
                    self._folder.mkdir(parents=True, exist_ok=True)
                    self._files[part] = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115
                self._files[part].write(memory_of(tensor.contiguous()))

    def info(self, part: str) -> TensorInfo:
        """Shape and dtype of one of the three tensors."""
        shape = (self.num_rows,) if part == "rows" else (self.num_rows, self._width)
        return TensorInfo(shape, self._dtypes[part])

    def portions(self, part: str) -> Iterator[bytes]:
        """Bytes of one of the three tensors."""
        file = self._files[part]
        file.seek(0)
        while portion := file.read(_READ_BYTES):
            yield portion


def write_patch(path: Path, tables: Mapping[str, PatchRows], about: About) -> int:
    """Write a patch; it is there whole or not at all.

    Args:
        tables: rows, at least one of each, by the name of the table.

    Returns:
        Bytes of the file.

    Raises:
        OSError: the disk refuses.
    """
    sources = {f"{part}.{table}": (rows, part) for table, rows in sorted(tables.items()) for part in _PARTS}
    infos = {name: rows.info(part) for name, (rows, part) in sources.items()}

    def portions(ordered: Iterable[str]) -> Iterator[bytes]:
        for name in ordered:
            rows, part = sources[name]
            yield from rows.portions(part)

    header, ordered = made_header(infos, about.as_metadata(_UNSEALED))
    names = [name for name, _ in ordered]
    digest = hashlib.sha256(header)
    for portion in portions(names):
        digest.update(portion)
    header, _ = made_header(infos, about.as_metadata(digest.hexdigest()))
    with atomic_write(path) as stream:
        stream.write(header)
        for portion in portions(names):
            stream.write(portion)
        return stream.tell()


class Patch:
    """A patch that was read and found whole.

    Attributes:
        path: path of the file.
        about: contents besides the rows.
        num_bytes: bytes of the file.
    """

    def __init__(self, path: Path, about: About, reader: SafetensorsReader, num_bytes: int) -> None:
        self.path, self.about, self.num_bytes = path, about, num_bytes
        self._reader = reader
        self._row_ids: dict[str, np.ndarray] = {}

    @property
    def tables(self) -> list[str]:
        """Names of the tables that have rows in it."""
        return sorted(self.about.shapes)

    def num_rows(self, table: str) -> int:
        """Rows of a table that are in it."""
        return self._reader.tensors[f"rows.{table}"].shape[0]

    def dtype(self, side: Side, table: str) -> torch.dtype:
        """Dtype of the rows as they were, or as they became."""
        return self._reader.tensors[f"{side}.{table}"].dtype

    def row_ids(self, table: str) -> np.ndarray:
        """Numbers of the rows, [n] int64, ascending."""
        if table not in self._row_ids:
            name = f"rows.{table}"
            self._row_ids[table] = self._reader.read(self._reader.tensors[name].whole(name)).numpy()
        return self._row_ids[table]

    def read(self, side: Side, table: str, start: int, stop: int) -> Tensor:
        """Rows as they were or became, [stop - start, W], by their places in the patch."""
        return self._reader.read(Region(f"{side}.{table}", (start, 0), (stop - start, self.about.shapes[table][1])))


def read_patch(path: Path) -> Patch:
    """Read a patch, and see that nothing in it was changed.

    Raises:
        CheckpointError: the file is missing, damaged, edited, or no patch.
    """
    header = read_header(path)
    metadata = header.metadata
    if metadata.get("format") != _FORMAT:
        raise CheckpointError(f"{path} is no patch: give a file that `megamem patch make` or `merge` wrote")
    if metadata.get("version") != _VERSION:
        raise CheckpointError(
            f"{path} is a patch of version {metadata.get('version')}, and this program reads version {_VERSION}: use the "
            "one that wrote it"
        )
    infos = {name: place.info for name, place in header.places.items()}
    if made_header(infos, metadata)[0] != header.content or _seal_of(path, infos, metadata) != metadata.get(_SEAL):
        raise CheckpointError(f"{path} is damaged, or was edited: copy it again, or make it anew")
    about, reader = _about(path, metadata), SafetensorsReader(header.places)
    if (problem := _problem(about, reader)) is not None:
        raise CheckpointError(f"{path} is no patch that can be used: {problem}. Make it anew")
    return Patch(path, about, reader, path.stat().st_size)


def _seal_of(path: Path, infos: Mapping[str, TensorInfo], metadata: Mapping[str, str]) -> str:
    """Hash over the file as it was before it had one."""
    unsealed, _ = made_header(infos, {**metadata, _SEAL: _UNSEALED})
    digest = hashlib.sha256(unsealed)
    try:
        with path.open("rb") as stream:
            stream.seek(len(unsealed))
            while portion := stream.read(_READ_BYTES):
                digest.update(portion)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    return digest.hexdigest()


def _about(path: Path, metadata: Mapping[str, str]) -> About:
    try:
        identity = {str(name): str(value) for name, value in json.loads(metadata["identity"]).items()}
        shapes = {name: (int(rows), int(columns)) for name, (rows, columns) in json.loads(metadata["shapes"]).items()}
        made_of = [Origin(str(each["before"]), str(each["after"])) for each in json.loads(metadata["made_of"])]
        return About(identity, shapes, made_of)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is no patch that can be used: {error!r}. Make it anew") from error


def _problem(about: About, reader: SafetensorsReader) -> str | None:
    """Contradiction between tensors and shapes, in words; None if there is none."""
    expected = {f"{part}.{table}" for table in about.shapes for part in _PARTS}
    if expected != reader.tensors.keys():
        return f"it has {sorted(expected ^ reader.tensors.keys())[0]} on one side alone"
    for table, (num_rows, width) in about.shapes.items():
        ids, *sides = (reader.tensors[f"{part}.{table}"] for part in _PARTS)
        if ids.dtype != torch.int64 or len(ids.shape) != 1 or not ids.shape[0]:
            return f"rows.{table} is {ids.dtype} of {ids.shape}"
        for side in sides:
            if not side.dtype.is_floating_point or side.shape != (ids.shape[0], width):
                return f"rows of {table} are {side.dtype} of {side.shape}"
        numbers = reader.read(ids.whole(f"rows.{table}"))
        if numbers[0] < 0 or numbers[-1] >= num_rows or not bool((numbers.diff() > 0).all()):
            return f"rows.{table} does not ascend from 0 to below {num_rows}"
    return None


def slices(length: int, at_once: int) -> Iterator[tuple[int, int]]:
    """First and last place, exclusive, of portions of a number of rows."""
    return pairwise([*range(0, length, max(1, at_once)), length])
