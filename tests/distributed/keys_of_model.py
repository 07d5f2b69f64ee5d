"""Effects of the keys under `model` but those of the memory, measured on initial weights and single passes of models
on one rank.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping, Sequence

import pytest
import torch
from keys_table import (
    MOE,
    PKM,
    Subject,
    Table,
    changed_names,
    last_parts,
    rms,
    root_mean_square,
    same,
    set_key,
    with_model,
)
from torch import Tensor

from megamem.attention.rotary_config import RotaryScalingConfig
from megamem.config.model import LatentAttentionConfig, MoEConfig, MultiTokenConfig
from megamem.config.width import MupConfig

MODEL = Table()
FC1, QKV, PROJ = "mlp.ffn.linear_fc1.weight", "self_attention.linear_qkv.weight", "self_attention.linear_proj.weight"
BLOCK = "decoder.layers.0."


@MODEL.key("seed", 2)
def _(base: Subject, second: Subject) -> None:
    """Other draws of the same distributions: constants stay, and what is drawn is uncorrelated."""
    same_bits = base.weights.keys() - changed_names(base.weights, second.weights)
    assert last_parts(same_bits) == {
        *("input_layernorm", "pre_mlp_layernorm", "q_layernorm", "k_layernorm", "final_layernorm")
    }
    embedding = "embedding.word_embeddings.weight"
    one, other = base.weights[embedding].flatten(), second.weights[embedding].flatten()
    assert abs(float(torch.corrcoef(torch.stack([one, other]))[0, 1])) < 4 / math.sqrt(one.numel())
    assert root_mean_square(other) == pytest.approx(root_mean_square(one), rel=0.1)
    entries = torch.arange(144)
    assert not torch.equal(base.layer.locate(entries)[0], second.layer.locate(entries)[0])


@MODEL.key("model.num_layers", 3)
def _(base: Subject, second: Subject) -> None:
    assert (len(base.model.decoder.layers), len(second.model.decoder.layers)) == (2, 3)
    assert (len(base.model.banks), len(second.model.banks)) == (2, 3)
    # Outputs to the residual stream are scaled by 1 / sqrt(2L); inputs are not.
    scaled = second.weights[BLOCK + PROJ] * math.sqrt(3 / 2)
    assert same(scaled, base.weights[BLOCK + PROJ])
    assert torch.equal(second.weights[BLOCK + QKV], base.weights[BLOCK + QKV])


@MODEL.key("model.hidden_size", 40)
def _(base: Subject, second: Subject) -> None:
    for subject, width in ((base, 32), (second, 40)):
        shapes = subject.shapes
        assert shapes["embedding.word_embeddings.weight"] == (64, width)
        assert shapes[BLOCK + FC1] == (2 * 48, width)
        assert shapes[BLOCK + QKV] == (3 * width, width)
        assert shapes[BLOCK + "mlp.memory.value_proj"] == (width, 16)


@MODEL.key("model.num_attention_heads", 2)
def _(base: Subject, second: Subject) -> None:
    """Fewer heads of the same width together: no weight but the gains of their norms has another shape."""
    differ = {name for name in base.shapes if base.shapes[name] != second.shapes[name]}
    assert last_parts(differ) == {"q_layernorm", "k_layernorm"}
    gain = BLOCK + "self_attention.q_layernorm.weight"
    assert (base.shapes[gain], second.shapes[gain]) == ((8,), (16,))
    assert not same(base.logits(), second.logits())


@MODEL.key("model.num_query_groups", 2)
def _(base: Subject, second: Subject) -> None:
    """Rows of the projection are those of queries, keys and values."""
    assert base.shapes[BLOCK + QKV] == ((4 + 2 * 4) * 8, 32)
    assert second.shapes[BLOCK + QKV] == ((4 + 2 * 2) * 8, 32)
    assert base.shapes[BLOCK + PROJ] == second.shapes[BLOCK + PROJ] == (32, 32)


@MODEL.key("model.head_dim", 10)
def _(base: Subject, second: Subject) -> None:
    for subject, head in ((base, 8), (second, 10)):
        assert subject.shapes[BLOCK + QKV] == (3 * 4 * head, 32)
        assert subject.shapes[BLOCK + PROJ] == (32, 4 * head)


@MODEL.key("model.ffn_hidden_size", 44)
def _(base: Subject, second: Subject) -> None:
    for subject, inner in ((base, 48), (second, 44)):
        assert subject.shapes[BLOCK + FC1] == (2 * inner, 32)
        assert subject.shapes[BLOCK + "mlp.ffn.linear_fc2.weight"] == (32, inner)


@MODEL.key("model.vocab_size_multiple", 7)
def _(base: Subject, second: Subject) -> None:
    """61 ids, padded."""
    name = "embedding.word_embeddings.weight"
    assert (base.shapes[name], second.shapes[name]) == ((64, 32), (63, 32))
    assert {n for n in base.shapes if base.shapes[n] != second.shapes[n]} == {name}


@MODEL.key("model.tied_embeddings", False)
def _(base: Subject, second: Subject) -> None:
    assert second.weights.keys() - base.weights.keys() == {"output_layer.weight"}
    assert base.weights.keys() <= second.weights.keys()
    assert second.shapes["output_layer.weight"] == (64, 32)
    assert not same(base.logits(), second.logits())


@MODEL.key("model.qk_norm", False)
def _(base: Subject, second: Subject) -> None:
    assert last_parts(base.weights.keys() - second.weights.keys()) == {"q_layernorm", "k_layernorm"}
    assert second.weights.keys() <= base.weights.keys()
    assert not same(base.logits(), second.logits())


@MODEL.key("model.qkv_bias", True)
def _(base: Subject, second: Subject) -> None:
    """One for each row of the projection, 0 at first; `test_backbone.py` has others."""
    bias = BLOCK + "self_attention.linear_qkv.bias"
    assert second.weights.keys() - base.weights.keys() == {bias, bias.replace("0", "1")}
    assert second.shapes[bias] == (3 * 32,)
    assert not second.weights[bias].any()
    assert same(base.logits(), second.logits())


def norms_are_rms(subject: Subject, epsilon: float) -> None:
    """Every norm of the backbone computes x / sqrt(mean(x^2) + epsilon) at its initial gain of 1.

    Heads are normalised where they are turned, which leaves those of the first token as they are.
    """
    seen: dict[str, tuple[Tensor, Tensor]] = {}
    heads: dict[str, tuple[Tensor, ...]] = {}
    hooks = [
        module.register_forward_hook(lambda _, inputs, out, name=name: seen.update({name: (inputs[0], out)}))
        for name, module in subject.model.named_modules()
        # Slots without a norm are filled too.
        if name.endswith("layernorm") and list(module.parameters())
    ]
    hooks += [
        module.register_forward_pre_hook(lambda _, inputs, name=name: heads.update({name: inputs[:2]}))
        for name, module in subject.model.named_modules()
        if name.endswith("core_attention")
    ]
    subject.logits()
    for hook in hooks:
        hook.remove()
    assert len(seen) == 2 * 4 + 1
    for name, turned in heads.items():
        for kind, of_kind in zip("qk", turned, strict=True):
            slot = name.replace("core_attention", f"{kind}_layernorm")
            seen[slot] = seen[slot][0][:1], of_kind[:1]
    assert all(same(out, rms(x, epsilon)) for x, out in seen.values())


def tucker_key_scores(subject: Subject, epsilon: float) -> tuple[Tensor, Tensor]:
    """Eq. 6 by one sum, for one query per side and rank: queries and keys normalised, [T, H, N, R] per side."""
    memory, weights = subject.memory, subject.memory_weights
    queries = (subject.hidden @ weights["query_proj"].T).view(7, 2, memory.tucker_rank, memory.key_dim)
    queries = rms(queries, epsilon) * weights["query_norm"]
    # The keys' dimension stands before the rank.
    keys = rms(weights["keys"].movedim(3, 4), epsilon) * weights["keys_norm"]
    rows, columns = torch.einsum("tsrd,hsnrd->sthnr", queries, keys)
    return rows, columns


def product_key_scores(subject: Subject, epsilon: float | None) -> tuple[Tensor, Tensor]:
    """Eq. 3: a query per head and side, normalised unless `epsilon` is None, [T, H, N] per side."""
    memory, weights = subject.memory, subject.memory_weights
    queries = (subject.hidden @ weights["query_proj"].T).view(7, memory.num_heads, 2, memory.key_dim)
    if epsilon is not None:
        queries = rms(queries, epsilon)
    rows, columns = torch.einsum("thsd,hsnd->sthn", queries, weights["keys"])
    return rows, columns


def scores_are(subject: Subject, expected: tuple[Tensor, Tensor]) -> bool:
    with torch.no_grad():
        found = subject.layer.key_scores(subject.hidden)  # type: ignore[operator]
    return all(same(actual, wanted) for actual, wanted in zip(found, expected, strict=True))


@MODEL.key("model.norm_epsilon", 0.3)
def _(base: Subject, second: Subject) -> None:
    """The norms of the backbone and of the memory have it; the weights are the same bits."""
    for subject, epsilon in ((base, 1e-5), (second, 0.3)):
        norms_are_rms(subject, epsilon)
        assert scores_are(subject, tucker_key_scores(subject, epsilon))
    assert not changed_names(base.weights, second.weights)


@MODEL.key("model.norm_epsilon", 0.4, PKM)
def _(base: Subject, second: Subject) -> None:
    for subject, epsilon in ((base, 1e-5), (second, 0.4)):
        assert scores_are(subject, product_key_scores(subject, epsilon))


@MODEL.key("model.rotary_base", 100)
def _(base: Subject, second: Subject) -> None:
    """The first position is not turned at all; all others are, by position x base^(-2i / d)."""
    for subject, theta in ((base, 10000), (second, 100)):
        assert same(subject.model.rotary_pos_emb.inv_freq, torch.tensor([theta ** (-i / 4) for i in range(4)]))
    one, other = base.logits(), second.logits()
    assert torch.equal(one[:, 0], other[:, 0])
    # The second attends to two keys at least, and no two vectors agree by chance.
    assert all(not torch.equal(one[:, position], other[:, position]) for position in range(1, 8))


YARN = with_model(rotary_scaling=RotaryScalingConfig("yarn", factor=4.0, original_length=1024))
LLAMA = with_model(rotary_scaling=RotaryScalingConfig("llama3", factor=4.0, original_length=1024))
YARN_FREQUENCIES = (1.0, 0.1 * (1 / 12 + 2 / 3), 0.01 * (2 / 12 + 1 / 3), 0.001 / 4)
"""YaRN's frequencies of 1, 0.1, 0.01 and 0.001: those that turn 32 times and once over 1024 positions have the numbers
0.7 and 2.2, rounded to 0 and 3; between them a frequency is divided by 4 to one and two thirds.
"""


def of_llama(low: float, high: float) -> tuple[float, ...]:
    """The third turns 1.63 times over 1024 positions, the fourth not once."""
    kept = (1024 * 0.01 / (2 * math.pi) - low) / (high - low)
    return 1.0, 0.1, 0.01 * (kept + (1 - kept) / 4), 0.001 / 4


def turned_by(base: Subject, second: Subject, *frequencies: Sequence[float]) -> None:
    """The frequencies of both, and that the second's reach attention: all positions but the first, which sees itself."""
    for subject, expected in zip((base, second), frequencies, strict=True):
        torch.testing.assert_close(subject.model.rotary_pos_emb.inv_freq, torch.tensor(expected), rtol=1e-5, atol=0)
    one, other = base.logits(), second.logits()
    assert torch.equal(one[:, 0], other[:, 0])
    assert all(not torch.equal(one[:, position], other[:, position]) for position in range(1, 8))


