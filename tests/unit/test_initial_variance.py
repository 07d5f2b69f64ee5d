"""Closed formulas of initial variances against the paper's figures, recorded ones, and plain sampling."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from megamem.config.model import ModelConfig, MoEConfig
from megamem.families.ultramem.config import UltraMemConfig
from megamem.families.ultramem_v2.config import UltraMemV2Config
from megamem.retrieval.initial import (
    linear_output_variance,
    memory_variance,
    normal_mean,
    paper_ffn_variance,
    sigma_values,
    swiglu_ffn_variance,
    target_variance,
)

MODEL = ModelConfig(num_layers=20, hidden_size=768, num_attention_heads=12, ffn_hidden_size=2496)
MEMORY = UltraMemV2Config(num_keys=360, key_dim=192, value_dim=192, pre_value_dim=192, top_k=32)
MEMORIES = {
    "plain": MEMORY,
    "two heads": replace(MEMORY, num_heads=2),
    "no pre-values": replace(MEMORY, pre_value_dim=0),
    "gelu": replace(MEMORY, pre_value_activation="gelu"),
    "ultramem": UltraMemConfig(num_keys=360, key_dim=192, value_dim=192, top_k=32),
}


def test_sigma_v_is_the_recorded_one(golden_dir: Path) -> None:
    table = json.loads((golden_dir / "sigma_v.json").read_text())["table"]
    assert table
    for row in table:
        model = ModelConfig(
            num_layers=row["L"],
            hidden_size=row["h"],
            num_attention_heads=1,
            ffn_hidden_size=round(row["k_inner"] * row["h"]),
        )
        memory = UltraMemV2Config(
            num_keys=128,
            value_dim=row["d_v"],
            pre_value_dim=row["d_prev"],
            top_k=row["k"],
            num_heads=row["n_head"],
        )
        assert sigma_values(model, memory, row["sigma_s"]) == pytest.approx(row["sigma_V"], rel=1e-12)


def test_the_papers_constants() -> None:
    """0.4 after a linear, 0.064 k_inner / 2L after the feed-forward (Eq. 25), 0.16 in Eq. 22."""
    assert linear_output_variance(MODEL) == pytest.approx(0.4)
    assert paper_ffn_variance(MODEL) == pytest.approx(0.064 * 3.25 / 40)
    eq_22 = (0.16 + 0.16 * 0.3**2) * 0.07**4 * 192 * 32 * 192 / 768
    assert memory_variance(MODEL, MEMORY, sigma_v=0.07, score_square=1.09) == pytest.approx(eq_22)


def test_the_swiglu_has_a_third_of_the_papers_variance() -> None:
    """0.049 in place of 0.16, by sampling too."""
    assert swiglu_ffn_variance(MODEL) / paper_ffn_variance(MODEL) == pytest.approx(0.049 / 0.16, rel=0.01)
    g = torch.Generator().manual_seed(0)
    gate, up = (torch.randn(1_000_000, generator=g, dtype=torch.float64) * math.sqrt(0.4) for _ in range(2))
    inner = float((F.silu(gate) * up).square().mean())
    assert swiglu_ffn_variance(MODEL) == pytest.approx(2496 * (0.4 / 768) / 40 * inner, rel=0.01)


def test_quadrature_is_exact_for_moments() -> None:
    assert normal_mean(lambda x: x * x, 2.5) == pytest.approx(2.5, rel=1e-13)
    assert normal_mean(lambda x: x**4, 0.3) == pytest.approx(3 * 0.3**2, rel=1e-13)


@pytest.mark.parametrize("choice", ["paper", "matched"])
@pytest.mark.parametrize("name", MEMORIES)
def test_sigma_v_inverts_eq_22(name: str, choice: str) -> None:
    memory = replace(MEMORIES[name], initialisation=choice)
    sigma_v = sigma_values(MODEL, memory, 0.3)
    predicted = memory_variance(MODEL, memory, sigma_v=sigma_v, score_square=1 + 0.3**2)
    assert predicted == pytest.approx(target_variance(MODEL, memory), rel=1e-9)


def test_sigma_v_follows_the_linears_standard_deviation() -> None:
    """Eq. 26's 0.2 is h std^2 / 2."""
    wider = replace(MODEL, init_std=2 * MODEL.linear_std)
    assert sigma_values(wider, MEMORY, 0.3) == pytest.approx(4**0.25 * sigma_values(MODEL, MEMORY, 0.3))


def test_matched_is_refused_beside_a_mixture_of_experts() -> None:
    with pytest.raises(ValueError, match=r"initialisation is matched.*model\.moe is set"):
        replace(MODEL, moe=MoEConfig(), memory=replace(MEMORY, initialisation="matched"))


def test_outputs_fall_with_depth_as_the_feed_forwards_do() -> None:
    deep = replace(MODEL, num_layers=80)
    for choice in ("paper", "matched"):
        memory = replace(MEMORY, initialisation=choice)
        assert 80 * target_variance(deep, memory) == pytest.approx(20 * target_variance(MODEL, memory))
