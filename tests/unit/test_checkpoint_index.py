"""An index is plain values that hold together, or it is refused before any tensor is read."""

from __future__ import annotations

import pickle
import re
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_checkpoint
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex

from pretrain.checkpoint.derived import SCALE_PREFIX, derived_weights, is_moment, main_name
from pretrain.checkpoint.index import Index, StoredItem, StoredTensor, read_index
from pretrain.checkpoint.index_writer import pickled_index
from pretrain.checkpoint.store.tensors import Region, TensorInfo
from pretrain.errors import CheckpointError


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A checkpoint as PyTorch writes it: `a` of [3, 2] fp32, `b` of [4] bf16."""
    folder = tmp_path / "saved"
    state = {"a": torch.zeros(3, 2), "b": torch.zeros(4, dtype=torch.bfloat16)}
    torch_checkpoint.save(state, checkpoint_id=folder, no_dist=True)
    return folder


def test_pytorchs_index_becomes_plain_values(saved: Path) -> None:
    index = read_index(saved)
    assert index.tensors == {"a": TensorInfo((3, 2), torch.float32), "b": TensorInfo((4,), torch.bfloat16)}
    assert [item.region for items in index.items.values() for item in items] == [
        Region("a", (0, 0), (3, 2)),
        Region("b", (0,), (4,)),
    ]
    (file,) = {item.file for items in index.items.values() for item in items}
    sizes = sum(item.num_bytes for items in index.items.values() for item in items)
    assert sizes == (saved / file).stat().st_size


def test_paths_of_every_python_are_passed_over(saved: Path) -> None:
    """Python 3.13 pickles those of POSIX by another module."""
    metadata = pickle.loads((saved / ".metadata").read_bytes())
    as_text = pickle.dumps(metadata, protocol=2)
    before = read_index(saved)
    for module in (b"pathlib", b"pathlib._local"):
        written, num = re.subn(rb"cpathlib(\._local)?\nPosixPath\n", b"c" + module + b"\nPosixPath\n", as_text)
        assert num == 1
        (saved / ".metadata").write_bytes(written)
        assert read_index(saved) == before


def test_ours_is_read_by_us_and_by_pytorch(tmp_path: Path) -> None:
    table = torch.arange(12.0).view(4, 3)
    parts = {Region("table", (0, 0), (1, 3)): table[:1], Region("table", (1, 0), (3, 3)): table[1:]}
    items, start = [], 0
    with (tmp_path / "some.distcp").open("wb") as file:
        for region, part in parts.items():
            torch.save(part.clone(), file)
            items.append(StoredItem("some.distcp", start, file.tell() - start, region))
            start = file.tell()
    tensors = {"table": TensorInfo((4, 3), torch.float32)}
    (tmp_path / ".metadata").write_bytes(pickled_index(tensors, reversed(items)))
    assert read_index(tmp_path) == Index({"table": StoredTensor((4, 3), "float32")}, {"table": tuple(items)}, {})
    found = {"table": torch.empty(4, 3)}
    torch_checkpoint.load(found, checkpoint_id=tmp_path, no_dist=True)
    assert torch.equal(found["table"], table)


def place(**changes: Any) -> Callable[[Metadata], None]:
    """Other storage for `a`."""

    def change(metadata: Metadata) -> None:
        for name, value in changes.items():
            setattr(metadata.storage_data[MetadataIndex("a", (0, 0))], name, value)

    return change


def shaped(size: tuple[int, ...], *parts: tuple[tuple[int, ...], tuple[int, ...]]) -> Callable[[Metadata], None]:
    """Another shape, or other parts, for `a`."""

    def change(metadata: Metadata) -> None:
        entry: Any = metadata.state_dict_metadata["a"]
        entry.size = torch.Size(size)
        entry.chunks = [ChunkStorageMetadata(torch.Size(start), torch.Size(shape)) for start, shape in parts]

    return change


def lost(metadata: Metadata) -> None:
    del metadata.storage_data[MetadataIndex("a", (0, 0))]


HUGE = 2**50
REFUSED = {
    "the folder above": (place(relative_path="../other/__0_0.distcp"), "which is no file of this folder"),
    "the folder itself": (place(relative_path=".."), "which is no file of this folder"),
    "an absolute path": (place(relative_path="/etc/passwd"), "which is no file of this folder"),
    "a folder below": (place(relative_path="sub/__0_0.distcp"), "which is no file of this folder"),
    "a path that is none": (place(relative_path=7), "which is no file of this folder"),
    "no such file": (place(relative_path="__9_9.distcp"), "No such file"),
    "past the end": (place(length=10**6), "which has"),
    "before the start": (place(offset=-1), "would be at -1"),
    "a negative length": (place(length=-1), "would be at"),
    "transformed": (place(transform_descriptors=["zstd"]), "which nothing here undoes"),
    "nowhere": (lost, "is in no file"),
    "more than its bytes": (shaped((HUGE, 2), ((0, 0), (HUGE, 2))), "elements of torch.float32 in"),
    "more than any memory": (shaped((2**40, 2**40), ((0, 0), (3, 2))), "larger than any memory"),
    "outside of the tensor": (shaped((2, 2), ((0, 0), (3, 2))), "is not inside of"),
    "of other dimensions": (shaped((3, 2), ((0,), (3,))), "is not inside of"),
    "twice": (shaped((3, 2), ((0, 0), (3, 2)), ((0, 0), (3, 2))), "more than its shape"),
    "a negative size": (shaped((3, -2), ((0, 0), (3, 2))), "shape or offset"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_index_that_contradicts_itself_or_the_files_is_refused(saved: Path, name: str) -> None:
    change, message = REFUSED[name]
    metadata = pickle.loads((saved / ".metadata").read_bytes())
    change(metadata)
    (saved / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=re.escape(message)):
        read_index(saved)


def reduce_again_and_again(function: bytes, first: bytes, times: int) -> bytes:
    """A pickle that applies a function to its own result, memoised, over and over: [.., f(x), f(f(x)), ..]."""
    steps = b"".join(b"c" + function + b"\n" + b"(g0\nVhex\ntRp0\n0" for _ in range(times))
    return first + b"p0\n0" + steps + b"g0\n."


def many_copies(function: bytes, times: int) -> bytes:
    """A pickle of a few kilobytes that keeps thousands of copies of one of its values, of a hundred kilobytes."""
    text = b"V" + b"x" * 100_000 + b"\np0\n0"
    return text + b"(" + b"".join(b"c" + function + b"\n(g0\ntR" for _ in range(times)) + b"l."


BOMBS = {
    "doubled and doubled": reduce_again_and_again(b"_codecs\nencode", b"Vab\n", 40),
    "copies as lists": many_copies(b"builtins\nlist", 20_000),
    "copies as tuples": many_copies(b"builtins\ntuple", 20_000),
    "copies as sets": many_copies(b"builtins\nset", 20_000),
    "copies as sizes": many_copies(b"torch\nSize", 20_000),
    "fields of fields": b"}p0\n0"
    + b"(g0\n"
    + b"".join(b"Vk%d\nI1\n" % key for key in range(50_000))
    + b"u0"
    + b"("
    + b"ctorch.distributed.checkpoint.metadata\nMetadataIndex\n)\x81g0\nb" * 20_000
    + b"l.",
}


@pytest.mark.parametrize("name", BOMBS)
def test_an_index_cannot_ask_for_more_memory_than_an_index_needs(saved: Path, name: str) -> None:
    (saved / ".metadata").write_bytes(BOMBS[name])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CheckpointError, match="can be trusted"):
        read_index(saved)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300_000


def test_weights_follow_from_their_main_weights_unless_they_are_there() -> None:
    names = ["a", main_name("a"), main_name("b"), f"{SCALE_PREFIX}b", "optimizer.state.exp_avg.b", "buffer"]
    assert derived_weights(names) == {"b": "optimizer.state.param.b"}
    assert [name for name in names if is_moment(name)] == ["optimizer.state.exp_avg.b"]
