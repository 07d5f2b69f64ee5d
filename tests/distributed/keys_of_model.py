"""What the keys under `model` do, measured on initial weights and single passes of models on one rank."""

from __future__ import annotations

import importlib.util
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from keys_table import (
    BASE,
    MEMORY,
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
    with_memory,
    with_model,
)
from torch import Tensor

from megamem.config import MemoryConfig, MoEConfig, PlacementConfig, SharingConfig

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
    slots = torch.arange(144)
    assert not torch.equal(base.layer.locate(slots)[0], second.layer.locate(slots)[0])


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


def norms_are_rms(subject: Subject, epsilon: float) -> None:
    """Every norm of the backbone computes x / sqrt(mean(x^2) + epsilon) at its initial gain of 1."""
    seen: dict[str, tuple[Tensor, Tensor]] = {}
    hooks = [
        module.register_forward_hook(lambda _, inputs, out, name=name: seen.update({name: (inputs[0], out)}))
        for name, module in subject.model.named_modules()
        # Slots without a norm are filled too.
        if name.endswith("layernorm") and list(module.parameters())
    ]
    subject.logits()
    for hook in hooks:
        hook.remove()
    assert len(seen) == 2 * 4 + 1
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
    """In the backbone and in the memory; the weights are the same bits."""
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


@MODEL.key("model.moe.balance_loss_weight", 0.5, MOE)
def _(base: Subject, second: Subject) -> None:
    """E sum_e f_e P_e, by counting the two experts that each token chooses out of six."""
    is_linear_in("model.moe.balance_loss_weight", 0.5, base, second, {"router"})
    logits, (balance, z) = router_losses(second)
    expected = []
    for microbatch in logits:
        chosen = torch.bincount(microbatch.topk(2).indices.flatten(), minlength=6) / (2 * len(microbatch))
        expected.append(6 * float((chosen * microbatch.softmax(1).mean(0)).sum()))
    assert balance == pytest.approx(sum(expected) / len(expected), rel=1e-5)
    assert z == 0


@MODEL.key("model.moe.z_loss_weight", 0.25, MOE)
def _(base: Subject, second: Subject) -> None:
    """The mean squared log-sum-exp of the logits."""
    is_linear_in("model.moe.z_loss_weight", 0.25, base, second, {"router"})
    logits, (balance, z) = router_losses(second)
    assert z == pytest.approx(float(torch.cat(logits).logsumexp(1).square().mean()), rel=1e-5)
    assert balance == 0


# The memory.


NAMES_OF_KINDS = {
    "ultramem_v2": {"query_proj", "keys", "query_norm", "keys_norm", "cores", "value_proj", "pre_value_proj"},
    "ultramem": {"query_proj", "keys", "query_norm", "keys_norm", "cores", "value_proj"},
    "pkm": {"query_proj", "keys", "query_norm"},
    "memory_plus": {"query_proj", "keys", "query_norm", "value_proj", "silu_gate"},
    "peer": {"query_proj", "keys", "query_norm"},
}


def _enter_kind(kind: Any) -> None:
    base = replace(BASE, model=replace(BASE.model, memory=MemoryConfig(num_keys=12, value_dim=32, top_k=4)))

    @MODEL.key("model.memory.kind", kind, base)
    def _(base: Subject, second: Subject) -> None:
        assert set(base.memory_weights) == NAMES_OF_KINDS["ultramem_v2"]
        assert set(second.memory_weights) == NAMES_OF_KINDS[kind]
        # PEER's pre-values are as wide as its values.
        assert second.shapes.get("banks.0.pre_values") == ((144, 32) if kind == "peer" else None)
        assert base.shapes["banks.0.pre_values"] == (144, 64)


for _kind in ("ultramem", "pkm", "memory_plus", "peer"):
    _enter_kind(_kind)


