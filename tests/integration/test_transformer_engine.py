"""`model.implementation: transformer_engine`, with a stand-in for the package that computes by PyTorch: the specs that
Megatron fills, the names in checkpoints, tensor parallelism, and going on with the other implementation.
"""

from __future__ import annotations

import importlib.util
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed.checkpoint as torch_checkpoint
from commands import Megamem, checkpoint, steps
from stand_ins import TRANSFORMER_ENGINE, WithStandIns, called, with_stand_ins

TE = "model.implementation=transformer_engine"
# Of `saved_run`, which is trained without it.
SHORT = ("train.num_steps=6", "checkpoint.every_steps=3")

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformer_engine") is not None, reason="the real Transformer Engine is installed here"
)


def losses(folder: Path) -> list[float]:
    return [row["loss"] for row in steps(folder)]


@pytest.fixture(scope="module")
def with_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WithStandIns]:
    with with_stand_ins(tmp_path_factory.mktemp("with_engine"), TRANSFORMER_ENGINE) as interpreter:
        yield interpreter


@pytest.fixture(scope="module")
def halfway(config_file: Path, tmp_path_factory: pytest.TempPathFactory, with_engine: WithStandIns) -> Path:
    """Three steps with it, and the rows of six, on two tensor-parallel ranks."""
    folder = tmp_path_factory.mktemp("te") / "run"
    with_engine.train(folder, config_file, TE, *SHORT, "parallel.tensor=2", "--nproc", 2)
    shutil.rmtree(checkpoint(folder, 6))
    return folder


def entries(folder: Path, step: int) -> set[str]:
    """Names in a checkpoint."""
    return set(torch_checkpoint.FileSystemReader(checkpoint(folder, step)).read_metadata().state_dict_metadata)


def test_its_modules_are_in_every_slot(halfway: Path) -> None:
    """Each of two ranks has four blocks of four norms, and one norm at the end."""
    made = called(halfway)
    of_attention = {"TEColumnParallelLinear": 4, "TERowParallelLinear": 4, "TEDotProductAttention": 4}
    of_ffn = {"TEColumnParallelLinear": 4, "TERowParallelLinear": 4}
    expected = Counter(of_attention) + Counter(of_ffn) + Counter({"RMSNorm": 17})
    assert made == {name: 2 * number for name, number in expected.items()}


def test_names_in_a_checkpoint_are_those_of_the_other(saved_run: Path, halfway: Path) -> None:
    """Its modules have extra states, which hold nothing and are left out."""
    assert entries(halfway, 3) == entries(saved_run, 3)


def test_the_same_losses_on_tensor_parallel_ranks(saved_run: Path, halfway: Path) -> None:
    assert losses(halfway) == pytest.approx(losses(saved_run), rel=1e-5)


def test_the_other_implementation_goes_on(
    saved_run: Path, halfway: Path, config_file: Path, tmp_path: Path, megamem: Megamem
) -> None:
    shutil.copytree(halfway, tmp_path / "run")
    result = megamem("train", config_file, *SHORT, "--nproc", 1, "--run-dir", tmp_path / "run")
    assert result.code == 0, result.output
    assert "model.implementation: transformer_engine -> local" in result.output
    assert losses(tmp_path / "run")[3:] == pytest.approx(losses(saved_run)[3:], rel=1e-5)


def test_it_goes_on_with_a_run_of_the_other(
    saved_run: Path, config_file: Path, tmp_path: Path, with_engine: WithStandIns
) -> None:
    shutil.copytree(saved_run, tmp_path / "run")
    shutil.rmtree(checkpoint(tmp_path / "run", 6))
    output = with_engine.train(tmp_path / "run", config_file, TE, *SHORT, "--nproc", 1)
    assert "model.implementation: local -> transformer_engine" in output
    assert losses(tmp_path / "run")[3:] == pytest.approx(losses(saved_run)[3:], rel=1e-5)
