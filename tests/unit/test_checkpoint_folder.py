"""The folder of a run's checkpoints: what counts as complete, what is found, what is kept."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import platform
from collections.abc import Callable, Iterable
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.metadata import Metadata

from pretrain.checkpoint import folder as folders
from pretrain.checkpoint.hashes import RecordedFile, shares
from pretrain.checkpoint.newest import damaged_files, newest_complete, the_newest
from pretrain.errors import CheckpointError
from pretrain.state import RunState


def write(folder: Path, step: int, content: bytes = b"weights") -> Path:
    path = folders.start_writing(folder, step)
    (path / "__0_0.distcp").write_bytes(content)
    (path / ".metadata").write_bytes(pickle.dumps(Metadata({})))
    torch.save({"content_metadata": {}}, path / "common.pt")
    (path / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    return folders.complete(
        folder,
        step,
        run={"step": step},
        rng={"seed": 1},
        config={"a": 1},
        versions={"torch": "2"},
        weights_dtype="bfloat16",
    )


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def step_names(steps: Iterable[int]) -> list[str]:
    return [f"step_{step:08d}" for step in steps]


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = write(tmp_path, 7)
    assert path == folders.step_folder(tmp_path, 7)
    saved = folders.read_state(path)
    assert (saved.path, saved.run, saved.config) == (path, RunState(step=7), {"a": 1})
    assert saved.weights_dtype == "bfloat16"
    names = ("__0_0.distcp", ".metadata", "common.pt", "metadata.json")
    contents = {name: (path / name).read_bytes() for name in names}
    hashes = {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
    assert saved.files == {name: RecordedFile(len(contents[name]), hashes[name]) for name in names}
    state = json.loads((path / folders.STATE_FILE).read_text())
    rest = json.dumps({key: value for key, value in state.items() if key != "sha256"}, sort_keys=True)
    assert state == {
        "format": 2,
        "run": {"step": 7},
        "rng": {"seed": 1},
        "config": {"a": 1},
        "versions": {"torch": "2"},
        "weights_dtype": "bfloat16",
        "files": {name: {"bytes": len(contents[name]), "sha256": hashes[name]} for name in names},
        "sha256": hashlib.sha256(rest.encode()).hexdigest(),
    }


def as_format_1(path: Path) -> None:
    """Write a checkpoint's `state.json` as it was before there were hashes."""
    state = json.loads((path / folders.STATE_FILE).read_text())
    del state["weights_dtype"], state["sha256"]
    sizes = {name: entry["bytes"] for name, entry in state["files"].items()}
    (path / folders.STATE_FILE).write_text(json.dumps({**state, "format": 1, "files": sizes}))


def test_format_1_is_read_and_knows_sizes_alone(tmp_path: Path) -> None:
    path = write(tmp_path, 7)
    as_format_1(path)
    saved = folders.read_state(path)
    assert saved.weights_dtype is None
    assert saved.files["__0_0.distcp"] == RecordedFile(7, None)
    (path / "__0_0.distcp").write_bytes(b"WEIGHTS")
    assert damaged_files(path) == []
    shorten(path)
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp has 1 bytes, and 7 bytes were written"):
        damaged_files(path)


def test_the_packages_that_wrote_it_are_named() -> None:
    found = folders.package_versions()
    assert found["python"] == platform.python_version()
    for package in ("torch", "megatron-core", "numpy"):
        assert found[package] == version(package)


def test_an_unfinished_one_is_never_found(tmp_path: Path) -> None:
    path = folders.start_writing(tmp_path, 3)
    (path / folders.STATE_FILE).write_text("{}")
    assert folders.list_checkpoints(tmp_path) == []
    assert newest_complete(tmp_path) == (None, [])


def test_starting_removes_what_an_interrupted_save_left(tmp_path: Path) -> None:
    kept = write(tmp_path, 2)
    for step in (3, 4):
        (folders.writing_folder(tmp_path, step) / "sub").mkdir(parents=True)
    path = folders.start_writing(tmp_path, 4)
    assert names(tmp_path) == [path.name, kept.name]
    assert list(path.iterdir()) == []


def test_a_step_that_is_saved_again_is_replaced(tmp_path: Path) -> None:
    write(tmp_path, 5, b"old")
    path = write(tmp_path, 5, b"newer")
    assert (path / "__0_0.distcp").read_bytes() == b"newer"
    assert names(tmp_path) == step_names([5])


def in_the_way(path: Path, what: str) -> None:
    if what == "a file":
        path.write_text("mine")
    elif what == "a link":
        path.symlink_to("nowhere")
    else:
        path.mkdir()
        (path / "notes.txt").write_text("mine")


