"""The loss in chunks of tokens: what it computes, against PyTorch's cross entropy of whole logits; the same runs as with
whole logits, on every axis; and what it holds.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from test_layouts import assembled, shards
from tiny_runs import PRIVATE, SHARED, on, tiny_run
from torch import Tensor, nn

from kernels.implementations import Implementation, unavailable
from kernels.select import Kernels, select_kernels
from megamem.backbone.chunked_loss import ChunkedLoss, judge
from pretrain.config.schema import RunConfig
from pretrain.planning.dryrun.recorder import Recorder
from tests.rotation import in_rotation, named_in_rotation

LENGTH, SEQUENCES, WIDTH, IDS = 14, 3, 10, 24
KERNELS: dict[Implementation, Kernels] = {
    name: select_kernels(name, device_type="cpu") for name in ("torch", "triton") if not unavailable(name, "cpu")
}
CHUNKS = {"one": 42, "one token": 1, "even": 14, "a rest": 10}
"""Tokens per chunk, of 42."""


# Relative to the largest element. In fp32 some ten roundings; logits of 50 have an absolute one of 4e-6. In bf16 logits
# of 50 are off by up to 1/8 before the softmax.
TOLERANCES = {torch.float64: 1e-13, torch.float32: 5e-6, torch.bfloat16: 0.05}
OF_TRITON = in_rotation(list(TOLERANCES))


def drawn(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states [s, b, D], weight [V, D], labels [b, s], and a gradient of the losses [b, s]."""
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(LENGTH, SEQUENCES, WIDTH, generator=generator, dtype=torch.float64).to(dtype)
    # Logits up to 50: without the largest one taken out, exponentials would overflow in fp32 soon.
    weight = (5 * torch.randn(IDS, WIDTH, generator=generator, dtype=torch.float64)).to(dtype)
    labels = torch.randint(0, IDS, (SEQUENCES, LENGTH), generator=generator)
    return hidden, weight, labels, torch.rand(SEQUENCES, LENGTH, generator=generator, dtype=torch.float64)


