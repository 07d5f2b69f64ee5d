"""`megamem patch`: rows that changed go into checkpoints and exports, and come back to the bit."""

from __future__ import annotations

import contextlib
import ctypes
import io
import json
import os
import shutil
import signal
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import Megamem, Result, checkpoint, tensors

from pretrain.checkpoint.derived import main_name
from pretrain.checkpoint.store.torch_dist import open_torch_dist
from pretrain.config.schema import ParallelConfig
from pretrain.convert import resources
from pretrain.convert.convert import convert
from pretrain.convert.format import ConversionTarget
from pretrain.convert.registry import FORMATS, open_checkpoint
from pretrain.convert.resources import Resources
from pretrain.patch import folders
from pretrain.patch.file import read_patch
from pretrain.run.folder import RunFolder
from pretrain.run.owner import owned
from tests.changed_rows import ChangedRows, write_some_patch
from tests.rotation import in_rotation
from tools.cli import main

RESOURCES = Resources(1, 2 << 30)
STEP = 6
VALUES, PRE_VALUES, OTHER_VALUES = "banks.0.values", "banks.0.pre_values", "banks.1.values"
ROWS = {VALUES: (0, 7, 8, 9, 300, 511), PRE_VALUES: (7, 41), OTHER_VALUES: (510,)}
EXPORTS = {
    "fp32": (),
    "bf16": ("--dtype", "bf16"),
    "int8": ("--tables", "int8"),
    "int4": ("--tables", "int4", "--dtype", "bf16"),
    "files": ("--max-file-size", "20KiB"),
}


class Here:
    """Runs `megamem ARGS...` in this process."""

    def __call__(self, *args: object) -> Result:
        output = io.StringIO()
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            code = main([str(arg) for arg in args])
        return Result(code, output.getvalue())


def changed_run(
    run: Path,
    path: Path,
    rows: Mapping[str, tuple[int, ...]] = ROWS,
    by: float = 0.01,
    layout: ParallelConfig | None = None,
    dtype: torch.dtype | None = None,
    with_optimizer: bool = True,
) -> Path:
    """A run as training of some rows alone leaves it."""
    source = open_checkpoint(run)
    target = ConversionTarget(layout or ParallelConfig(), with_optimizer, dtype, 1 << 30)
    changed = replace(source, reader=ChangedRows(source.reader, rows, by))
    convert(changed, FORMATS["megatron-dist"], path, target, RESOURCES, on_start=lambda *_: lambda _: None)
    return path


def assert_sound(folder: Path) -> None:
    """Checksums of all archives in a checkpoint's files are those of their contents."""
    reader, num_items = open_torch_dist(folder), 0
    for name in reader.tensors:
        for item in reader.parts(name):
            content = (folder / item.file).read_bytes()[item.start : item.start + item.num_bytes]
            assert zipfile.ZipFile(io.BytesIO(content)).testzip() is None, item
            num_items += 1
    assert num_items > 20


def contents(folder: Path) -> dict[str, bytes]:
    """Bytes of all files below a folder, without the claims on a run."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.parent.name != "owner")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def made(here: Here, *args: object) -> str:
    result = here("patch", "make", *args)
    assert result.code == 0, result.output
    return result.output


def done(here: Here, *args: object) -> str:
    result = here(*args)
    assert result.code == 0, result.output
    return result.output


def refused(here: Here, code: int, *args: object) -> str:
    result = here(*args)
    assert result.code == code, result.output
    assert "Traceback" not in result.output
    return result.last_line


@pytest.fixture(scope="module", autouse=True)
def small_pieces() -> Iterator[None]:
    """Pieces of tables that have several rows, and several of which a table has."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resources, "_LARGEST_PIECE_BYTES", 6000)
        yield


@pytest.fixture(scope="module")
def here(warm: None) -> Here:
    return Here()


