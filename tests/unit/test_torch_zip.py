"""Files of `torch.save`, read region by region and without trust, and written so that `torch.load` reads them."""

from __future__ import annotations

import argparse
import enum
import io
import os
import pathlib
import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pretrain.checkpoint.store.lazy_tensor import LazyTensor, fits
from pretrain.checkpoint.store.tensors import Region, TensorInfo
from pretrain.checkpoint.store.torch_pickle import Inert, Settings
from pretrain.checkpoint.store.torch_zip import open_zip
from pretrain.checkpoint.store.torch_zip_writer import TensorPlaceholder, write_zip
from pretrain.errors import CheckpointError

_BASE = torch.arange(6 * 10, dtype=torch.float32).reshape(6, 10)
_TENSORS = {
    "contiguous": _BASE,
    "bf16": _BASE.bfloat16(),
    "fp16": _BASE.half(),
    "fp64": _BASE.double(),
    "int64": _BASE.long(),
    "bool": _BASE > 7,
    "uint8": _BASE.to(torch.uint8),
    "uint16": _BASE.to(torch.uint16),
    "float8": _BASE.to(torch.float8_e4m3fn),
    "complex": torch.complex(_BASE, -_BASE),
    "transposed": _BASE.clone().t(),
    "columns": _BASE[:, 3:5],
    "every third": _BASE[1::2, ::3],
    "a column": _BASE[:, 4],
    "three dimensions": torch.arange(4 * 5 * 6).reshape(4, 5, 6).permute(2, 0, 1),
    "scalar": torch.tensor(1.5),
    "a view's scalar": _BASE[2, 3],
    "empty": torch.empty(0, 3),
    "parameter": torch.nn.Parameter(_BASE.clone()),
}


def saved(path: Path, value: object) -> Path:
    torch.save(value, path)
    return path


def bits(tensor: Tensor) -> list[int]:
    """All of a tensor's bytes."""
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach()).view(-1).view(torch.uint8).tolist()


@pytest.mark.parametrize("name", _TENSORS)
def test_whole_tensors_are_what_was_saved(name: str, tmp_path: Path) -> None:
    tensor = _TENSORS[name]
    lazy = open_zip(saved(tmp_path / "t.pt", {"t": tensor}))["t"]
    assert (lazy.shape, lazy.dtype) == (tuple(tensor.shape), tensor.dtype)
    read = lazy.read()
    assert read.is_contiguous()
    assert read.dtype == tensor.dtype
    assert bits(read) == bits(tensor)