@MODEL.key("model.memory.num_keys", 9)
def _(base: Subject, second: Subject) -> None:
    for subject, keys in ((base, 12), (second, 9)):
        assert subject.shapes["banks.0.values"] == (keys**2, 16)
        assert subject.memory_weights["keys"].shape == (1, 2, keys, 6, 2)


@MODEL.key("model.memory.key_dim", 5)
def _(base: Subject, second: Subject) -> None:
    for subject, dim in ((base, 6), (second, 5)):
        assert subject.memory_weights["keys"].shape == (1, 2, 12, dim, 2)
        assert subject.memory_weights["query_proj"].shape == (2 * 2 * dim, 32)


@MODEL.key("model.memory.value_dim", 14)
def _(base: Subject, second: Subject) -> None:
    for subject, columns in ((base, 16), (second, 14)):
        assert subject.shapes["banks.0.values"] == (144, columns)
        assert subject.memory_weights["value_proj"].shape == (32, columns)
        assert subject.shapes["banks.0.pre_values"] == (144, 10)


@MODEL.key("model.memory.pre_value_dim", 7)
def _(base: Subject, second: Subject) -> None:
    for subject, columns in ((base, 10), (second, 7)):
        assert subject.shapes["banks.0.pre_values"] == (144, columns)
        assert subject.memory_weights["pre_value_proj"].shape == (columns, 32)
        assert subject.shapes["banks.0.values"] == (144, 16)


def retrieved(subject: Subject) -> Any:
    with torch.no_grad():
        return subject.layer.retrieve(subject.hidden)


@MODEL.key("model.memory.top_k", 6, with_memory(row_top_k_limit=3))
def _(base: Subject, second: Subject) -> None:
    """More of one order, out of nine candidates."""
    for subject, top_k in ((base, 4), (second, 6)):
        assert retrieved(subject).row_ids.shape == retrieved(subject).column_ids.shape == (7, 1, 3)
        assert retrieved(subject).slots[:, 0].tolist() == best_slots(subject, top_k)


def best_slots(subject: Subject, top_k: int) -> list[list[int]]:
    """The best slots of every token among the kept rows and columns, best first, one product at a time."""
    found, (core,) = retrieved(subject), subject.memory_weights["cores"].sum(0)
    rows, columns = (scores[:, 0] for scores in tucker_key_scores(subject, 1e-5))
    best = []
    for token in range(7):
        grid = [
            (float(rows[token, i] @ core @ columns[token, j]), int(i) * 12 + int(j))
            for i in found.row_ids[token, 0]
            for j in found.column_ids[token, 0]
        ]
        best.append([slot for _, slot in sorted(grid, reverse=True)[:top_k]])
    return best


@MODEL.key("model.memory.row_top_k_limit", 2)
def _(base: Subject, second: Subject) -> None:
    """Four slots of two rows and two columns are all of their grid."""
    all_kept, limited = retrieved(base), retrieved(second)
    assert all_kept.row_ids.shape[2] == all_kept.column_ids.shape[2] == 4
    assert torch.equal(limited.row_ids, all_kept.row_ids[..., :2])
    assert torch.equal(limited.column_ids, all_kept.column_ids[..., :2])
    for token in range(7):
        grid = {int(i * 12 + j) for i in limited.row_ids[token, 0] for j in limited.column_ids[token, 0]}
        assert set(limited.slots[token, 0].tolist()) == grid
    assert not torch.equal(limited.slots, all_kept.slots)


@MODEL.key("model.memory.num_heads", 3)
def _(base: Subject, second: Subject) -> None:
    """Queries are shared by the heads."""
    for subject, heads in ((base, 1), (second, 3)):
        assert subject.memory_weights["keys"].shape == (heads, 2, 12, 6, 2)
        assert subject.memory_weights["cores"].shape == (2, heads, 2, 2)
        assert subject.memory_weights["query_proj"].shape == (2 * 2 * 6, 32)
        assert retrieved(subject).slots.shape == (7, heads, 4)


