"""`megamem checkpoint`: what a person types, sees and finds on disk."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import Megamem, assert_same_tensors, checkpoint, steps, tensors

from pretrain.checkpoint.store.torch_dist_writer import TorchDistFile


def test_inspect_says_what_is_there(megamem: Megamem, saved_run: Path) -> None:
    result = megamem("checkpoint", "inspect", saved_run)
    assert result.code == 0, result.output
    assert "6 of 6, 1,536 tokens" in result.output
    assert "tensor 1, pipeline 1 x 1, context 1, memory 1; fits any other" in result.output
    assert "| banks.0.values | table | 512 x 16 | float32 | 32.77 kB | 98.30 kB |" in result.output
    older = megamem("checkpoint", "inspect", saved_run, "--step", 3)
    assert "3 of 6" in older.output


def test_inspect_as_json_names_every_tensor(megamem: Megamem, saved_run: Path) -> None:
    result = megamem("checkpoint", "inspect", checkpoint(saved_run, 6), "--json")
    content = json.loads(result.output)
    assert content["step"] == 6
    assert content["config"]["model"]["memory"]["num_keys"] == 16
    stored = tensors(checkpoint(saved_run, 6))
    for name, tensor in stored.items():
        entry = content["tensors"][name]
        assert (entry["shape"], entry["bytes"]) == (list(tensor.shape), tensor.nbytes)
    kinds = {entry["kind"] for entry in content["tensors"].values()}
    assert kinds == {"weight", "table", "optimizer"}


def test_inspect_does_not_wait_for_torch(saved_run: Path) -> None:
    """A second is not enough for its import."""
    program = (
        "import sys\nfrom tools import cli\n"
        f"assert cli.main(['checkpoint', 'inspect', {str(saved_run)!r}]) == 0\n"
        "assert not {'torch', 'megatron'} & set(sys.modules)\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    assert "banks.0.values" in result.stdout


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory, megamem: Megamem, saved_run: Path) -> Path:
    """The run's checkpoint of step 3, packed for split tables."""
    path = tmp_path_factory.mktemp("converted") / "run"
    layout = ("--tensor", 2, "--memory", 2, "--max-file-size", "64KiB")
    result = megamem("checkpoint", "convert", saved_run, path, "--step", 3, *layout)
    assert result.code == 0, result.output
    assert "equal, as read back" in result.output
    assert f"written: {path}" in result.output
    return path


def test_a_converted_checkpoint_holds_the_same_in_parts_of_the_layout(converted: Path, saved_run: Path) -> None:
    before, after = checkpoint(saved_run, 3), checkpoint(converted, 3)
    stored, original = tensors(after), tensors(before)
    for name, tensor in stored.items():
        assert torch.equal(tensor, original[name]), name
    assert {f"optimizer.state.param.{name}" for name in original.keys() - stored.keys()} <= stored.keys()
    assert len(list(after.glob("*.distcp"))) > 2


def test_a_run_goes_on_from_a_converted_checkpoint(
    megamem: Megamem, config_file: Path, converted: Path, saved_run: Path, tmp_path: Path
) -> None:
    run = Path(shutil.copytree(converted, tmp_path / "run"))
    command = ("train", config_file, "--run-dir", run, "train.num_steps=6", "checkpoint.every_steps=3")
    result = megamem(*command)
    assert result.code == 0, result.output
    assert "(step 3)" in result.output
    assert steps(run) == steps(saved_run)[3:]
    assert_same_tensors(checkpoint(run, 6), checkpoint(saved_run, 6))


def test_diff_is_0_only_for_equal_ones(megamem: Megamem, converted: Path, saved_run: Path, tmp_path: Path) -> None:
    same = megamem("checkpoint", "diff", converted, checkpoint(saved_run, 3))
    assert same.code == 0, same.output
    assert "equal: " in same.output
    other = megamem("checkpoint", "diff", converted, saved_run)
    assert other.code == 1, other.output
    assert "banks.0.values differs in " in other.output
    half = tmp_path / "half"
    assert megamem("checkpoint", "convert", converted, half, "--weights-only", "--dtype", "bf16").code == 0
    states = megamem("checkpoint", "diff", converted, half, "--any-dtype", "--tolerance", 0.004)
    assert states.code == 1
    assert f"optimizer.state.exp_avg.banks.0.values is not in {half}" in states.output
    weights = ("checkpoint", "diff", converted, half, "--weights-only")
    assert "is float32 in " in megamem(*weights).output
    # bf16 has 8 bits of precision: half a unit in the last place is 2^-9 of a number.
    assert megamem(*weights, "--any-dtype", "--tolerance", 2**-8).code == 0
    assert megamem(*weights, "--any-dtype", "--tolerance", 2**-11).code == 1


def die_at_the_second_file() -> None:
    write, written = TorchDistFile.write, []

    def dying(self: TorchDistFile, *args: Any) -> Any:
        if written:
            os.kill(os.getpid(), signal.SIGKILL)
        written.append(self.name)
        return write(self, *args)

    TorchDistFile.write = dying  # type: ignore[method-assign]


