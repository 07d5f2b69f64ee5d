"""Sequences cut over context-parallel ranks: who holds which tokens, and attention across the cuts against plain
attention over whole sequences.
"""

from __future__ import annotations

import itertools
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
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megamem.attention.core import SdpaCoreAttention
from megamem.attention.documents import document_bounds
from megamem.config.model import ModelConfig
from parallel.context import GatheredAttention, gather_sequence, own_tokens
from parallel.context_heads import HeadAttention
from parallel.context_ring import RingAttention
from parallel.context_ways import attention_core
from parallel.machine.cpu import cuda_on_cpu
from pretrain.config.context_ways import context_costs
from pretrain.engine.megatron import transformer_config
from pretrain.planning.dryrun.recorder import Recorder

LENGTH, SEQUENCES, HEADS, WIDTH = 24, 2, 4, 6
LONG = 2048
SIZES = (2, 4)
GROUPED = {"one head per query": 4, "grouped": 2, "one for all": 1}
WAYS = {"gather": GatheredAttention, "heads": HeadAttention, "ring": RingAttention}
DTYPES = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 3e-2}
"""Dtypes and their tolerances against the definition in fp64, of elements of size 1: a bf16 unit in the last place is
2^-8, and output and gradients are rounded a few times.
"""
# Documents that lie in a slice, begin and end with one, and reach over one, two and all but one of the ranks' slices.
STARTS = {"joined": None, "separate": ((0, 2, 3, 9, 21), (0, 12))}


def held_by(rank: int, size: int) -> Tensor:
    """Positions of a sequence that a rank holds: the rank-th of 2 CP slices from the start, and the rank-th from the
    end.
    """
    length = LENGTH // (2 * size)
    first, second = rank * length, LENGTH - (rank + 1) * length
    return torch.tensor([*range(first, first + length), *range(second, second + length)])


def context_groups() -> Iterator[tuple[int, dist.ProcessGroup]]:
    """Groups of four ranks: pairs of neighbours, and all of them."""
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


