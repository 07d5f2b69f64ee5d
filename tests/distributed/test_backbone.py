"""The backbone's settings reach Megatron's modules: logits against a plain transformer that is written out here,
setting by setting.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny_runs import VOCAB_SIZE, joined
from torch import Tensor

from megamem.config.model import ModelConfig
from megamem.model import MemoryGPTModel
from parallel.groups import ParallelGroups
from pretrain.config.schema import RunConfig, TrainConfig
from pretrain.engine.build import build_chunks

LENGTH = 12
# Megatron keeps rotary frequencies in fp32, here multiplied by positions up to 11; all else is in fp64.
TOLERANCE = 1e-5

PLAIN = ModelConfig(
    num_layers=2, hidden_size=24, num_attention_heads=4, head_dim=8, ffn_hidden_size=20, vocab_size_multiple=16
)
MODELS = {
    "plain": PLAIN,
    "rotary_base": replace(PLAIN, rotary_base=50),
    "norm_epsilon": replace(PLAIN, norm_epsilon=0.25),
    "qk_norm": replace(PLAIN, qk_norm=False),
    "qkv_bias": replace(PLAIN, qkv_bias=True),
    "tied_embeddings": replace(PLAIN, tied_embeddings=False),
    "num_query_groups": replace(PLAIN, num_query_groups=2),
    "head_dim": replace(PLAIN, head_dim=None),
    "vocab_size_multiple": replace(PLAIN, vocab_size_multiple=7),
    "init_std": replace(PLAIN, init_std=0.5),
}
PADDED = {name: 63 if name == "vocab_size_multiple" else 64 for name in MODELS}


def normalised(x: Tensor, gain: Tensor, epsilon: float) -> Tensor:
    return x / ((x**2).sum(-1, keepdim=True) / x.shape[-1] + epsilon).sqrt() * gain


def rotated(x: Tensor, base: float) -> Tensor:
    """Position m turns the pair (i, i + d/2) of a head [s, d] by the angle m base^(-2i/d)."""
    half = x.shape[-1] // 2
    angles = torch.tensor(
        [[position * base ** (-2 * i / (2 * half)) for i in range(half)] for position in range(len(x))],
        dtype=torch.float64,
    )
    first, second = x[:, :half], x[:, half:]
    return torch.cat(
        [first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], dim=-1
    )


def attention(x: Tensor, weights: dict[str, Tensor], model: ModelConfig, prefix: str) -> Tensor:
    """[s, D]: heads one by one."""
    heads, width = model.num_attention_heads, model.head_dim or model.hidden_size // model.num_attention_heads
    groups = model.num_query_groups or heads
    per_group = heads // groups
    # Each group has its queries, then its key, then its value.
    fused = x @ weights[f"{prefix}linear_qkv.weight"].T
    if model.qkv_bias:
        fused = fused + weights[f"{prefix}linear_qkv.bias"]
    fused = fused.view(len(x), groups, per_group + 2, width)
    allowed = torch.ones(len(x), len(x), dtype=torch.bool).tril()
    outputs = []
    for head in range(heads):
        group = fused[:, head // per_group]
        query, key, value = group[:, head % per_group], group[:, per_group], group[:, per_group + 1]
        if model.qk_norm:
            query = normalised(query, weights[f"{prefix}q_layernorm.weight"], model.norm_epsilon)
            key = normalised(key, weights[f"{prefix}k_layernorm.weight"], model.norm_epsilon)
        scores = rotated(query, model.rotary_base) @ rotated(key, model.rotary_base).T / math.sqrt(width)
        outputs.append(scores.masked_fill(~allowed, -math.inf).softmax(-1) @ value)
    return torch.cat(outputs, -1) @ weights[f"{prefix}linear_proj.weight"].T


def plain_logits(ids: Tensor, weights: dict[str, Tensor], model: ModelConfig) -> Tensor:
    """[s, rows of the embedding], of one sequence."""
    embedding = weights["embedding.word_embeddings.weight"]
    x = embedding[ids]
    for layer in range(model.num_layers):
        prefix = f"decoder.layers.{layer}."
        read = normalised(x, weights[f"{prefix}input_layernorm.weight"], model.norm_epsilon)
        x = x + attention(read, weights, model, f"{prefix}self_attention.")
        read = normalised(x, weights[f"{prefix}pre_mlp_layernorm.weight"], model.norm_epsilon)
        gate, up = (read @ weights[f"{prefix}mlp.linear_fc1.weight"].T).chunk(2, dim=-1)
        x = x + (gate * gate.sigmoid() * up) @ weights[f"{prefix}mlp.linear_fc2.weight"].T
    x = normalised(x, weights["decoder.final_layernorm.weight"], model.norm_epsilon)
    return x @ (embedding if model.tied_embeddings else weights["output_layer.weight"]).T


def built(model: ModelConfig, groups: ParallelGroups) -> MemoryGPTModel:
    config = RunConfig(model=model, train=TrainConfig(sequence_length=LENGTH))
    (chunk,) = build_chunks(config, groups, vocab_size=VOCAB_SIZE, dtype=torch.float64)
    return chunk


def compare(name: str, groups: ParallelGroups) -> dict[str, Any]:
    """Figures of one model, among them how far its logits are from the plain ones of its own settings, and from
    those of `PLAIN` with the same weights.
    """
    model = MODELS[name]
    chunk = built(model, groups)
    frequencies = chunk.rotary_pos_emb.inv_freq
    generator = torch.Generator().manual_seed(3)
    stds = {key: float(p.std()) for key, p in chunk.named_parameters() if p.dim() == 2}
    with torch.no_grad():
        for parameter in chunk.parameters():
            # So large that attention is uneven, and every gain tells.
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(1 + 0.3 * noise if parameter.dim() == 1 else 0.3 * noise)
        ids = torch.randint(VOCAB_SIZE, (LENGTH,), generator=generator)
        logits = chunk(ids.unsqueeze(0), torch.arange(LENGTH).unsqueeze(0), None)[0]
    weights = dict(chunk.state_dict())
    scale = float(logits.abs().max())

    def distance(settings: ModelConfig) -> float:
        try:
            expected = plain_logits(ids, weights, settings)
        except (KeyError, RuntimeError):
            # The weights are of other names or shapes.
            return math.inf
        return float((logits - expected).abs().max()) / scale

    return {
        "error": distance(model),
        "distance from the defaults": distance(PLAIN),
        "stds": stds,
        "shapes": {key: tuple(p.shape) for key, p in chunk.named_parameters()},
        "rows": len(weights["embedding.word_embeddings.weight"]),
        "output rows": logits.shape[-1],
        "frequencies": frequencies.tolist(),
    }


@pytest.fixture(scope="module")
def compared(run_ranks: Any) -> dict[str, dict[str, Any]]:
    def main() -> dict[str, dict[str, Any]]:
        with joined(RunConfig()) as groups:
            return {name: compare(name, groups) for name in MODELS}

    found: dict[str, dict[str, Any]] = run_ranks(main, 1)[0]
    return found


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_a_plain_transformer(compared: dict[str, dict[str, Any]], name: str) -> None:
    assert compared[name]["error"] < TOLERANCE


@pytest.mark.parametrize(
    "name", ["rotary_base", "norm_epsilon", "qk_norm", "qkv_bias", "tied_embeddings", "num_query_groups", "head_dim"]
)
def test_every_setting_tells(compared: dict[str, dict[str, Any]], name: str) -> None:
    """The plain transformer of the defaults computes something else with the same weights."""
    assert compared[name]["distance from the defaults"] > 1e-2


@pytest.mark.parametrize("name", MODELS)
def test_the_embedding_is_padded(compared: dict[str, dict[str, Any]], name: str) -> None:
    """61 ids: to 64, or to 63."""
    assert compared[name]["rows"] == compared[name]["output rows"] == PADDED[name]


@pytest.mark.parametrize("name", MODELS)
def test_weights_have_the_widths_of_the_settings(compared: dict[str, dict[str, Any]], name: str) -> None:
    """Hidden size 24, feed-forward 20 (gate and up together 40), four heads of 8 or, without head_dim, of 6."""
    head, groups = (6 if name == "head_dim" else 8), (2 if name == "num_query_groups" else 4)
    expected: dict[str, tuple[int, ...]] = {
        "embedding.word_embeddings.weight": (PADDED[name], 24),
        "decoder.final_layernorm.weight": (24,),
    }
    for layer in ("decoder.layers.0.", "decoder.layers.1."):
        expected |= {
            f"{layer}input_layernorm.weight": (24,),
            f"{layer}self_attention.linear_qkv.weight": ((4 + 2 * groups) * head, 24),
            f"{layer}self_attention.linear_proj.weight": (24, 4 * head),
            f"{layer}pre_mlp_layernorm.weight": (24,),
            f"{layer}mlp.linear_fc1.weight": (40, 24),
            f"{layer}mlp.linear_fc2.weight": (24, 20),
        }
        if name != "qk_norm":
            expected |= {f"{layer}self_attention.{part}_layernorm.weight": (head,) for part in "qk"}
        if name == "qkv_bias":
            expected[f"{layer}self_attention.linear_qkv.bias"] = (3 * 32,)
    if name == "tied_embeddings":
        expected["output_layer.weight"] = (64, 24)
    assert compared[name]["shapes"] == expected


@pytest.mark.parametrize("name", MODELS)
def test_rotary_frequencies_are_powers_of_the_base(compared: dict[str, dict[str, Any]], name: str) -> None:
    base, width = (50 if name == "rotary_base" else 10000), (6 if name == "head_dim" else 8)
    expected = [base ** (-2 * i / width) for i in range(width // 2)]
    assert compared[name]["frequencies"] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("name", MODELS)
def test_initial_weights_have_the_deviation_that_was_asked_for(compared: dict[str, dict[str, Any]], name: str) -> None:
    """sqrt(2 / 5D) unless set; what writes to the residual stream has 1 / sqrt(2L) of it."""
    std = 0.5 if name == "init_std" else math.sqrt(2 / (5 * 24))
    stds = compared[name]["stds"]
    assert len(stds) == (10 if name == "tied_embeddings" else 9)
    for key, found in stds.items():
        expected = std / 2 if key.endswith(("linear_proj.weight", "linear_fc2.weight")) else std
        # The smallest matrix has 480 elements, whose deviation has a standard error of 3 %.
        assert found == pytest.approx(expected, rel=0.12), key
