"""Frequencies of stretched rotary positions, and how files of other programs say them."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch

from megamem.attention.rotary import scaled_frequencies
from megamem.attention.rotary_config import RotaryScalingConfig
from megamem.config.model import ModelConfig
from pretrain.convert.huggingface.rope import imported_base, imported_scaling, rope_parameters
from pretrain.errors import CheckpointError

CASES: dict[str, RotaryScalingConfig] = {
    "linear": RotaryScalingConfig("linear", factor=4.0),
    "ntk": RotaryScalingConfig("ntk", factor=4.0),
    "yarn": RotaryScalingConfig("yarn", factor=4.0, original_length=4096),
    "yarn, own factor": RotaryScalingConfig("yarn", factor=40.0, original_length=4096, attention_factor=1.3),
    "yarn, one step": RotaryScalingConfig("yarn", factor=2.0, original_length=8, beta_fast=2.0, beta_slow=1.5),
    "yarn, other ends": RotaryScalingConfig("yarn", factor=1.0, original_length=512, beta_fast=8.0, beta_slow=0.5),
    "llama3": RotaryScalingConfig("llama3", factor=8.0),
    "llama3, other ends": RotaryScalingConfig(
        "llama3", factor=32.0, original_length=1000, low_frequency_factor=0.5, high_frequency_factor=3.0
    ),
}


def model_with(scaling: RotaryScalingConfig, width: int, base: int) -> ModelConfig:
    return ModelConfig(head_dim=width, rotary_base=base, rotary_scaling=scaling)


def plain(width: int, base: int) -> torch.Tensor:
    return torch.tensor([base ** (-i / width) for i in range(0, width, 2)], dtype=torch.float32)


@pytest.mark.parametrize(("width", "base"), [(64, 500_000), (10, 10_000)])
@pytest.mark.parametrize("name", CASES)
def test_frequencies_and_the_factor_are_those_of_transformers(name: str, width: int, base: int) -> None:
    """The oracle reads the parameters that we export; static NTK is dynamic NTK for a sequence of that length."""
    transformers = pytest.importorskip("transformers", reason="the oracle: pip install '.[hf]'")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = CASES[name]
    parameters = rope_parameters(model_with(scaling, width, base))
    kind, length = parameters["rope_type"], None
    if scaling.kind == "ntk":
        # base (f s / L - (f - 1))^(d / (d - 2)), and s = (2 f - 1) L / f makes f of what is in brackets.
        parameters = {"rope_type": "dynamic", "rope_theta": float(base), "factor": scaling.factor}
        kind, length = "dynamic", int((2 * scaling.factor - 1) * 4096 / scaling.factor)
    config = transformers.LlamaConfig(head_dim=width, max_position_embeddings=4096, rope_parameters=parameters)
    expected, factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), length)
    actual = scaled_frequencies(plain(width, base), scaling, base)
    # Roundings of fp32 in another order; where two numbers nearly cancel at an end of llama3's, five of them become ten.
    torch.testing.assert_close(actual, expected, rtol=2e-6, atol=0)
    assert scaling.score_factor == pytest.approx(factor**2, rel=1e-12)


def test_ntk_keeps_the_highest_frequency_and_divides_the_lowest_by_the_factor() -> None:
    actual = scaled_frequencies(plain(64, 10_000), CASES["ntk"], 10_000) / plain(64, 10_000)
    assert actual[0] == 1.0
    assert float(actual[-1]) == pytest.approx(1 / 4, rel=1e-5)


@pytest.mark.parametrize("name", [name for name in CASES if not name.startswith("ntk")])
def test_a_config_goes_both_ways(name: str) -> None:
    content = json.loads(json.dumps({"rope_parameters": rope_parameters(model_with(CASES[name], 64, 5000))}))
    assert imported_scaling(content, "config.json") == CASES[name]
    assert imported_base(content, "config.json") == 5000


def test_ntk_goes_out_as_the_theta_that_it_is() -> None:
    parameters = rope_parameters(model_with(CASES["ntk"], 64, 10_000))
    assert parameters == {"rope_type": "default", "rope_theta": pytest.approx(10_000 * 4 ** (64 / 62))}


def test_the_file_of_llama_3_1_is_read() -> None:
    scaling = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    }
    content = {"rope_theta": 500000.0, "rope_scaling": scaling, "max_position_embeddings": 131072}
    assert imported_scaling(content, "config.json") == RotaryScalingConfig("llama3")
    assert imported_base(content, "config.json") == 500_000


REFUSED: dict[str, tuple[Any, str]] = {
    "kind": ({"rope_type": "longrope", "factor": 2.0}, "linear, yarn, llama3 or not at all"),
    "missing": ({"rope_type": "llama3", "factor": 8.0}, "llama3 needs original_max_position_embeddings, low_freq"),
    "unknown": ({"rope_type": "linear", "factor": 2.0, "mscale": 0.7}, "no mscale in linear"),
    "not rounded": (
        {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64, "truncate": False},
        "no truncate in yarn",
    ),
    "limit": ({"type": "linear", "factor": 0.5}, "must be at least 1"),
    "no number": ({"type": "linear", "factor": "2"}, "must be numbers"),
    "no mapping": ("yarn", "must be a mapping"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_scalings_are_refused_by_name(name: str) -> None:
    rope, told = REFUSED[name]
    with pytest.raises(CheckpointError, match=r"some\.json: rope_scaling is ") as error:
        imported_scaling({"rope_scaling": rope}, "some.json")
    assert told in str(error.value)


def test_ends_in_the_wrong_order_are_refused() -> None:
    with pytest.raises(ValueError, match=r"rotary_scaling\.beta_slow is 40\.0, and must be below beta_fast = 32\.0"):
        RotaryScalingConfig("yarn", beta_slow=40.0)
    with pytest.raises(ValueError, match=r"low_frequency_factor is 4\.0, and must be below high_frequency_factor"):
        RotaryScalingConfig("llama3", low_frequency_factor=4.0)


def test_models_that_a_scaling_means_nothing_to_are_refused() -> None:
    with pytest.raises(ValueError, match=r"kind is ntk, .* use linear"):
        ModelConfig(head_dim=2, rotary_scaling=RotaryScalingConfig("ntk"))
    with pytest.raises(ValueError, match="raise rotary_base"):
        ModelConfig(rotary_base=1, rotary_scaling=RotaryScalingConfig("yarn"))


def test_only_yarn_sharpens_attention() -> None:
    assert RotaryScalingConfig("yarn", factor=math.e**10).score_factor == pytest.approx(4.0)
    assert RotaryScalingConfig("llama3", factor=100.0).score_factor == 1.0