@pytest.mark.parametrize("what", ["a file", "a link", "notes.txt"])
def test_what_is_no_checkpoint_is_never_replaced(tmp_path: Path, what: str) -> None:
    write(tmp_path, 3)
    path = folders.step_folder(tmp_path, 5)
    in_the_way(path, what)
    # Of no concern to a run that is past it.
    folders.refuse_taken_names(tmp_path, 5)
    with pytest.raises(CheckpointError, match=rf"step_00000005 .*{what}.*move it away"):
        folders.refuse_taken_names(tmp_path, 3)
    with pytest.raises(CheckpointError, match="move it away"):
        write(tmp_path, 5)
    assert os.path.lexists(path)
    assert not path.is_dir() or (path / "notes.txt").read_text() == "mine"


def test_later_checkpoints_may_be_replaced_whole_or_damaged(tmp_path: Path) -> None:
    for step in (4, 5, 6):
        write(tmp_path, step)
    (folders.step_folder(tmp_path, 5) / folders.STATE_FILE).unlink()
    (folders.step_folder(tmp_path, 6) / folders.STATE_FILE).write_bytes(b"\xff")
    folders.refuse_taken_names(tmp_path, 3)
    for step in (4, 5, 6):
        write(tmp_path, step)
    (tmp_path / ".writing_step_00000007").write_text("mine")
    with pytest.raises(CheckpointError, match=r"\.writing_step_00000007 is no folder"):
        folders.refuse_taken_names(tmp_path, 6)


def test_steps_of_any_length_are_in_order(tmp_path: Path) -> None:
    for step in (10**9, 3, 20):
        write(tmp_path, step)
    (tmp_path / "step_12").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    assert [path.name for path in folders.list_checkpoints(tmp_path)] == step_names([3, 20, 10**9])


def shorten(path: Path) -> None:
    (path / "__0_0.distcp").write_bytes(b"w")


def lengthen(path: Path) -> None:
    (path / "__0_0.distcp").write_bytes(b"weights and more")


def lose(path: Path) -> None:
    (path / "__0_0.distcp").unlink()


def lose_state(path: Path) -> None:
    (path / folders.STATE_FILE).unlink()


def edit_state(**changes: object) -> Callable[[Path], None]:
    def edit(path: Path) -> None:
        state = json.loads((path / folders.STATE_FILE).read_text())
        (path / folders.STATE_FILE).write_text(json.dumps(folders.sealed({**state, **changes})))

    edit.__name__ = f"state with {changes}"
    return edit


def binary_state(path: Path) -> None:
    (path / folders.STATE_FILE).write_bytes(b"\xff\xfe\x00")


def list_as_state(path: Path) -> None:
    (path / folders.STATE_FILE).write_text("[]")


def plant_code(path: Path) -> None:
    index = path / ".metadata"
    size = index.stat().st_size
    index.write_bytes(b"cos\nsystem\n."[:size].ljust(size, b"\0"))


def change_a_counter(path: Path) -> None:
    """One digit of what a run would go on from, in a file that is JSON still."""
    text = (path / folders.STATE_FILE).read_text()
    (path / folders.STATE_FILE).write_text(text.replace('"seed": 1', '"seed": 5'))
    assert (path / folders.STATE_FILE).read_text() != text


DAMAGES = (
    change_a_counter,
    shorten,
    lengthen,
    lose,
    lose_state,
    binary_state,
    list_as_state,
    edit_state(format=3),
    edit_state(weights_dtype="float32", format="2"),
    edit_state(run=[]),
    edit_state(run={"step": 8}),
    edit_state(run={"step": None}),
    edit_state(run={"step": 9, "num_epochs": 1}),
    edit_state(files=["__0_0.distcp"]),
    edit_state(files={"__0_0.distcp": "big"}),
    edit_state(files={"__0_0.distcp": {"bytes": 7}}),
    edit_state(files={"../notes.txt": {"bytes": 4, "sha256": ""}}),
    edit_state(files={"/etc/hostname": 4}),
    plant_code,
)


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_damage_is_reported_and_passed_over(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    older, newer = write(tmp_path, 6), write(tmp_path, 9)
    damage(newer)
    saved, problems = newest_complete(tmp_path)
    assert saved is not None
    assert saved.path == older
    assert len(problems) == 1
    assert str(newer) in problems[0]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_no_older_one_stands_in_for_the_newest_where_that_is_meant(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    oldest, older, newer = write(tmp_path, 3), write(tmp_path, 6), write(tmp_path, 9)
    assert the_newest(tmp_path) == folders.read_state(newer)
    damage(newer)
    shorten(oldest)
    with pytest.raises(CheckpointError, match=r"sizes tell: 6$") as error:
        the_newest(tmp_path)
    assert str(error.value).startswith(str(newer))
    assert f"({older})" in str(error.value)
    shorten(older)
    with pytest.raises(CheckpointError, match="no older one that is whole"):
        the_newest(tmp_path)


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "common.pt", "metadata.json"])
def test_flipped_bits_are_found_in_every_kind_of_file(tmp_path: Path, name: str) -> None:
    path = write(tmp_path, 6)
    assert damaged_files(path) == []
    content = (path / name).read_bytes()
    (path / name).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    (problem,) = damaged_files(path)
    assert problem.startswith(f"{name} has other contents than were written")
    assert damaged_files(path, [other for other in folders.read_state(path).files if other != name]) == []