def score_scale(subject: Subject) -> float | None:
    """Factor on the first block's scores; None: 1 / sqrt(8)."""
    scale: float | None = subject.model.decoder.layers[0].self_attention.core_attention.softmax_scale
    return scale


@MODEL.key("model.rotary_scaling", RotaryScalingConfig("linear", factor=4.0))
def _(base: Subject, second: Subject) -> None:
    turned_by(base, second, (1.0, 0.1, 0.01, 0.001), (0.25, 0.025, 0.0025, 0.00025))
    assert score_scale(base) is None
    assert score_scale(second) == pytest.approx(8**-0.5)


def _enter_kind(kind: str, frequencies: Sequence[float]) -> None:
    @MODEL.key("model.rotary_scaling.kind", kind, YARN)
    def _(base: Subject, second: Subject) -> None:
        turned_by(base, second, YARN_FREQUENCIES, frequencies)
        assert score_scale(base) == pytest.approx((0.1 * math.log(4) + 1) ** 2 / 8**0.5)
        assert score_scale(second) == pytest.approx(8**-0.5)


_enter_kind("linear", (0.25, 0.025, 0.0025, 0.00025))
_enter_kind("ntk", (1.0, 0.1 * 4 ** (-1 / 3), 0.01 * 4 ** (-2 / 3), 0.001 / 4))
_enter_kind("llama3", of_llama(1, 4))


