"""Inputs of a microbatch reach every slot of every block: the right tokens at the right hidden states, on any schedule
and layout.

The memories of these tests are functions of (token id, position) that multiply what they are given, so a token of
another microbatch, of another place or of another rank changes the loss, and one in a recomputed block changes
gradients. One model has memories in the slots of four families, and in one that a family of the tests brings.

Legend: s sequence length, b sequences, D hidden size, n heads, d head dimension.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from megamem.chunk.inputs import Inputs
from megamem.config.model import ModelConfig
from megamem.families.midus.config import BEHIND_HEADS
from megamem.families.pkm.config import PkmConfig
from megamem.families.pkm.family import PKM
from megamem.families.registry import FAMILIES
from megamem.model import MemoryGPTModel
from megamem.placement.slots import BESIDE, INSTEAD, SKIP, Slot
from megamem.placement.spans import PlacementConfig, Span
from megamem.token_tables.config import VALUES
from parallel.groups import ParallelSizes, initialise_groups
from parallel.machine.cpu import cuda_on_cpu
from pretrain.config.schema import ParallelConfig, RunConfig
from pretrain.engine.build import build_chunks
from pretrain.engine.chunks import unwrap
from pretrain.engine.step import evaluation_loss
from pretrain.planning.counts.formulas import count_parameters
from tests.distributed.test_skip_insertion import plain_norm, rope_frequencies, rotate
from tests.distributed.tiny_runs import SHARED, VOCAB_SIZE, tiny_run
from tests.families.behind_heads.config import HEADS
from tests.rotation import in_rotation

# Pairs of blocks are closed in themselves, for two stages of two chunks.
SPANS = "0:1/1:1/2:2/3:3/4:4/5:5/6:7"
SLOTS = {0: SKIP, 1: VALUES, 2: BESIDE, 3: INSTEAD, 4: BEHIND_HEADS, 5: HEADS, 6: SKIP}
MEMORY = PkmConfig(num_keys=6, key_dim=8, value_dim=32, top_k=2, placement=PlacementConfig(spans=SPANS))
CONFIG = replace(SHARED, model=replace(SHARED.model, num_layers=8, memory=MEMORY))
# Tolerance of a loss or a gradient norm: see `test_skip_insertion`.
TOLERANCE = 2e-6


def factor(token_ids: Tensor, positions: Tensor) -> Tensor:
    """Factor by which a token's memory multiplies, in [0, 2]."""
    return 1 + torch.sin(0.7 * token_ids.double() + 0.3 * positions.double())


class Multiplies(MegatronModule):
    """A memory for any slot, without parameters: x times a function of the tokens.

    Attributes:
        num_served: passes without a token.
    """

    def __init__(self, config: Any, memory: PkmConfig, *_: Any, name: str, **__: Any) -> None:
        super().__init__(config=config)
        self.memory = memory
        self.name, self.cores, self.losses, self.usage, self.num_served = name, None, None, None, 0

    @classmethod
    def refresh(cls, layers: Any) -> None:
        """Nothing is kept between steps."""

    @classmethod
    def addresses(cls, *_: Any) -> None:
        """Nothing is computed of the tokens once for all."""

    def forward(self, x: Tensor, inputs: Inputs, hidden: Tensor | None = None) -> Tensor:
        assert inputs.token_ids.shape == inputs.positions.shape == x.shape[:2]
        self.num_served += not len(x)
        return x * factor(inputs.token_ids, inputs.positions).to(x.dtype).view(*x.shape[:2], *[1] * (x.dim() - 2))


