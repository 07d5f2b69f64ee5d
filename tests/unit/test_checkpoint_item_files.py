"""Files of items: hashed while they are written, readable as PyTorch's, and none of them half there without a word."""

from __future__ import annotations

import hashlib
import io
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from pretrain.checkpoint import item_files
from pretrain.checkpoint.item_files import FileWriters, HashedFile, files_of, write_file
from pretrain.checkpoint.store.tensors import Region

MAIN, MOMENT = "optimizer.state.param.w", "optimizer.state.exp_avg.w"


def items(name: str, sizes: list[int]) -> dict[Region, torch.Tensor]:
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    generator = torch.Generator().manual_seed(len(name))
    return {
        Region(name, (start,), (size,)): torch.randn(size, generator=generator)
        for start, size in zip(starts, sizes, strict=True)
    }


DATA = {**items(MAIN, [50, 30, 20, 10, 10]), **items(MOMENT, [40, 40, 40]), **items("buffer", [7])}


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_what_is_written_is_read_and_has_its_hash(tmp_path: Path, num_threads: int) -> None:
    files = FileWriters(tmp_path, 3, DATA, num_threads).wait()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(file.name for file in files)
    found = {}
    for file in files:
        content = (tmp_path / file.name).read_bytes()
        assert file.name.startswith("__3_")
        assert (file.recorded.num_bytes, file.recorded.sha256) == (len(content), hashlib.sha256(content).hexdigest())
        assert len({item.region.name == MOMENT for item in file.items}) == 1
        for item in file.items:
            part = content[item.start : item.start + item.num_bytes]
            found[item.region] = torch.load(io.BytesIO(part), weights_only=True)
    assert found.keys() == DATA.keys()
    assert all(torch.equal(found[region], DATA[region]) for region in DATA)


def test_files_have_about_the_same_bytes_and_moments_have_their_own() -> None:
    files = files_of(DATA, 2)
    sizes = [sum(item.numel for item in file) for file in files]
    assert sizes == [67, 60, 80, 40]
    assert [{item.name for item in file} for file in files] == [{MAIN, "buffer"}, {MAIN}, {MOMENT}, {MOMENT}]
    for file in files:
        assert file == sorted(file, key=lambda item: (item.name, item.offset))
    assert files_of({}, 2) == []


class Full:
    """A disk that takes so many bytes."""

    def __init__(self, space: int) -> None:
        self.space = space

    def open(self, path: Path, *arguments: Any, **keywords: Any) -> Any:
        stream = io.FileIO(path, "xb")
        disk = self

        class Limited:
            fileno, close = stream.fileno, stream.close

            def write(self, content: memoryview) -> int:
                if disk.space <= 0:
                    raise OSError(28, "No space left on device")
                written = stream.write(content[: disk.space])
                disk.space -= written
                return written

        return Limited()


@pytest.mark.parametrize("space", [0, 1, 700, 5000])
def test_a_full_disk_is_told_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, space: int) -> None:
    """Wherever in an archive that is: PyTorch raises something of its own on top."""
    disk = Full(space)
    monkeypatch.setattr(Path, "open", lambda path, *arguments, **keywords: disk.open(path))
    with pytest.raises(OSError, match="No space left on device"):
        write_file(tmp_path / "file", DATA, threading.Event())
    writers = FileWriters(tmp_path, 0, DATA, 2)
    with pytest.raises(OSError, match="No space left on device"):
        writers.wait()
    assert isinstance(writers.failure, OSError)


def test_portions_that_the_disk_takes_in_pieces_arrive_whole(tmp_path: Path) -> None:
    with HashedFile(tmp_path / "file") as file:
        for content in (b"abc", b"", b"defg"):
            assert file.write(content) == len(content)
        file._file.close()
        with pytest.raises(ValueError, match="closed"):
            file.write(b"x")
        file._file = (tmp_path / "file").open("ab", buffering=0)
    assert (tmp_path / "file").read_bytes() == b"abcdefg"
    assert file.recorded.num_bytes == 7


def test_who_gives_up_writes_no_further(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first item is being written when the save is abandoned."""
    begun, go_on = threading.Event(), threading.Event()
    serialised: list[int] = []

    def slowly(tensor: torch.Tensor) -> torch.Tensor:
        serialised.append(tensor.numel())
        begun.set()
        assert go_on.wait(60)
        return tensor.clone()

    monkeypatch.setattr(item_files, "with_storage_of_its_own", slowly)
    writers = FileWriters(tmp_path, 0, items(MAIN, [5, 4, 3, 2]), 1)
    assert begun.wait(60)
    assert not writers.are_done
    assert writers.failure is None
    writers.abandon()
    go_on.set()
    with pytest.raises(item_files.SaveAbandonedError):
        writers.wait()
    assert writers.are_done
    assert serialised == [5]


def test_the_reason_is_told_and_not_what_was_given_up_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first file is given up, as the second one cannot be written."""
    failed = threading.Event()
    write = item_files.write_file

    def second_fails(path: Path, data: Any, stop: threading.Event) -> Any:
        if path.name == "__0_1.distcp":
            raise OSError(5, "Input/output error")
        assert stop.wait(60)
        failed.set()
        return write(path, data, stop)

    monkeypatch.setattr(item_files, "write_file", second_fails)
    writers = FileWriters(tmp_path, 0, items(MAIN, [5, 4, 3, 2]), 2)
    with pytest.raises(OSError, match="Input/output error"):
        writers.wait()
    assert failed.is_set()
