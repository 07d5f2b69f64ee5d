"""Checkpoints that cannot be written, read or trusted: exit code 4 or the one before it, and no step is lost that was
saved.
"""

from __future__ import annotations

import errno
import json
import os
import pickle
import resource
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import Megamem, checkpoint, last_step, steps

import pretrain.checkpoint.folder as folders
from pretrain.checkpoint.hashes import record
from pretrain.checkpoint.newest import newest_complete
from pretrain.config.stages import load_config
from pretrain.engine.session import session
from pretrain.train.run import agreed_checkpoint
from tests.deadline import launch_within
from tests.rotation import in_rotation

TWO = ("parallel.pipeline=2",)


def limit_files(num_bytes: int) -> None:
    """Let no file grow past a size, from now on: writing fails as on a full disk."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, resource.RLIM_INFINITY))


def full_for_all() -> None:
    limit_files(100_000)


def full_for_rank_0_while_it_saves() -> None:
    """Leave rank 0 no room for the first small file of a checkpoint, which it writes while the others go on."""
    start_writing = folders.start_writing

    def limited(folder: Path, step: int) -> Path:
        path = start_writing(folder, step)
        if step > 5:
            limit_files(64)
        return path

    folders.start_writing = limited


def full_at_the_end_of_saving() -> None:
    complete = folders.complete

    def limited(*args: object, **kwargs: object) -> Path:
        limit_files(64)
        return complete(*args, **kwargs)  # type: ignore[arg-type]

    folders.complete = limited


@pytest.fixture(scope="module")
def five_steps(tmp_path_factory: pytest.TempPathFactory, megamem: Megamem, config_file: Path) -> Path:
    """A run of two ranks with one checkpoint. Copy it to go on."""
    path = tmp_path_factory.mktemp("five") / "run"
    result = megamem("train", config_file, *TWO, "--run-dir", path, "train.num_steps=5")
    assert result.code == 0, result.output
    return path


@pytest.mark.parametrize(
    "fill",
    in_rotation([full_for_all, full_for_rank_0_while_it_saves, full_at_the_end_of_saving]),
    ids=lambda fill: fill.__name__,
)
def test_disk_full_while_saving(
    megamem: Megamem, config_file: Path, five_steps: Path, tmp_path: Path, fill: Callable[[], None]
) -> None:
    run = Path(shutil.copytree(five_steps, tmp_path / "run"))
    command = ("train", config_file, *TWO, "--run-dir", run, "train.num_steps=8", "checkpoint.every_steps=7")
    result = megamem(*command, before=fill)
    assert result.code == 4, result.output
    message = result.output[result.output.rindex("megamem: error:") :]
    assert "cannot be written" in message
    assert "arlier checkpoints are intact" in message
    assert "Traceback" not in result.output
    assert last_step(run) == 7
    assert newest_complete(run / "checkpoints")[0] == folders.read_state(checkpoint(run, 5))
    # There is space again.
    result = megamem(*command)
    assert result.code == 0, result.output
    assert "(step 5)" in result.output
    assert [row["step"] for row in steps(run)] == list(range(1, 9))
    assert [path.name for path in sorted((run / "checkpoints").iterdir())] == ["step_00000007", "step_00000008"]


def test_disk_full_while_writing_in_the_background(
    megamem: Megamem, config_file: Path, five_steps: Path, tmp_path: Path
) -> None:
    """Every rank hears of it from a step, and the run ends before its last one."""
    run = Path(shutil.copytree(five_steps, tmp_path / "run"))
    options = ("train.num_steps=300", "checkpoint.every_steps=7", "checkpoint.asynchronous=true")
    result = megamem("train", config_file, *TWO, "--run-dir", run, *options, before=full_for_all)
    assert result.code == 4, result.output
    message = result.output[result.output.rindex("megamem: error:") :]
    assert "cannot be written" in message
    assert "arlier checkpoints are intact" in message
    assert "Traceback" not in result.output
    # It was found at a boundary between two steps, at the latest before the next save.
    assert 8 <= last_step(run) <= 14
    assert newest_complete(run / "checkpoints")[0] == folders.read_state(checkpoint(run, 5))


def read_only_from_now_on() -> None:
    """Checkpoints' folders cannot be made; whoever runs the tests may be allowed to write anywhere."""

    def refuse(folder: Path, step: int) -> Path:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(folder))

    folders.start_writing = refuse


