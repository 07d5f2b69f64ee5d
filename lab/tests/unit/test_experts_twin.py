"""Mixtures of experts of as many parameters as another model: the solution is the nearest there is, and the papers' models
follow it.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from lab.experts_twin import solve_experts
from megamem.config.model import ModelConfig, MoEConfig
from megamem.families.ultramem_v2.config import UltraMemV2Config
from pretrain.config.stages import load_config
from pretrain.planning.counts.equal_compute import flops_measure
from pretrain.planning.counts.formulas import count_parameters

CONFIGS = Path(__file__).parents[3] / "configs"
MODEL = ModelConfig(num_layers=4, hidden_size=64, num_attention_heads=4, ffn_hidden_size=512, vocab_size=384)
MEMORY = UltraMemV2Config(num_keys=64, key_dim=16, value_dim=24, pre_value_dim=8, top_k=8)


def test_a_mixture_of_experts_is_its_own_equal() -> None:
    moe = MoEConfig(num_experts=24, top_k=8, expert_ffn_hidden_size=40)
    counts = count_parameters(replace(MODEL, moe=moe))
    solved = solve_experts(MODEL, active=counts.active, total=counts.total)
    assert (solved.moe, solved.active_residual, solved.total_residual) == (moe, 0.0, 0.0)


def test_no_other_experts_come_nearer() -> None:
    counts = count_parameters(replace(MODEL, memory=MEMORY))
    solved = solve_experts(MODEL, active=counts.active, total=counts.total, top_k=4, count_multiple=2)
    moe = solved.moe

    def misses(**changed: int) -> tuple[float, float]:
        found = count_parameters(replace(MODEL, moe=replace(moe, **changed)))
        return abs(found.active - counts.active), abs(found.total - counts.total)

    assert moe.num_experts % 2 == moe.expert_ffn_hidden_size % 8 == 0
    for step in (-8, 8):
        assert misses()[0] <= misses(expert_ffn_hidden_size=moe.expert_ffn_hidden_size + step)[0]
    for step in (-2, 2):
        assert misses()[1] <= misses(num_experts=moe.num_experts + step)[1]
    assert solved.active_residual == pytest.approx(count_parameters(replace(MODEL, moe=moe)).active / counts.active - 1)


@pytest.mark.parametrize(("active", "total"), [(0.2, 0.3), (1.0, 0.8)])
def test_a_model_that_no_experts_equal_is_refused(active: float, total: float) -> None:
    counts = count_parameters(MODEL)
    with pytest.raises(ValueError, match="no mixture of experts has"):
        solve_experts(MODEL, active=active * counts.active, total=total * counts.active)


# A release gives the mixture of the smallest size.
@pytest.mark.parametrize("size", sorted({path.stem for path in (CONFIGS / "olmoe").glob("*.yaml")} - {"227m_1.2b"}))
def test_experts_of_the_papers_sizes_follow_the_stated_rules(size: str) -> None:
    """Active parameters by their width, total by their number; OLMoE-1B/7B itself comes out so."""
    config = load_config(CONFIGS / "olmoe" / f"{size}.yaml")
    # Names of mixtures leave out what is retrieved.
    (path,) = (CONFIGS / "ultramemv2").glob(f"{size}*.yaml")
    like = load_config(path)
    counts = count_parameters(like.model)
    solved = solve_experts(
        config.model,
        active=counts.active,
        total=counts.total,
        width_multiple=16,
        count_multiple=config.parallel.memory,
    )
    assert config.model.moe == solved.moe
    assert abs(solved.active_residual) < 0.007
    assert abs(solved.total_residual) < 0.0125
    measure = flops_measure(4096)
    assert measure(config.model) == pytest.approx(measure(like.model), rel=0.007)
