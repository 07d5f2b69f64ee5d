"""The calibrated gain makes the mean retrieved score 1, on samples that the calibration did not see."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean

import pytest
import torch
from torch import Tensor

from kernels.rms_norm.op import torch_rms_norm
from megamem.config.memory import MemoryConfig
from megamem.families.ultramem_v2.config import UltraMemV2Config
from megamem.layers.layer import ScoreCalibration
from megamem.layers.tucker import calibrate_scores, leading_singular_vectors, retrieve

CONFIGS = {
    "small": (UltraMemV2Config(num_keys=32, key_dim=16, top_k=8), 32),
    "shared": (UltraMemV2Config(num_keys=64, key_dim=32, top_k=16), 128),
    "two heads": (UltraMemV2Config(num_keys=48, key_dim=16, top_k=8, num_heads=2), 48),
    "single query": (UltraMemV2Config(num_keys=64, key_dim=32, top_k=16, query="single"), 64),
    "rank 3, one core": (UltraMemV2Config(num_keys=64, key_dim=16, top_k=16, tucker_rank=3, num_cores=1), 64),
    "capped rows": (UltraMemV2Config(num_keys=96, key_dim=32, top_k=64, row_top_k_limit=16), 96),
}


def cores_of(memory: MemoryConfig, seed: int = 0) -> Tensor:
    shape = (memory.num_cores, memory.num_heads, memory.tucker_rank, memory.tucker_rank)
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


def measured_scores(memory: MemoryConfig, num_keys: int, cores: Tensor, gain: float, seed: int) -> Tensor:
    """Scores of fresh random queries and keys that went through the layer's norms with this gain."""
    g = torch.Generator().manual_seed(seed)
    gains = torch.full((memory.key_dim,), gain, dtype=torch.float64)
    rank = memory.tucker_rank

    def normal(*shape: int) -> Tensor:
        return torch_rms_norm(torch.randn(*shape, generator=g, dtype=torch.float64), gains, 1e-5)

    queries = normal(200, 2, memory.num_queries // 2, memory.key_dim).expand(-1, -1, rank, -1)
    keys = normal(memory.num_heads, 2, num_keys, rank, memory.key_dim)
    scores = torch.einsum("tsrd,hsnrd->sthnr", queries, keys)
    zeros = torch.zeros(memory.num_heads, rank, dtype=torch.float64)
    wide = cores.double()
    u, v = leading_singular_vectors(wide.sum(0), zeros, zeros)
    return retrieve(scores, wide, u, v, row_top_k=memory.row_top_k, top_k=memory.top_k).scores


@pytest.mark.parametrize("name", CONFIGS)
def test_mean_and_deviation_hold_on_other_samples(name: str) -> None:
    memory, num_keys = CONFIGS[name]
    cores = cores_of(memory)
    calibrations = [calibrate_scores(memory, num_keys, cores, seed=seed, name="layer") for seed in range(12)]
    scores = [
        measured_scores(memory, num_keys, cores, calibration.gain, seed)
        for seed, calibration in enumerate(calibrations)
    ]
    # One sample on one calibration's gain leaves a deviation below 0.04, so the mean of twelve one of about 0.01.
    assert fmean(float(s.mean()) for s in scores) == pytest.approx(1, abs=0.05)
    deviation = fmean(float(s.std()) for s in scores)
    assert deviation == pytest.approx(fmean(calibration.sigma_s for calibration in calibrations), rel=0.05)


def test_calibration_is_a_function_of_seed_name_and_cores() -> None:
    memory, num_keys = CONFIGS["small"]
    cores = cores_of(memory)

    def figures(seed: int = 1, name: str = "layer", of: Tensor = cores) -> ScoreCalibration:
        return calibrate_scores(memory, num_keys, of, seed=seed, name=name)

    assert figures() == figures()
    assert figures() == figures(of=cores.clone().requires_grad_())
    assert len({figures(), figures(seed=2), figures(name="other"), figures(of=cores_of(memory, 1))}) == 4


def test_larger_cores_need_a_smaller_gain() -> None:
    """Scores are linear in the cores and of fourth degree in the gain; their relative deviation stays."""
    memory, num_keys = CONFIGS["small"]
    base = calibrate_scores(memory, num_keys, cores_of(memory), seed=1, name="layer")
    doubled = calibrate_scores(memory, num_keys, 2 * cores_of(memory), seed=1, name="layer")
    assert doubled.gain == pytest.approx(base.gain / 2**0.25, rel=1e-5)
    assert doubled.sigma_s == pytest.approx(base.sigma_s, rel=1e-5)


def test_scores_that_no_gain_can_lift_are_refused() -> None:
    """The best and the worst are averaged if the whole grid is retrieved: the mean is about 0, here just below."""
    memory = replace(CONFIGS["small"][0], num_keys=2, top_k=4, row_top_k_limit=2)
    with pytest.raises(ValueError, match=r"raise model\.memory\.num_keys or lower top_k"):
        calibrate_scores(memory, 2, -cores_of(memory), seed=1, name="layer")
