"""Results in bf16: summed in fp32 and rounded once, in the C++ kernels to the bit (to the nearest, ties to even).

The inputs are such that every sum is exact in fp32 in any order. So the C++ kernels' result is PyTorch's conversion of
a number that is known, whatever the order, the width of the vectors and the path that a width takes (whole vectors,
half ones, tails). The other implementations do not choose their rounding: PyTorch's sums of bags round ties away from
zero, and Triton's interpreter cuts off. They are held to one of the two neighbours, which sums in bf16 are not.

Legend: T tokens, J rows read per token, C column groups, W columns, B blocks of entries.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.implementations import Implementation, unavailable
from kernels.select import Kernels, select_kernels

BF16, FP32 = torch.bfloat16, torch.float32
IMPLEMENTATIONS: tuple[Implementation, ...] = ("cpu", "torch", "triton")
# Tails alone, half a vector, a whole one, several, and more than are kept in registers, each with and without a tail.
WIDTHS = (1, 3, 7, 8, 9, 15, 16, 17, 24, 31, 32, 33, 40, 65, 200, 545)


needs_compiler = pytest.mark.skipif(unavailable("cpu", "cpu") is not None, reason=str(unavailable("cpu", "cpu")))


def in_cpp() -> Kernels:
    return select_kernels("cpu", device_type="cpu")


def assert_bits(actual: Tensor, exact: Tensor) -> None:
    """`actual` is `exact`, which must be exact in fp32, rounded to bf16; NaN is any NaN, and 0 either zero."""
    assert actual.dtype == BF16
    finite = exact.isfinite()
    assert torch.equal(exact[finite].float().double(), exact[finite].double()), "not exact in fp32"
    expected = exact.float().to(BF16)
    same = (actual == expected) | (actual.isnan() & expected.isnan())
    wrong = [f"{e} became {a}" for a, e in zip(actual[~same].tolist(), exact[~same].tolist(), strict=True)]
    assert not wrong, f"{len(wrong)} of {same.numel()}: {', '.join(wrong[:5])}"


def assert_neighbours(actual: Tensor, exact: Tensor) -> None:
    """`actual` is one of the two numbers of bf16 around `exact`, or `exact` itself where bf16 has it; all are finite,
    and none subnormal.
    """
    assert actual.dtype == BF16
    inwards = (exact.float().view(torch.int32) & -0x10000).view(torch.float32)
    step = torch.where(inwards == exact, 0, 2.0 ** (exact.abs().float().clamp_min(1).log2().floor() - 7))
    distance = (actual.float() - inwards) * exact.sign()
    assert ((distance == 0) | (distance == step)).all()


def integers(generator: torch.Generator, largest: int, *size: int) -> Tensor:
    """Whole numbers that bf16 holds (up to 256), in int64."""
    return torch.randint(-largest, largest + 1, size, generator=generator)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("num_blocks", [1, 2])
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_sums_and_products_of_whole_numbers(name: Implementation, groups: int, num_blocks: int) -> None:
    """Sums of 40 rows have up to 15 bits, of which bf16 keeps 8, and ties are among them."""
    if reason := unavailable(name, "cpu"):
        pytest.skip(f"{name} {reason}")
    kernels = select_kernels(name, device_type="cpu")
    check = assert_bits if name == "cpu" else assert_neighbours
    g = torch.Generator().manual_seed(0)
    num_tokens, reads, rows = 3, 40, 9
    # Triton's kernels mask a block of any width and have no tails, and its interpreter is slow.
    for per_group in WIDTHS if name != "triton" else WIDTHS[1::6]:
        width = groups * per_group
        table, ids = integers(g, 200, rows, width), torch.randint(0, rows, (num_tokens, reads), generator=g)
        coef = integers(g, 8, num_tokens, reads, groups)
        x = integers(g, 8, num_tokens, num_blocks * width)
        block = torch.randint(0, num_blocks, ids.shape, generator=g)
        # [T, J, C, W / C]
        read = table[ids].unflatten(2, (groups, per_group))
        weighted = (read * coef.unsqueeze(3)).flatten(2)
        sums = torch.stack([(weighted * (block == b).unsqueeze(2)).sum(1) for b in range(num_blocks)], 1).flatten(1)
        vectors = x.unflatten(1, (num_blocks, width))[torch.arange(num_tokens).unsqueeze(1), block]
        products = (read * vectors.unflatten(2, (groups, per_group))).sum(3)
        of_blocks = block if num_blocks > 1 else None
        check(kernels.gather_sum(table.to(BF16), ids, coef.to(BF16), of_blocks, num_blocks), sums)
        check(kernels.gather_dot(table.to(BF16), ids, x.to(BF16), groups, of_blocks), products)
        if name == "cpu":
            # Operands of another type than the table: only the C++ kernels take them as they are.
            check(kernels.gather_sum(table.to(BF16), ids, coef.float(), of_blocks, num_blocks), sums)
            check(kernels.gather_dot(table.float(), ids, x.to(BF16), groups, of_blocks), products)


def bf16(*bits: int) -> Tensor:
    return torch.tensor(bits, dtype=torch.int32).to(torch.int16).view(BF16)


def summands() -> tuple[Tensor, Tensor]:
    """Pairs whose sums, exact in fp32, lie on, just above and just below the middle between two numbers of bf16; and
    special values.
    """
    # Even and odd mantissas, the last before a power of two, and the largest finite number; in both signs.
    high = bf16(0x3F80, 0x3F81, 0x3FFF, 0x4000, 0x42FE, 0x42FF, 0x0101, 0x7F7E, 0x7F7F).float()
    high = torch.cat([high, -high])
    ulp = 2.0 ** (high.abs().log2().floor() - 7)
    parts = torch.tensor([0, 0.25, 0.49609375, 0.5, 0.50390625, 0.75, 1])
    low = torch.cat([ulp.unsqueeze(1) * parts, -ulp.unsqueeze(1) * parts], 1)
    high = high.unsqueeze(1).expand_as(low)
    inf, nan = float("inf"), float("nan")
    special = torch.tensor(
        [[inf, 1], [-inf, 1], [inf, inf], [inf, -inf], [nan, 1], [1, nan], [0, 0], [2**-133, 0], [2**-126, -(2**-133)]]
    )
    return torch.cat([high.flatten(), special[:, 0]]).to(BF16), torch.cat([low.flatten(), special[:, 1]]).to(BF16)


def test_the_summands_meet_every_case() -> None:
    high, low = summands()
    total = high.float() + low.float()
    ties = total[(total.view(torch.int32) & 0xFFFF) == 0x8000]
    assert {bool(bits >> 16 & 1) for bits in ties.view(torch.int32).tolist()} == {False, True}
    rounded = total.to(BF16)
    assert (rounded.isinf() & total.isfinite()).any()
    assert rounded.isnan().any()
    # Cutting the last bits off, or adding half a step without regard to ties, would show.
    truncated = (total.view(torch.int32) >> 16).to(torch.int16).view(BF16)
    away = ((total.view(torch.int32) + 0x8000) >> 16).to(torch.int16).view(BF16)
    for wrong in (truncated, away):
        assert ((wrong != rounded) & rounded.isfinite()).any()


@needs_compiler
def test_roundings_of_sums_and_of_accumulation() -> None:
    kernels = in_cpp()
    high, low = summands()
    for width in WIDTHS:
        num_tokens = -(-len(high) // width)
        filler = high.new_zeros(num_tokens * width - len(high))
        first, second = (torch.cat([part, filler]).view(num_tokens, width) for part in (high, low))
        exact = first.float() + second.float()
        table = torch.stack([first, second], 1).flatten(0, 1)
        ids = torch.arange(2 * num_tokens).view(num_tokens, 2)
        ones = torch.ones(num_tokens, 2, 1, dtype=BF16)
        for coef in (ones, ones.float()):
            assert_bits(kernels.gather_sum(table, ids, coef), exact)
            # The second of two blocks, by the path that has blocks.
            of_blocks = kernels.gather_sum(table, ids, coef, torch.ones_like(ids), 2)
            assert not of_blocks[:, :width].any()
            assert_bits(of_blocks[:, width:], exact)
        for dtype in (BF16, FP32):
            accumulator, rows = first.clone(), torch.arange(num_tokens).unsqueeze(1)
            kernels.segment_accumulate(accumulator, rows, ones[:, :1].to(dtype), second.to(dtype))
            assert_bits(accumulator, exact)


@needs_compiler
@pytest.mark.parametrize("table_dtype", [BF16, FP32], ids=str)
def test_roundings_of_products(table_dtype: torch.dtype) -> None:
    """Both summands in the first and the last column of a row that is otherwise empty."""
    high, low = summands()
    for width in WIDTHS[1:]:
        table = torch.zeros(len(high), width, dtype=table_dtype)
        table[:, 0], table[:, -1] = high, low
        x = torch.zeros(1, width, dtype=BF16)
        x[0, 0] = x[0, -1] = 1
        products = in_cpp().gather_dot(table, torch.arange(len(high)).unsqueeze(0), x, 1)
        assert_bits(products.flatten(), high.float() + low.float())


@needs_compiler
def test_roundings_of_subnormal_numbers() -> None:
    """The smallest numbers of bf16 are multiples of 2^-133; a coefficient of 1/8 puts sums and products between them."""
    steps = torch.arange(-40, 41)
    table = (steps * 2.0**-133).to(BF16).view(1, -1)
    eighths = (steps.double() * 2.0**-136).view(1, -1)
    coef = torch.full((1, 1, 1), 0.125, dtype=BF16)
    assert_bits(in_cpp().gather_sum(table, torch.zeros(1, 1, dtype=torch.int64), coef), eighths)
    products = in_cpp().gather_dot(table.view(-1, 1), torch.arange(81).view(1, -1), coef.view(1, 1), 1)
    assert_bits(products.view(1, -1), eighths)


@needs_compiler
def test_nan_of_any_payload_stays_nan() -> None:
    """Rounding up the largest of them would overflow to a zero, and cutting the smallest off would leave an infinity."""
    payloads = torch.tensor([0x7FFFFFFF, -1, 0x7F800001, -0x7FFFFF, 0x7FC00000], dtype=torch.int32).view(torch.float32)
    assert payloads.isnan().all()
    ids = torch.arange(len(payloads)).view(1, -1)
    products = in_cpp().gather_dot(payloads.view(-1, 1).contiguous(), ids, torch.ones(1, 1, dtype=BF16), 1)
    assert products.isnan().all()
    ones = torch.ones(len(payloads), 1, dtype=BF16)
    assert in_cpp().gather_sum(ones, ids.view(-1, 1), payloads.view(-1, 1, 1)).isnan().all()
