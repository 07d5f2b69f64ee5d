"""A folder of safetensors files as a checkpoint: read by regions, and written from start to end.

Names, shapes and places stand in each file's header, a JSON text, and are checked against the file before anything
relies on them: a header that lies is an error, and costs no more memory than `_MAX_HEADER_BYTES` of text does.
"""

from __future__ import annotations

import itertools
import json
import os
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pretrain.checkpoint.store.lazy_tensor import memory_of
from pretrain.checkpoint.store.tensors import Region, TensorInfo, pieces
from pretrain.errors import CheckpointError
from pretrain.printable import printable

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

# A header takes some hundred bytes per tensor, and parsed text some dozen times its size.
_MAX_HEADER_BYTES = 16 * 2**20
_MAX_DIMENSIONS = 16
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
# By which transformers knows whose tensors they are.
_METADATA = {"format": "pt"}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
# Elements as whole numbers of their size: numpy knows no bfloat16.
_BITS = {1: "u1", 2: "<i2", 4: "<i4", 8: "<i8"}


@dataclass(frozen=True)
class TensorPlace:
    """Place of a tensor's bytes.

    Attributes:
        path: the file.
        start: first byte in it.
        info: shape and dtype; elements lie in row-major order.
    """

    path: Path
    start: int
    info: TensorInfo


@dataclass(frozen=True)
class FileHeader:
    """Header of a file.

    Attributes:
        content: bytes before those of the tensors.
        places: places of the tensors, by name.
        metadata: texts that the writer added, by name.
    """

    content: bytes
    places: Mapping[str, TensorPlace]
    metadata: Mapping[str, str]


