"""Memories that read in one block and add after a later one, or read with an earlier block's stream: what they compute,
and that no schedule or layout changes it.

Legend: s sequence length, b sequences, D hidden size, n heads, d head dimension.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megamem.config.model import ModelConfig
from megamem.families.engram.config import EngramConfig
from megamem.model import MemoryGPTModel
from megamem.placement.spans import PlacementConfig, Span
from parallel.groups import ParallelSizes, initialise_groups
from parallel.machine.cpu import cuda_on_cpu
from pretrain.config.schema import ParallelConfig, RunConfig
from pretrain.engine.build import build_chunks
from tests.distributed.tiny_runs import MEMORY, SHARED, VOCAB_SIZE, tiny_run
from tests.microbatch import some_inputs
from tests.rotation import in_rotation

# Overlapping, nested, one that adds where it reads, two that add after the same block; the first four blocks are closed
# in themselves.
SPANS = "0:2/1:3/2:2/4:7/5:6/6:7"
# Every pair of blocks is closed in itself, for two stages of two chunks.
SHORT_SPANS = "0:1/2:3/5:5/6:7"
# Pairs and fours of blocks that read with one stream, beside plain blocks.
FOURS = PlacementConfig(query_group=4)
GAPS = PlacementConfig(blocks=(0, 2, 5, 7), query_group=2)
PAIRS = PlacementConfig(query_group=2)
# Tolerance of a loss or a gradient norm: ten times what an ulp in every weight does to them (`tiny_runs.EPSILON`).
TOLERANCE = 2e-6
# Tolerance beside n-grams: their gate's root has a slope of up to 500, where others have one of about 1. A norm is of all
# gradients, of which some hundredth are behind a score that near to zero.
OF_ROOTS = 500 * 2.0**-24


def spread(spans: str) -> PlacementConfig:
    return PlacementConfig(spans=spans)


def placed(placement: PlacementConfig) -> RunConfig:
    """Eight blocks, a private table per memory."""
    model = replace(SHARED.model, num_layers=8, memory=replace(MEMORY, placement=placement))
    return replace(SHARED, model=model)


def plain_logits(model: MemoryGPTModel, config: ModelConfig, ids: Tensor) -> Tensor:
    """The model once more in plain PyTorch, from its weights: logits [b, s, vocabulary]. Memories alone are called as
    they are.
    """
    weights = dict(model.named_parameters())
    x = F.embedding(ids, weights["embedding.word_embeddings.weight"])
    pending: list[tuple[Span, Tensor]] = []
    normal: dict[int, Tensor] = {}
    memories = {int(layer.name.split(".")[2]): layer for layer in model.memory_layers}
    for block in range(config.num_layers):
        of_block = {
            name.removeprefix(f"decoder.layers.{block}."): weight
            for name, weight in weights.items()
            if name.startswith(f"decoder.layers.{block}.")
        }
        x = x + plain_attention(plain_norm(x, of_block["input_layernorm.weight"]), of_block, config)
        n = normal[block] = plain_norm(x, of_block["pre_mlp_layernorm.weight"])
        prefix = "mlp.ffn" if block in memories else "mlp"
        gate, up = F.linear(n, of_block[f"{prefix}.linear_fc1.weight"]).chunk(2, -1)
        x = x + F.linear(F.silu(gate) * up, of_block[f"{prefix}.linear_fc2.weight"])
        if block in memories:
            span = next(span for span in config.memory_spans if span.read == block)
            query = normal[block if span.queried is None else span.queried].transpose(0, 1)
            pending.append((span, memories[block](query, some_inputs(query)).transpose(0, 1)))
        x = x + sum(out for span, out in pending if span.add == block)
    return F.linear(
        plain_norm(x, weights["decoder.final_layernorm.weight"]), weights["embedding.word_embeddings.weight"]
    )


def plain_norm(x: Tensor, gain: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * gain


def plain_attention(x: Tensor, weights: dict[str, Tensor], config: ModelConfig) -> Tensor:
    """Causal attention with grouped queries, normalised queries and keys, and RoPE, of x [b, s, D]."""
    b, s, _ = x.shape
    d, groups = config.attention_head_dim, config.query_groups
    qkv = F.linear(x, weights["self_attention.linear_qkv.weight"]).view(b, s, groups, -1, d)
    q, k, v = qkv.split([qkv.shape[3] - 2, 1, 1], 3)
    q = rotate(plain_norm(q, weights["self_attention.q_layernorm.weight"]), config)
    k = rotate(plain_norm(k, weights["self_attention.k_layernorm.weight"]), config)
    scores = torch.einsum("bsgnd,btgd->bgnst", q, k.squeeze(3)) / d**0.5
    scores = scores.masked_fill(torch.ones(s, s, dtype=torch.bool).triu(1), -torch.inf)
    mixed = torch.einsum("bgnst,btgd->bsgnd", scores.softmax(-1), v.squeeze(3))
    return F.linear(mixed.reshape(b, s, -1), weights["self_attention.linear_proj.weight"])


def rotate(x: Tensor, config: ModelConfig) -> Tensor:
    """RoPE on [b, s, groups, heads, d]."""
    angles = torch.outer(torch.arange(x.shape[1], dtype=x.dtype), rope_frequencies(config)).repeat(1, 2)
    angles = angles[None, :, None, None]
    first, second = x.chunk(2, -1)
    return x * angles.cos() + torch.cat([-second, first], -1) * angles.sin()


def rope_frequencies(config: ModelConfig) -> Tensor:
    width = config.attention_head_dim
    return config.rotary_base ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)


def errors_against_plain(placement: PlacementConfig) -> dict[str, float]:
    """Largest errors of logits and of every gradient, over the largest element of the reference."""
    config = placed(placement)
    with cuda_on_cpu():
        groups = initialise_groups(ParallelSizes(), device=torch.device("cpu"), timeout_minutes=1, seed=1)
        (model,) = build_chunks(config, groups, vocab_size=VOCAB_SIZE, dtype=torch.float64)
        # Megatron computes them in fp32 whatever the model's dtype.
        model.rotary_pos_emb.inv_freq = rope_frequencies(config.model)
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for layer in model.memory_layers:
                # Large enough to matter in the logits.
                layer.value_proj.mul_(30)
        ids = torch.randint(0, VOCAB_SIZE, (2, 16), generator=generator)
        results = []
        for compute in (
            lambda: model(ids, torch.arange(16).expand(2, -1), None),
            lambda: plain_logits(model, config.model, ids),
        ):
            model.zero_grad()
            logits = compute()
            logits.log_softmax(-1)[..., 0].sum().backward()
            grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
            results.append({"logits": logits.detach(), **grads})
        assert any(layer.plan.memories for layer in model.decoder.layers)
    actual, reference = results
    assert actual.keys() == reference.keys() == {"logits", *dict(model.named_parameters())}
    return {name: float((actual[name] - r).abs().max() / r.abs().max()) for name, r in reference.items()}


@pytest.mark.parametrize("placement", [*map(spread, (SPANS, SHORT_SPANS, "0:7/3:5", "0:2/1:3")), FOURS, GAPS], ids=str)
def test_the_model_computes_what_plain_pytorch_does(run_ranks: Any, placement: PlacementConfig) -> None:
    """The release keeps the second output only in `0:2/1:3`, and the first memory has no gradient there."""
    (errors,) = run_ranks(lambda: errors_against_plain(placement), 1)
    assert max(errors.values()) < 1e-9, errors


def train(config: RunConfig) -> list[tuple[float, float]]:
    """Steps, of which the second shows the first one's update."""
    with tiny_run(config) as run:
        return run.train(2)


