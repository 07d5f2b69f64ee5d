"""Tensors on disk without ranks: regions, the distributed format's files, other names, coverage, and going on."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as torch_checkpoint
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pretrain.checkpoint.index import read_index
from pretrain.checkpoint.store.coverage import coverage_problem
from pretrain.checkpoint.store.files import JOURNAL_FILE, WrittenFile, finished_files, write_files
from pretrain.checkpoint.store.selected import Joined, Padded, Selected
from pretrain.checkpoint.store.tensors import Region, TensorInfo, overlap, pieces
from pretrain.checkpoint.store.torch_dist import TorchDistReader, open_torch_dist
from pretrain.checkpoint.store.torch_dist_writer import TorchDistFile, pack, parts_of, write_index
from pretrain.errors import CheckpointError

SHAPES = st.lists(st.integers(1, 5), min_size=0, max_size=4).map(tuple)


@dataclass
class InMemory:
    """A reader of tensors that are at hand; counts the elements that it was asked for."""

    values: Mapping[str, Tensor]
    asked: list[Region] = field(default_factory=list)

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return {name: TensorInfo(tuple(value.shape), value.dtype) for name, value in self.values.items()}

    def read(self, region: Region) -> Tensor:
        self.asked.append(region)
        return cut(self.values[region.name], region).clone()


def cut(tensor: Tensor, region: Region) -> Tensor:
    return tensor[tuple(slice(start, start + size) for start, size in zip(region.offset, region.shape, strict=True))]


def positions(region: Region) -> set[tuple[int, ...]]:
    return set(
        itertools.product(
            *(range(start, start + size) for start, size in zip(region.offset, region.shape, strict=True))
        )
    )


@st.composite
def regions(draw: st.DrawFn, shape: tuple[int, ...]) -> Region:
    starts = [draw(st.integers(0, size - 1)) for size in shape]
    return Region(
        "x", tuple(starts), tuple(draw(st.integers(1, size - start)) for start, size in zip(starts, shape, strict=True))
    )


@given(st.data(), SHAPES, st.integers(1, 40))
def test_pieces_are_the_region_in_row_major_order_and_small_enough(
    data: st.DataObject, shape: tuple[int, ...], limit: int
) -> None:
    region = data.draw(regions(shape))
    tensor = torch.arange(math.prod(shape)).view(shape)
    parts = list(pieces(region, limit))
    assert all(part.numel <= limit for part in parts)
    assert torch.equal(torch.cat([cut(tensor, part).reshape(-1) for part in parts]), cut(tensor, region).reshape(-1))


@given(st.data(), SHAPES)
def test_an_overlap_is_what_two_regions_have_in_common(data: st.DataObject, shape: tuple[int, ...]) -> None:
    first, second = data.draw(regions(shape)), data.draw(regions(shape))
    common = overlap(first, second)
    assert (positions(common) if common is not None else set()) == positions(first) & positions(second)


def tensors_of_all_kinds() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "banks.0.values": torch.randn(301, 12, generator=generator),
        "keys": torch.randn(2, 3, 7, 5, 2, generator=generator).bfloat16(),
        "norm": torch.randn(9, generator=generator),
        "count": torch.tensor(7),
    }


def write_all(folder: Path, tensors: Mapping[str, Tensor], files: list[TorchDistFile]) -> list[WrittenFile]:
    reader = InMemory(tensors)
    written = write_files(
        files, folder, reader, request={}, num_workers=2, max_piece_bytes=100, on_bytes=lambda _: None
    )
    write_index(folder, reader.tensors, files, written)
    return written


@pytest.fixture
def written(tmp_path: Path) -> tuple[Path, dict[str, Tensor]]:
    """A checkpoint whose table is in three groups of columns, in parts of at most 1,000 bytes and several files."""
    tensors = tensors_of_all_kinds()
    infos = InMemory(tensors).tensors
    parts = [
        piece
        for name, info in infos.items()
        for part in parts_of(name, info, 3 if name.startswith("banks") else 1)
        for piece in pieces(part, 1000 // info.dtype.itemsize)
    ]
    write_all(tmp_path, tensors, pack("__0", parts, infos, 4000))
    return tmp_path, tensors


def test_pytorch_reads_what_was_written(written: tuple[Path, dict[str, Tensor]]) -> None:
    folder, tensors = written
    state = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    torch_checkpoint.load(state, storage_reader=torch_checkpoint.FileSystemReader(folder), no_dist=True)
    assert len(list(folder.glob("*.distcp"))) > 2
    for name, tensor in tensors.items():
        assert torch.equal(state[name], tensor), name


@given(data=st.data())
def test_any_region_can_be_read(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    tensor = torch.arange(7 * 12 * 3).view(7, 12, 3)
    folder = tmp_path_factory.mktemp("regions")
    info = TensorInfo((7, 12, 3), tensor.dtype)
    parts = [piece for part in parts_of("x", info, 2) for piece in pieces(part, 17)]
    write_all(folder, {"x": tensor}, pack("__0", parts, {"x": info}, 2**20))
    region = data.draw(regions((7, 12, 3)))
    assert torch.equal(open_torch_dist(folder).read(region), cut(tensor, region))


def test_what_pytorch_wrote_is_read(tmp_path: Path) -> None:
    tensors = tensors_of_all_kinds()
    torch_checkpoint.save(dict(tensors), storage_writer=torch_checkpoint.FileSystemWriter(tmp_path), no_dist=True)
    reader = open_torch_dist(tmp_path)
    assert reader.tensors == InMemory(tensors).tensors
    for name, info in reader.tensors.items():
        assert torch.equal(reader.read(info.whole(name)), tensors[name])


def test_a_missing_part_and_an_unknown_name_are_errors(tmp_path: Path) -> None:
    files = [TorchDistFile("__0_0.distcp", (Region("x", (0, 0), (3, 2)),), 24)]
    write_all(tmp_path, {"x": torch.ones(4, 2)}, files)
    reader = open_torch_dist(tmp_path)
    assert reader.read(Region("x", (1, 0), (2, 2))).shape == (2, 2)
    with pytest.raises(CheckpointError, match=r"of 4 elements of x at \(2, 0\) it holds 2"):
        reader.read(Region("x", (2, 0), (2, 2)))
    with pytest.raises(CheckpointError, match="has no tensor y"):
        reader.read(Region("y", (0,), (1,)))


def test_a_part_that_is_not_where_the_index_says_is_an_error(written: tuple[Path, dict[str, Tensor]]) -> None:
    folder, _ = written
    index = read_index(folder)
    (other,) = index.items["count"]
    items = {**index.items, "norm": tuple(replace(other, region=item.region) for item in index.items["norm"])}
    with pytest.raises(CheckpointError, match="not the part of norm that the index says"):
        TorchDistReader(folder, replace(index, items=items)).read(Region("norm", (0,), (9,)))


@given(data=st.data())
def test_coverage_is_every_element_exactly_once(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple))
    parts = data.draw(st.lists(regions(shape), max_size=6))
    counts = torch.zeros(shape, dtype=torch.int64)
    for part in parts:
        cut(counts, part).add_(1)
    problem = coverage_problem(TensorInfo(shape, torch.float32), parts)
    assert (problem is None) == bool((counts == 1).all())
    if problem is not None:
        assert ("twice" in problem) == bool((counts > 1).any())


def test_a_part_outside_of_its_tensor_is_told() -> None:
    problem = coverage_problem(TensorInfo((4, 4), torch.float32), [Region("x", (0, 2), (4, 4))])
    assert problem == "a part of (4, 4) at (0, 2) lies outside of its shape (4, 4)"


def test_a_selection_renames_and_casts() -> None:
    reader = Selected(InMemory({"main": torch.tensor([1.0, 2.00001])}), {"weight": "main"}, {"weight": torch.bfloat16})
    assert reader.tensors == {"weight": TensorInfo((2,), torch.bfloat16)}
    assert reader.read(Region("weight", (1,), (1,))).tolist() == [2.0]
    with pytest.raises(CheckpointError, match="no tensor main"):
        reader.read(Region("main", (0,), (1,)))


def test_padding_is_zero_behind_what_is_there() -> None:
    reader = Padded(InMemory({"x": torch.ones(3, 2)}), {"x": (5, 2)})
    assert reader.tensors["x"].shape == (5, 2)
    assert reader.read(Region("x", (2, 0), (3, 1))).tolist() == [[1], [0], [0]]
    assert reader.read(Region("x", (4, 0), (1, 2))).tolist() == [[0, 0]]
    assert reader.read(Region("x", (0, 1), (3, 1))).tolist() == [[1], [1], [1]]


def test_of_two_readers_the_first_one_counts() -> None:
    first, second = InMemory({"x": torch.zeros(1)}), InMemory({"x": torch.ones(1), "y": torch.ones(1)})
    reader = Joined(first, second, ["x", "y"])
    assert [float(reader.read(Region(name, (0,), (1,)))) for name in "xy"] == [0, 1]
    with pytest.raises(CheckpointError, match="no tensor z"):
        reader.read(Region("z", (0,), (1,)))


class Stop(Exception):
    pass


@dataclass
class BreakingReader(InMemory):
    """Fails when it is asked for a tensor."""

    breaks_at: str = ""

    def read(self, region: Region) -> Tensor:
        if region.name == self.breaks_at:
            raise Stop
        return super().read(region)


def test_what_was_finished_is_kept_and_the_rest_written(tmp_path: Path) -> None:
    tensors = {name: torch.randn(8) for name in ("a", "b", "c")}
    files = [TorchDistFile(f"{name}.distcp", (Region(name, (0,), (8,)),), 32) for name in tensors]
    reader = BreakingReader(tensors, breaks_at="c")
    arguments = {"num_workers": 1, "max_piece_bytes": 100, "on_bytes": lambda _: None}
    with pytest.raises(Stop):
        write_files(files, tmp_path, reader, request={"of": 1}, **arguments)
    assert set(finished_files(tmp_path, {"of": 1})) == {"a.distcp", "b.distcp"}
    assert finished_files(tmp_path, {"of": 2}) == {}
    # A line that was cut off, and a file that is not as it was noted.
    with (tmp_path / JOURNAL_FILE).open("a") as stream:
        stream.write('{"name": "c.dis')
    (tmp_path / "b.distcp").write_bytes(b"short")
    progress: list[int] = []
    reader = BreakingReader(tensors)
    write_files(files, tmp_path, reader, request={"of": 1}, **{**arguments, "on_bytes": progress.append})
    assert sorted(region.name for region in reader.asked) == ["b", "c"]
    assert sum(progress) == 96
    assert set(finished_files(tmp_path, {"of": 1})) == {"a.distcp", "b.distcp", "c.distcp"}
