"""`train.apex`, with a stand-in for the package that computes by PyTorch: what it computes, and on which ranks; going on
with a run of the other implementation; what is refused.
"""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import Megamem, checkpoint, steps
from stand_ins import APEX, TRANSFORMER_ENGINE, WithStandIns, called, with_stand_ins

from tests.rotation import in_turn

ALL = "train.apex=[norms,weight_gradients,adamw]"
# Of `saved_run`, which is trained without it.
SHORT = ("train.num_steps=6", "checkpoint.every_steps=3")
RANKS, BLOCKS, MICROBATCHES = 2, 4, 2

pytestmark = pytest.mark.skipif(importlib.util.find_spec("apex") is not None, reason="the real Apex is installed here")


def losses(folder: Path) -> list[float]:
    return [row["loss"] for row in steps(folder)]


@pytest.fixture(scope="module")
def with_apex(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WithStandIns]:
    with with_stand_ins(tmp_path_factory.mktemp("with_apex"), APEX) as interpreter:
        yield interpreter


@pytest.fixture(scope="module")
def halfway(config_file: Path, tmp_path_factory: pytest.TempPathFactory, with_apex: WithStandIns) -> Path:
    """Three steps with it, and the rows of six, on two tensor-parallel ranks."""
    folder = tmp_path_factory.mktemp("apex") / "run"
    with_apex.train(folder, config_file, ALL, *SHORT, "parallel.tensor=2", "--nproc", RANKS)
    shutil.rmtree(checkpoint(folder, 6))
    return folder


def test_it_computes_what_was_asked_for(halfway: Path) -> None:
    """Per block two norms and four linears, and one of each at the end, in every microbatch; two optimizers, of dense
    and of split parameters. Queries and keys are normed where they are rotated, which Apex has nothing for."""
    passes = 6 * MICROBATCHES * RANKS
    assert called(halfway) == {
        "fused_rms_norm_affine": passes * (2 * BLOCKS + 1),
        "wgrad_gemm_accum_fp32": passes * (4 * BLOCKS + 1),
        "FusedAdam": 6 * 2 * RANKS,
    }


def test_the_same_losses_on_tensor_parallel_ranks(saved_run: Path, halfway: Path) -> None:
    assert losses(halfway) == pytest.approx(losses(saved_run), rel=1e-5)


def test_pytorch_goes_on(saved_run: Path, halfway: Path, config_file: Path, tmp_path: Path, megamem: Megamem) -> None:
    shutil.copytree(halfway, tmp_path / "run")
    result = megamem("train", config_file, *SHORT, "--nproc", 1, "--run-dir", tmp_path / "run")
    assert result.code == 0, result.output
    assert losses(tmp_path / "run")[3:] == pytest.approx(losses(saved_run)[3:], rel=1e-5)


def test_it_goes_on_with_a_run_of_pytorch(
    saved_run: Path, config_file: Path, tmp_path: Path, with_apex: WithStandIns
) -> None:
    shutil.copytree(saved_run, tmp_path / "run")
    shutil.rmtree(checkpoint(tmp_path / "run", 6))
    with_apex.train(tmp_path / "run", config_file, ALL, *SHORT, "--nproc", 1)
    assert losses(tmp_path / "run")[3:] == pytest.approx(losses(saved_run)[3:], rel=1e-5)


@in_turn(1)
def test_transformer_engine_adds_up_gradients_of_its_own_linears(
    saved_run: Path, config_file: Path, tmp_path: Path
) -> None:
    """Apex those of the output projection, which is Megatron's: once per microbatch."""
    options = ("model.implementation=transformer_engine", "train.apex=[weight_gradients]", *SHORT, "--nproc", 1)
    with with_stand_ins(tmp_path, APEX, TRANSFORMER_ENGINE) as interpreter:
        interpreter.train(tmp_path / "run", config_file, *options)
    assert called(tmp_path / "run")["wgrad_gemm_accum_fp32"] == 6 * MICROBATCHES
    assert losses(tmp_path / "run") == pytest.approx(losses(saved_run), rel=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ("train.apex=[norms]",),
            "train.apex has norms, but apex and fused_layer_norm_cuda cannot be imported: install Apex from its sources "
            "(github.com/NVIDIA/apex) with its C++ and CUDA extensions, or remove norms",
        ),
        (
            ("train.apex=[adamw]", "model.implementation=transformer_engine"),
            "train.apex has adamw, but model.implementation is transformer_engine, which has an AdamW, which Megatron takes "
            "for Apex's: remove adamw, or use model.implementation: local",
        ),
        (("train.apex=[norms,norms]",), "train.apex has norms twice: name it once"),
        (
            ("train.apex=[layernorm]",),
            "train.apex.0 is 'layernorm' (text), expected one of norms, weight_gradients, adamw",
        ),
    ],
)
def test_what_does_not_fit_is_refused(
    options: tuple[str, ...], message: str, config_file: Path, tmp_path: Path, megamem: Megamem
) -> None:
    result = megamem("train", config_file, *options, "--run-dir", tmp_path / "run")
    assert result.code == 2
    assert message in " ".join(result.output.split())


@in_turn(0)
def test_layers_that_were_trained_alone_keep_their_count(
    config_file: Path, tmp_path: Path, megamem: Megamem, with_apex: WithStandIns
) -> None:
    """A group of Apex's has one number of updates for all of its parameters."""
    run = tmp_path / "run"
    result = megamem("train", config_file, "train.num_steps=3", "optimizer.trained_layers=[2]", "--run-dir", run)
    assert result.code == 0, result.output
    with pytest.raises(AssertionError, match="counts the updates of a group of parameters together") as refused:
        with_apex.train(run, config_file, "train.apex=[adamw]", "train.num_steps=4", "--nproc", 1)
    assert "have seen 0 and 3 of them" in str(refused.value)