LAYOUTS: dict[PlacementConfig, list[dict[str, int]]] = {
    spread(SPANS): [{"tensor": 2}, {"pipeline": 2}, {}, {"context": 2}],
    spread(SHORT_SPANS): [{"pipeline": 2, "virtual_pipeline": 2}],
    FOURS: [{"context": 2}, {"pipeline": 2}],
    GAPS: [{"pipeline": 2}],
    PAIRS: [{"pipeline": 2, "virtual_pipeline": 2}],
}


@dataclass(frozen=True)
class Variant:
    """A run on some ranks that recomputes in a way; by default the one that all others are compared with."""

    placement: PlacementConfig
    num_ranks: int = 1
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    recompute: Literal["none", "selective", "full"] = "none"


def variants_of(placement: PlacementConfig) -> list[Variant]:
    """One rank that recomputes, each layout with its own way to do so, and a schedule with all."""
    layouts = [ParallelConfig(**layout) for layout in LAYOUTS[placement]]
    on_two = [*zip(layouts, itertools.cycle(("full", "none", "selective")), strict=False)]
    if layouts[0].virtual_pipeline > 1:
        on_two += [(layouts[0], way) for way in ("none", "selective")]
    return [
        *(Variant(placement, recompute=way) for way in ("selective", "full")),
        *(Variant(placement, 2, layout, way) for layout, way in on_two),
    ]