@MODEL.key("model.rotary_scaling.factor", 8.0, YARN)
def _(base: Subject, second: Subject) -> None:
    expected = (1.0, 0.1 * (1 / 24 + 2 / 3), 0.01 * (2 / 24 + 1 / 3), 0.001 / 8)
    turned_by(base, second, YARN_FREQUENCIES, expected)
    assert score_scale(second) == pytest.approx((0.1 * math.log(8) + 1) ** 2 / 8**0.5)


@MODEL.key("model.rotary_scaling.original_length", 64, YARN)
def _(base: Subject, second: Subject) -> None:
    """The numbers are -0.5 and 1.01: between 0 and 2."""
    turned_by(base, second, YARN_FREQUENCIES, (1.0, 0.1 * (0.5 / 4 + 0.5), 0.01 / 4, 0.001 / 4))


@MODEL.key("model.rotary_scaling.beta_fast", 8.0, YARN)
def _(base: Subject, second: Subject) -> None:
    """Its number is 1.3, rounded to 1."""
    turned_by(base, second, YARN_FREQUENCIES, (1.0, 0.1, 0.01 * (0.5 / 4 + 0.5), 0.001 / 4))


@MODEL.key("model.rotary_scaling.beta_slow", 0.05, YARN)
def _(base: Subject, second: Subject) -> None:
    """Its number is 3.5, rounded to 4."""
    expected = (1.0, 0.1 * (0.25 / 4 + 0.75), 0.01 * (0.5 / 4 + 0.5), 0.001 * (0.75 / 4 + 0.25))
    turned_by(base, second, YARN_FREQUENCIES, expected)