@pytest.fixture(scope="module")
def after(saved_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run after its tables' rows changed."""
    return changed_run(saved_run, tmp_path_factory.mktemp("after") / "run")


@pytest.fixture(scope="module")
def patch(here: Here, saved_run: Path, after: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The patch from the one to the other."""
    path = tmp_path_factory.mktemp("patch") / "facts.safetensors"
    output = made(here, saved_run, after, "--output", path)
    assert f"{VALUES}: 6 rows of 512 (1.172%)" in output
    assert f"{PRE_VALUES}: 2 rows of 512 (0.391%)" in output
    assert f"written: {path}, " in output
    return path


@pytest.fixture
def run(saved_run: Path, tmp_path: Path) -> Path:
    """A run to change, or to own: others look at the shared one meanwhile."""
    return Path(shutil.copytree(saved_run, tmp_path / "run"))


@pytest.fixture(scope="module", params=in_rotation(list(EXPORTS), 2))
def exports(
    request: pytest.FixtureRequest,
    here: Here,
    saved_run: Path,
    after: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Path, Path]:
    """Both runs, exported in one way."""
    folder = tmp_path_factory.mktemp("exports")
    pair = folder / "before", folder / "after"
    for source, path in zip((saved_run, after), pair, strict=True):
        done(here, "checkpoint", "convert", source, path, "--format", "huggingface", *EXPORTS[request.param])
    return pair


def test_a_run_is_patched_and_reverted_to_the_bit(
    here: Here, run: Path, saved_run: Path, after: Path, patch: Path
) -> None:
    before = contents(run)
    assert f"{run}: not applied" in done(here, "patch", "show", patch, run)
    output = done(here, "patch", "apply", patch, run)
    assert "applied: 9 rows in " in output
    assert f"changed: {checkpoint(run, STEP)}" in output
    assert "is whole" in done(here, "checkpoint", "verify", run)
    assert_sound(checkpoint(run, STEP))
    assert "equal: " in done(here, "checkpoint", "diff", run, after)
    assert f"{run}: applied" in done(here, "patch", "show", patch, run)
    # The older checkpoint and the moments are those of the run.
    assert {name for name, content in contents(run).items() if before[name] != content} <= {
        str(path.relative_to(run)) for path in checkpoint(run, STEP).iterdir()
    }
    for name in ("exp_avg", "exp_avg_sq"):
        moments = f"optimizer.state.{name}.{VALUES}"
        assert torch.equal(tensors(checkpoint(run, STEP))[moments], tensors(checkpoint(saved_run, STEP))[moments])
    patched = contents(run)
    assert "already applied" in done(here, "patch", "apply", patch, run)
    assert contents(run) == patched
    assert "reverted: 9 rows" in done(here, "patch", "revert", patch, checkpoint(run, STEP))
    assert contents(run) == before
    assert "is not applied" in done(here, "patch", "revert", patch, run, "--step", STEP)
    assert not [path for path in (run / "checkpoints").iterdir() if path.name.startswith(".")]


def test_a_run_trains_on_with_patched_rows(
    megamem: Megamem, here: Here, run: Path, patch: Path, config_file: Path
) -> None:
    done(here, "patch", "apply", patch, run)
    options = ("train.num_steps=7", "checkpoint.every_steps=1", "optimizer.lr=1e-9", "optimizer.min_lr=0")
    result = megamem("train", config_file, "--run-dir", run, *options)
    assert result.code == 0, result.output
    expected = tensors(checkpoint(run, STEP))[main_name(VALUES)]
    torch.testing.assert_close(tensors(checkpoint(run, 7))[main_name(VALUES)], expected, rtol=0, atol=1e-6)


def test_rows_cut_by_columns_and_rows_are_found(
    here: Here, saved_run: Path, after: Path, patch: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    layout = ("--weights-only", "--memory", 4, "--tensor", 2, "--max-file-size", "16KiB")
    done(here, "checkpoint", "convert", saved_run, run, *layout)
    before = contents(run)
    done(here, "patch", "apply", patch, run)
    done(here, "checkpoint", "verify", run)
    done(here, "checkpoint", "diff", run, after, "--weights-only")
    changed = {name for name, content in contents(run).items() if before.get(name) != content}
    assert 3 < len(changed) < len(before) / 2
    done(here, "patch", "revert", patch, run)
    assert contents(run) == before


def test_an_export_is_patched_and_reverted_to_the_bit(
    here: Here, exports: tuple[Path, Path], patch: Path, tmp_path: Path
) -> None:
    export = Path(shutil.copytree(exports[0], tmp_path / "export"))
    before = contents(export)
    done(here, "patch", "apply", patch, export)
    assert "is whole" in done(here, "checkpoint", "verify", export)
    # Tables, hashes, and all else.
    assert contents(export) == {**contents(exports[1]), "README.md": before["README.md"]} | {
        name: content for name, content in contents(export).items() if name == "SHA256SUMS"
    }
    done(here, "checkpoint", "diff", export, exports[1])
    done(here, "patch", "revert", patch, export)
    assert contents(export) == before
    assert [path.name for path in tmp_path.iterdir()] == ["export"]


def test_a_new_folder_is_written_beside(here: Here, saved_run: Path, after: Path, patch: Path, tmp_path: Path) -> None:
    before, new = contents(saved_run), tmp_path / "new"
    assert f"written: {new}" in done(here, "patch", "apply", patch, saved_run, "--output", new)
    assert contents(saved_run) == before
    assert {path.name for path in new.iterdir()} == {"config.yaml", "checkpoints", "tokenizer"}
    assert [path.name for path in (new / "checkpoints").iterdir()] == [f"step_{STEP:08d}"]
    done(here, "checkpoint", "verify", new)
    done(here, "checkpoint", "diff", new, after)
    assert "is there already" in refused(here, 2, "patch", "apply", patch, saved_run, "--output", new)
    done(here, "patch", "revert", patch, new, "--output", tmp_path / "back")
    done(here, "checkpoint", "diff", tmp_path / "back", saved_run)
    export = tmp_path / "export"
    done(here, "checkpoint", "convert", saved_run, export, "--format", "huggingface")
    kept = contents(export)
    done(here, "patch", "apply", patch, export, "--output", tmp_path / "patched")
    assert contents(export) == kept
    done(here, "checkpoint", "verify", tmp_path / "patched")
    done(here, "checkpoint", "convert", after, tmp_path / "expected", "--format", "huggingface")
    done(here, "checkpoint", "diff", tmp_path / "patched", tmp_path / "expected")
    inside = refused(here, 2, "patch", "apply", patch, export, "--output", export / "new")
    assert "inside of" in inside
    assert contents(export) == kept


def test_a_bf16_run_takes_a_patch_in_its_main_weights(here: Here, saved_run: Path, run: Path, tmp_path: Path) -> None:
    """Weights alone in bf16, and the same model with fp32 main weights: what one drops, the other has."""
    half, trained = tmp_path / "half", tmp_path / "trained"
    done(here, "checkpoint", "convert", saved_run, half, "--weights-only", "--dtype", "bf16")
    changed_run(saved_run, trained, dtype=torch.bfloat16)
    path = tmp_path / "facts.safetensors"
    assert "6 rows" in made(here, half, trained, "--output", path)
    found = read_patch(path)
    assert (found.dtype("before", VALUES), found.dtype("after", VALUES)) == (torch.bfloat16, torch.float32)
    done(here, "patch", "apply", path, half)
    rows = list(ROWS[VALUES])
    expected = tensors(checkpoint(trained, STEP))[main_name(VALUES)][rows].bfloat16()
    assert torch.equal(tensors(checkpoint(half, STEP))[VALUES][rows], expected)
    # The run has more bits of the rows than the patch has of them before.
    text = refused(here, 4, "patch", "apply", path, run)
    assert "The patch has fewer bits of these rows" in text


def test_only_rows_may_differ(here: Here, saved_run: Path, after: Path, tmp_path: Path) -> None:
    path = tmp_path / "facts.safetensors"
    text = refused(here, 4, "patch", "make", saved_run, checkpoint(saved_run, 3), "--output", path)
    assert "differ in " in text
    assert "more, and a patch has rows of tables alone: train with optimizer.trained_rows" in text
    text = refused(here, 4, "patch", "make", after, after, "--output", path)
    assert "differ in no row of a table" in text
    text = refused(here, 4, "patch", "make", saved_run, after, "--output", path, "--max-size", 500)
    assert "4 of the first 93 rows of banks.0.values differ (4.3%)" in text
    assert "larger than --max-size, 500 bytes: give a larger one" in text
    assert not list(tmp_path.iterdir())
    path.touch()
    assert "is there already" in refused(here, 2, "patch", "make", saved_run, after, "--output", path)


def test_another_model_and_damage_are_refused(
    here: Here, run: Path, saved_run: Path, patch: Path, tmp_path: Path
) -> None:
    before = contents(run)
    text = refused(here, 4, "patch", "apply", patch, run, "--step", 3)
    assert f"{patch} was made on another model: " in text
    assert f" has other values in {checkpoint(run, 3)}" in text
    assert "of another model: " in done(here, "patch", "show", patch, checkpoint(run, 3))
    damaged = tmp_path / "damaged.safetensors"
    content = bytearray(patch.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    assert f"{damaged} is damaged, or was edited" in refused(here, 4, "patch", "apply", damaged, run)
    assert contents(run) == before
    # New hashes would hide damage.
    file = next(iter(sorted(checkpoint(run, STEP).glob("*.distcp"))))
    for each in checkpoint(run, STEP).glob("*.distcp"):
        content = bytearray(each.read_bytes())
        content[-1] ^= 1
        each.write_bytes(content)
    broken = contents(run)
    text = refused(here, 4, "patch", "apply", patch, run)
    assert f"{checkpoint(run, STEP)} is damaged" in text, file
    assert contents(run) == broken


def test_rows_that_somebody_else_changed_are_refused(
    here: Here, saved_run: Path, after: Path, patch: Path, tmp_path: Path
) -> None:
    twice = changed_run(after, tmp_path / "twice", {VALUES: (8, 9)}, by=1.0, with_optimizer=False)
    before = contents(twice)
    for action in ("apply", "revert"):
        text = refused(here, 4, "patch", action, patch, twice)
        number, first = ("6", 0) if action == "apply" else ("2", 8)
        assert f"{number} of 6 rows of {VALUES} hold something else (the first is row {first})" in text
        assert "`megamem patch merge`" in text
    assert "cannot be applied: 2 of 6 rows of " in done(here, "patch", "show", patch, twice)
    assert contents(twice) == before
    second, both = tmp_path / "second.safetensors", tmp_path / "both.safetensors"
    made(here, after, twice, "--output", second)
    text = refused(here, 4, "patch", "merge", patch, second, "--output", both)
    assert f"2 of 6 rows of {VALUES}" in text
    assert "--overlap last" in text
    # The second one is on top of the first.
    assert "--overlap last" in refused(here, 4, "patch", "merge", patch, second, "--output", both, "--overlap", "add")
    assert "2 rows in several patches (last)" in done(
        here, "patch", "merge", patch, second, "--output", both, "--overlap", "last"
    )
    done(here, "patch", "revert", both, twice)
    done(here, "checkpoint", "diff", twice, saved_run, "--weights-only")


def test_show_says_what_is_in_a_patch(here: Here, saved_run: Path, after: Path, patch: Path) -> None:
    output = done(here, "patch", "show", patch)
    assert f"made of run, step {STEP} -> run, step {STEP}" in output
    assert f"{VALUES}: 6 rows of 512 x 16, float32, 816 B, largest change " in output
    content = json.loads(done(here, "patch", "show", patch, saved_run, after, "--json").splitlines()[-1])
    assert content["folders"] == {str(saved_run): "not applied", str(after): "applied"}
    table = content["tables"][VALUES]
    assert (table["rows"], table["rows_of_table"], table["columns"]) == (6, 512, 16)
    change = (
        tensors(checkpoint(after, STEP))[main_name(VALUES)] - tensors(checkpoint(saved_run, STEP))[main_name(VALUES)]
    )
    change = change.double()[list(ROWS[VALUES])]
    assert table["largest_change"] == pytest.approx(float(change.abs().max()), rel=1e-5)
    assert table["rms_change"] == pytest.approx(float(change.square().mean().sqrt()), rel=1e-5)


def test_formats_that_are_not_patched_say_so(here: Here, run: Path, patch: Path, tmp_path: Path) -> None:
    for name, words in (("nothing", "no such file"), (str(tmp_path), "is a folder")):
        assert words in refused(here, 4, "patch", "show", name)
    assert "no such file" in refused(here, 4, "patch", "apply", patch, tmp_path / "none")
    assert "no checkpoint of a known format" in refused(here, 4, "patch", "apply", patch, tmp_path)
    config = run / "config.yaml"
    assert "is a configuration" in refused(here, 2, "patch", "apply", patch, config)
    assert "is no patch" in refused(here, 4, "patch", "show", _some_safetensors(tmp_path))
    text = refused(here, 2, "patch", "apply", patch, checkpoint(run, STEP), "--step", 3)
    assert "--step is 3, and " in text
    assert "is the checkpoint of step 6: leave it out" in text
    assert "only patch" in refused(here, 2, "patch", "merge", patch, "--output", tmp_path / "new")


def _some_safetensors(folder: Path) -> Path:
    from safetensors.torch import save_file

    save_file({"rows.banks.0.values": torch.arange(3)}, folder / "other.safetensors")
    return folder / "other.safetensors"


def test_a_run_that_trains_is_not_touched(here: Here, run: Path, patch: Path, tmp_path: Path) -> None:
    before = contents(run)
    with owned(RunFolder(run)):
        for folder in (run, checkpoint(run, STEP)):
            text = refused(here, 2, "patch", "apply", patch, folder)
            assert "is in use by process " in text
            assert "--output DIR" in text
        assert contents(run) == before
        done(here, "patch", "apply", patch, run, "--output", tmp_path / "new")
    assert contents(run) == before
    done(here, "patch", "apply", patch, run)


def test_a_mapped_table_keeps_its_bytes(here: Here, saved_run: Path, patch: Path, tmp_path: Path) -> None:
    export = tmp_path / "export"
    done(here, "checkpoint", "convert", saved_run, export, "--format", "huggingface")
    path, blob = export / "model.safetensors", tmp_path / "blob"
    # As in the cache of a hub.
    path.rename(blob)
    path.symlink_to("../blob")
    mapped, config = np.memmap(path, np.uint8, "r"), (export / "config.json").stat().st_ino
    before = mapped.tobytes()
    done(here, "patch", "apply", patch, export)
    assert mapped.tobytes() == before
    assert path.read_bytes() != before
    assert (path.is_symlink(), blob.read_bytes()) == (False, before)
    # Files that do not change are not copied.
    assert (export / "config.json").stat().st_ino == config


def die_in(module: Any, name: str, after_it: bool) -> Callable[[], None]:
    """Has a process be killed right before or behind a call of one of its functions."""

    def before() -> None:
        function = getattr(module, name)

        def dying(*args: Any, **options: Any) -> Any:
            if after_it:
                function(*args, **options)
            os.kill(os.getpid(), signal.SIGKILL)

        setattr(module, name, dying)

    return before


@pytest.mark.parametrize("kind", ["run", "export"])
def test_a_kill_leaves_the_folder_as_it_was_or_patched(
    megamem: Megamem, here: Here, saved_run: Path, patch: Path, tmp_path: Path, kind: str
) -> None:
    from pretrain.patch import apply

    whole, expected = tmp_path / "whole", tmp_path / "expected"
    if kind == "run":
        shutil.copytree(saved_run, whole)
    else:
        done(here, "checkpoint", "convert", saved_run, whole, "--format", "huggingface", "--max-file-size", "20KiB")
    before = contents(whole)
    shutil.copytree(whole, expected)
    done(here, "patch", "apply", patch, expected)
    patched = contents(expected)
    early_steps = [
        (apply, "copy", False),
        (apply, "link_or_copy", True),
        (apply, "_write_rows", False),
        (apply, "_write_rows", True),
        (apply, "_write_anew", False),
        (apply, "sync_folder", True),
        (apply, "exchange", False),
        (folders, "sync", True),
    ]
    found = set()
    for number, (module, name, after_it) in enumerate([*in_rotation(early_steps), (apply, "exchange", True)]):
        folder = Path(shutil.copytree(whole, tmp_path / f"{number}"))
        result = megamem("patch", "apply", patch, folder, before=die_in(module, name, after_it))
        assert result.code == -signal.SIGKILL, result.output
        now = {path: content for path, content in contents(folder).items() if ".patching_" not in path}
        assert now in (before, patched), (name, after_it)
        found.add(now == patched)
        # What the killed one left goes, too.
        done(here, "patch", "apply", patch, folder)
        assert contents(folder) == patched
        assert not (tmp_path / f".patching_{number}").exists()
    assert found == {True, False}


def refuse_exchange() -> None:
    class WithoutExchange:
        def __init__(self, *_: object, **__: object) -> None:
            self.renameat2 = self._refuse

        def _refuse(self, *_: object) -> int:
            ctypes.set_errno(22)
            return -1

    folders.ctypes.CDLL = WithoutExchange  # type: ignore[assignment, misc]


def test_a_file_system_that_cannot_exchange_is_named(megamem: Megamem, run: Path, patch: Path, tmp_path: Path) -> None:
    before = contents(run)
    result = megamem("patch", "apply", patch, run, before=refuse_exchange)
    assert result.code == 4, result.output
    assert "cannot be exchanged with another folder in one step" in result.last_line
    assert "--output DIR" in result.last_line
    assert contents(run) == before
    new = megamem("patch", "apply", patch, run, "--output", tmp_path / "new", before=refuse_exchange)
    assert new.code == 0, new.output


def test_weights_that_are_stored_twice_change_twice(
    megamem: Megamem, here: Here, config_file: Path, tmp_path: Path
) -> None:
    """Also in a checkpoint of format 1, which has no hashes."""
    run, path = tmp_path / "run", tmp_path / "facts.safetensors"
    options = ("train.num_steps=1", "optimizer.warmup_steps=0", "checkpoint.weights_copy=true", "train.precision=bf16")
    result = megamem("train", config_file, "--run-dir", run, *options)
    assert result.code == 0, result.output
    write_some_patch(run, path, ROWS)
    old = tensors(checkpoint(run, 1))
    assert (old[VALUES].dtype, old[main_name(VALUES)].dtype) == (torch.bfloat16, torch.float32)
    for number in (2, 1):
        state = checkpoint(run, 1) / "state.json"
        if number == 1:
            content = json.loads(state.read_text())
            sizes = {name: entry["bytes"] for name, entry in content["files"].items()}
            state.write_text(json.dumps({**content, "format": 1, "files": sizes}))
        before = contents(run)
        assert "applied: 18 rows in " in done(here, "patch", "apply", path, run)
        new = tensors(checkpoint(run, 1))
        for table, rows in ROWS.items():
            assert (new[main_name(table)] != old[main_name(table)]).any(1).nonzero().flatten().tolist() == list(rows)
            assert torch.equal(new[table], new[main_name(table)].bfloat16())
        done(here, "checkpoint", "verify", run)
        done(here, "patch", "revert", path, run)
        assert contents(run) == before


def test_a_patch_of_an_export_and_a_run_goes_between_them(
    here: Here, saved_run: Path, after: Path, tmp_path: Path
) -> None:
    """Training began from the export, and the patch goes back there."""
    export, path = tmp_path / "export", tmp_path / "facts.safetensors"
    done(here, "checkpoint", "convert", saved_run, export, "--format", "huggingface", "--dtype", "bf16")
    before = contents(export)
    begun, trained = tmp_path / "begun", tmp_path / "trained"
    done(here, "checkpoint", "convert", export, begun, "--dtype", "fp32")
    changed_run(begun, trained)
    made(here, export, trained, "--output", path)
    assert "made of export -> trained, step 0" in done(here, "patch", "show", path)
    for folder in (export, begun):
        done(here, "patch", "apply", path, folder)
    done(here, "checkpoint", "diff", begun, trained)
    done(here, "patch", "revert", path, export)
    assert contents(export) == before
