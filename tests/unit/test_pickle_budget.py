"""Pickles that ask for more than they hold are refused before they are loaded, and all others are not."""

from __future__ import annotations

import argparse
import io
import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_checkpoint
from hypothesis import given
from hypothesis import strategies as st

from pretrain.checkpoint.index import read_index
from pretrain.checkpoint.pickle_budget import check_budget
from pretrain.checkpoint.safe_metadata import check_small_files
from pretrain.checkpoint.store.torch_zip import open_zip
from pretrain.errors import CheckpointError

# `Vtext\n`, `I1\n` and `(`, `t`: of protocol 0. `\x85` to `\x87`: tuples of the last one to three. `q`, `h`: remember, take.
DOUBLED = b"I1\n" + b"".join(b"q%ch%c\x86" % (number, number) for number in range(60))
TEXT = b"V" + b"x" * 100_000 + b"\nq\x000"
CLASS = b"ctorch\nFloatStorage\n"
BOMBS = {
    "copies of a text as bytes": TEXT + b"(" + b"c_codecs\nencode\n(h\x00Vlatin1\ntR" * 3_000 + b"t.",
    "bytes as sizes": b"B"
    + struct.pack("<I", 100_000)
    + bytes(100_000)
    + b"q\x000("
    + b"ctorch\nSize\nh\x00\x85R" * 9_000
    + b"t.",
    "a tuple as a key": b"}" + DOUBLED + b"I1\ns.",
    "a tuple in a set": b"\x8f(" + DOUBLED + b"\x90.",
    "a frozen set": b"(" + DOUBLED + b"\x91.",
    "a set of a list": b"cbuiltins\nset\n(]" + DOUBLED + b"atR.",
    "a persistent id": DOUBLED + b"Q.",
    "a persistent id that names a tuple": b"(Vstorage\n" + CLASS + DOUBLED + b"Vcpu\nI1\ntQ.",
    "a shape": b"ctorch._utils\n_rebuild_tensor_v2\n((Vstorage\n"
    + CLASS
    + b"V0\nVcpu\nI1\ntQI0\n"
    + DOUBLED
    + b"(I1\nttR.",
    "dictionaries of dictionaries": b"}q\x00"
    + b"".join(b"0}q%c(Va\nh%cVb\nh%cu" % (n + 1, n, n) for n in range(60))
    + b".",
    # Each is taken while there is nothing in it.
    "filled from the other end": b"".join(b"]q%c0" % n for n in range(60))
    + b"".join(b"h%c(h%ch%ce0" % (n, n + 1, n + 1) for n in range(59))
    + b"h\x00.",
    "duplicates on the stack": b"I1\n" + b"2\x86" * 60 + b"}Va\ns.",
    "tuples in tuples": b"I1\n" + b"\x85" * 100_000 + b"}Va\ns.",
    "lists in lists": b"(l" * 100_000 + b"a" * 99_999 + b".",
    "a number": b"Nr\xff\xff\xff\x7f.",
    "a number as text": b"Np2147483647\n.",
    "an array of bytes": b"\x80\x05\x96" + struct.pack("<Q", 2**40) + b"x.",
}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    torch_checkpoint.save({"a": torch.zeros(3, 2)}, checkpoint_id=tmp_path, no_dist=True)
    (tmp_path / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    torch.save({}, tmp_path / "common.pt")
    return tmp_path


def zipped(path: Path, content: bytes, compression: int = zipfile.ZIP_STORED) -> Path:
    """A file of `torch.save` with a pickle in it."""
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("archive/data.pkl", content)
    return path


@pytest.mark.parametrize("name", BOMBS)
def test_no_reader_is_exhausted(saved: Path, name: str) -> None:
    (saved / ".metadata").write_bytes(BOMBS[name])
    with pytest.raises(CheckpointError, match="can be trusted"):
        read_index(saved)
    with pytest.raises(CheckpointError, match="that can be read"):
        open_zip(zipped(saved / "t.pt", BOMBS[name]))


@pytest.mark.parametrize(
    "name", sorted(BOMBS.keys() - {"a set of a list", "copies of a text as bytes", "bytes as sizes"})
)
def test_a_common_file_does_not_exhaust(saved: Path, name: str) -> None:
    check_small_files(saved)
    zipped(saved / "common.pt", BOMBS[name])
    with pytest.raises(CheckpointError, match=r"common\.pt is not a file"):
        check_small_files(saved)


def test_a_compressed_common_file_is_not_unpacked(saved: Path) -> None:
    content = pickle.dumps({"a": "x" * 2**20})
    zipped(saved / "common.pt", content)
    check_small_files(saved)
    zipped(saved / "common.pt", content, zipfile.ZIP_DEFLATED)
    with pytest.raises(CheckpointError, match=r"common\.pt is not a file"):
        check_small_files(saved)


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_are_refused_by_their_weight(name: str) -> None:
    with pytest.raises(
        pickle.UnpicklingError, match=r"again and again|in 200 others|numbers an object|ends before|grows"
    ):
        check_budget(BOMBS[name])


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner, inner) | st.frozensets(st.text())
    ),
)


@given(VALUES, st.integers(0, pickle.HIGHEST_PROTOCOL))
def test_any_plain_value_is_let_through(value: Any, protocol: int) -> None:
    check_budget(pickle.dumps([value, value, {"again": value}], protocol))


@pytest.mark.parametrize(
    "make",
    [
        lambda: {f"layers.{number}.weight": torch.zeros(2, 3) for number in range(2_000)},
        lambda: torch.nn.Transformer(8, 2, 2, 2, 8),
        lambda: torch.optim.AdamW(torch.nn.Linear(3, 3).parameters()).state_dict(),
        lambda: {
            "args": argparse.Namespace(a=[1, 2], b=None),
            "tuple key": {(1, "a"): 2},
            "set": {1, 2},
            "o": OrderedDict(a=1),
        },
        lambda: ["decoder.layers.0.self_attention.linear_qkv.weight" * 2] * 100_000,
    ],
    ids=["a state dict", "modules", "an optimizer", "other values", "a text that is used often"],
)
@pytest.mark.parametrize("protocol", [2, 4])
def test_what_torch_saves_is_let_through(make: Callable[[], Any], protocol: int) -> None:
    stream = io.BytesIO()
    torch.save(make(), stream, pickle_protocol=protocol)
    with zipfile.ZipFile(stream) as archive:
        check_budget(archive.read(next(name for name in archive.namelist() if name.endswith("data.pkl"))))


def test_every_cut_is_damage() -> None:
    content = pickle.dumps({"a": [1, 2.5, "text", (b"bytes", None)], "b": {1, 2}})
    check_budget(content)
    for size in range(len(content)):
        with pytest.raises(pickle.UnpicklingError):
            check_budget(content[:size])