@MODEL.key("model.rotary_scaling.attention_factor", 1.5, YARN)
def _(base: Subject, second: Subject) -> None:
    turned_by(base, second, YARN_FREQUENCIES, YARN_FREQUENCIES)
    assert score_scale(second) == pytest.approx(2.25 / 8**0.5)


@MODEL.key("model.rotary_scaling.low_frequency_factor", 1.5, LLAMA)
def _(base: Subject, second: Subject) -> None:
    turned_by(base, second, of_llama(1, 4), of_llama(1.5, 4))


@MODEL.key("model.rotary_scaling.high_frequency_factor", 3.0, LLAMA)
def _(base: Subject, second: Subject) -> None:
    turned_by(base, second, of_llama(1, 4), of_llama(1, 3))


LATENTS = with_model(latent_attention=LatentAttentionConfig(latent_dim=12, rotary_dim=4))
OF_LATENTS = {"linear_q_proj": 32, "linear_kv_down_proj": 16, "linear_kv_up_proj": 4 * (4 + 8)}
"""Rows of its weights: 4 heads of 8 columns, of which 4 are the shared rotary key's."""


def check_latents(subject: Subject, rows: Mapping[str, int], width: int) -> None:
    of = f"{BLOCK}self_attention."
    columns = {"linear_q_proj": 32, "linear_kv_down_proj": 32, "linear_kv_up_proj": width}
    assert {part: subject.shapes[f"{of}{part}.weight"] for part in rows} == {
        part: (number, columns[part]) for part, number in rows.items()
    }
    assert subject.shapes[f"{of}kv_layernorm.weight"] == (width,)


@MODEL.key("model.latent_attention", LatentAttentionConfig(latent_dim=12, rotary_dim=4))
def _(base: Subject, second: Subject) -> None:
    """Projections of latents in place of those of keys and values; all else keeps its name and its bits."""
    own, latents = base.weights.keys() - second.weights.keys(), second.weights.keys() - base.weights.keys()
    assert last_parts(own) == {"linear_qkv", "q_layernorm", "k_layernorm"}
    assert last_parts(latents) == {*OF_LATENTS, "kv_layernorm"}
    check_latents(second, OF_LATENTS, 12)