def test_a_folder_that_cannot_be_written(megamem: Megamem, config_file: Path, five_steps: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(five_steps, tmp_path / "run"))
    command = ("train", config_file, *TWO, "--run-dir", run, "train.num_steps=7")
    result = megamem(*command, before=read_only_from_now_on)
    assert result.code == 4, result.output
    assert "Read-only file system" in result.output
    assert "Traceback" not in result.output
    result = megamem(*command)
    assert result.code == 0, result.output
    assert "(step 5)" in result.output


def truncate(path: Path) -> None:
    file = next(path.glob("*.distcp"))
    os.truncate(file, file.stat().st_size // 2)


def remove_a_file(path: Path) -> None:
    next(path.glob("*.distcp")).unlink()


def scribble_on_the_state(path: Path) -> None:
    (path / folders.STATE_FILE).write_text("[1, 2")


def replace_the_state(path: Path) -> None:
    (path / folders.STATE_FILE).write_text('{"format": 1, "run": [], "rng": 0, "config": 0, "versions": 0, "files": 0}')


def replace_the_common_file(path: Path) -> None:
    """Replace it by a pickle of the same size that would run something."""
    common = path / "common.pt"
    content = pickle.dumps(shutil.rmtree)
    common.write_bytes(content + b"." * (common.stat().st_size - len(content)))


def truncated(name: str) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        os.truncate(path / name, (path / name).stat().st_size - 1)

    damage.__name__ = f"truncated {name}"
    return damage


def scribbled_on(name: str) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        (path / name).write_bytes(os.urandom((path / name).stat().st_size))

    damage.__name__ = f"scribbled on {name}"
    return damage


def flipped(name: str) -> Callable[[Path], None]:
    """One bit in the middle: an element of a tensor, a name in the index, ..."""

    def damage(path: Path) -> None:
        content = bytearray((path / name).read_bytes())
        # No white space, which says nothing in JSON.
        place = next(i for i in range(len(content) // 2, len(content)) if bytes([content[i]]).strip())
        content[place] ^= 1
        (path / name).write_bytes(content)

    damage.__name__ = f"a bit of {name}"
    return damage


def index_out_of_the_folder(path: Path) -> None:
    """Act as someone who makes all sizes and hashes right."""
    metadata = pickle.loads((path / ".metadata").read_bytes())
    for place in metadata.storage_data.values():
        place.relative_path = f"../{checkpoint(path.parent.parent, 3).name}/{place.relative_path}"
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    state = json.loads((path / folders.STATE_FILE).read_text())
    del state["sha256"], state["files"]
    (path / folders.STATE_FILE).unlink()
    folders.write_state(path, {file.name: record(file) for file in path.iterdir()}, state)


SMALL_FILES = (".metadata", "common.pt", "metadata.json", folders.STATE_FILE)
DAMAGES = (
    truncate,
    remove_a_file,
    scribble_on_the_state,
    replace_the_state,
    replace_the_common_file,
    index_out_of_the_folder,
    *(truncated(name) for name in SMALL_FILES),
    *(scribbled_on(name) for name in (".metadata", "common.pt", "metadata.json")),
    *(flipped(name) for name in ("__0_0.distcp", "__0_2.distcp", *SMALL_FILES)),
)


def test_every_damage_is_found_before_a_run_goes_on(
    config_file: Path, saved_run: Path, tmp_path: Path, warm: None
) -> None:
    """One rank looks at all of them, as it does when it starts."""
    runs = {damage.__name__: Path(shutil.copytree(saved_run, tmp_path / damage.__name__)) for damage in DAMAGES}
    for damage in DAMAGES:
        damage(checkpoint(runs[damage.__name__], 6))
    config = load_config(config_file)

    def look() -> dict[str, tuple[Path | None, list[str]]]:
        with session(config):
            found = {name: agreed_checkpoint(run / "checkpoints", check_hashes=True) for name, run in runs.items()}
        return {name: (saved and saved.path, problems) for name, (saved, problems) in found.items()}

    (found,) = launch_within(look, 1, timeout_s=120)
    for name, (path, problems) in found.items():
        assert path == checkpoint(runs[name], 3), name
        (problem,) = problems
        assert str(checkpoint(runs[name], 6)) in problem


@pytest.mark.parametrize("damage", [index_out_of_the_folder, flipped("__0_2.distcp")], ids=lambda it: it.__name__)
def test_a_damaged_checkpoint_is_reported_and_the_one_before_it_used(
    megamem: Megamem, config_file: Path, saved_run: Path, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    """Hashes may be right or not; of the moments, as of all that a run needs."""
    run = Path(shutil.copytree(saved_run, tmp_path / "run"))
    damage(checkpoint(run, 6))
    result = megamem("train", config_file, "--run-dir", run, "train.num_steps=5")
    assert result.code == 0, result.output
    assert f"passed over a damaged checkpoint: {checkpoint(run, 6)}" in result.output
    assert f"resuming from {checkpoint(run, 3)}" in result.output
    assert last_step(run) == 5
    # The damaged one does not push a good one out.
    assert folders.read_state(checkpoint(run, 3)).step == 3
    assert folders.read_state(checkpoint(run, 5)).step == 5


def test_nothing_but_damaged_checkpoints(megamem: Megamem, config_file: Path, saved_run: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(saved_run, tmp_path / "run"))
    for step in (3, 6):
        truncate(checkpoint(run, step))
    before = sorted(path for path in run.rglob("*") if path.parent.name != "owner")
    for command in (("train", config_file, "--run-dir", run, "--nproc", 2), ("eval", run), ("generate", run)):
        result = megamem(*command)
        assert result.code == 4, result.output
        assert "no checkpoint of this run can be read" in result.output
        assert "Traceback" not in result.output
    assert [path for path in before if not path.exists()] == []


def test_who_reads_a_saved_run_passes_over_damaged_contents(
    megamem: Megamem, config_file: Path, saved_run: Path, tmp_path: Path
) -> None:
    """Weights that eval and generate would use; moments are of no use to them, and not looked at."""
    run = Path(shutil.copytree(saved_run, tmp_path / "run"))
    flipped("__0_2.distcp")(checkpoint(run, 6))
    for command in (("eval", run), ("generate", run, "--max-tokens", 2)):
        result = megamem(*command)
        assert result.code == 0, result.output
        assert "passed over" not in result.output
    flipped("__0_0.distcp")(checkpoint(run, 6))
    for command in (("eval", run), ("generate", run, "--max-tokens", 2)):
        result = megamem(*command)
        assert result.code == 0, result.output
        assert f"passed over a damaged checkpoint: {checkpoint(run, 6)}" in result.output
        assert "__0_0.distcp has other contents than were written" in result.output
    for command in (("eval", run, "--step", 6), ("generate", run, "--step", 6), ("replay", run, "--step", 6)):
        result = megamem(*command)
        assert result.code == 4, result.output
        assert f"{checkpoint(run, 6)} is damaged: __0_0.distcp has other contents" in result.output
    # The steps after 3 are taken again, from the checkpoint of 3.
    flipped("__0_2.distcp")(checkpoint(run, 3))
    result = megamem("replay", run, "--nproc", 1)
    assert result.code == 4, result.output
    assert "__0_2.distcp has other contents" in result.output


class Payload:
    """Runs a command when it is unpickled."""

    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch {self.proof}",)


def test_code_in_a_checkpoint_is_not_run(megamem: Megamem, config_file: Path, saved_run: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(saved_run, tmp_path / "run"))
    proof = tmp_path / "proof"
    shutil.rmtree(checkpoint(run, 3))
    # Whoever plants code makes the sizes right, too.
    index = checkpoint(run, 6) / ".metadata"
    payload = pickle.dumps(Payload(proof))
    index.write_bytes(payload + b"\0" * (index.stat().st_size - len(payload)))
    for command in (
        ("train", config_file, "--run-dir", run, "train.num_steps=7"),
        ("eval", run, "--step", 6),
        ("generate", run, "--step", 6),
        ("generate", run),
    ):
        result = megamem(*command)
        assert result.code == 4, result.output
        assert "posix.system" in result.output
        assert not proof.exists()


def test_another_model_is_refused(megamem: Megamem, config_file: Path, saved_run: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(saved_run, tmp_path / "run"))
    result = megamem("train", config_file, "--run-dir", run, "model.memory.top_k=8", "model.hidden_size=64", "seed=3")
    assert result.code == 4, result.output
    for change in ("model.hidden_size: 32 -> 64", "model.memory.top_k: 4 -> 8", "seed: 1 -> 3"):
        assert change in result.output
    assert "Traceback" not in result.output


def test_a_missing_run_or_step(megamem: Megamem, saved_run: Path, tmp_path: Path) -> None:
    for arguments in ((tmp_path / "none",), (saved_run, "--step", 7)):
        for command in ("eval", "generate"):
            result = megamem(command, *arguments)
            assert result.code == 4, result.output
            assert "Traceback" not in result.output