def plain_attention(query: Tensor, key: Tensor, value: Tensor, documents: str = "joined") -> Tensor:
    """Causal attention by its definition, [s, b, n d] of [s, b, n or g, d]."""
    key, value = (x.repeat_interleave(HEADS // x.shape[2], 2) for x in (key, value))
    scores = 0.3 * torch.einsum("sbnd,tbnd->bnst", query, key)
    for sequence, starts in enumerate(STARTS[documents] or [(0,)] * SEQUENCES):
        for q, k in itertools.product(range(LENGTH), range(LENGTH)):
            if k > q or any(k < start <= q for start in starts):
                scores[sequence, :, q, k] = -torch.inf
    return torch.einsum("bnst,tbnd->sbnd", scores.softmax(-1), value).flatten(2)


def bounds_of(documents: str) -> Tensor | None:
    starts = STARTS[documents]
    if starts is None:
        return None
    positions = torch.ones(SEQUENCES, LENGTH, dtype=torch.int64)
    for sequence, of_sequence in enumerate(starts):
        positions[sequence, list(of_sequence)] = 0
    return document_bounds(positions)


def inputs(num_key_heads: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Query, key, value and the gradient of the output; the same on every rank, and numbers that bf16 has."""
    generator = torch.Generator().manual_seed(5)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).bfloat16().to(dtype)

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
    """Findings of each rank of one set of ranks, for all tests."""

    def main() -> dict[Any, Any]:
        found: dict[Any, Any] = {}
        for size, group in context_groups():
            held = held_by(group.rank(), size)
            for case in itertools.product(WAYS, GROUPED, STARTS, DTYPES):
                way, name, documents, dtype = case
                parts = inputs(GROUPED[name], dtype)
                own = [part.detach()[held].requires_grad_(part.requires_grad) for part in parts]
                attend = partial(attention(WAYS[way], group), attention_mask=bounds_of(documents))
                found[size, *case] = output_and_gradients(attend, *own)
            for way, name in itertools.product(WAYS, GROUPED):
                found[size, way, name, "kept"] = kept_bytes(way, name, group)
            for way, documents in itertools.product(WAYS, STARTS):
                found[size, way, documents, "largest"] = largest_tensor(way, documents, group)
            found[size, "tokens"] = tokens_of(group)
            found[size, "angles"] = angles_of(group)
            found[size, "sum"] = sum_of_bf16(group)
            groups: Any = SimpleNamespace(cp=group)
            found[size, "cores"] = {way: attention_core(groups, way) for way in WAYS}  # type: ignore[arg-type]
        groups.cp, _ = dist.new_subgroups(1)
        found["cores alone"] = {attention_core(groups, way) for way in WAYS}  # type: ignore[arg-type]
        return found

    return run_ranks(main, 4)


def kept_bytes(way: str, name: str, group: dist.ProcessGroup) -> int:
    """Bytes that autograd holds for backward in fp32, every storage once."""
    held = held_by(group.rank(), group.size())
    *own, _ = (part.detach()[held].requires_grad_() for part in inputs(GROUPED[name], torch.float32))
    kept: dict[int, int] = {}

    def keep(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        out = attention(WAYS[way], group)(*own, attention_mask=None)
    assert out.requires_grad
    return sum(kept.values())


class LargestTensor(TorchDispatchMode):
    """Elements of the largest tensor that any operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.num_elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        sizes = [x.untyped_storage().nbytes() // x.itemsize for x in tree_leaves(result) if isinstance(x, Tensor)]
        self.num_elements = max(self.num_elements, *sizes, 0)
        return result


def largest_tensor(way: str, documents: str, group: dist.ProcessGroup) -> int:
    """Elements of the largest tensor in attention over one long sequence, forward and backward, with narrow heads."""
    bounds = None if documents == "joined" else torch.tensor([0, 7, 700, LONG])
    own = [torch.randn(LONG // group.size(), 1, 4, 2, requires_grad=True) for _ in range(3)]
    with LargestTensor() as largest:
        attention(WAYS[way], group)(*own, attention_mask=bounds).sum().backward()
    return largest.num_elements


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


@pytest.mark.parametrize("documents", STARTS)
@pytest.mark.parametrize("name", GROUPED)
@pytest.mark.parametrize("way", WAYS)
def test_attention_across_the_cuts_is_that_over_whole_sequences(seen: Any, way: str, name: str, documents: str) -> None:
    expected = output_and_gradients(partial(plain_attention, documents=documents), *inputs(GROUPED[name]))
    for size, dtype in itertools.product(SIZES, DTYPES):
        for rank, of_rank in enumerate(seen):
            held = held_by(rank % size, size)
            for actual, whole in zip(of_rank[size, way, name, documents, dtype], expected, strict=True):
                assert actual.dtype == dtype
                assert torch.allclose(actual.double(), whole[held], rtol=DTYPES[dtype], atol=DTYPES[dtype])


@pytest.mark.parametrize("documents", STARTS)
@pytest.mark.parametrize("name", GROUPED)
def test_attention_over_whole_sequences_is_that_of_the_definition(name: str, documents: str) -> None:
    attend = partial(attention(SdpaCoreAttention, None), attention_mask=bounds_of(documents))
    expected = output_and_gradients(partial(plain_attention, documents=documents), *inputs(GROUPED[name]))
    for dtype, tolerance in DTYPES.items():
        actual = output_and_gradients(attend, *inputs(GROUPED[name], dtype))
        for ours, plain in zip(actual, expected, strict=True):
            assert torch.allclose(ours.double(), plain, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("way", WAYS)
def test_a_way_keeps_what_the_formula_says(seen: Any, way: Any, size: int) -> None:
    for name, num_key_heads in GROUPED.items():
        model = ModelConfig(
            hidden_size=HEADS * WIDTH, num_attention_heads=HEADS, num_query_groups=num_key_heads, ffn_hidden_size=8
        )
        costs = context_costs(
            model,
            way,
            context_size=size,
            tensor_size=1,
            num_tokens=SEQUENCES * LENGTH // size,
            element_bytes=4,
        )
        assert [of_rank[size, way, name, "kept"] for of_rank in seen] == [costs.kept] * 4, name


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("way", WAYS)
def test_no_tensor_grows_with_the_square_of_the_length(seen: Any, way: str, size: int) -> None:
    """Gathered keys and values, or a rank's queries, keys and values together, are the largest; the scores of one head and
    two slices would be twice as many elements or more.
    """
    vectors = LONG * 4 * 2
    assert (LONG // (2 * size)) ** 2 > 1.9 * 2 * vectors
    for documents in STARTS:
        for of_rank in seen:
            largest = of_rank[size, way, documents, "largest"]
            assert largest <= (2 * vectors if way == "gather" else 3 * vectors // size)


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
    for of_rank in seen:
        assert of_rank["cores alone"] == {SdpaCoreAttention}
        assert all(of_rank[size, "cores"] == WAYS for size in SIZES)


def most_held(way: str, group: dist.ProcessGroup | None, num_key_heads: int) -> tuple[int, int]:
    """Elements that attention holds at its most, forward and backward, of 64 tokens per rank and 8 query heads; in
    vectors of one head of all of the rank's tokens.
    """
    tokens = 64
    own = [torch.randn(tokens, 1, n, WIDTH, requires_grad=True) for n in (8, num_key_heads, num_key_heads)]
    with Recorder({}, answers=False).recording() as recorder:
        out = attention(WAYS[way], group)(*own, attention_mask=None)
        forward = recorder.peak.total
        recorder.restart_peak()
        out.sum().backward()
        backward = recorder.peak.total
    vector = 4 * tokens * WIDTH
    return forward // vector, backward // vector


def test_a_ring_of_any_size_holds_what_is_there_and_what_is_coming(run_ranks: Any) -> None:
    """Twice as many ranks with as many tokens each hold no more; where keys are gathered, twice as many of them."""

    def main() -> dict[Any, tuple[int, int]]:
        half, _ = dist.new_subgroups(4)
        assert dist.group.WORLD is not None
        groups = {4: half, 8: dist.group.WORLD}
        return {
            (way, size, key_heads): most_held(way, group, key_heads)
            for way, key_heads in itertools.product(("gather", "ring"), (2, 8))
            for size, group in groups.items()
        }

    of_ranks = run_ranks(main, 8)

    def most(size: int, key_heads: int) -> tuple[int, int]:
        """Vectors of the fullest rank: a tile has all queries and half the keys, or half the queries and all keys."""
        forward, backward = zip(*(found["ring", size, key_heads] for found in of_ranks), strict=True)
        return max(forward), max(backward)

    for key_heads in (2, 8):
        (forward, backward), (of_8, backward_of_8) = most(4, key_heads), most(8, key_heads)
        assert of_8 == forward
        # A sum of gradients, of keys and values, is made while one is still on its way.
        assert backward_of_8 - backward <= 2 * key_heads
        for found in of_ranks:
            for gathered, twice in zip(found["gather", 4, key_heads], found["gather", 8, key_heads], strict=True):
                assert twice - gathered >= 4 * 2 * key_heads