def whole(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Losses, and the gradients of hidden states and weight, in fp64 of inputs that are rounded to `dtype`."""
    hidden, weight, labels, of_losses = drawn(dtype)
    hidden, weight = (x.double().requires_grad_() for x in (hidden, weight))
    losses = F.cross_entropy((hidden @ weight.t()).permute(1, 2, 0), labels, reduction="none")
    losses.backward(of_losses)
    assert hidden.grad is not None
    assert weight.grad is not None
    return losses.detach(), hidden.grad, weight.grad


def in_chunks(
    chunk_tokens: int, dtype: torch.dtype, *, main_grad: bool, implementation: Implementation = "torch"
) -> tuple[Tensor, Tensor, Tensor]:
    """Losses and gradients from this rank's parts; the weight's gradient is that of two passes, as in accumulation."""
    group = dist.group.WORLD
    assert group is not None
    rank, size = group.rank(), group.size()
    hidden, weight, labels, of_losses = drawn(dtype)
    part: Any = nn.Parameter(weight.chunk(size)[rank].clone())
    if main_grad:
        part.main_grad = torch.zeros_like(part, dtype=torch.promote_types(dtype, torch.float32))
    num_hooks = []
    part.register_post_accumulate_grad_hook(lambda weight: num_hooks.append(1))
    for _ in range(2):
        of_rank = hidden.chunk(size)[rank].clone().requires_grad_()
        losses = ChunkedLoss(chunk_tokens, group, KERNELS[implementation])(of_rank, part, labels)
        losses.backward(of_losses.to(losses.dtype))
        if main_grad:
            # DDP does this after each pass.
            part.main_grad += part.grad
            part.grad = None
    assert len(num_hooks) == 2
    assert of_rank.grad is not None
    gradient = part.main_grad if main_grad else part.grad
    assert gradient is not None
    return losses.detach(), of_rank.grad, gradient / 2


@pytest.fixture(scope="module", params=[1, 2], ids=lambda size: f"{size} ranks")
def computed(request: pytest.FixtureRequest, run_ranks: Any) -> list[dict[Any, tuple[Tensor, ...]]]:
    """Losses and gradients of each rank by chunk, dtype, and whether the weight has a buffer for its gradient."""
    cases = [(chunk, dtype, main_grad) for chunk in CHUNKS for dtype in TOLERANCES for main_grad in (False, True)]
    found: list[dict[Any, tuple[Tensor, ...]]] = run_ranks(
        lambda: {case: in_chunks(CHUNKS[case[0]], case[1], main_grad=case[2]) for case in cases}, request.param
    )
    return found


@pytest.fixture(scope="module", params=[1, 2], ids=lambda size: f"{size} ranks")
def by_triton(request: pytest.FixtureRequest, run_ranks: Any) -> list[dict[Any, tuple[Tensor, ...]]]:
    """Losses and gradients of each rank by dtype, of Triton's kernels and chunks that leave a rest."""
    if reason := unavailable("triton", "cpu"):
        pytest.skip(f"triton {reason}")

    def main() -> dict[Any, tuple[Tensor, ...]]:
        chunk = CHUNKS["a rest"]
        return {dtype: in_chunks(chunk, dtype, main_grad=True, implementation="triton") for dtype in OF_TRITON}

    found: list[dict[Any, tuple[Tensor, ...]]] = run_ranks(main, request.param)
    return found


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("main_grad", [False, True])
def test_losses_and_gradients_are_those_of_whole_logits(
    computed: list[dict[Any, tuple[Tensor, ...]]], chunk: str, dtype: torch.dtype, main_grad: bool
) -> None:
    assert_whole([of_rank[chunk, dtype, main_grad] for of_rank in computed], dtype)


@pytest.mark.parametrize("dtype", OF_TRITON, ids=str)
def test_losses_of_tritons_kernels_are_those_of_whole_logits(
    by_triton: list[dict[Any, tuple[Tensor, ...]]], dtype: torch.dtype
) -> None:
    assert_whole([of_rank[dtype] for of_rank in by_triton], dtype)


def assert_whole(of_ranks: list[tuple[Tensor, ...]], dtype: torch.dtype) -> None:
    """Losses and gradients of all ranks together are those of whole logits."""
    of_hidden, of_weight = (torch.cat([of_rank[place] for of_rank in of_ranks]) for place in (1, 2))
    for losses, expected in zip([of_rank[0] for of_rank in of_ranks], [whole(dtype)[0]] * len(of_ranks), strict=True):
        assert losses.dtype == torch.promote_types(dtype, torch.float32)
        assert torch.equal(losses, of_ranks[0][0])
        assert (losses - expected).abs().max() <= TOLERANCES[dtype] * expected.abs().max()
    for gradient, expected in zip((of_hidden, of_weight), whole(dtype)[1:], strict=True):
        assert (gradient - expected).abs().max() <= TOLERANCES[dtype] * expected.abs().max()


def by_formula(chunk_tokens: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Losses and gradients of one rank in PyTorch's operations, one after the other, as recorded runs rounded them."""
    hidden, weight, labels, of_losses = drawn(dtype)
    tokens, targets, scale = hidden.flatten(0, 1), labels.t().flatten(), of_losses.t().flatten()
    wide = torch.promote_types(dtype, torch.float32)
    losses, of_hidden, of_weight = [], [], torch.zeros_like(weight, dtype=wide)
    for part in torch.arange(len(tokens)).split(chunk_tokens):
        place = targets[part].unsqueeze(1)
        logits = (tokens[part] @ weight.t()).to(wide)
        logits = logits - logits.amax(1, keepdim=True)
        total = logits.exp().sum(1)
        losses.append(total.log() - logits.gather(1, place).squeeze(1))
        softmax = logits.exp() / total.unsqueeze(1)
        of_logits = softmax.scatter_add(1, place, -torch.ones_like(place, dtype=wide)) * scale[part].to(wide).unsqueeze(
            1
        )
        of_hidden.append(of_logits.to(dtype) @ weight)
        if dtype == wide:
            of_weight.addmm_(of_logits.t(), tokens[part])
        else:
            of_weight += of_logits.to(dtype).t() @ tokens[part]
    return torch.cat(losses).view(LENGTH, SEQUENCES).t(), torch.cat(of_hidden).view_as(hidden), of_weight.to(dtype)


DTYPES = (torch.float64, torch.float32, torch.bfloat16)


@pytest.fixture(scope="module")
def alone(run_ranks: Any) -> dict[tuple[str, torch.dtype], tuple[Tensor, ...]]:
    """Losses and gradients of one rank by chunk and dtype."""
    cases = itertools.product(CHUNKS, DTYPES)
    (found,) = run_ranks(lambda: {case: in_chunks(CHUNKS[case[0]], case[1], main_grad=False) for case in cases}, 1)
    return dict(found)


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_pytorchs_operations_on_one_rank_have_the_bits_of_the_formula(
    alone: dict[tuple[str, torch.dtype], tuple[Tensor, ...]], chunk: str, dtype: torch.dtype
) -> None:
    losses, of_hidden, of_weight = alone[chunk, dtype]
    for found, expected in zip((losses, of_hidden, of_weight), by_formula(CHUNKS[chunk], dtype), strict=True):
        # Chunks are multiplied with the same operations, so that nothing but the softmax could round otherwise.
        assert torch.equal(found, expected)


def test_gradients_in_bf16_are_summed_in_fp32_under_ddp(run_ranks: Any) -> None:
    """Each token adds 1/512 to a sum that reaches 1, where bf16 would lose it: exact numbers all the way."""

    def main() -> Tensor:
        assert dist.group.WORLD is not None
        weight: Any = nn.Parameter(torch.zeros(2, 1, dtype=torch.bfloat16))
        weight.main_grad = torch.zeros(2, 1)
        labels = torch.zeros(1, 1024, dtype=torch.int64)
        # The softmax of two equal logits is 1/2, so every token gives -1/2 and 1/2 times its loss's gradient.
        losses = ChunkedLoss(1, dist.group.WORLD, KERNELS["torch"])(
            torch.ones(1024, 1, 1, dtype=torch.bfloat16), weight, labels
        )
        losses.backward(torch.full((1, 1024), 1 / 256))
        gradient: Tensor = weight.main_grad + weight.grad
        return gradient

    (gradient,) = run_ranks(main, 1)
    assert gradient.flatten().tolist() == [-2.0, 2.0]


def test_two_tensor_ranks_find_the_likeliest_id_of_whole_logits(run_ranks: Any) -> None:
    """Labels are first and second in turn. Whole numbers, whose logits are exact; some ids of both ranks have equal ones."""
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randint(-4, 5, (LENGTH, SEQUENCES, WIDTH), generator=generator).float()
    weight = torch.randint(-4, 5, (IDS, WIDTH), generator=generator).float()
    weight[IDS // 2 :][:4] = weight[:4]
    logits = (hidden @ weight.t()).transpose(0, 1)
    best, ids = logits.topk(2)
    turn = torch.arange(SEQUENCES * LENGTH).view(SEQUENCES, LENGTH)
    labels = ids.gather(2, turn.unsqueeze(2) % 2).squeeze(2)
    asked = turn % 5 != 0
    is_tie = best[..., 0] == best[..., 1]
    is_likeliest = asked & (turn % 2 == 0) & ~is_tie
    # Labels of either rank that are the likeliest, ties, and labels that are not.
    for of_rank in (labels < IDS // 2, labels >= IDS // 2):
        assert (is_likeliest & of_rank).any()
        assert (asked & ~is_likeliest & ~is_tie & of_rank).any()
    assert (asked & is_tie).any()

    def main() -> Tensor:
        group = dist.group.WORLD
        assert group is not None
        of_hidden, of_weight = (x.chunk(2)[group.rank()] for x in (hidden, weight))
        return judge(of_hidden, of_weight, labels, asked, CHUNKS["a rest"], group)

    for judged in run_ranks(main, 2):
        assert torch.equal(judged[1], is_likeliest.float())


def chunked(config: RunConfig, **axes: Any) -> RunConfig:
    """Configuration of a layout, with chunks that do not divide a microbatch of 64 or 32 tokens."""
    return on(replace(config, train=replace(config.train, loss_chunk_tokens=15)), **axes)


STEPS = 2
LAYOUTS: dict[str, tuple[RunConfig, int]] = named_in_rotation(
    {
        "1 rank": (chunked(SHARED), 1),
        "untied, small microbatches": (chunked(PRIVATE, micro_batch_size=2), 1),
        "untied, pipeline 2 x virtual 2": (chunked(PRIVATE, pipeline=2, virtual_pipeline=2, micro_batch_size=2), 2),
        "context 2": (chunked(SHARED, context=2), 2),
        "data 2, full recomputation": (chunked(PRIVATE, recompute="full"), 2),
        "tensor 2 x pipeline 2": (chunked(SHARED, tensor=2, pipeline=2), 4),
        "tensor 2 x context 2": (chunked(PRIVATE, tensor=2, context=2), 4),
    }
)


def trained(config: RunConfig) -> tuple[list[tuple[float, float]], list[Any]]:
    with tiny_run(config) as run:
        return run.train(STEPS), shards(run.bare)


@pytest.fixture(scope="module")
def runs(run_ranks: Any) -> dict[Any, list[tuple[list[tuple[float, float]], list[Any]]]]:
    """Losses and norms, and parameters, by layout and rank; of one rank with whole logits, by model."""
    found: dict[Any, Any] = {}
    whole_logits = {
        model: replace(model, train=replace(model.train, loss_chunk_tokens=None)) for model in (SHARED, PRIVATE)
    }
    for num_ranks in sorted({1, *(ranks for _, ranks in LAYOUTS.values())}):
        configs: dict[Any, RunConfig] = {
            name: config for name, (config, ranks) in LAYOUTS.items() if ranks == num_ranks
        }
        if num_ranks == 1:
            configs |= {model.model: config for model, config in whole_logits.items()}
        by_rank = run_ranks(lambda configs=configs: {name: trained(c) for name, c in configs.items()}, num_ranks)
        found |= {name: [of_rank[name] for of_rank in by_rank] for name in configs}
    return found


@pytest.mark.parametrize("name", LAYOUTS)
def test_runs_are_those_with_whole_logits(runs: dict[Any, Any], name: str) -> None:
    ((history, parts),) = runs[LAYOUTS[name][0].model]
    for of_rank in runs[name]:
        for (loss, norm), expected in zip(of_rank[0], history, strict=True):
            assert loss == pytest.approx(expected[0], rel=1e-6)
            assert norm == pytest.approx(expected[1], rel=1e-5)
    before, after = assembled(parts), assembled([shard for of_rank in runs[name] for shard in of_rank[1]])
    assert after.keys() == before.keys()
    for key, expected in before.items():
        assert (after[key] - expected).abs().max() <= 1e-5 * expected.abs().max(), key


MIB = 2**20
TOKENS, MANY_IDS, CHUNK = 4096, 16384, 1024


def most_held_bytes(chunk_tokens: int) -> int:
    """Bytes of this rank's tensors of forward and backward together, at their most."""
    assert dist.group.WORLD is not None
    hidden = torch.randn(TOKENS, 1, WIDTH, requires_grad=True)
    weight = nn.Parameter(torch.randn(MANY_IDS, WIDTH))
    labels = torch.zeros(1, TOKENS, dtype=torch.int64)
    with Recorder({}, answers=False).recording() as recorder:
        ChunkedLoss(chunk_tokens, dist.group.WORLD, KERNELS["torch"])(hidden, weight, labels).sum().backward()
    return recorder.peak.total


def test_logits_take_the_memory_of_a_chunk(run_ranks: Any) -> None:
    """4 n V bytes in fp32, and at most 3 MiB: two gradients, one as large again of the chunk's, losses."""
    (held,) = run_ranks(lambda: {size: most_held_bytes(size) for size in (64, CHUNK, TOKENS)}, 1)
    for size, num_bytes in held.items():
        assert 0 <= num_bytes - 4 * size * MANY_IDS < 3 * MIB, (size, num_bytes)