def with_multiplying_memories(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(FAMILIES, PKM.kind, replace(PKM, layer_path=f"{__name__}:Multiplies"))
    patch.setattr(PkmConfig, "reads_tokens", True)
    patch.setattr(PkmConfig, "slot_of", lambda memory, span: SLOTS[span.read])


def plain_logits(model: MemoryGPTModel, config: ModelConfig, ids: Tensor) -> Tensor:
    """The model once more in plain PyTorch, from its weights: logits [b, s, vocabulary]."""
    weights = dict(model.named_parameters())
    by_token = factor(ids, torch.arange(ids.shape[1])).unsqueeze(-1)
    x = F.embedding(ids, weights["embedding.word_embeddings.weight"])
    pending: list[tuple[Span, Tensor]] = []
    for block in range(config.num_layers):
        slot, prefix = SLOTS.get(block), f"decoder.layers.{block}."
        of_block = {name.removeprefix(prefix): weight for name, weight in weights.items() if name.startswith(prefix)}
        x = x + plain_attention(plain_norm(x, of_block["input_layernorm.weight"]), of_block, config, slot, by_token)
        n = plain_norm(x, of_block["pre_mlp_layernorm.weight"]) if slot != BEHIND_HEADS else x
        if slot not in (INSTEAD, BEHIND_HEADS):
            mlp = "mlp.ffn" if slot in (BESIDE, SKIP) else "mlp"
            gate, up = F.linear(n, of_block[f"{mlp}.linear_fc1.weight"]).chunk(2, -1)
            x = x + F.linear(F.silu(gate) * up, of_block[f"{mlp}.linear_fc2.weight"])
        if slot in (BESIDE, INSTEAD, SKIP):
            pending.append((next(span for span in config.memory_spans if span.read == block), n * by_token))
        x = x + sum(out for span, out in pending if span.add == block)
    return F.linear(
        plain_norm(x, weights["decoder.final_layernorm.weight"]), weights["embedding.word_embeddings.weight"]
    )


def plain_attention(
    x: Tensor, weights: dict[str, Tensor], config: ModelConfig, slot: Slot | None, by_token: Tensor
) -> Tensor:
    """Causal attention with grouped queries, normalised queries and keys, and RoPE, of x [b, s, D]."""
    b, s, _ = x.shape
    d, groups = config.attention_head_dim, config.query_groups
    qkv = F.linear(x, weights["self_attention.linear_qkv.weight"]).view(b, s, groups, -1, d)
    q, k, v = qkv.split([qkv.shape[3] - 2, 1, 1], 3)
    q = rotate(plain_norm(q, weights["self_attention.q_layernorm.weight"]), config)
    k = rotate(plain_norm(k, weights["self_attention.k_layernorm.weight"]), config)
    v = v.squeeze(3)
    if slot == VALUES:
        v = v * by_token.unsqueeze(-1)
    scores = torch.einsum("bsgnd,btgd->bgnst", q, k.squeeze(3)) / d**0.5
    scores = scores.masked_fill(torch.ones(s, s, dtype=torch.bool).triu(1), -torch.inf)
    heads = torch.einsum("bgnst,btgd->bsgnd", scores.softmax(-1), v).reshape(b, s, -1)
    if slot == BEHIND_HEADS:
        return heads * by_token
    if slot == HEADS:
        heads = heads + heads * by_token
    return F.linear(heads, weights["self_attention.linear_proj.weight"])


def errors_against_plain() -> tuple[dict[str, float], list[int]]:
    """Largest errors of logits and gradients, over the largest element of the reference; passes without a token of each
    memory.
    """
    with cuda_on_cpu(), pytest.MonkeyPatch.context() as patch:
        with_multiplying_memories(patch)
        groups = initialise_groups(ParallelSizes(), device=torch.device("cpu"), timeout_minutes=1, seed=1)
        (model,) = build_chunks(CONFIG, groups, vocab_size=VOCAB_SIZE, dtype=torch.float64)
        # Megatron computes them in fp32 whatever the model's dtype.
        model.rotary_pos_emb.inv_freq = rope_frequencies(CONFIG.model)
        ids = torch.randint(0, VOCAB_SIZE, (2, 16), generator=torch.Generator().manual_seed(3))
        results = []
        for compute in (
            lambda: model(ids, torch.arange(16).expand(2, -1)),
            lambda: plain_logits(model, CONFIG.model, ids),
        ):
            model.zero_grad()
            logits = compute()
            logits.log_softmax(-1)[..., 0].sum().backward()
            grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
            results.append({"logits": logits.detach(), **grads})
        actual, reference = results
        assert (
            actual.keys()
            == reference.keys()
            == {"logits", *dict(model.decoder.named_parameters(prefix="decoder"))}
            | {"embedding.word_embeddings.weight"}
        )
        # These memories have no weights of their own.
        counts = count_parameters(CONFIG.model)
        assert sum(p.numel() for p in model.decoder.parameters()) == counts.attention + counts.ffn + counts.norms
        model.serve_memory()
        served = [layer.num_served for layer in model.memory_layers]
    return {name: float((actual[name] - r).abs().max() / r.abs().max()) for name, r in reference.items()}, served


def test_every_slot_computes_what_plain_pytorch_does_and_serves_without_tokens(run_ranks: Any) -> None:
    ((errors, served),) = run_ranks(errors_against_plain, 1)
    assert max(errors.values()) < 1e-9, errors
    assert served == [1] * len(SLOTS)


def chunks_that_read_tokens(config: RunConfig, memory_asks: bool = False) -> list[bool]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PkmConfig, "reads_tokens", memory_asks)
        with tiny_run(config) as run:
            run.train(1)
            return [unwrap(chunk).reads_tokens for chunk in run.chunks]


