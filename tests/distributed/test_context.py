"""Sequences cut over context-parallel ranks: who holds which tokens, and attention across the cuts against plain
attention over whole sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.transformer.enums import AttnMaskType
from tiny_runs import SHARED
from torch import Tensor

from megamem.attention import SdpaCoreAttention
from parallel.context import ContextParallelAttention, attention_core, gather_sequence, own_tokens
from parallel.cpu import cuda_on_cpu
from pretrain.megatron import transformer_config

LENGTH, SEQUENCES, HEADS, WIDTH = 24, 2, 4, 6
SIZES = (2, 4)
GROUPED = {"one head per query": 4, "grouped": 2, "one for all": 1}


def held_by(rank: int, size: int) -> Tensor:
    """Positions of a sequence that a rank holds: the rank-th of 2 CP slices from the start, and the rank-th from the
    end.
    """
    length = LENGTH // (2 * size)
    first, second = rank * length, LENGTH - (rank + 1) * length
    return torch.tensor([*range(first, first + length), *range(second, second + length)])


def context_groups() -> Iterator[tuple[int, dist.ProcessGroup]]:
    """Of four ranks: pairs of neighbours, and all of them."""
    pair, _ = dist.new_subgroups(2)
    yield 2, pair
    assert dist.group.WORLD is not None
    yield 4, dist.group.WORLD


def attention(core: type[SdpaCoreAttention], group: dist.ProcessGroup | None) -> SdpaCoreAttention:
    return core(
        transformer_config(SHARED, dtype=torch.float64, on_gpu=False),
        layer_number=1,
        attn_mask_type=AttnMaskType.causal,
        attention_type="self",
        softmax_scale=0.3,
        pg_collection=SimpleNamespace(cp=group),
    )


def plain_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal attention by its definition, [s, b, n d] of [s, b, n or g, d]."""
    key, value = (x.repeat_interleave(HEADS // x.shape[2], 2) for x in (key, value))
    scores = 0.3 * torch.einsum("sbnd,tbnd->bnst", query, key)
    scores = scores.masked_fill(torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1), -torch.inf)
    return torch.einsum("bnst,tbnd->sbnd", scores.softmax(-1), value).flatten(2)


def inputs(num_key_heads: int) -> list[Tensor]:
    """Query, key, value and the gradient of the output; the same on every rank."""
    random = partial(torch.randn, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    heads = (HEADS, num_key_heads, num_key_heads)
    parts = [random(LENGTH, SEQUENCES, n, WIDTH).requires_grad_() for n in heads]
    return [*parts, random(LENGTH, SEQUENCES, HEADS * WIDTH)]


def output_and_gradients(
    attend: Callable[..., Tensor], query: Tensor, key: Tensor, value: Tensor, upstream: Tensor
) -> list[Tensor]:
    out = attend(query, key, value)
    return [out.detach(), *torch.autograd.grad(out, (query, key, value), upstream)]


@pytest.fixture(scope="module")
def seen(run_ranks: Any) -> list[dict[Any, Any]]:
    """By rank, what one set of ranks found out for all tests."""

    def main() -> dict[Any, Any]:
        found: dict[Any, Any] = {}
        for size, group in context_groups():
            held = held_by(group.rank(), size)
            for name, num_key_heads in GROUPED.items():
                own = [part.detach()[held].requires_grad_(part.requires_grad) for part in inputs(num_key_heads)]
                core = attention(ContextParallelAttention, group)
                found[size, name] = output_and_gradients(partial(core, attention_mask=None), *own)
            found[size, "tokens"] = tokens_of(group)
            found[size, "angles"] = angles_of(group)
            found[size, "sum"] = sum_of_bf16(group)
            found[size, "core"] = attention_core(SimpleNamespace(cp=group)).__name__  # type: ignore[arg-type]
        alone, _ = dist.new_subgroups(1)
        found["core alone"] = attention_core(SimpleNamespace(cp=alone)).__name__  # type: ignore[arg-type]
        return found

    return run_ranks(main, 4)


def tokens_of(group: dist.ProcessGroup) -> dict[str, Tensor]:
    """Two batches cut one after the other: a loader may hand out the same one again."""
    batch = {"tokens": torch.arange(SEQUENCES * LENGTH).view(SEQUENCES, LENGTH), "loss_mask": torch.ones(1, LENGTH)}
    first, second = own_tokens(batch, group), own_tokens(batch, group)
    assert torch.equal(first["tokens"], second["tokens"])
    assert batch["tokens"].shape == (SEQUENCES, LENGTH)
    return first


def angles_of(group: dist.ProcessGroup) -> Tensor:
    with cuda_on_cpu():
        return RotaryEmbedding(WIDTH, 1.0, use_cpu_initialization=True, cp_group=group)(LENGTH)


def sum_of_bf16(group: dist.ProcessGroup) -> Tensor:
    """The gradient of gathered tokens of which rank 0 makes 256, and every other rank 1."""
    x = torch.zeros(LENGTH // group.size(), dtype=torch.bfloat16, requires_grad=True)
    upstream = torch.full((LENGTH,), 256.0 if group.rank() == 0 else 1.0, dtype=torch.bfloat16)
    (gradient,) = torch.autograd.grad(gather_sequence(x, group), x, upstream)
    return gradient


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", GROUPED)
def test_attention_across_the_cuts_is_that_over_whole_sequences(seen: Any, size: int, name: str) -> None:
    expected = output_and_gradients(plain_attention, *inputs(GROUPED[name]))
    for rank, of_rank in enumerate(seen):
        held = held_by(rank % size, size)
        for actual, whole in zip(of_rank[size, name], expected, strict=True):
            assert actual.dtype == torch.float64
            assert torch.allclose(actual, whole[held], rtol=0, atol=1e-13)


@pytest.mark.parametrize("name", GROUPED)
def test_attention_over_whole_sequences_is_that_of_the_definition(name: str) -> None:
    core = attention(SdpaCoreAttention, None)
    actual = output_and_gradients(partial(core, attention_mask=None), *inputs(GROUPED[name]))
    for ours, plain in zip(actual, output_and_gradients(plain_attention, *inputs(GROUPED[name])), strict=True):
        assert torch.allclose(ours, plain, rtol=0, atol=1e-13)


@pytest.mark.parametrize("size", SIZES)
def test_a_rank_has_one_slice_from_either_end(seen: Any, size: int) -> None:
    ids = torch.arange(SEQUENCES * LENGTH).view(SEQUENCES, LENGTH)
    for rank, of_rank in enumerate(seen):
        own = of_rank[size, "tokens"]
        assert torch.equal(own["tokens"], ids[:, held_by(rank % size, size)])
        assert own["loss_mask"].shape == (1, LENGTH // size)


@pytest.mark.parametrize("size", SIZES)
def test_megatron_cuts_its_rotary_embedding_alike(seen: Any, size: int) -> None:
    with cuda_on_cpu():
        whole = RotaryEmbedding(WIDTH, 1.0, use_cpu_initialization=True)(LENGTH)
    for rank, of_rank in enumerate(seen):
        assert torch.equal(of_rank[size, "angles"], whole[held_by(rank % size, size)])


@pytest.mark.parametrize("size", SIZES)
def test_contributions_of_ranks_are_rounded_once(seen: Any, size: int) -> None:
    """256 + 1 is 256 in bf16, however often 1 is added."""
    expected = torch.tensor(256.0 + size - 1).bfloat16()
    for of_rank in seen:
        assert of_rank[size, "sum"].dtype == torch.bfloat16
        assert bool((of_rank[size, "sum"] == expected).all())


def test_sequences_that_are_whole_are_attended_to_without_a_collective(seen: Any) -> None:
    assert {of_rank["core alone"] for of_rank in seen} == {"SdpaCoreAttention"}
    assert {of_rank[size, "core"] for of_rank in seen for size in SIZES} == {"ContextParallelAttention"}