def test_a_killed_conversion_goes_on(megamem: Megamem, saved_run: Path, tmp_path: Path) -> None:
    path = tmp_path / "run"
    command = ("checkpoint", "convert", saved_run, path, "--max-file-size", "64KiB", "--workers", 1)
    assert megamem(*command, before=die_at_the_second_file).code == -signal.SIGKILL
    assert not path.exists()
    result = megamem(*command)
    assert result.code == 0, result.output
    assert "1 file of an earlier start kept" in result.output
    assert megamem("checkpoint", "diff", path, saved_run).code == 0
    assert [entry.name for entry in tmp_path.iterdir()] == ["run"]


def test_another_conversion_to_the_same_place_starts_over(megamem: Megamem, saved_run: Path, tmp_path: Path) -> None:
    path = tmp_path / "run"
    command = ("checkpoint", "convert", saved_run, path, "--max-file-size", "64KiB", "--workers", 1)
    assert megamem(*command, before=die_at_the_second_file).code == -signal.SIGKILL
    result = megamem(*command, "--step", 3)
    assert result.code == 0, result.output
    assert "kept" not in result.output
    assert megamem("checkpoint", "diff", path, checkpoint(saved_run, 3)).code == 0


def flip_a_written_byte() -> None:
    """A disk that keeps something else than was written."""
    write = TorchDistFile.write

    def flipping(self: TorchDistFile, path: Path, read: Any, *options: Any) -> Any:
        return write(self, path, lambda region: read(region).add_(1), *options)

    TorchDistFile.write = flipping  # type: ignore[method-assign]


def test_what_is_not_equal_when_read_back_gets_no_name(megamem: Megamem, saved_run: Path, tmp_path: Path) -> None:
    result = megamem("checkpoint", "convert", saved_run, tmp_path / "run", before=flip_a_written_byte)
    assert result.code == 4, result.output
    assert "is not what was to be written" in result.output
    assert not (tmp_path / "run").exists()


def test_wrong_input_is_named(megamem: Megamem, saved_run: Path, tmp_path: Path) -> None:
    there = tmp_path / "there"
    there.mkdir()
    (there / "file").write_text("mine")
    cases = [
        (("inspect", tmp_path / "nothing"), 4, "no such file or folder"),
        (("inspect", there), 4, "is no checkpoint of a known format"),
        (("inspect", saved_run, "--step", 4), 4, "there are 3, 6"),
        (("convert", saved_run, there), 2, "is there already"),
        (("convert", saved_run, tmp_path / "x", "--max-memory", "1GiB"), 2, "--max-memory is 1,024 MiB"),
        (("convert", saved_run, tmp_path / "x", "--max-memory", "much"), 2, "much is no size"),
    ]
    for args, code, text in cases:
        result = megamem("checkpoint", *args)
        assert result.code == code, result.output
        assert text in result.output
        assert "Traceback" not in result.output
    assert (there / "file").read_text() == "mine"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["there"]


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (lambda path: flip(next(path.glob("*.distcp"))), "has other contents"),
        (lambda path: next(path.glob("*.distcp")).unlink(), "is missing"),
        (lambda path: flip(path / "common.pt"), "has other contents"),
    ],
    ids=["a flipped byte", "a missing file", "a small file"],
)
def test_verify_finds_damage(megamem: Megamem, saved_run: Path, tmp_path: Path, damage: Any, text: str) -> None:
    run = Path(shutil.copytree(saved_run, tmp_path / "run"))
    whole = megamem("checkpoint", "verify", checkpoint(run, 6), "--finite")
    assert whole.code == 0, whole.output
    assert "is whole: " in whole.output
    damage(checkpoint(run, 6))
    result = megamem("checkpoint", "verify", checkpoint(run, 6))
    assert result.code == 4, result.output
    assert text in result.output


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (lambda path: (path / "state.json").write_text("junk"), "state.json cannot be read"),
        (lambda path: flip(next(path.glob("*.distcp"))), "has other contents"),
    ],
    ids=["junk as state", "a flipped byte"],
)
def test_a_damaged_newest_checkpoint_is_not_replaced_by_an_older_one(
    megamem: Megamem, saved_run: Path, tmp_path: Path, damage: Any, text: str
) -> None:
    """A run's newest checkpoint alone is converted, and nothing if that is damaged; `verify` judges all of them."""
    run = Path(shutil.copytree(saved_run, tmp_path / "run"))
    damage(checkpoint(run, 6))
    result = megamem("checkpoint", "verify", run)
    assert result.code == 4, result.output
    assert f"{checkpoint(run, 3)} is whole: " in result.output
    assert text in result.output
    assert f"1 of 2 checkpoints of {run} is damaged, see above: step_00000006" in result.last_line
    result = megamem("checkpoint", "convert", run, tmp_path / "made", "--weights-only")
    assert result.code == 4, result.output
    assert str(checkpoint(run, 6)) in result.last_line
    assert f"name its folder ({checkpoint(run, 3)}) or its step (--step)" in result.last_line
    assert not (tmp_path / "made").exists()


def flip(path: Path) -> None:
    """Change one byte in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
