"""Reads and writes of residual streams and their gradients, of every implementation against the twins' in fp64.

Legend: n streams, D columns.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kernels.common.tiles import mixing_tile, streams_tile
from kernels.implementations import unavailable
from kernels.parity import TOLERANCE, stream_problems
from kernels.select import Kernels, implementation_of, select_kernels
from tests.small_chunks import OF_STEPS, small

needs_triton = pytest.mark.skipif(bool(unavailable("triton", "cpu")), reason=str(unavailable("triton", "cpu")))
# Tokens, n and D: as shipped; padded sides; odd columns; one of each; a last tile that is not full; none.
SHAPES = (((3, 2), 4, 24), ((5,), 3, 7), ((2, 3), 2, 13), ((1,), 1, 1), ((2, 1), 5, 17), ((0, 2), 4, 8))
ERRORS = {**TOLERANCE, torch.float64: 1e-14}
MIXES, STAYS, WEIGHS = "mix_streams", "mix_streams without a mix", "weigh_streams"
CALLS = (MIXES, STAYS, WEIGHS)


def draw(tokens: tuple[int, ...], n: int, width: int, dtype: torch.dtype) -> dict[str, list[Tensor]]:
    """Operands of every call; weights are in fp32, or fp64."""
    generator = torch.Generator().manual_seed(5)
    wide = torch.promote_types(dtype, torch.float32)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*tokens, *shape, generator=generator, dtype=torch.float64)

    streams, out = normal(n, width).to(dtype), normal(width).to(dtype)
    post, mix = normal(n).to(wide), normal(n, n).to(wide)
    return {MIXES: [streams, out, post, mix], STAYS: [streams, out, post], WEIGHS: [streams, post]}


def call_of(kernels: Kernels, call: str) -> Callable[..., Tensor]:
    if call == STAYS:
        return lambda *operands: kernels.mix_streams(*operands, None)
    function: Callable[..., Tensor] = getattr(kernels, call)
    return function


TWINS = select_kernels("naive")


def outcome(
    function: Callable[..., Tensor], operands: Sequence[Tensor], wanted: Sequence[bool] | None = None
) -> list[Tensor]:
    """Result, and the gradients that are wanted."""
    wanted = wanted or [True] * len(operands)
    leaves = [each.detach().requires_grad_(wants) for each, wants in zip(operands, wanted, strict=True)]
    out = function(*leaves)
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(6)).bfloat16()
    asked = [leaf for leaf in leaves if leaf.requires_grad]
    return [out.detach(), *torch.autograd.grad(out, asked, upstream.to(out.dtype))]


@pytest.mark.parametrize("dtype", list(ERRORS), ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("call", CALLS)
def test_results_and_gradients_are_the_twins(
    kernels: Kernels, call: str, shape: tuple[tuple[int, ...], int, int], dtype: torch.dtype
) -> None:
    operands = draw(*shape, dtype)[call]
    expected = outcome(call_of(TWINS, call), [each.double() for each in operands])
    with small(OF_STEPS):
        found = outcome(call_of(kernels, call), operands)
        with torch.no_grad():
            assert torch.equal(call_of(kernels, call)(*operands), found[0])
    for ours, reference, narrow in zip(found, expected, (operands[0], *operands), strict=True):
        assert (ours.shape, ours.dtype) == (reference.shape, narrow.dtype)
        largest = float(reference.abs().max()) if reference.numel() else 0.0
        torch.testing.assert_close(ours.double(), reference, rtol=0, atol=ERRORS[ours.dtype] * largest)


@pytest.mark.parametrize("call", CALLS)
def test_gradients_that_are_wanted_have_the_same_bits_whichever_they_are(kernels: Kernels, call: str) -> None:
    operands = draw((2,), 3, 11, torch.bfloat16)[call]
    out, *gradients = outcome(call_of(kernels, call), operands)
    for wanted in itertools.product((False, True), repeat=len(operands)):
        if not any(wanted):
            continue
        expected = [out, *(each for each, wants in zip(gradients, wanted, strict=True) if wants)]
        found = outcome(call_of(kernels, call), operands, wanted)
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


@pytest.mark.parametrize("call", CALLS)
def test_gradients_are_those_of_differences(kernels: Kernels, call: str) -> None:
    """Along a random direction, where the slow mode moves every element by itself: twins have every gradient."""
    operands = [each.requires_grad_() for each in draw((2, 1), 3, 9, torch.float64)[call]]
    assert torch.autograd.gradcheck(call_of(kernels, call), operands, fast_mode=True)


@pytest.mark.parametrize("call", CALLS)
def test_strides_change_nothing_and_a_second_run_has_the_same_bits(kernels: Kernels, call: str) -> None:
    operands = draw((3, 2), 4, 10, torch.bfloat16)[call]
    expected = outcome(call_of(kernels, call), operands)
    turned = [each.transpose(0, 1).contiguous().transpose(0, 1) for each in operands]
    gaps = [torch.stack((each, each), -1)[..., 0] for each in operands]
    for others in (operands, turned, gaps):
        found = outcome(call_of(kernels, call), others)
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def test_weights_that_all_tokens_share_are_taken(kernels: Kernels) -> None:
    """Static hyper-connections have weights without a stride, and a gradient of a sum has none."""
    streams, out, post, mix = draw((3, 2), 3, 10, torch.float32)[MIXES]
    gradients = []
    for function in (kernels.mix_streams, TWINS.mix_streams):
        shared = post[0, 0].clone().requires_grad_(), mix[0, 0].clone().requires_grad_()
        result = function(streams, out, shared[0].expand(3, 2, 3), shared[1].expand(3, 2, 3, 3))
        gradients.append(torch.autograd.grad(result.sum(), shared))
    for found, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(found, expected)


def test_backward_keeps_streams_in_their_own_dtype_and_none_without_a_mix(kernels: Kernels) -> None:
    operands = draw((2, 2), 4, 10, torch.bfloat16)
    for call, num_kept in ((MIXES, 4), (STAYS, 2), (WEIGHS, 2)):
        leaves = [each.requires_grad_() for each in operands[call]]
        kept: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x, kept=kept: kept.append(x) or x, lambda x: x):
            call_of(kernels, call)(*leaves)
        assert len(kept) == num_kept
        assert {each.data_ptr() for each in kept} <= {each.data_ptr() for each in leaves}


def test_a_token_that_is_not_finite_stays_alone(kernels: Kernels) -> None:
    for call, operands in draw((4,), 3, 10, torch.float32).items():
        expected = outcome(call_of(kernels, call), operands)
        broken = [each.clone() for each in operands]
        broken[0][1] = torch.nan
        for ours, reference in zip(outcome(call_of(kernels, call), broken), expected, strict=True):
            assert torch.equal(ours[[0, 2, 3]], reference[[0, 2, 3]])


def test_an_identity_adds_and_rounds_once(kernels: Kernels) -> None:
    streams, out, post, _ = draw((4,), 4, 24, torch.float32)[MIXES]
    ones, identity = torch.ones_like(post), torch.eye(4).expand(4, 4, 4)
    for mix in (identity, None):
        assert torch.equal(kernels.mix_streams(streams, out, ones, mix), streams + out.unsqueeze(1))
    narrow = streams.bfloat16(), out.bfloat16(), post
    assert torch.equal(kernels.mix_streams(*narrow, identity), kernels.mix_streams(*narrow, None))


def test_streams_that_are_mixed_the_other_way_are_seen() -> None:
    good = select_kernels("torch")

    def other_way(streams: Tensor, out: Tensor, post: Tensor, mix: Tensor | None) -> Tensor:
        return good.mix_streams(streams, out, post, None if mix is None else mix.mT)

    assert list(stream_problems(good, "cpu", torch.float32)) == []
    problems = list(stream_problems(replace(good, mix_streams=other_way), "cpu", torch.float32))
    assert problems
    assert all(problem.startswith("mix_streams") for problem in problems)
    problems = list(
        stream_problems(
            replace(good, weigh_streams=lambda x, w: good.weigh_streams(x, w.flip(-1))), "cpu", torch.float32
        )
    )
    assert problems
    assert all(problem.startswith("weigh_streams") for problem in problems)


@needs_triton
def test_the_operators_are_what_tracing_is_told() -> None:
    from kernels.mix_streams import triton_op as mixing
    from kernels.weigh_streams import triton_op as weighing

    streams, out, post, mix = draw((2,), 3, 12, torch.bfloat16)[MIXES]
    for operands in ((streams, out, post, mix), (streams, out, post, None)):
        torch.library.opcheck(mixing._mix_streams, operands)
    torch.library.opcheck(mixing._gradients, (streams, streams, out, post, mix))
    torch.library.opcheck(mixing._gradients, (streams, None, out, post, None))
    torch.library.opcheck(weighing._weigh_streams, (streams, post))
    torch.library.opcheck(weighing._gradients, (out, streams, post))


def test_a_tile_covers_streams_with_loads_of_16_bytes() -> None:
    for width, n, itemsize in itertools.product((1, 24, 768, 2560, 5120), range(1, 9), (2, 4, 8)):
        for tile in (streams_tile(width, n, itemsize), mixing_tile(width, n, itemsize)):
            assert tile.side >= n
            assert tile.lanes * tile.per_lane == tile.columns
            assert tile.per_lane * itemsize <= 16
            assert tile.num_warps <= 16
        assert tile.per_lane * tile.side <= 32


def test_twins_are_the_formula_in_loops() -> None:
    streams, out, post, mix = draw((2,), 3, 5, torch.float64)[MIXES]
    loops = torch.stack(
        [post[:, j, None] * out + sum(mix[:, i, j, None] * streams[:, i] for i in range(3)) for j in range(3)],
        1,
    )
    torch.testing.assert_close(implementation_of("mix_streams", "naive")(streams, out, post, mix), loops)
    weighed = torch.stack([post[:, i, None] * streams[:, i] for i in range(3)]).sum(0)
    torch.testing.assert_close(implementation_of("weigh_streams", "naive")(streams, post), weighed)
