"""The feed-forward width at equal cost: the core, and the command."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megamem.config.model import ModelConfig, MoEConfig
from megamem.families.memory_plus.config import MemoryPlusConfig
from megamem.families.ultramem_v2.config import UltraMemV2Config
from megamem.placement.sharing import SharingConfig
from megamem.placement.spans import PlacementConfig
from pretrain.planning.counts.equal_compute import (
    active_measure,
    core_measure,
    flops_measure,
    solve_ffn_width,
)
from tools import cli

MODEL = ModelConfig(num_layers=4, hidden_size=64, num_attention_heads=4, ffn_hidden_size=512, vocab_size=384)
MEMORY = UltraMemV2Config(num_keys=16, key_dim=16, value_dim=24, pre_value_dim=8, top_k=8)
MEASURES = {"flops": flops_measure(128), "active": active_measure, "core": core_measure}


@pytest.mark.parametrize("measure", MEASURES.values(), ids=MEASURES)
@pytest.mark.parametrize("multiple", [1, 64])
def test_no_other_multiple_comes_nearer(measure: object, multiple: int) -> None:
    with_memory = replace(MODEL, memory=MEMORY)
    target = measure(MODEL)  # type: ignore[operator]
    solved = solve_ffn_width(with_memory, measure, target, multiple=multiple)  # type: ignore[arg-type]
    assert solved.width % multiple == 0
    assert abs(solved.width - solved.exact) <= multiple / 2
    misses = {
        width: abs(measure(replace(with_memory, ffn_hidden_size=width)) - target)  # type: ignore[operator]
        for width in (solved.width - multiple, solved.width, solved.width + multiple)
        if width > 0
    }
    assert min(misses, key=misses.__getitem__) == solved.width
    assert solved.residual == pytest.approx(solved.value / target - 1)


def test_a_model_is_as_wide_as_itself() -> None:
    for model in (MODEL, replace(MODEL, memory=MEMORY)):
        solved = solve_ffn_width(model, MEASURES["flops"], MEASURES["flops"](model), multiple=1)
        assert (solved.width, solved.residual) == (512, 0.0)


def test_more_keys_leave_less_feed_forward() -> None:
    target = MEASURES["flops"](replace(MODEL, memory=MEMORY))
    widths = [
        solve_ffn_width(
            replace(MODEL, memory=replace(MEMORY, sharing=SharingConfig("ring", group))), MEASURES["flops"], target
        ).exact
        for group in (1, 2, 4)
    ]
    assert widths == sorted(widths, reverse=True)


@pytest.mark.parametrize(
    ("model", "target", "message"),
    [
        (replace(MODEL, moe=MoEConfig()), 1e9, "model.moe is set"),
        (
            replace(
                MODEL,
                memory=MemoryPlusConfig(value_dim=64, placement=PlacementConfig(position="instead")),
            ),
            1e9,
            "no feed-forward is left",
        ),
        (MODEL, 10.0, "no width makes them equal"),
    ],
)
def test_what_has_no_answer_says_so(model: ModelConfig, target: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        solve_ffn_width(model, MEASURES["flops"], target)


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    dense, memory = tmp_path / "dense.yaml", tmp_path / "memory.yaml"
    dense.write_text("model: {vocab_size: 300, hidden_size: 64, ffn_hidden_size: 512}")
    memory.write_text("base: dense.yaml\nmodel: {memory: {num_keys: 16, top_k: 8}}")
    return str(memory), str(dense)


def test_the_command_prints_the_key_and_the_residual(
    files: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    memory, dense = files
    arguments = ["config", "ffn-width", memory, "--like", dense]
    assert cli.main([*arguments, "model.memory=null"]) == 0
    key, residual, _ = capsys.readouterr().out.splitlines()
    assert key == "model.ffn_hidden_size: 512"
    assert residual.startswith("# forward FLOPs per token: ")
    assert "+0.000 % of" in residual
    assert residual.endswith(f"({dense})")
    # Tensor-parallel ranks hold equal parts.
    assert cli.main([*arguments, "--multiple", "8", "parallel.tensor=3", "--match", "active"]) == 0
    assert "the multiple of 24 nearest to" in capsys.readouterr().out
    assert cli.main(["config", "ffn-width", memory, "--target", "2e5", "--match", "core"]) == 0
    assert "of 200,000 (--target)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--target", "1"], "no width makes them equal"),
        (["--target", "-5"], "it must be above 0"),
        (["--target", "1e6", "--multiple", "0"], "it must be at least 1"),
        ([], "one of the arguments --like --target is required"),
    ],
)
def test_the_command_refuses(
    files: tuple[str, str], arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["config", "ffn-width", files[0], *arguments]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_a_vocabulary_on_one_side_only_is_refused(files: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    memory, dense = files
    assert cli.main(["config", "ffn-width", memory, "--like", dense, "model.vocab_size=null"]) == 2
    assert "model.vocab_size, which they need" in " ".join(capsys.readouterr().err.split())
