"""Tensors of one format, read in rectangles from those of another."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pretrain.checkpoint.store.paired import PairedReader
from pretrain.checkpoint.store.tensors import Pair, Region, TensorInfo
from pretrain.errors import CheckpointError
from tests.in_memory import InMemory, part_of


def regions(name: str, shape: tuple[int, ...]) -> st.SearchStrategy[Region]:
    """Any rectangle of a tensor."""
    bounds = st.tuples(*[st.tuples(*[st.integers(0, size)] * 2).map(sorted) for size in shape])
    return bounds.map(lambda b: Region(name, tuple(a for a, _ in b), tuple(z - a for a, z in b)))


RESHAPED = [
    ((24,), (4, 6)),
    ((4, 6), (6, 4)),
    ((2, 3, 4), (6, 4)),
    ((6, 4), (2, 1, 3, 4)),
    ((1, 24), (24,)),
    ((), (1, 1)),
]


@pytest.mark.parametrize("shapes", RESHAPED + [(b, a) for a, b in RESHAPED], ids=str)
@given(data=st.data())
def test_any_rectangle_of_a_reshaped_tensor(
    shapes: tuple[tuple[int, ...], tuple[int, ...]], data: st.DataObject
) -> None:
    ours, theirs = shapes
    source = torch.arange(torch.Size(theirs).numel()).view(theirs)
    pair = Pair(TensorInfo(ours, source.dtype).whole("a"), TensorInfo(theirs, source.dtype).whole("b"))
    reader = PairedReader([pair], InMemory({"b": source}))
    region = data.draw(regions("a", ours))
    assert reader.read(region).equal(part_of(source.view(ours), region))


@given(data=st.data())
def test_a_tensor_of_several_parts(data: st.DataObject) -> None:
    """Two blocks of rows that change places, the first of which is stored in two halves of its columns."""
    whole = torch.arange(7 * 6).view(7, 6)
    source = {"low": whole[4:], "left": whole[:4, :3], "right": whole[:4, 3:]}
    pairs = [
        Pair(Region("a", (0, 0), (4, 3)), Region("left", (0, 0), (4, 3))),
        Pair(Region("a", (0, 3), (4, 3)), Region("right", (0, 0), (4, 3))),
        # A second copy, which is not read.
        Pair(Region("a", (0, 0), (4, 3)), Region("right", (0, 0), (4, 3))),
        Pair(Region("a", (4, 0), (3, 6)), Region("low", (0, 0), (3, 6))),
    ]
    reader = PairedReader(pairs, InMemory(source))
    assert reader.tensors == {"a": TensorInfo((7, 6), torch.int64)}
    region = data.draw(regions("a", (7, 6)))
    assert reader.read(region).equal(part_of(whole, region))


def test_what_is_missing_is_named() -> None:
    source = InMemory({"b": torch.zeros(4), "half": torch.zeros(4, dtype=torch.half)})
    pair = Pair(Region("a", (2,), (4,)), Region("b", (0,), (4,)))
    with pytest.raises(CheckpointError, match=r"'a'.*in no tensor"):
        PairedReader([pair], source).read(Region("a", (1,), (2,)))
    with pytest.raises(CheckpointError, match="no tensor x"):
        PairedReader([pair], source).read(Region("x", (0,), (1,)))
    with pytest.raises(CheckpointError, match="c is missing, from which a"):
        PairedReader([Pair(Region("a", (0,), (4,)), Region("c", (0,), (4,)))], source)
    with pytest.raises(CheckpointError, match=r"b has shape \(4,\), and a needs it up to \(5,\)"):
        PairedReader([Pair(Region("a", (0,), (4,)), Region("b", (1,), (4,)))], source)
    with pytest.raises(CheckpointError, match="several dtypes"):
        PairedReader([pair, Pair(Region("a", (6,), (4,)), Region("half", (0,), (4,)))], source)