@given(data=st.data())
def test_any_rectangle_of_any_view(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    tensor = data.draw(st.sampled_from([each for each in _TENSORS.values() if each.dim() >= 1 and each.numel()]))
    tensor = tensor.detach()
    lazy = open_zip(saved(tmp_path_factory.mktemp("zip") / "t.pt", tensor))
    bounds = [sorted(data.draw(st.tuples(*[st.integers(0, size)] * 2))) for size in tensor.shape]
    offset = tuple(start for start, _ in bounds)
    shape = tuple(stop - start for start, stop in bounds)
    expected = tensor[tuple(slice(start, stop) for start, stop in bounds)]
    read = lazy.read(offset, shape)
    assert read.shape == expected.shape
    assert bits(read) == bits(expected)


@pytest.mark.parametrize("span_bytes", [1, 64, 200])
@pytest.mark.parametrize("name", [name for name, tensor in _TENSORS.items() if tensor.dim() >= 1])
def test_the_bound_on_gaps_read_along_changes_nothing(
    name: str, span_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pretrain.checkpoint.store.lazy_tensor._SPAN_BYTES", span_bytes)
    tensor = _TENSORS[name].detach()
    lazy = open_zip(saved(tmp_path / "t.pt", tensor))
    assert bits(lazy.read()) == bits(tensor)


def test_a_rectangle_outside_is_refused(tmp_path: Path) -> None:
    lazy = open_zip(saved(tmp_path / "t.pt", _BASE))
    with pytest.raises(ValueError, match="not inside"):
        lazy.read((5, 0), (2, 10))
    with pytest.raises(ValueError, match="not inside"):
        lazy.read((-1, 0), (2, 10))


class _Colour(enum.Enum):
    RED = 1


def test_other_objects_are_inert(tmp_path: Path) -> None:
    tree = open_zip(
        saved(
            tmp_path / "t.pt",
            {
                "args": argparse.Namespace(width=8, path=pathlib.PurePosixPath("/a")),
                "dtype": torch.bfloat16,
                "rng": [{"np": ("MT19937", np.arange(3)), "torch": torch.ByteTensor([1, 2])}],
                "ordered": OrderedDict(a=1),
                "plain": [None, True, 1, 2.5, "é", b"\xff\x00", (1,), {1, 2}, torch.Size([2, 3])],
                "enum": _Colour.RED,
                "extra": io.BytesIO(b"x"),
            },
        )
    )
    args = tree["args"]
    assert isinstance(args, Settings)
    assert args.values["width"] == 8
    assert isinstance(path := args.values["path"], Inert)
    assert (path.module, path.name) == (pathlib.PurePosixPath.__module__, "PurePosixPath")
    assert tree["dtype"] is torch.bfloat16
    assert tree["rng"][0]["torch"].read().tolist() == [1, 2]
    assert tree["ordered"] == {"a": 1}
    assert tree["plain"] == [None, True, 1, 2.5, "é", b"\xff\x00", (1,), {1, 2}, (2, 3)]
    assert tree["enum"].name == "_Colour"
    assert isinstance(tree["extra"], Inert)


class _Call:
    def __init__(self, function: Callable[..., Any], *arguments: Any, state: Any = None) -> None:
        self.reduced = (function, arguments) if state is None else (function, arguments, state)

    def __reduce__(self) -> Any:
        return self.reduced


def test_nothing_is_called(tmp_path: Path) -> None:
    mark = tmp_path / "called"
    value = open_zip(saved(tmp_path / "t.pt", [_Call(os.mkdir, str(mark)), _Call(eval, "1 / 0"), {"a": _BASE}]))
    assert not mark.exists()
    assert [each.name for each in value[:2]] == ["mkdir", "eval"]
    assert value[2]["a"].read().equal(_BASE)


def test_a_tensor_cannot_be_led_elsewhere(tmp_path: Path) -> None:
    call = _Call(
        torch._utils._rebuild_tensor_v2, _BASE.storage(), 0, (2,), (1,), False, OrderedDict(), state={"path": 1}
    )
    with pytest.raises(CheckpointError, match="cannot be changed"):
        open_zip(saved(tmp_path / "t.pt", call))


@pytest.mark.parametrize(
    ("first", "shape", "strides"),
    [
        (55, (6,), (1,)),
        (-1, (2,), (1,)),
        (0, (2,), (-1,)),
        (0, (1 << 62, 2), (0, 1)),
        (0, (7, 10), (10, 1)),
        (0, (2, 2), (1,)),
        (0, (-3,), (1,)),
        (0, (1,) * 65, (1,) * 65),
        (0, (2.0,), (1,)),
    ],
)
def test_a_tensor_beyond_its_storage_is_refused(
    first: int, shape: tuple[int, ...], strides: tuple[int, ...], tmp_path: Path
) -> None:
    call = _Call(torch._utils._rebuild_tensor_v2, _BASE.storage(), first, shape, strides, False, OrderedDict())
    with pytest.raises(CheckpointError, match=r"t\.pt"):
        open_zip(saved(tmp_path / "t.pt", {"t": call}))


def test_a_number_of_a_remembered_object_takes_no_memory(tmp_path: Path) -> None:
    # PROTO 2, NONE, LONG_BINPUT 2^31 - 1, STOP.
    path = rewritten(saved(tmp_path / "t.pt", None), "data.pkl", b"\x80\x02Nr\xff\xff\xff\x7f.")
    with pytest.raises(CheckpointError, match="numbers an object 2147483647"):
        open_zip(path)


def rewritten(path: Path, name: str, content: bytes | None, compression: int = zipfile.ZIP_STORED) -> Path:
    """The zip with an entry's content changed; without the entry, if None."""
    with zipfile.ZipFile(path) as archive:
        entries = {each: archive.read(each) for each in archive.namelist()}
    with zipfile.ZipFile(path, "w", compression) as archive:
        for each, old in entries.items():
            if not each.endswith(f"/{name}"):
                archive.writestr(each, old)
            elif content is not None:
                archive.writestr(each, content)
    return path


def _truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-30])