class SafetensorsReader:
    """A `TensorReader` of safetensors files. Files are mapped into memory: a read touches only what it copies."""

    def __init__(self, places: Mapping[str, TensorPlace]) -> None:
        self._places = places
        self._tensors = {name: place.info for name, place in places.items()}

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Shapes and dtypes of the tensors, by name."""
        return self._tensors

    def place(self, name: str) -> TensorPlace:
        """Place of a tensor."""
        return self._places[name]

    def read(self, region: Region) -> Tensor:
        """See `TensorReader.read`."""
        place = self._places.get(region.name)
        if place is None:
            raise CheckpointError(f"there is no tensor {region.name}")
        shape, dtype = place.info.shape, place.info.dtype
        assert len(region.shape) == len(region.offset) == len(shape)
        assert all(
            start >= 0 and start + size <= whole
            for start, size, whole in zip(region.offset, region.shape, shape, strict=True)
        ), region
        if not region.numel:
            return torch.empty(region.shape, dtype=dtype)
        try:
            mapped = np.memmap(place.path, _BITS[dtype.itemsize], "r", offset=place.start, shape=shape or (1,))
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{place.path}: {region.name} cannot be read ({error})") from error
        part = tuple(slice(start, start + size) for start, size in zip(region.offset, region.shape, strict=True))
        return torch.from_numpy(np.array(mapped[part], order="C").reshape(region.shape)).view(dtype)


def open_safetensors(folder: Path) -> SafetensorsReader:
    """Open `model.safetensors.index.json` and the files it names, or `model.safetensors` alone.

    Raises:
        CheckpointError: neither file is there, or one is damaged, or is not what the index says.
    """
    index = folder / INDEX_FILE
    if not index.is_file():
        if not (folder / SINGLE_FILE).is_file():
            raise CheckpointError(
                f"{folder} has neither {INDEX_FILE} nor {SINGLE_FILE}: give a folder with weights in safetensors files"
            )
        return SafetensorsReader(read_header(folder / SINGLE_FILE).places)
    by_file: dict[str, set[str]] = {}
    for name, file in _read_index(index).items():
        by_file.setdefault(file, set()).add(name)
    places: dict[str, TensorPlace] = {}
    for file, names in sorted(by_file.items()):
        found = read_header(folder / file).places
        if found.keys() != names:
            odd = sorted(found.keys() ^ names)[0]
            raise CheckpointError(f"{index} and {file} do not agree on where {odd} is: copy the folder again")
        places.update(found)
    return SafetensorsReader(places)


def _read_index(path: Path) -> dict[str, str]:
    """File names by tensor; all of them inside of the folder."""
    if path.stat().st_size > _MAX_HEADER_BYTES:
        raise CheckpointError(f"{path} has {path.stat().st_size} bytes, which is no index of tensors")
    content = _parse(path.read_bytes(), path)
    names = content.get("weight_map")
    if not isinstance(names, dict):
        raise CheckpointError(f"{path} is no index: it has no weight_map")
    for file in names.values():
        if not isinstance(file, str) or file != os.path.basename(file) or not file.endswith(".safetensors"):
            raise CheckpointError(f"{path} names the file {file!r}, which is none beside it")
    return names


def read_header(path: Path) -> FileHeader:
    """Read the header of one file.

    Raises:
        CheckpointError: the file is no safetensors file, or its header does not fit it.
    """
    try:
        with path.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            first = stream.read(8)
            num_bytes = struct.unpack("<Q", first)[0] if len(first) == 8 else size
            if num_bytes > min(size - 8, _MAX_HEADER_BYTES):
                raise CheckpointError(f"{path} is damaged: its header cannot be {num_bytes} bytes long")
            content = stream.read(num_bytes)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    header = _parse(content, path)
    metadata = header.pop("__metadata__", None)
    begin = 8 + num_bytes
    spans = {name: _checked(name, entry, path) for name, entry in header.items()}
    end = 0
    for name, (start, stop, _) in sorted(spans.items(), key=lambda item: item[1][:2]):
        if start != end:
            raise CheckpointError(f"{path} is damaged: {name} starts at byte {start}, and {end} was expected")
        end = stop
    if begin + end != size:
        raise CheckpointError(f"{path} is damaged: it has {size} bytes, and its header describes {begin + end}")
    places = {name: TensorPlace(path, begin + start, info) for name, (start, _, info) in spans.items()}
    texts = metadata if isinstance(metadata, dict) and all(isinstance(each, str) for each in metadata.values()) else {}
    return FileHeader(first + content, places, texts)


def _checked(name: str, entry: Any, path: Path) -> tuple[int, int, TensorInfo]:
    """First byte, end and info of one tensor, counted from the end of the header."""
    if not name.isprintable():
        raise CheckpointError(f"{path} is damaged: it names a tensor {printable(name, 80)}")
    match entry:
        case {"dtype": str(code), "shape": list(shape), "data_offsets": [start, stop]}:
            counts = [*shape, start, stop]
            if all(type(count) is int and 0 <= count < 2**63 for count in counts) and len(shape) <= _MAX_DIMENSIONS:
                if code not in _DTYPES:
                    raise CheckpointError(
                        f"{path}: {name} has the dtype {code}; those that are read are {', '.join(_DTYPES)}"
                    )
                info = TensorInfo(tuple(shape), _DTYPES[code])
                if stop - start == info.num_bytes:
                    return start, stop, info
    raise CheckpointError(f"{path} is damaged: its header describes {name} impossibly: {str(entry)[:200]}")


def _parse(content: bytes, path: Path) -> dict[str, Any]:
    def unique(items: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(dict(items)) != len(items):
            raise ValueError("a name occurs twice")
        return dict(items)

    try:
        parsed = json.loads(content, object_pairs_hook=unique)
        if not isinstance(parsed, dict):
            raise ValueError("it is no mapping")
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: its description of the tensors cannot be read ({error})") from error
    return parsed


@dataclass(frozen=True)
class SafetensorsFile:
    """A file of a checkpoint that is written from its start to its end, see `OutputFile`.

    Attributes:
        name: name of the file.
        tensors: shapes and dtypes of its tensors, by name.
    """

    name: str
    tensors: Mapping[str, TensorInfo]

    @property
    def num_bytes(self) -> int:
        """Bytes of its tensors."""
        return sum(info.num_bytes for info in self.tensors.values())

    def write(self, path: Path, read: Callable[[Region], Tensor], max_piece_bytes: int) -> None:
        """See `OutputFile`."""
        header, ordered = made_header(self.tensors, _METADATA)
        with path.open("xb") as stream:
            stream.write(header)
            for name, info in ordered:
                for piece in pieces(info.whole(name), max(1, max_piece_bytes // info.dtype.itemsize)):
                    stream.write(memory_of(read(piece).contiguous()))
            stream.flush()
            os.fsync(stream.fileno())


def safetensors_files(infos: Mapping[str, TensorInfo], max_shard_bytes: int) -> list[SafetensorsFile]:
    """The files of a checkpoint, named as transformers does; a tensor larger than the limit has its own."""
    shards = list(_shards(infos, max_shard_bytes))
    return [SafetensorsFile(name, shard) for name, shard in zip(_file_names(len(shards)), shards, strict=True)]


def write_index(folder: Path, files: Sequence[SafetensorsFile]) -> None:
    """Write the index of tensors over several files; a single file needs none."""
    if len(files) > 1:
        index = {
            "metadata": {"total_size": sum(file.num_bytes for file in files)},
            "weight_map": {name: file.name for file in files for name in file.tensors},
        }
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")


def _file_names(number: int) -> list[str]:
    if number == 1:
        return [SINGLE_FILE]
    return [f"model-{index:05d}-of-{number:05d}.safetensors" for index in range(1, number + 1)]


def made_header(
    infos: Mapping[str, TensorInfo], metadata: Mapping[str, str]
) -> tuple[bytes, list[tuple[str, TensorInfo]]]:
    """A file's bytes before its tensors, and its tensors in their order.

    By falling alignment, so that every tensor starts at a multiple of its element's size.
    """
    ordered = sorted(infos.items(), key=lambda item: -item[1].dtype.itemsize)
    ends = list(itertools.accumulate(info.num_bytes for _, info in ordered))
    entries: dict[str, Any] = {"__metadata__": dict(metadata)}
    for (name, info), start, stop in zip(ordered, [0, *ends], ends, strict=False):
        entries[name] = {"dtype": _NAMES[info.dtype], "shape": list(info.shape), "data_offsets": [start, stop]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text, ordered


def _shards(infos: Mapping[str, TensorInfo], max_bytes: int) -> Iterator[dict[str, TensorInfo]]:
    """The tensors of each file; the first file is there even if there are none."""
    shard: dict[str, TensorInfo] = {}
    held = 0
    for name, info in infos.items():
        if shard and held + info.num_bytes > max_bytes:
            yield shard
            shard, held = {}, 0
        shard[name] = info
        held += info.num_bytes
    yield shard