@MODEL.key("model.memory.tucker_rank", 3)
def _(base: Subject, second: Subject) -> None:
    for subject, rank in ((base, 2), (second, 3)):
        assert subject.memory_weights["cores"].shape == (2, 1, rank, rank)
        assert subject.memory_weights["keys"].shape == (1, 2, 12, 6, rank)
        assert subject.memory_weights["query_proj"].shape == (2 * rank * 6, 32)


@MODEL.key("model.memory.num_cores", 4)
def _(base: Subject, second: Subject) -> None:
    for subject, cores in ((base, 2), (second, 4)):
        assert subject.memory_weights["cores"].shape == (cores, 1, 2, 2)
        assert retrieved(subject).scores.shape == (7, 1, 4, cores)


@MODEL.key("model.memory.query", "single")
def _(base: Subject, second: Subject) -> None:
    """Both Tucker ranks of a side get the same query."""
    assert base.memory_weights["query_proj"].shape == (2 * 2 * 6, 32)
    assert second.memory_weights["query_proj"].shape == (2 * 6, 32)
    weights = second.memory_weights
    queries = rms((second.hidden @ weights["query_proj"].T).view(7, 2, 6), 1e-5) * weights["query_norm"]
    keys = rms(weights["keys"].movedim(3, 4), 1e-5) * weights["keys_norm"]
    assert scores_are(second, tuple(torch.einsum("tsd,hsnrd->sthnr", queries, keys)))  # type: ignore[arg-type]


@MODEL.key("model.memory.key_expansion", 3)
def _(base: Subject, second: Subject) -> None:
    """Three times the keys per side, for the same rows: nine slots of the grid read each of them."""
    for subject, expansion in ((base, 1), (second, 3)):
        assert subject.memory_weights["keys"].shape == (1, 2, expansion * 12, 6, 2)
        assert subject.shapes["banks.0.values"] == (144, 16)
        rows, blocks = subject.layer.locate(torch.arange((expansion * 12) ** 2))
        assert torch.bincount(rows, minlength=144).tolist() == [expansion**2] * 144
        assert blocks is None


@MODEL.key("model.memory.value_blocks", "projected", with_memory(key_expansion=2))
def _(base: Subject, second: Subject) -> None:
    for subject, blocks in ((base, 1), (second, 4)):
        assert subject.memory_weights["value_proj"].shape == (32, blocks * 16)
    _, block = second.layer.locate(torch.arange(576))
    assert block is not None
    assert torch.bincount(block).tolist() == [144] * 4


@MODEL.key("model.memory.pre_value_activation", "gelu")
def _(base: Subject, second: Subject) -> None:
    """A lookup by its definition: scores times products, activated or not, times values."""
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(0, 144, (7, 4), generator=generator)
    scores, x = torch.randn(7, 4, 2, generator=generator), torch.randn(7, 10, generator=generator)
    for subject, activation in ((base, lambda p: p), (second, lambda p: 0.5 * p * (1 + torch.erf(p / 2**0.5)))):
        values, pre_values = subject.weights["banks.0.values"], subject.weights["banks.0.pre_values"]
        products = activation(torch.einsum("tjp,tp->tj", pre_values[rows], x))
        expected = torch.einsum("tjc,tj,tjcv->tcv", scores, products, values[rows].view(7, 4, 2, 8)).flatten(1)
        with torch.no_grad():
            assert same(subject.layer.lookup.read(rows, scores, x), expected)


def _enter_shuffle(second_value: str) -> None:
    @MODEL.key("model.memory.shuffle", second_value)
    def _(base: Subject, second: Subject) -> None:
        """All are bijections; `none` is the identity, and only `table` keeps a permutation."""
        slots = torch.arange(144)
        keyed, other = base.layer.locate(slots)[0], second.layer.locate(slots)[0]
        for rows in (keyed, other):
            assert torch.equal(rows.sort().values, slots)
        assert not torch.equal(keyed, slots)
        assert not torch.equal(keyed, other)
        assert torch.equal(other, slots) == (second_value == "none")
        stored = dict(second.layer.named_buffers()).get("permutation")
        assert (stored is not None) == (second_value == "table")
        assert stored is None or torch.equal(stored, other)
        assert "permutation" not in dict(base.layer.named_buffers())
        assert changed_names(base.weights, second.weights) == set()


