"""Effects of the keys under `model.memory`, measured on initial weights and single passes of models on one rank."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from keys_of_model import is_linear_in, product_key_scores, scores_are, tucker_key_scores
from keys_table import (
    BASE,
    PKM,
    Subject,
    Table,
    changed_names,
    last_parts,
    rms,
    root_mean_square,
    same,
    set_key,
    with_kind,
    with_memory,
)
from torch import Tensor

from megamem.families.ultramem_v2.config import UltraMemV2Config
from megamem.placement.spans import PlacementConfig

MEMORIES = Table()


NAMES_OF_KINDS = {
    "ultramem_v2": {"query_proj", "keys", "query_norm", "keys_norm", "cores", "value_proj", "pre_value_proj"},
    "ultramem": {"query_proj", "keys", "query_norm", "keys_norm", "cores", "value_proj"},
    "pkm": {"query_proj", "keys", "query_norm"},
    "memory_plus": {"query_proj", "keys", "query_norm", "value_proj", "silu_gate"},
    "peer": {"query_proj", "keys", "query_norm"},
    "linear_memory": {"query_proj", "keys"},
    "move": {"gate_proj"},
    "lave": {"gate_proj"},
    "value_ngrams": {"gate", "up_proj"},
    "ngram_embedding": {"up_proj"},
    "mome": {"gate", "router", "router_bias"},
    "residual_ngrams": {"gain"},
    "tide": {"router"},
    "stem": {"gate_proj", "down_proj"},
    "midus": {"keys", "expansion"},
    "engram": {"key_proj", "value_proj", "key_bias", "value_bias", "key_gain", "query_gain", "conv_gain", "conv"},
}


def _enter_kind(kind: Any) -> None:
    # Rows of MoME are as wide as a head, others as the stream, or as any.
    columns = 8 if kind == "mome" else 32
    base = replace(
        BASE, model=replace(BASE.model, memory=UltraMemV2Config(num_keys=12, value_dim=columns, top_k=4, num_heads=4))
    )

    @MEMORIES.key("model.memory.kind", kind, base)
    def _(base: Subject, second: Subject) -> None:
        assert set(base.memory_weights) == NAMES_OF_KINDS["ultramem_v2"]
        assert set(second.memory_weights) == NAMES_OF_KINDS[kind]
        # PEER's pre-values are as wide as its values.
        assert second.shapes.get("banks.0.pre_values") == ((144, 32) if kind == "peer" else None)
        assert base.shapes["banks.0.pre_values"] == (144, 64)


for _kind in (
    "ultramem",
    "pkm",
    "memory_plus",
    "peer",
    "linear_memory",
    "move",
    "lave",
    "value_ngrams",
    "mome",
    "residual_ngrams",
    "tide",
    "stem",
    "midus",
    "engram",
):
    _enter_kind(_kind)


@MEMORIES.key("model.memory.num_keys", 9)
def _(base: Subject, second: Subject) -> None:
    for subject, keys in ((base, 12), (second, 9)):
        assert subject.shapes["banks.0.values"] == (keys**2, 16)
        assert subject.memory_weights["keys"].shape == (1, 2, keys, 6, 2)


@MEMORIES.key("model.memory.key_dim", 5)
def _(base: Subject, second: Subject) -> None:
    for subject, dim in ((base, 6), (second, 5)):
        assert subject.memory_weights["keys"].shape == (1, 2, 12, dim, 2)
        assert subject.memory_weights["query_proj"].shape == (2 * 2 * dim, 32)


@MEMORIES.key("model.memory.value_dim", 14)
def _(base: Subject, second: Subject) -> None:
    for subject, columns in ((base, 16), (second, 14)):
        assert subject.shapes["banks.0.values"] == (144, columns)
        assert subject.memory_weights["value_proj"].shape == (32, columns)
        assert subject.shapes["banks.0.pre_values"] == (144, 10)


@MEMORIES.key("model.memory.pre_value_dim", 7)
def _(base: Subject, second: Subject) -> None:
    for subject, columns in ((base, 10), (second, 7)):
        assert subject.shapes["banks.0.pre_values"] == (144, columns)
        assert subject.memory_weights["pre_value_proj"].shape == (columns, 32)
        assert subject.shapes["banks.0.values"] == (144, 16)


def retrieved(subject: Subject) -> Any:
    with torch.no_grad():
        return subject.layer.retrieve(subject.hidden)


@MEMORIES.key("model.memory.top_k", 6, with_memory(row_top_k_limit=3))
def _(base: Subject, second: Subject) -> None:
    """More of one order, out of nine candidates."""
    for subject, top_k in ((base, 4), (second, 6)):
        assert retrieved(subject).stage_ids[0].shape == retrieved(subject).stage_ids[1].shape == (7, 1, 3)
        assert retrieved(subject).entries[:, 0].tolist() == best_entries(subject, top_k)


def best_entries(subject: Subject, top_k: int) -> list[list[int]]:
    """The best entries of every token among the kept rows and columns, best first, one product at a time."""
    found, (core,) = retrieved(subject), subject.memory_weights["cores"].sum(0)
    rows, columns = (scores[:, 0] for scores in tucker_key_scores(subject, 1e-5))
    best = []
    for token in range(7):
        grid = [
            (float(rows[token, i] @ core @ columns[token, j]), int(i) * 12 + int(j))
            for i in found.stage_ids[0, token, 0]
            for j in found.stage_ids[1, token, 0]
        ]
        best.append([entry for _, entry in sorted(grid, reverse=True)[:top_k]])
    return best


@MEMORIES.key("model.memory.row_top_k_limit", 2)
def _(base: Subject, second: Subject) -> None:
    """Four entries of two rows and two columns are all of their grid."""
    all_kept, limited = retrieved(base), retrieved(second)
    assert all_kept.stage_ids[0].shape[2] == all_kept.stage_ids[1].shape[2] == 4
    assert torch.equal(limited.stage_ids[0], all_kept.stage_ids[0, ..., :2])
    assert torch.equal(limited.stage_ids[1], all_kept.stage_ids[1, ..., :2])
    for token in range(7):
        grid = {int(i * 12 + j) for i in limited.stage_ids[0, token, 0] for j in limited.stage_ids[1, token, 0]}
        assert set(limited.entries[token, 0].tolist()) == grid
    assert not torch.equal(limited.entries, all_kept.entries)


@MEMORIES.key("model.memory.num_heads", 3)
def _(base: Subject, second: Subject) -> None:
    """Queries are shared by the heads."""
    for subject, heads in ((base, 1), (second, 3)):
        assert subject.memory_weights["keys"].shape == (heads, 2, 12, 6, 2)
        assert subject.memory_weights["cores"].shape == (2, heads, 2, 2)
        assert subject.memory_weights["query_proj"].shape == (2 * 2 * 6, 32)
        assert retrieved(subject).entries.shape == (7, heads, 4)


@MEMORIES.key("model.memory.tucker_rank", 3)
def _(base: Subject, second: Subject) -> None:
    for subject, rank in ((base, 2), (second, 3)):
        assert subject.memory_weights["cores"].shape == (2, 1, rank, rank)
        assert subject.memory_weights["keys"].shape == (1, 2, 12, 6, rank)
        assert subject.memory_weights["query_proj"].shape == (2 * rank * 6, 32)


@MEMORIES.key("model.memory.num_cores", 4)
def _(base: Subject, second: Subject) -> None:
    for subject, cores in ((base, 2), (second, 4)):
        assert subject.memory_weights["cores"].shape == (cores, 1, 2, 2)
        assert retrieved(subject).scores.shape == (7, 1, 4, cores)


@MEMORIES.key("model.memory.query", "single")
def _(base: Subject, second: Subject) -> None:
    """Both Tucker ranks of a side get the same query."""
    assert base.memory_weights["query_proj"].shape == (2 * 2 * 6, 32)
    assert second.memory_weights["query_proj"].shape == (2 * 6, 32)
    weights = second.memory_weights
    queries = rms((second.hidden @ weights["query_proj"].T).view(7, 2, 6), 1e-5) * weights["query_norm"]
    keys = rms(weights["keys"].movedim(3, 4), 1e-5) * weights["keys_norm"]
    assert scores_are(second, tuple(torch.einsum("tsd,hsnrd->sthnr", queries, keys)))  # type: ignore[arg-type]


@MEMORIES.key("model.memory.key_expansion", 3)
def _(base: Subject, second: Subject) -> None:
    """Three times the keys per side, for the same rows: nine entries of the grid read each of them."""
    for subject, expansion in ((base, 1), (second, 3)):
        assert subject.memory_weights["keys"].shape == (1, 2, expansion * 12, 6, 2)
        assert subject.shapes["banks.0.values"] == (144, 16)
        rows, blocks = subject.layer.locate(torch.arange((expansion * 12) ** 2))
        assert torch.bincount(rows, minlength=144).tolist() == [expansion**2] * 144
        assert blocks is None


@MEMORIES.key("model.memory.value_blocks", "projected", with_memory(key_expansion=2))
def _(base: Subject, second: Subject) -> None:
    for subject, blocks in ((base, 1), (second, 4)):
        assert subject.memory_weights["value_proj"].shape == (32, blocks * 16)
    _, block = second.layer.locate(torch.arange(576))
    assert block is not None
    assert torch.bincount(block).tolist() == [144] * 4


@MEMORIES.key("model.memory.pre_value_activation", "gelu")
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
    @MEMORIES.key("model.memory.shuffle", second_value)
    def _(base: Subject, second: Subject) -> None:
        """All are bijections; `none` is the identity, and only `table` keeps a permutation."""
        entries = torch.arange(144)
        keyed, other = base.layer.locate(entries)[0], second.layer.locate(entries)[0]
        for rows in (keyed, other):
            assert torch.equal(rows.sort().values, entries)
        assert not torch.equal(keyed, entries)
        assert not torch.equal(keyed, other)
        assert torch.equal(other, entries) == (second_value == "none")
        stored = dict(second.layer.named_buffers()).get("permutation")
        assert (stored is not None) == (second_value == "table")
        assert stored is None or torch.equal(stored, other)
        assert "permutation" not in dict(base.layer.named_buffers())
        assert changed_names(base.weights, second.weights) == set()


for _shuffle in ("table", "none"):
    _enter_shuffle(_shuffle)


@MEMORIES.key("model.memory.queries_per_head", True, with_kind("ultramem", num_heads=3))
def _(base: Subject, second: Subject) -> None:
    """A side has three queries of 6 columns in place of one."""
    for subject, heads in ((base, 1), (second, 3)):
        assert subject.memory_weights["query_proj"].shape == (2 * heads * 6, 32)
        assert subject.memory_weights["keys"].shape == (3, 2, 24, 6, 2)


@MEMORIES.key("model.memory.num_rows", 70, with_kind("linear_memory", value_dim=32, num_rows=60))
def _(base: Subject, second: Subject) -> None:
    for subject, rows in ((base, 60), (second, 70)):
        assert subject.shapes["banks.0.values"] == (rows, 32)
        assert subject.memory_weights["keys"].shape == (1, rows, 6)


@MEMORIES.key("model.memory.query_norm", False, PKM)
def _(base: Subject, second: Subject) -> None:
    assert set(base.memory_weights) - set(second.memory_weights) == {"query_norm"}
    assert scores_are(base, product_key_scores(base, 1e-5))
    assert scores_are(second, product_key_scores(second, None))


@MEMORIES.key("model.memory.biases", True, PKM)
def _(base: Subject, second: Subject) -> None:
    assert set(second.memory_weights) - set(base.memory_weights) == {"query_bias"}


@MEMORIES.key("model.memory.biases", True, with_kind("memory_plus", output_gate=True))
def _(base: Subject, second: Subject) -> None:
    added = set(second.memory_weights) - set(base.memory_weights)
    assert added == {"query_bias", "value_bias", "silu_gate_bias", "output_gate_bias"}


@MEMORIES.key("model.memory.value_projection", True, PKM)
def _(base: Subject, second: Subject) -> None:
    assert set(second.memory_weights) - set(base.memory_weights) == {"value_proj"}
    values = torch.randn(7, 32, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        assert torch.equal(base.layer.project(values, base.hidden), values)
        expected = values @ second.memory_weights["value_proj"].T
        assert same(second.layer.project(values, second.hidden), expected)


@MEMORIES.key("model.memory.output_gate", True, PKM)
def _(base: Subject, second: Subject) -> None:
    assert set(second.memory_weights) - set(base.memory_weights) == {"output_gate"}
    values = torch.randn(7, 32, generator=torch.Generator().manual_seed(2))
    gate = 1 / (1 + torch.exp(-second.hidden @ second.memory_weights["output_gate"][0]))
    with torch.no_grad():
        assert torch.equal(base.layer.project(values, base.hidden), values)
        assert same(second.layer.project(values, second.hidden), values * gate[:, None])


@MEMORIES.key("model.memory.initialisation", "matched")
def _(base: Subject, second: Subject) -> None:
    """Only the tables, by the fourth root of the SwiGLU's inner variance over the paper's 0.16, for gates and inputs of
    variance 0.4.
    """
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


@MEMORIES.key("model.memory.initialisation", "released")
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


@MEMORIES.key("model.memory.tucker_penalty_weight", 0.5)
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


@MEMORIES.key("model.memory.tucker_penalty_margin", 0.05, with_memory(tucker_penalty_weight=0.5))
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


@MEMORIES.key("model.memory.key_balance_weight", 0.5)
def _(base: Subject, second: Subject) -> None:
    is_linear_in("model.memory.key_balance_weight", 0.5, base, second, {"keys", "query_proj"})


@MEMORIES.key("model.memory.key_balance_sequences", 2, with_memory(key_balance_weight=0.5))
def _(base: Subject, second: Subject) -> None:
    """N sum_n f_n p_n of rows and columns, counted over so many sequences of a microbatch of two."""
    reported = []
    for subject, sequences in ((base, 1), (second, 2)):
        run, inputs = subject.build(), []
        layer = run.bare[0].memory_layers[0]
        hook = layer.register_forward_pre_hook(lambda _, given, seen=inputs: seen.append(given[0].detach()))
        run.train(1)
        hook.remove()
        expected = []
        for hidden in inputs:
            for group in hidden.transpose(0, 1).split(sequences):
                found = subject.layer.retrieve(group.flatten(0, 1))
                for scores, ids in zip(found.stage_scores().detach(), found.stage_ids, strict=True):
                    share = torch.bincount(ids.flatten(), minlength=12) / ids.numel()
                    expected.append(12 * float((share * scores.softmax(-1).mean((0, 1))).sum()))
        of_layer = layer.losses.sums.tolist()
        reported.append(of_layer[2] / of_layer[0])
        assert reported[-1] == pytest.approx(2 * sum(expected) / len(expected), rel=1e-5)
    assert reported[0] != pytest.approx(reported[1], rel=1e-3)
    assert base.steps[0].loss == second.steps[0].loss


def _enter_query(query: Any) -> None:
    base = set_key(with_kind("midus", num_heads=4), "model.memory.placement", PlacementConfig(blocks=(1,)))

    @MEMORIES.key("model.memory.query_from", query, base)
    def _(base: Subject, second: Subject) -> None:
        """The memory of block 1 gets the core's heads, their sum with the block's input, or their projection."""
        found = {}
        for name, subject in (("base", base), ("second", second)):
            block, seen = subject.model.decoder.layers[1], {}
            attention = block.self_attention.core_attention
            core = attention.core if name == "base" else attention
            hooks = [
                core.register_forward_hook(lambda module, arguments, out, seen=seen: seen.update(heads=out)),
                subject.layer.register_forward_pre_hook(
                    lambda module, arguments, seen=seen: seen.update(given=arguments[0].flatten(2))
                ),
                block.register_forward_pre_hook(
                    lambda module, arguments, seen=seen: seen.update(x=arguments[0].hidden)
                ),
            ]
            subject.logits()
            for hook in hooks:
                hook.remove()
            found[name] = seen
        assert same(found["base"]["given"], found["base"]["heads"])
        seen, projection = found["second"], "decoder.layers.1.self_attention.linear_proj.weight"
        assert (projection in second.weights) == (query == "projected")
        if query == "projected":
            assert same(seen["given"], seen["heads"] @ second.weights[projection].T)
        else:
            assert same(seen["given"], seen["x"] + seen["heads"])


for _query in ("stream_and_heads", "projected"):
    _enter_query(_query)


@MEMORIES.key(
    "model.memory.query_norm",
    "layer",
    set_key(with_kind("midus", num_heads=4), "model.memory.placement", PlacementConfig(blocks=(1,))),
)
def _(base: Subject, second: Subject) -> None:
    """A gain and a bias for every column of every head, ones and zeros at first."""
    new = {name: second.memory_weights[name] for name in set(second.memory_weights) - set(base.memory_weights)}
    assert {name: (weight.shape, weight.unique().tolist()) for name, weight in new.items()} == {
        "query_gain": ((4, 8), [1.0]),
        "query_bias": ((4, 8), [0.0]),
    }


def _rows_of_first_read(subject: Subject) -> tuple[Tensor, Tensor]:
    """Rows that the first layer asks for, and those that its bank is asked for; [s, b, J]."""
    asked, read = [], []
    bank = subject.model.banks[str(subject.layer.view.bank)]
    locate, weighted_sum = subject.layer.locate, bank.weighted_sum
    subject.layer.locate = lambda entries: asked.append(locate(entries)) or asked[-1]
    bank.weighted_sum = lambda name, rows, *rest: read.append(rows) or weighted_sum(name, rows, *rest)
    subject.logits()
    del subject.layer.locate, bank.weighted_sum
    shape = (*subject.tokens.T.shape, -1)
    return asked[0][0].view(shape), read[0].view(shape)


@MEMORIES.key("model.memory.control", "one_row")
def _(base: Subject, second: Subject) -> None:
    for subject, expected in ((base, lambda asked: asked), (second, torch.zeros_like)):
        asked, read = _rows_of_first_read(subject)
        assert read.equal(expected(asked).to(read.dtype))
        assert asked.unique().numel() > 9
    assert {name: tensor.shape for name, tensor in base.weights.items()} == second.shapes


@MEMORIES.key("model.memory.control", "others_rows")
def _(base: Subject, second: Subject) -> None:
    """Rows of the sequence before; the first sequence's are of the last one, a place earlier."""
    asked, read = _rows_of_first_read(second)
    assert read[:, 1].equal(asked[:, 0].to(read.dtype))
    assert read[1:, 0].equal(asked[:-1, 1].to(read.dtype))
    assert not read.equal(asked.to(read.dtype))
