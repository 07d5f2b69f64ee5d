"""Safetensors files: any region read and written, shards, and headers that lie."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from exported import write_safetensors
from in_memory import InMemory
from safetensors.torch import load_file, save_file
from torch import Tensor

from pretrain.checkpoint.store.safetensors_store import INDEX_FILE, SINGLE_FILE, open_safetensors
from pretrain.checkpoint.store.tensors import Region, TensorInfo
from pretrain.errors import CheckpointError

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool]
SHAPES = [(), (0, 3), (5,), (7, 3), (4, 1, 6), (2, 3, 4, 5)]


def some(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    values = torch.randint(-100, 100, shape, generator=torch.Generator().manual_seed(seed))
    return values.to(dtype)


def some_tensors() -> dict[str, Tensor]:
    return {f"{dtype}.{shape}".removeprefix("torch."): some(shape, dtype) for dtype in DTYPES for shape in SHAPES}


def infos(tensors: dict[str, Tensor]) -> dict[str, TensorInfo]:
    return {name: TensorInfo(tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}


def some_regions(name: str, shape: tuple[int, ...]) -> Iterator[Region]:
    """The whole, and rectangles that end and begin everywhere."""
    yield Region(name, (0,) * len(shape), shape)
    for first in range(1, 3):
        offset = tuple(min(first, size - 1) for size in shape)
        yield Region(name, offset, tuple(size - start for size, start in zip(shape, offset, strict=True)))
        yield Region(name, (0,) * len(shape), tuple(max(1, size - first) for size in shape))


@pytest.mark.parametrize("shards", [10**9, 500, 1])
def test_what_is_written_by_pieces_is_what_the_library_reads(tmp_path: Path, shards: int) -> None:
    expected = some_tensors()
    write_safetensors(tmp_path, InMemory(expected), shards, max_piece_bytes=16)
    files = sorted(tmp_path.glob("*.safetensors"))
    found = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert all(found[name].dtype == tensor.dtype for name, tensor in expected.items())
    assert (len(files) == 1) == (shards == 10**9) == (files[0].name == SINGLE_FILE)
    if len(files) > 1:
        index = json.loads((tmp_path / INDEX_FILE).read_text())
        assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in expected.values())
        assert set(index["weight_map"].values()) == {file.name for file in files}
    if shards == 500:
        assert all(sum(tensor.nbytes for tensor in load_file(file).values()) <= 960 for file in files)


def test_any_region_of_what_the_library_wrote_is_read(tmp_path: Path) -> None:
    expected = {name: tensor for name, tensor in some_tensors().items() if tensor.numel()}
    save_file(expected, tmp_path / SINGLE_FILE)
    reader = open_safetensors(tmp_path)
    assert reader.tensors == infos(expected)
    for name, tensor in expected.items():
        for region in some_regions(name, tuple(tensor.shape)):
            part = tuple(slice(a, a + b) for a, b in zip(region.offset, region.shape, strict=True))
            found = reader.read(region)
            assert found.dtype == tensor.dtype
            assert torch.equal(found, tensor[part])
            assert found.is_contiguous()
            # The caller's own.
            found.zero_()
    assert torch.equal(reader.read(Region("float32.(5,)", (0,), (5,))), expected["float32.(5,)"])


def test_a_tensor_that_is_missing_is_named(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2)}, tmp_path / SINGLE_FILE)
    with pytest.raises(CheckpointError, match="no tensor b"):
        open_safetensors(tmp_path).read(Region("b", (0,), (1,)))


def write_raw(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)


def entry(shape: Any = (2,), offsets: Any = (0, 8), dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


HOSTILE: dict[str, tuple[Any, bytes, int | None]] = {
    "longer than the file": ({}, b"", 2**63),
    "longer than allowed": ({}, b" " * 2**10, 2**40),
    "no JSON": (b"{nonsense", b"", None),
    "nested deeply": (b"[" * 100_000, b"", None),
    "no mapping": ([], b"", None),
    "a tensor that is none": ({"a": 1}, b"", None),
    "past the end": ({"a": entry(offsets=(0, 16), shape=(4,))}, b"\0" * 8, None),
    "before the beginning": ({"a": entry(offsets=(-8, 0))}, b"", None),
    "backwards": ({"a": entry(offsets=(8, 0))}, b"\0" * 8, None),
    "another size": ({"a": entry(shape=(3,))}, b"\0" * 8, None),
    "negative sizes": ({"a": entry(shape=(-1, -2))}, b"\0" * 8, None),
    "sizes that are no numbers": ({"a": entry(shape=(True, 2))}, b"\0" * 8, None),
    "sizes that overflow": ({"a": entry(shape=(2**62, 2**62), offsets=(0, 2**62))}, b"\0" * 8, None),
    "many dimensions": ({"a": entry(shape=(2, *(1,) * 1000))}, b"\0" * 8, None),
    "an unknown dtype": ({"a": entry(dtype="PICKLE")}, b"\0" * 8, None),
    "overlapping": ({"a": entry(), "b": entry(offsets=(4, 12))}, b"\0" * 12, None),
    "a hole": ({"a": entry(), "b": entry(offsets=(12, 20))}, b"\0" * 20, None),
    "bytes left over": ({"a": entry()}, b"\0" * 9, None),
    "the same name twice": (b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"a":1}', b"", None),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_header_that_lies_is_refused(tmp_path: Path, case: str) -> None:
    header, data, length = HOSTILE[case]
    write_raw(tmp_path / SINGLE_FILE, header, data, length)
    with pytest.raises(CheckpointError, match=r"damaged|has the dtype PICKLE"):
        open_safetensors(tmp_path)


def test_the_last_header_that_does_not_lie_is_read(tmp_path: Path) -> None:
    write_raw(tmp_path / SINGLE_FILE, {"a": entry(), "b": entry(offsets=(8, 16)), "__metadata__": {}}, b"\0" * 16)
    assert set(open_safetensors(tmp_path).tensors) == {"a", "b"}


def test_a_header_is_not_read_past_its_limit(tmp_path: Path) -> None:
    """The file is as large as its header says, and takes no space."""
    with (tmp_path / SINGLE_FILE).open("wb") as stream:
        stream.write(struct.pack("<Q", 2**33))
        stream.truncate(2**34)
    with pytest.raises(CheckpointError, match="cannot be 8589934592 bytes long"):
        open_safetensors(tmp_path)


@pytest.mark.parametrize("file", ["../a.safetensors", "/etc/a.safetensors", "a/b.safetensors", "a.bin", 3, ""])
def test_an_index_does_not_leave_its_folder(tmp_path: Path, file: Any) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()
    save_file({"a": torch.zeros(2)}, tmp_path / "a.safetensors")
    (inside / INDEX_FILE).write_text(json.dumps({"weight_map": {"a": file}}))
    with pytest.raises(CheckpointError, match="which is none beside it"):
        open_safetensors(inside)


@pytest.mark.parametrize(
    ("index", "problem"),
    [
        ({"weight_map": {"a": "x.safetensors", "b": "x.safetensors"}}, "do not agree on where b is"),
        ({"weight_map": {"a": "y.safetensors"}}, "cannot be read"),
        ({"weight_map": []}, "no weight_map"),
        ([], "damaged"),
    ],
)
def test_an_index_that_is_wrong_is_refused(tmp_path: Path, index: Any, problem: str) -> None:
    save_file({"a": torch.zeros(2)}, tmp_path / "x.safetensors")
    (tmp_path / INDEX_FILE).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=problem):
        open_safetensors(tmp_path)


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="has neither"):
        open_safetensors(tmp_path)