def test_reading_for_hashes_tells_how_far_it_is(tmp_path: Path) -> None:
    path = write(tmp_path, 6, b"w" * (9 << 20))
    told: list[int] = []
    assert damaged_files(path, ["__0_0.distcp"], told.append) == []
    assert sum(told) == 9 << 20
    assert len(told) > 1
    assert damaged_files(path, ["other"]) == ["other is not among the files that were written"]


def test_damaged_contents_are_passed_over(tmp_path: Path) -> None:
    older, newer = write(tmp_path, 6), write(tmp_path, 9)
    (newer / "__0_0.distcp").write_bytes(b"WEIGHTS")
    assert newest_complete(tmp_path)[0] == folders.read_state(newer)
    saved, (problem,) = newest_complete(tmp_path, damage=lambda saved: damaged_files(saved.path))
    assert saved == folders.read_state(older)
    assert problem.startswith(f"{newer} is damaged: __0_0.distcp has other contents")
    with pytest.raises(CheckpointError, match=r"__0_0.distcp has other contents.*sizes tell: 6"):
        the_newest(tmp_path, damage=lambda saved: damaged_files(saved.path))


def test_files_are_shared_out_by_bytes() -> None:
    sizes = {"a": 10, "b": 9, "c": 5, "d": 4, "e": 4, "f": 0}
    files = {name: RecordedFile(size, None) for name, size in sizes.items()}
    shared = shares(files, 3)
    assert sorted(name for names in shared for name in names) == sorted(files)
    assert [sum(sizes[name] for name in names) for names in shared] == [10, 13, 9]
    assert shares(files, 1) == [sorted(files, key=lambda name: -sizes[name])]


def test_the_newest_is_told_by_its_step_and_not_by_the_clock(tmp_path: Path) -> None:
    older, newer = write(tmp_path, 6), write(tmp_path, 9)
    for file in (newer, *newer.iterdir()):
        os.utime(file, (0, 0))
    assert newest_complete(tmp_path)[0] == folders.read_state(newer)
    folders.remove_superseded(tmp_path, 9, keep_last=1, keep_every_steps=0)
    assert folders.list_checkpoints(tmp_path) == [newer]
    assert not older.exists()


def test_nothing_but_damage_is_an_error_that_names_all(tmp_path: Path) -> None:
    paths = [write(tmp_path, 6), write(tmp_path, 9)]
    for path in paths:
        shorten(path)
    with pytest.raises(CheckpointError) as error:
        newest_complete(tmp_path)
    assert all(str(path) in str(error.value) for path in paths)


def test_no_folder_is_no_checkpoint(tmp_path: Path) -> None:
    assert newest_complete(tmp_path / "none") == (None, [])
    assert the_newest(tmp_path / "none") is None


@pytest.mark.parametrize(
    ("keep_last", "keep_every_steps", "kept"),
    [
        (1, 0, [50]),
        (2, 0, [40, 50]),
        (9, 0, [10, 20, 30, 40, 50]),
        (0, 0, [10, 20, 30, 40, 50]),
        (1, 20, [20, 40, 50]),
        (2, 10, [10, 20, 30, 40, 50]),
        (0, 20, [10, 20, 30, 40, 50]),
    ],
)
def test_retention(tmp_path: Path, keep_last: int, keep_every_steps: int, kept: list[int]) -> None:
    for step in range(10, 60, 10):
        write(tmp_path, step)
    removed = folders.remove_superseded(tmp_path, 50, keep_last=keep_last, keep_every_steps=keep_every_steps)
    assert names(tmp_path) == step_names(kept)
    assert [path.name for path in removed] == step_names(s for s in range(10, 60, 10) if s not in kept)


def test_damaged_ones_do_not_push_good_ones_out(tmp_path: Path) -> None:
    for step in (10, 20, 30, 40):
        write(tmp_path, step)
    # Damaged; the run went on from 20 and has just saved 35, while 30 and 40 are still there.
    for step in (30, 40):
        shorten(folders.step_folder(tmp_path, step))
    write(tmp_path, 35)
    folders.remove_superseded(tmp_path, 35, keep_last=2, keep_every_steps=0)
    assert names(tmp_path) == step_names([20, 30, 35, 40])
    folders.remove_superseded(tmp_path, 35, keep_last=1, keep_every_steps=0)
    assert names(tmp_path) == step_names([35, 40])