VARIANTS = in_rotation([variant for placement in LAYOUTS for variant in variants_of(placement)])
PLACEMENTS = list(dict.fromkeys(variant.placement for variant in VARIANTS))


@pytest.fixture(scope="module")
def trained(run_ranks: Any) -> dict[Variant, list[tuple[float, float]]]:
    """Four microbatches per step, so that 1F1B has several on their way when blocks are recomputed."""
    variants = [*map(Variant, PLACEMENTS), *VARIANTS]

    def main(num_ranks: int) -> dict[Variant, list[tuple[float, float]]]:
        return {
            variant: train(
                replace(config, parallel=variant.parallel, train=replace(config.train, recompute=variant.recompute))
            )
            for variant in variants
            for config in [placed(variant.placement)]
            if variant.num_ranks == num_ranks
        }

    return {variant: run for n in (1, 2) for variant, run in run_ranks(lambda n=n: main(n), n)[0].items()}


@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
def test_no_layout_and_no_recomputation_changes_a_run(trained: dict[Variant, Any], placement: PlacementConfig) -> None:
    expected = trained[Variant(placement)]
    for variant in VARIANTS:
        if variant.placement == placement:
            for actual, reference in zip(trained[variant], expected, strict=True):
                assert actual == pytest.approx(reference, rel=TOLERANCE), variant


def test_blocks_of_another_family_pass_it_on(run_ranks: Any) -> None:
    """The memory of block 3 reads with the stream of block 1, over a block with n-grams."""
    learned = replace(MEMORY, placement=PlacementConfig(blocks=(1, 3), query_group=2))
    ngrams = EngramConfig(rows_per_head=31, heads_per_order=2, value_dim=8, placement=PlacementConfig(blocks=(0, 2)))
    both = replace(SHARED, model=replace(SHARED.model, num_layers=4, memory=learned, second_memory=ngrams))
    own = replace(both, model=replace(both.model, memory=replace(learned, placement=PlacementConfig(blocks=(1, 3)))))
    again = replace(both, train=replace(both.train, recompute="full"))
    expected, recomputed, others = run_ranks(lambda: [train(config) for config in (both, again, own)], 1)[0]
    (split,) = run_ranks(lambda: [train(replace(both, parallel=ParallelConfig(tensor=2)))], 2)[0]
    for run in (recomputed, split):
        for actual, reference in zip(run, expected, strict=True):
            assert actual == pytest.approx(reference, rel=OF_ROOTS)
    assert others[0] != pytest.approx(expected[0], rel=10 * OF_ROOTS)