@MODEL.key("model.latent_attention.latent_dim", 20, LATENTS)
def _(base: Subject, second: Subject) -> None:
    check_latents(base, OF_LATENTS, 12)
    check_latents(second, {**OF_LATENTS, "linear_kv_down_proj": 24}, 20)


@MODEL.key("model.latent_attention.rotary_dim", 2, LATENTS)
def _(base: Subject, second: Subject) -> None:
    """Fewer columns are turned, by the same base; each head has as many more of its own."""
    check_latents(second, {**OF_LATENTS, "linear_kv_down_proj": 14, "linear_kv_up_proj": 4 * (6 + 8)}, 12)
    assert base.model.rotary_pos_emb.inv_freq.tolist() == pytest.approx([1.0, 0.01])
    assert second.model.rotary_pos_emb.inv_freq.tolist() == pytest.approx([1.0])


@MODEL.key("model.latent_attention.query_latent_dim", 20, LATENTS)
def _(base: Subject, second: Subject) -> None:
    """Two projections and a norm in place of the one of queries; all else keeps its name and its bits."""
    own, latents = base.weights.keys() - second.weights.keys(), second.weights.keys() - base.weights.keys()
    assert last_parts(own) == {"linear_q_proj"}
    assert last_parts(latents) == {"linear_q_down_proj", "q_layernorm", "linear_q_up_proj"}
    of = f"{BLOCK}self_attention."
    assert second.shapes[f"{of}linear_q_down_proj.weight"] == (20, 32)
    assert second.shapes[f"{of}q_layernorm.weight"] == (20,)
    assert second.shapes[f"{of}linear_q_up_proj.weight"] == (32, 20)


@MODEL.key("model.init_std", 0.01)
def _(base: Subject, second: Subject) -> None:
    """All linear weights and embeddings in proportion, by default sqrt(2 / 5D); neither keys nor cores nor gains."""
    by_default = math.sqrt(2 / (5 * 32))
    linear = {"word_embeddings", "linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"}
    linear |= {"query_proj", "value_proj", "pre_value_proj"}
    for name, weight in base.weights.items():
        (part,) = last_parts({name})
        if part in linear:
            assert same(second.weights[name] / 0.01, weight / by_default), name
        elif part not in ("values", "pre_values"):
            assert torch.equal(second.weights[name], weight), name
    assert root_mean_square(second.weights["embedding.word_embeddings.weight"]) == pytest.approx(0.01, rel=0.1)
    # a = D std^2 of Eq. 25-26: sigma_V^4 = target / (std^2 a P ...) with a target that goes with a^2 std^2.
    scale = (0.01 / by_default) ** 0.5
    assert same(second.weights["banks.0.values"] / scale, base.weights["banks.0.values"])


@MODEL.key("model.mup", MupConfig(base_hidden_size=16))
def _(base: Subject, second: Subject) -> None:
    """A base of half the width: larger embeddings and value projections, smaller gains before logits; `test_width.py` has all."""
    factors = {"word_embeddings": 2**0.5, "value_proj": 2**0.5, "final_layernorm": 0.5}
    for name, weight in base.weights.items():
        (part,) = last_parts({name})
        if not name.startswith("banks."):
            assert same(second.weights[name], factors.get(part, 1.0) * weight), name
    # sigma_V^4 goes with one over the projection's variance.
    assert same(second.weights["banks.0.values"] * 2**0.25, base.weights["banks.0.values"])


WITH_MUP = with_model(mup=MupConfig(base_hidden_size=16))


@MODEL.key("model.mup.base_hidden_size", 8, WITH_MUP)
def _(base: Subject, second: Subject) -> None:
    gain = "decoder.final_layernorm.weight"
    assert (float(base.weights[gain][0]), float(second.weights[gain][0])) == (0.5, 0.25)


@MODEL.key("model.mup.base_head_dim", 2, WITH_MUP)
def _(base: Subject, second: Subject) -> None:
    """sqrt(2 / 8) in the gains of queries, and nowhere else."""
    gains = {name for name in base.weights if "q_layernorm" in name}
    assert changed_names(base.weights, second.weights) == gains
    assert all(same(second.weights[name], 0.5 * base.weights[name]) for name in gains)