def _not_a_zip(path: Path) -> None:
    path.write_bytes(pickle.dumps({"a": 1}))


def _no_file(path: Path) -> None:
    path.unlink()


def _no_pickle(path: Path) -> None:
    rewritten(path, "data.pkl", None)


def _no_storage(path: Path) -> None:
    rewritten(path, "data/0", None)


def _short_storage(path: Path) -> None:
    rewritten(path, "data/0", b"\0" * 236)


def _compressed(path: Path) -> None:
    rewritten(path, "version", b"3\n", zipfile.ZIP_DEFLATED)


def _big_endian(path: Path) -> None:
    rewritten(path, "byteorder", b"big")


def _damaged_pickle(path: Path) -> None:
    rewritten(path, "data.pkl", b"\x80\x02}q\x00X\xff")


def _two_folders(path: Path) -> None:
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("elsewhere/data/9", b"1")


def _an_entry_twice(path: Path) -> None:
    with zipfile.ZipFile(path, "a") as archive, pytest.warns(UserWarning, match="Duplicate"):
        archive.writestr(archive.namelist()[0], b"1")


def _longer_than_the_file(path: Path) -> None:
    """The central directory says that a storage has a terabyte."""
    content = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        size = archive.getinfo(f"{archive.namelist()[0].partition('/')[0]}/data/0").file_size
    at = content.rindex(struct.pack("<LL", size, size))
    path.write_bytes(content[:at] + struct.pack("<LL", 1 << 30, 1 << 30) + content[at + 8 :])


def _another_name(path: Path) -> None:
    """The central directory's entry does not lead to the storage of its name."""
    content = path.read_bytes()
    at = content.index(b"/data/0")
    path.write_bytes(content[:at] + b"/data/1" + content[at + 7 :])


_DAMAGE = [
    _truncated,
    _not_a_zip,
    _no_file,
    _no_pickle,
    _no_storage,
    _short_storage,
    _compressed,
    _big_endian,
    _damaged_pickle,
    _two_folders,
    _an_entry_twice,
    _longer_than_the_file,
    _another_name,
]


@pytest.mark.parametrize("damage", _DAMAGE, ids=lambda each: each.__name__)
def test_damage_is_refused_by_name(damage: Callable[[Path], None], tmp_path: Path) -> None:
    path = saved(tmp_path / "t.pt", {"t": _BASE})
    damage(path)
    with pytest.raises(CheckpointError, match=str(path)):
        open_zip(path)