def test_a_chunk_in_the_middle_reads_tokens_only_for_memories_that_ask(run_ranks: Any) -> None:
    """Two stages of two chunks: the embedding is in the first, the loss in the last, a memory in the fourth block or
    none.
    """
    layout = ParallelConfig(pipeline=2, virtual_pipeline=2)
    dense = replace(SHARED, parallel=layout, model=replace(SHARED.model, num_layers=8, memory=None))
    one = replace(PkmConfig(num_keys=6, key_dim=8, value_dim=32, top_k=2), placement=PlacementConfig(blocks=(3,)))
    with_one = replace(dense, model=replace(dense.model, memory=one))
    found = run_ranks(
        lambda: [
            chunks_that_read_tokens(dense),
            chunks_that_read_tokens(with_one),
            chunks_that_read_tokens(with_one, memory_asks=True),
        ],
        2,
    )
    no_memory_asks, one_asks = [[True, False], [False, True]], [[True, False], [True, True]]
    assert found == [[rank, rank, asked] for rank, asked in zip(no_memory_asks, one_asks, strict=True)]


def test_a_layer_that_asks_for_tokens_without_saying_so_is_told() -> None:
    with pytest.raises(AssertionError, match="reads_tokens = True"):
        _ = Inputs(None).token_ids


def train_and_evaluate(config: RunConfig) -> list[tuple[float, ...]]:
    """Loss and gradient norm of each step, and the loss of what comes next in the data, without gradients."""
    with tiny_run(config) as run:
        rows: list[tuple[float, ...]] = [*run.train(2)]
        evaluated = evaluation_loss(
            run.chunks,
            run.batches,
            run.groups,
            num_microbatches=run.run.num_microbatches,
            micro_batch_size=config.train.micro_batch_size,
            sequence_length=config.train.sequence_length,
        )
        return [*rows, (evaluated.mean,)]


def outcomes(variants: list[tuple[dict[str, int], Any]]) -> dict[str, list[tuple[float, ...]]]:
    # Four microbatches per step on a rank that holds all data, two on two: 1F1B has several on their way when blocks
    # are recomputed.
    with pytest.MonkeyPatch.context() as patch:
        with_multiplying_memories(patch)
        return {
            f"{layout} {recompute}": train_and_evaluate(
                replace(
                    CONFIG,
                    parallel=ParallelConfig(**layout),
                    train=replace(CONFIG.train, micro_batch_size=2, recompute=recompute),
                )
            )
            for layout, recompute in variants
        }


def test_no_schedule_no_layout_and_no_recomputation_changes_what_a_memory_sees(run_ranks: Any) -> None:
    # Schedules have several microbatches on their way when blocks are recomputed, and meet every way to do so: whole
    # blocks on four ranks. In an order that gives every share one run of four ranks.
    variants: list[tuple[int, dict[str, int], Any]] = [
        (1, {}, "selective"),
        (2, {"tensor": 2}, "selective"),
        (4, {"pipeline": 2, "virtual_pipeline": 2, "tensor": 2}, "full"),
        (1, {}, "full"),
        (4, {"pipeline": 2, "context": 2}, "full"),
        (2, {"context": 2}, "none"),
        (2, {"pipeline": 2}, "selective"),
        (4, {"tensor": 2, "context": 2}, "full"),
        (2, {"pipeline": 2, "virtual_pipeline": 2}, "none"),
        (2, {"pipeline": 2, "virtual_pipeline": 2}, "selective"),
    ]
    variants = [(1, {}, "none"), *in_rotation(variants)]
    found: dict[str, list[tuple[float, ...]]] = {}
    for num_ranks in sorted({number for number, _, _ in variants}):
        here = [(layout, recompute) for number, layout, recompute in variants if number == num_ranks]
        found |= run_ranks(lambda here=here: outcomes(here), num_ranks)[0]
    expected = found["{} none"]
    for name, rows in found.items():
        for actual, right in zip(rows, expected, strict=True):
            assert actual == pytest.approx(right, rel=TOLERANCE), name