@MODEL.key("model.implementation", "transformer_engine")
def _(base: Subject, second: Subject) -> None:
    """Another class in every slot of a norm; refused where it is not installed."""
    assert type(base.model.decoder.final_layernorm).__name__ == "RMSNorm"
    if importlib.util.find_spec("transformer_engine") is None:
        with pytest.raises(ValueError, match=r"^model.implementation is transformer_engine, which is not installed"):
            second.build()
    else:
        assert type(second.model.decoder.final_layernorm).__module__.startswith("transformer_engine")


@MODEL.key("model.moe", MoEConfig(num_experts=6, top_k=2, expert_ffn_hidden_size=20))
def _(base: Subject, second: Subject) -> None:
    """Experts in place of the feed-forward of every block; all else keeps its name."""
    assert {name for name in base.weights if name not in second.weights} == {
        f"decoder.layers.{block}.mlp.ffn.{part}.weight" for block in (0, 1) for part in ("linear_fc1", "linear_fc2")
    }
    assert last_parts(second.weights.keys() - base.weights.keys()) == {"router", "linear_fc1", "linear_fc2"}
    assert len(second.model.routers) == 2


AHEAD = with_model(multi_token_prediction=MultiTokenConfig())


@MODEL.key("model.multi_token_prediction", MultiTokenConfig())
def _(base: Subject, second: Subject) -> None:
    """A branch behind all that there was, which moves it by another gradient; the loss is that of the next token."""
    added = second.weights.keys() - base.weights.keys()
    assert {name.split(".")[0] for name in added} == {"multi_token"}
    assert changed_names(base.weights, {name: second.weights[name] for name in base.weights}) == set()
    assert second.steps[0].loss == base.steps[0].loss
    assert second.steps[1].loss != base.steps[1].loss


@MODEL.key("model.multi_token_prediction.depth", 2, AHEAD)
def _(base: Subject, second: Subject) -> None:
    """Another such block, for the token after."""
    of_first = {name.replace(".1.", ".0.") for name in second.weights.keys() - base.weights.keys()}
    assert of_first == {name for name in base.weights if name.startswith("multi_token.")}


@MODEL.key("model.multi_token_prediction.loss_weight", 0.6, AHEAD)
def _(base: Subject, second: Subject) -> None:
    """The branch's own weights have gradients of its loss alone: twice as large."""
    one, twice = base.steps[0], second.steps[0]
    assert one.loss == twice.loss
    branch = {name for name in one.gradients if name.startswith("multi_token.")}
    for name in branch:
        assert torch.allclose(twice.gradients[name], 2 * one.gradients[name], rtol=1e-3, atol=3e-7), name
    assert not torch.allclose(twice.gradients[BLOCK + FC1], 2 * one.gradients[BLOCK + FC1], rtol=1e-2)


@MODEL.key("model.memory", None)
def _(base: Subject, second: Subject) -> None:
    assert len(base.model.banks) == len(base.model.memory_layers) == 2
    assert len(second.model.banks) == len(second.model.memory_layers) == 0
    assert not same(base.logits(), second.logits())


# The mixture of experts.


def routes(subject: Subject) -> tuple[Tensor, Tensor]:
    """Weights and choices [T, E] of the first router for the subject's tokens."""
    router, seen = subject.model.routers[0], []
    hook = router.register_forward_hook(lambda _, inputs, out: seen.append(out))
    subject.logits()
    hook.remove()
    ((weights, chosen),) = seen
    return weights, chosen


@MODEL.key("model.moe.num_experts", 5, MOE)
def _(base: Subject, second: Subject) -> None:
    for subject, experts in ((base, 6), (second, 5)):
        assert subject.shapes[BLOCK + "mlp.router.weight"] == (experts, 32)
        assert len([name for name in subject.shapes if name.startswith(BLOCK) and "linear_fc1" in name]) == experts


@MODEL.key("model.moe.top_k", 3, MOE)
def _(base: Subject, second: Subject) -> None:
    for subject, top_k in ((base, 2), (second, 3)):
        assert routes(subject)[1].sum(1).tolist() == [top_k] * 16
    assert not changed_names(base.weights, second.weights)


@MODEL.key("model.moe.expert_ffn_hidden_size", 12, MOE)
def _(base: Subject, second: Subject) -> None:
    for subject, inner in ((base, 20), (second, 12)):
        shapes = {name: s for name, s in subject.shapes.items() if "experts" in name}
        assert {s for name, s in shapes.items() if "linear_fc1" in name} == {(2 * inner, 32)}
        assert {s for name, s in shapes.items() if "linear_fc2" in name} == {(32, inner)}