for _shuffle in ("table", "none"):
    _enter_shuffle(_shuffle)


@MODEL.key("model.memory.query_norm", False, PKM)
def _(base: Subject, second: Subject) -> None:
    assert set(base.memory_weights) - set(second.memory_weights) == {"query_norm"}
    assert scores_are(base, product_key_scores(base, 1e-5))
    assert scores_are(second, product_key_scores(second, None))


@MODEL.key("model.memory.biases", True, PKM)
def _(base: Subject, second: Subject) -> None:
    assert set(second.memory_weights) - set(base.memory_weights) == {"query_bias"}


@MODEL.key("model.memory.biases", True, with_memory(kind="memory_plus", pre_value_dim=64, output_gate=True))
def _(base: Subject, second: Subject) -> None:
    added = set(second.memory_weights) - set(base.memory_weights)
    assert added == {"query_bias", "value_bias", "silu_gate_bias", "output_gate_bias"}


@MODEL.key("model.memory.value_projection", True, PKM)
def _(base: Subject, second: Subject) -> None:
    assert set(second.memory_weights) - set(base.memory_weights) == {"value_proj"}
    values = torch.randn(7, 32, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        assert torch.equal(base.layer.project(values, base.hidden), values)
        expected = values @ second.memory_weights["value_proj"].T
        assert same(second.layer.project(values, second.hidden), expected)


@MODEL.key("model.memory.output_gate", True, PKM)
def _(base: Subject, second: Subject) -> None:
    assert set(second.memory_weights) - set(base.memory_weights) == {"output_gate"}
    values = torch.randn(7, 32, generator=torch.Generator().manual_seed(2))
    gate = 1 / (1 + torch.exp(-second.hidden @ second.memory_weights["output_gate"][0]))
    with torch.no_grad():
        assert torch.equal(base.layer.project(values, base.hidden), values)
        assert same(second.layer.project(values, second.hidden), values * gate[:, None])


@MODEL.key("model.memory.initialisation", "matched")
def _(base: Subject, second: Subject) -> None:
    """Only the tables, by the fourth root of the SwiGLU's inner variance over the paper's 0.16, for gates and inputs of variance 0.4."""
    assert last_parts(changed_names(base.weights, second.weights)) == {"values", "pre_values"}
    gate = np.linspace(-8, 8, 100_001)
    density = np.exp(-(gate**2) / 0.8) / math.sqrt(0.8 * math.pi)
    inner = 0.4 * float(np.sum((gate / (1 + np.exp(-gate))) ** 2 * density) * (gate[1] - gate[0]))
    scale = (inner / 0.16) ** 0.25
    for name in ("banks.0.values", "banks.1.pre_values"):
        assert same(second.weights[name], base.weights[name] * scale)
    # Eq. 26 of `paper`, for the deviation that the layer's scores may have.
    k_inner = 48 / 32
    without_scores = (0.2 * k_inner * 32 / (4 * 1 * 10 * 16 * 2)) ** 0.25
    assert 0.5 * without_scores < root_mean_square(base.weights["banks.0.values"]) < without_scores


@MODEL.key("model.memory.initialisation", "released")
def _(base: Subject, second: Subject) -> None:
    """The constants of the release."""
    assert root_mean_square(second.weights["banks.0.values"]) == pytest.approx(0.02, rel=0.05)
    by_default = math.sqrt(2 / (5 * 32))
    for part, std in (("query_proj", 6**-0.5), ("value_proj", 16**-0.5), ("pre_value_proj", 32**-0.5)):
        assert same(second.memory_weights[part] / std, base.memory_weights[part] / by_default)
    for part in ("query_norm", "keys_norm"):
        assert same(second.memory_weights[part], torch.full((6,), 6**-0.4))
    assert torch.equal(second.memory_weights["cores"], base.memory_weights["cores"])


def penalty(cores: Tensor, margin: float) -> Tensor:
    """Eq. 17 of cores [C, 1, 2, 2], by the closed form of the smaller singular value of a 2 x 2 matrix."""
    matrix = cores.double().sum((0, 1))
    square, determinant = matrix.square().sum(), matrix.det().abs()
    smaller = ((square + 2 * determinant).sqrt() - (square - 2 * determinant).sqrt()) / 2
    return (smaller - margin).clamp_min(0).square()


@MODEL.key("model.memory.tucker_penalty_weight", 0.5)
def _(base: Subject, second: Subject) -> None:
    """Into the cores alone, along the gradient of Eq. 17; its margin is 0.15 by default."""
    added = is_linear_in("model.memory.tucker_penalty_weight", 0.5, base, second, set())
    assert last_parts({name for name, gradient in added.items() if root_mean_square(gradient) > 1e-6}) <= {"cores"}
    reached = 0
    for block in (0, 1):
        name = f"decoder.layers.{block}.mlp.memory.cores"
        cores = base.weights[name].double().requires_grad_()
        loss = penalty(cores, 0.15)
        (gradient,) = torch.autograd.grad(loss, cores)
        reached += float(loss) > 0
        # Per token, over the targets: some of the samples' tokens are none.
        share = float((added[name] / 0.5 * gradient).sum() / gradient.square().sum()) if float(loss) > 0 else 1.0
        assert 1.0 <= share < 2.0
        assert torch.allclose(added[name].double(), 0.5 * share * gradient, rtol=1e-3, atol=1e-6)
    assert reached


@MODEL.key("model.memory.tucker_penalty_margin", 0.05, with_memory(tucker_penalty_weight=0.5))
def _(base: Subject, second: Subject) -> None:
    """The reported penalty is Eq. 17 at each margin, and the loss is the same."""
    assert base.steps[0].loss == second.steps[0].loss
    reported = []
    for subject, margin in ((base, 0.15), (second, 0.05)):
        run = subject.build()
        expected = [float(penalty(layer.cores.detach(), margin)) for layer in run.bare[0].memory_layers]
        run.train(1)
        sums = [layer.losses.sums.tolist() for layer in run.bare[0].memory_layers]
        reported.append([of_layer[1] / of_layer[0] for of_layer in sums])
        assert reported[-1] == pytest.approx(expected, rel=1e-4, abs=1e-9)
    assert reported[0] != reported[1]


@MODEL.key("model.memory.key_balance_weight", 0.5)
def _(base: Subject, second: Subject) -> None:
    is_linear_in("model.memory.key_balance_weight", 0.5, base, second, {"keys", "query_proj"})


# Sharing and placement.


def with_sharing(pattern: Any, group: int = 1, **fields: Any) -> Any:
    return with_model(num_layers=4, memory=replace(MEMORY, sharing=SharingConfig(pattern, group, **fields)))


def rows_of_banks(subject: Subject) -> list[int]:
    return [shape[0] for name, shape in subject.shapes.items() if name.endswith(".values")]


def tables_seen(subject: Subject) -> list[set[int]]:
    """Per memory layer: the tables of 144 rows of its bank that its slots read."""
    found = []
    for layer in subject.model.memory_layers:
        rows, _ = layer.locate(torch.arange(layer.view.num_keys**2))
        found.append({int(row) // 144 for row in rows})
    return found


@MODEL.key("model.memory.sharing.pattern", "all", with_sharing("block", 4))
def _(base: Subject, second: Subject) -> None:
    assert (rows_of_banks(base), rows_of_banks(second)) == ([4 * 144], [144])
    assert tables_seen(base) == [{0, 1, 2, 3}] * 4
    assert tables_seen(second) == [{0}] * 4


@MODEL.key("model.memory.sharing.pattern", "no_ring", with_sharing("ring", 3))
def _(base: Subject, second: Subject) -> None:
    """A window of three: floor(12 sqrt(3))^2 = 400 rows from the table before the layer's own. At the ends it goes around, or stops."""
    assert rows_of_banks(base) == rows_of_banks(second) == [4 * 144]
    assert tables_seen(base) == [{3, 0, 1}, {0, 1, 2}, {1, 2, 3}, {2, 3, 0}]
    assert tables_seen(second) == [{0, 1, 2}, {0, 1, 2}, {1, 2, 3}, {1, 2, 3}]


@MODEL.key("model.memory.sharing.pattern", "all", with_sharing("none"))
def _(base: Subject, second: Subject) -> None:
    assert (rows_of_banks(base), rows_of_banks(second)) == ([144] * 4, [144])
    assert len({layer.view.bank for layer in base.model.memory_layers}) == 4


@MODEL.key("model.memory.sharing.group", 4, with_sharing("block", 2))
def _(base: Subject, second: Subject) -> None:
    assert rows_of_banks(base) == [2 * 144] * 2
    assert rows_of_banks(second) == [4 * 144]


@MODEL.key("model.memory.sharing.window", "released", with_sharing("ring", 3))
def _(base: Subject, second: Subject) -> None:
    assert tables_seen(base) == [{3, 0, 1}, {0, 1, 2}, {1, 2, 3}, {2, 3, 0}]
    assert tables_seen(second) == [{0, 1, 2}, {1, 2, 3}, {2, 3, 0}, {3, 0, 1}]


def blocks_with_memory(subject: Subject) -> list[int]:
    return [int(layer.name.split(".")[2]) for layer in subject.model.memory_layers]


FOUR_BLOCKS = with_model(num_layers=4)


@MODEL.key("model.memory.placement.every", 2, FOUR_BLOCKS)
def _(base: Subject, second: Subject) -> None:
    assert (blocks_with_memory(base), blocks_with_memory(second)) == ([0, 1, 2, 3], [1, 3])


@MODEL.key("model.memory.placement.blocks", (0, 3), FOUR_BLOCKS)
def _(base: Subject, second: Subject) -> None:
    assert (blocks_with_memory(base), blocks_with_memory(second)) == ([0, 1, 2, 3], [0, 3])


@MODEL.key(
    "model.memory.placement.position",
    "instead",
    set_key(FOUR_BLOCKS, "model.memory.placement", PlacementConfig(blocks=(1,))),
)
def _(base: Subject, second: Subject) -> None:
    assert blocks_with_memory(base) == blocks_with_memory(second) == [1]
    assert {name for name in base.weights if name not in second.weights} == {
        "decoder.layers.1.mlp.ffn.linear_fc1.weight",
        "decoder.layers.1.mlp.ffn.linear_fc2.weight",
    }


def outputs_that_the_memory_changes(subject: Subject) -> list[int]:
    """Blocks whose output is another with the memory switched off."""
    outputs: list[list[Tensor]] = []
    for enabled in (True, False):
        seen: list[Tensor] = []
        hooks = [
            layer.register_forward_hook(lambda _, inputs, out, seen=seen: seen.append(out[0]))
            for layer in subject.model.decoder.layers
        ]
        subject.model.set_memory_enabled(enabled)
        subject.logits()
        for hook in hooks:
            hook.remove()
        outputs.append(seen)
    subject.model.set_memory_enabled(True)
    return [block for block, (on, off) in enumerate(zip(*outputs, strict=True)) if not torch.equal(on, off)]


@MODEL.key("model.memory.placement.spans", "1:2", set_key(FOUR_BLOCKS, "model.memory.placement", PlacementConfig()))
def _(base: Subject, second: Subject) -> None:
    """It reads in block 1, and joins after block 2."""
    assert blocks_with_memory(second) == [1]
    assert outputs_that_the_memory_changes(base) == [0, 1, 2, 3]
    assert outputs_that_the_memory_changes(second) == [2, 3]