@given(at=st.integers(0, 10_000), bit=st.integers(0, 7))
def test_a_flipped_bit_raises_nothing_else(at: int, bit: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = saved(tmp_path_factory.mktemp("zip") / "t.pt", {"t": _BASE, "n": argparse.Namespace(a=1)})
    content = bytearray(path.read_bytes())
    content[at % len(content)] ^= 1 << bit
    path.write_bytes(content)
    try:
        tree = open_zip(path)
    except CheckpointError:
        return
    for value in tree.values() if isinstance(tree, dict) else ():
        if isinstance(value, LazyTensor):
            value.read()


def test_a_file_that_shrinks_under_its_reader(tmp_path: Path) -> None:
    path = saved(tmp_path / "t.pt", _BASE)
    lazy = open_zip(path)
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(CheckpointError, match="shorter"):
        lazy.read()
    path.unlink()
    with pytest.raises(CheckpointError, match="cannot be read"):
        lazy.read()


def test_one_of_several_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "items"
    places = []
    with path.open("wb") as file:
        for index in range(3):
            start = file.tell()
            torch.save(_BASE + index, file)
            places.append((start, file.tell() - start))
            file.write(b"between")
    for index, (start, length) in enumerate(places):
        assert open_zip(path, start, length).read((1, 2), (3, 4)).equal((_BASE + index)[1:4, 2:6])
    with pytest.raises(CheckpointError, match="items"):
        open_zip(path, places[1][0] + 1, places[1][1])
    with pytest.raises(CheckpointError, match="items"):
        open_zip(path, places[2][0], places[2][1] + 8)


def test_what_is_written_is_what_torch_loads(tmp_path: Path) -> None:
    tensors = {name: each.detach() for name, each in _TENSORS.items() if name not in ("uint16", "float8")}
    asked: list[Region] = []

    def read(region: Region) -> Tensor:
        asked.append(region)
        whole = tensors[region.name]
        return whole[tuple(slice(a, a + n) for a, n in zip(region.offset, region.shape, strict=True))]

    def stand_in(name: str) -> TensorPlaceholder:
        return TensorPlaceholder(name, TensorInfo(tuple(tensors[name].shape), tensors[name].dtype))

    tree = {"model": OrderedDict((name, stand_in(name)) for name in tensors), "iteration": 3}
    write_zip(tmp_path / "plain.pt", tree, read, max_elements=7)
    assert max(region.numel for region in asked) == 7
    loaded = torch.load(tmp_path / "plain.pt", weights_only=True)
    assert loaded["iteration"] == 3
    for name, tensor in tensors.items():
        assert loaded["model"][name].dtype == tensor.dtype
        assert loaded["model"][name].equal(tensor)
        assert open_zip(tmp_path / "plain.pt")["model"][name].read().equal(tensor)
    assert torch.load(tmp_path / "plain.pt", weights_only=True, mmap=True)["model"]["transposed"].data_ptr() % 64 == 0
    with pytest.raises(CheckpointError, match=r"plain\.pt cannot be written"):
        write_zip(tmp_path / "plain.pt", tree, read)


def test_storages_beyond_four_gibibytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The form of such entries, and of entries behind them, at sizes that a test can write."""
    monkeypatch.setattr("zipfile.ZIP64_LIMIT", 1000)
    big = torch.arange(2000, dtype=torch.float32)

    def read(region: Region) -> Tensor:
        return big[region.offset[0] : region.offset[0] + region.shape[0]]

    tree = {
        "big": TensorPlaceholder("big", TensorInfo((2000,), big.dtype)),
        "s": TensorPlaceholder("s", TensorInfo((3,), big.dtype)),
    }
    write_zip(tmp_path / "big.pt", tree, read)
    loaded, lazy = torch.load(tmp_path / "big.pt", weights_only=True), open_zip(tmp_path / "big.pt")
    for name, expected in (("big", big), ("s", big[:3])):
        assert loaded[name].equal(expected)
        assert lazy[name].read().equal(expected)
        assert lazy[name].start % 64 == 0


@pytest.mark.parametrize(
    ("shape", "strides", "first", "stored", "is_inside"),
    [
        ((), (), 2, 3, True),
        ((), (), 3, 3, False),
        ((1,), (1,), 3, 3, False),
        ((2, 3), (3, 1), 1, 7, True),
        ((2, 3), (3, 1), 2, 7, False),
        ((0, 3), (3, 1), 9, 3, True),
    ],
)
def test_a_tensor_ends_where_its_storage_does(
    shape: tuple[int, ...], strides: tuple[int, ...], first: int, stored: int, is_inside: bool
) -> None:
    assert fits(shape, strides, first, stored) == is_inside