@MODEL.key("model.moe.renormalise", True, MOE)
def _(base: Subject, second: Subject) -> None:
    """The same experts; their weights sum to 1, and otherwise to less, in the same proportions."""
    (weights, chosen), (normal, chosen_too) = routes(base), routes(second)
    assert torch.equal(chosen, chosen_too)
    assert bool((weights.sum(1) < 0.99).all())
    assert same(normal, weights / weights.sum(1, keepdim=True))


def is_linear_in(key: str, weight: float, base: Subject, second: Subject, parts: set[str]) -> dict[str, Tensor]:
    """The loss's gradient enters with its weight, into `parts` among others, and leaves the loss as it is.

    Returns:
        The gradient of the weighted loss, by parameter.
    """
    twice = Subject(set_key(second.config, key, 2 * weight), second.groups)
    without, with_it, with_twice = (subject.steps[0] for subject in (base, second, twice))
    assert without.loss == with_it.loss == with_twice.loss
    added = {name: with_it.gradients[name] - gradient for name, gradient in without.gradients.items()}
    reached = {name for name, gradient in added.items() if root_mean_square(gradient) > 1e-6}
    assert parts <= last_parts(reached)
    for name in reached:
        double = with_twice.gradients[name] - without.gradients[name]
        assert torch.allclose(double, 2 * added[name], rtol=1e-3, atol=3e-7), name
    return added


def router_losses(subject: Subject) -> tuple[list[Tensor], list[float]]:
    """Logits [T, E] of the first router by microbatch, and its reported losses per token: balance, then z."""
    run = subject.build()
    router, inputs = run.bare[0].routers[0], []
    hook = router.register_forward_pre_hook(lambda _, arguments: inputs.append(arguments[0].detach().flatten(0, -2)))
    weight = router.weight.detach().clone()
    run.train(1)
    hook.remove()
    num_tokens, *sums = router.sums.tolist()
    assert num_tokens == 32
    return [x @ weight.T for x in inputs], [total / num_tokens for total in sums]


def balance_by_hand(logits: list[Tensor], sequences: int) -> float:
    """Mean of E sum_e f_e P_e over groups of sequences, of the logits of microbatches of two, in the order [s, b]."""
    found = []
    for microbatch in logits:
        by_sequence = microbatch.view(-1, 2, 6).transpose(0, 1)
        for group in by_sequence.reshape(2 // sequences, -1, 6):
            chosen = torch.bincount(group.topk(2).indices.flatten(), minlength=6) / (2 * len(group))
            found.append(6 * float((chosen * group.softmax(1).mean(0)).sum()))
    return sum(found) / len(found)


@MODEL.key("model.moe.balance_loss_weight", 0.5, MOE)
def _(base: Subject, second: Subject) -> None:
    """E sum_e f_e P_e, by counting the two experts that each token chooses out of six."""
    is_linear_in("model.moe.balance_loss_weight", 0.5, base, second, {"router"})
    logits, (balance, z) = router_losses(second)
    assert balance == pytest.approx(balance_by_hand(logits, 1), rel=1e-5)
    assert z == 0


@MODEL.key("model.moe.balance_sequences", 2, set_key(MOE, "model.moe.balance_loss_weight", 0.5))
def _(base: Subject, second: Subject) -> None:
    """Counted over so many sequences of a microbatch of two."""
    reported = []
    for subject, sequences in ((base, 1), (second, 2)):
        logits, (balance, _) = router_losses(subject)
        assert balance == pytest.approx(balance_by_hand(logits, sequences), rel=1e-5)
        reported.append(balance)
    assert reported[0] != pytest.approx(reported[1], rel=1e-3)
    assert base.steps[0].loss == second.steps[0].loss


@MODEL.key("model.moe.z_loss_weight", 0.25, MOE)
def _(base: Subject, second: Subject) -> None:
    """The mean squared log-sum-exp of the logits."""
    is_linear_in("model.moe.z_loss_weight", 0.25, base, second, {"router"})
    logits, (balance, z) = router_losses(second)
    assert z == pytest.approx(float(torch.cat(logits).logsumexp(1).square().mean()), rel=1e-5)
    assert balance == 0
