"""The pair of gathers against its naive twin: forward, every gradient, and accumulation into `main_grad`, in every
implementation.

Triton's kernels run in its interpreter where there is no GPU (`tests/conftest.py`).

Legend: R table rows, T tokens, J rows read per token, P pre-value columns, V value columns, C scores per row, B blocks
of entries.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.common.tiles import split_length
from kernels.gather_dot import naive as naive_dot
from kernels.gather_pair.naive import gather_pair as twin
from kernels.gather_pair.op import GatherPair
from kernels.gather_pair.operands import Activation
from kernels.gather_sum import naive as naive_sum
from kernels.implementations import Implementation, unavailable
from kernels.select import Kernels, select_kernels
from megamem.bank import Bank
from megamem.families.ultramem_v2.config import UltraMemV2Config
from megamem.sharing import BankSpec
from tests.unit.test_kernels import main_grad_table, sorts_from_now_on, wide

# Largest error over the largest element of the reference, in float64. Between the gathers there may be two more
# roundings than in one of them.
TOLERANCE = {torch.float64: 1e-13, torch.float32: 4e-6, torch.bfloat16: 1.6e-2}
DTYPES = list(TOLERANCE)
IMPLEMENTATIONS: tuple[Implementation, ...] = ("torch", "cpu", "triton")


@dataclass(frozen=True)
class Shape:
    rows: int
    tokens: int
    reads: int
    pre_width: int
    width: int
    groups: int = 1
    blocks: int = 1
    activation: Activation = "none"


SHAPES = [
    Shape(rows=7, tokens=5, reads=3, pre_width=8, width=8),
    # Two cores; widths that are no powers of two, and not the same.
    Shape(rows=9, tokens=3, reads=5, pre_width=24, width=40, groups=2),
    Shape(rows=9, tokens=3, reads=5, pre_width=40, width=24, activation="gelu"),
    # Virtual blocks.
    Shape(rows=11, tokens=3, reads=9, pre_width=5, width=18, groups=3, blocks=4, activation="gelu"),
    # One row for all.
    Shape(rows=1, tokens=4, reads=6, pre_width=3, width=7, activation="gelu"),
    # One token, whose entries several programs share, the last of them fewer; wider than a tile.
    Shape(rows=50, tokens=1, reads=45, pre_width=1032, width=1288, groups=2),
    Shape(rows=5, tokens=0, reads=3, pre_width=8, width=16, groups=2),
]


class Case(NamedTuple):
    pre_values: Tensor
    values: Tensor
    ids: Tensor
    x: Tensor
    scores: Tensor
    block: Tensor | None
    gradient: Tensor


@pytest.fixture(params=IMPLEMENTATIONS, scope="module")
def kernels(request: pytest.FixtureRequest) -> Kernels:
    """Every implementation that this machine can run; the others are skipped with the reason."""
    if reason := unavailable(request.param, "cpu"):
        pytest.skip(f"{request.param} {reason}")
    return select_kernels(request.param, device_type="cpu")


def draw(shape: Shape, dtype: torch.dtype = torch.float64, seed: int = 0) -> Case:
    g = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=g, dtype=torch.float64).to(dtype)

    tokens, reads = shape.tokens, shape.reads
    return Case(
        normal(shape.rows, shape.pre_width),
        normal(shape.rows, shape.width),
        torch.randint(0, shape.rows, (tokens, reads), generator=g),
        normal(tokens, shape.pre_width),
        normal(tokens, reads, shape.groups),
        torch.randint(0, shape.blocks, (tokens, reads), generator=g) if shape.blocks > 1 else None,
        normal(tokens, shape.blocks * shape.width),
    )


def outcome(pair: GatherPair, c: Case, shape: Shape) -> dict[str, Tensor]:
    """Output and the gradients of all four."""
    leaves = {
        name: getattr(c, name).detach().clone(memory_format=torch.preserve_format).requires_grad_()
        for name in ("pre_values", "values", "x", "scores")
    }
    out = pair(
        leaves["pre_values"], leaves["values"], c.ids, leaves["x"], leaves["scores"], shape.activation, c.block, shape.blocks
    )  # fmt: skip
    out.backward(c.gradient)
    found = {"out": out.detach()}
    for name, leaf in leaves.items():
        assert leaf.grad is not None
        found[name] = leaf.grad
    return found


def in_float64(c: Case) -> Case:
    return Case(*(None if t is None else wide(t)[0] for t in c))  # type: ignore[arg-type]


def assert_close(actual: dict[str, Tensor], reference: dict[str, Tensor], dtype: torch.dtype) -> None:
    for name, expected in reference.items():
        assert actual[name].dtype == dtype
        assert actual[name].shape == expected.shape
        if expected.numel():
            error = (actual[name].double() - expected).abs().max() / expected.abs().max().clamp_min(1e-3)
            assert error <= TOLERANCE[dtype], f"{name}: relative error {error:.2e}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_pairs_equal_their_twin(kernels: Kernels, shape: Shape, dtype: torch.dtype) -> None:
    c = draw(shape, dtype)
    assert_close(outcome(kernels.gather_pair, c, shape), outcome(twin, in_float64(c), shape), dtype)


shapes = st.builds(
    lambda rows, tokens, reads, pre_width, groups, per_group, blocks, activation: Shape(
        rows, tokens, reads, pre_width, groups * per_group, groups, blocks, activation
    ),
    st.integers(1, 9),
    st.integers(0, 4),
    st.integers(1, 20),
    st.integers(1, 9),
    st.integers(1, 3),
    st.integers(1, 5),
    st.integers(1, 3),
    st.sampled_from(["none", "gelu"]),
)


@settings(max_examples=12, deadline=None, derandomize=True)
@given(shape=shapes, seed=st.integers(0, 1000))
def test_pairs_equal_their_twin_at_any_shape(kernels: Kernels, shape: Shape, seed: int) -> None:
    c = draw(shape, seed=seed)
    assert_close(outcome(kernels.gather_pair, c, shape), outcome(twin, c, shape), torch.float64)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_twin_is_its_two_gathers(shape: Shape) -> None:
    c = draw(shape)

    def of_two(*operands: Any) -> Tensor:
        pre_values, values, ids, x, scores, activation, block, num_blocks = operands
        products = naive_dot.gather_dot(pre_values, ids, x)
        hidden = torch.nn.functional.gelu(products) if activation == "gelu" else products
        return naive_sum.gather_sum(values, ids, scores * hidden, block, num_blocks)

    assert_close(outcome(of_two, c, shape), outcome(twin, c, shape), torch.float64)


def test_the_pair_is_what_its_docstring_says(kernels: Kernels) -> None:
    pre_values = torch.tensor([[1.0, 2.0], [0.5, -1.0]])
    values = torch.tensor([[1.0, 2.0, 3.0, 4.0], [10.0, 20.0, 30.0, 40.0]])
    ids, x = torch.tensor([[0, 1]]), torch.tensor([[2.0, 1.0]])
    scores = torch.tensor([[[1.0, 0.5], [2.0, -1.0]]])
    for pair in (kernels.gather_pair, twin):
        # The products are 4 and 0: nothing of the second row is left.
        assert pair(pre_values, values, ids, x, scores).tolist() == [[4.0, 8.0, 6.0, 8.0]]
        x_again = torch.tensor([[2.0, 0.0]])
        # 2 and 1, the second into another block.
        block = torch.tensor([[1, 0]])
        expected = [[20.0, 40.0, -30.0, -40.0, 2.0, 4.0, 3.0, 4.0]]
        assert pair(pre_values, values, ids, x_again, scores, "none", block, 2).tolist() == expected


@pytest.mark.parametrize("activation", ["none", "gelu"])
def test_gradcheck(kernels: Kernels, activation: Activation) -> None:
    c = draw(Shape(rows=3, tokens=2, reads=3, pre_width=2, width=4, groups=2))
    leaves = [t.requires_grad_() for t in (c.pre_values, c.values, c.x, c.scores)]
    # Along a random direction, where the slow mode moves every element by itself: the twin has every gradient.
    assert torch.autograd.gradcheck(
        lambda pre_values, values, x, scores: kernels.gather_pair(pre_values, values, c.ids, x, scores, activation),
        leaves,
        fast_mode=True,
    )


def test_gradients_that_nobody_asked_for_are_not_made(kernels: Kernels) -> None:
    c = draw(SHAPES[1])
    for wanted in range(4):
        leaves = [t.detach().clone() for t in (c.pre_values, c.values, c.x, c.scores)]
        leaves[wanted].requires_grad_()
        kernels.gather_pair(leaves[0], leaves[1], c.ids, leaves[2], leaves[3]).sum().backward()
        assert [leaf.grad is not None for leaf in leaves] == [i == wanted for i in range(4)]


@pytest.mark.parametrize("shape", [SHAPES[1], SHAPES[3]], ids=str)
def test_strides_do_not_matter(kernels: Kernels, shape: Shape) -> None:
    c = draw(shape)

    def strided(tensor: Tensor) -> Tensor:
        order = tuple(reversed(range(tensor.dim())))
        again = tensor.permute(order).contiguous().permute(order)
        assert not again.is_contiguous()
        return again

    other = c._replace(
        ids=strided(c.ids),
        x=strided(c.x),
        scores=strided(c.scores),
        block=None if c.block is None else strided(c.block),
        gradient=strided(c.gradient),
    )
    assert_close(outcome(kernels.gather_pair, other, shape), outcome(kernels.gather_pair, c, shape), torch.float64)


def test_strided_tables_are_refused(kernels: Kernels) -> None:
    if kernels.implementations["gather_pair"] == "torch":
        pytest.skip("PyTorch's operations take any strides")
    c = draw(SHAPES[1])
    for name in ("pre_values", "values"):
        tables = c._replace(**{name: getattr(c, name).t().contiguous().t()})
        with pytest.raises(ValueError, match="need contiguous rows"):
            kernels.gather_pair(tables.pre_values, tables.values, c.ids, c.x, c.scores)


@pytest.mark.parametrize("shape", [SHAPES[1], SHAPES[3]], ids=str)
def test_rows_that_are_not_read_may_hold_anything(kernels: Kernels, shape: Shape) -> None:
    c = draw(replace(shape, rows=12))
    c = c._replace(ids=c.ids % 6 * 2)
    found = []
    for other in (0.0, float("nan")):
        tables = {name: getattr(c, name).clone() for name in ("pre_values", "values")}
        for table in tables.values():
            table[1::2] = other
        found.append(outcome(kernels.gather_pair, c._replace(**tables), shape))
    assert all(torch.equal(clean, poisoned) for clean, poisoned in zip(*(f.values() for f in found), strict=True))


@pytest.mark.parametrize("shape", [SHAPES[3], SHAPES[5]], ids=str)
def test_no_memory_is_read_before_it_is_written(kernels: Kernels, shape: Shape) -> None:
    """Whatever is allocated holds NaN at first: outputs, products, and the sums of parts."""
    c = draw(shape, torch.float32)
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(8).isnan().all()
        found = outcome(kernels.gather_pair, c, shape)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(tensor.isfinite().all() for tensor in found.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [SHAPES[3], SHAPES[4], SHAPES[5]], ids=str)
def test_table_gradients_go_to_main_grad(kernels: Kernels, shape: Shape, dtype: torch.dtype) -> None:
    """Two backward passes add up, nothing dense is left in `grad`, Megatron's hooks fire, and the rows are sorted once
    for both tables.
    """
    c = draw(shape, dtype)
    reference = outcome(twin, in_float64(c), shape)
    tables = [main_grad_table(c.pre_values), main_grad_table(c.values)]
    ready: list[Tensor] = []
    for table in tables:
        table.register_post_accumulate_grad_hook(ready.append)
    for _ in range(2):
        out = kernels.gather_pair(*tables, c.ids, c.x, c.scores, shape.activation, c.block, shape.blocks)
        out.backward(c.gradient)
    assert len(ready) == 4
    for table, name in zip(tables, ("pre_values", "values"), strict=True):
        expected = 2 * reference[name]
        error = (table.main_grad.double() - expected).abs().max() / expected.abs().max()
        assert error <= TOLERANCE[dtype]
        assert table.grad_added_to_main_grad is True
        assert table.grad is not None
        assert table.grad.is_sparse
        assert table.grad._nnz() == 0


def test_values_and_pre_values_share_one_sort(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = sorts_from_now_on(kernels, monkeypatch)
    c = draw(SHAPES[1], torch.float32)
    tables = main_grad_table(c.pre_values), main_grad_table(c.values)
    kernels.gather_pair(*tables, c.ids.clone(), c.x, c.scores).sum().backward()
    assert len(calls) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_repeats_are_bit_identical(kernels: Kernels, dtype: torch.dtype) -> None:
    for shape in (SHAPES[3], SHAPES[4], SHAPES[5]):
        c = draw(shape, dtype)
        first = outcome(kernels.gather_pair, c, shape)
        again = outcome(kernels.gather_pair, c, shape)
        assert all(torch.equal(a, b) for a, b in zip(first.values(), again.values(), strict=True))


def test_triton_does_not_round_between_the_gathers() -> None:
    """A product that bf16 cannot hold, less one that it can."""
    if reason := unavailable("triton", "cpu"):
        pytest.skip(f"triton {reason}")
    pre_values = torch.tensor([[1.0, 1.0], [1.0, 0.0]], dtype=torch.bfloat16)
    values, x = torch.ones(2, 8, dtype=torch.bfloat16), torch.tensor([[512.0, 1.0]], dtype=torch.bfloat16)
    scores = torch.tensor([[[1.0], [-1.0]]], dtype=torch.bfloat16)
    # 513 - 512, of which bf16 would make 512 - 512.
    out = select_kernels("triton", device_type="cpu").gather_pair(pre_values, values, torch.tensor([[0, 1]]), x, scores)
    assert out.tolist() == [[1.0] * 8]


@pytest.mark.parametrize("shape", [SHAPES[2], SHAPES[3]], ids=str)
def test_torch_compile_takes_the_pair_whole(kernels: Kernels, shape: Shape) -> None:
    """Forward and backward in one graph each."""
    c = draw(shape, torch.float32)

    def read(pre_values: Tensor, values: Tensor, x: Tensor, scores: Tensor) -> Tensor:
        return kernels.gather_pair(pre_values, values, c.ids, x, scores, shape.activation, c.block, shape.blocks)

    compiled = torch.compile(read, backend="aot_eager", fullgraph=True)
    results = []
    for function in (read, compiled):
        leaves = [t.clone().requires_grad_() for t in (c.pre_values, c.values, c.x, c.scores)]
        out = function(*leaves)
        out.backward(c.gradient)
        results.append([out.detach(), *(leaf.grad for leaf in leaves)])
    for eager, traced in zip(*results, strict=True):
        torch.testing.assert_close(traced, eager)


@pytest.mark.parametrize(
    ("tokens", "reads"), [(1, 32), (1, 768), (3, 50), (64, 32), (255, 700), (256, 32), (32768, 768)]
)
def test_few_tokens_are_cut_into_parts(tokens: int, reads: int) -> None:
    """The programs are as many as a GPU wants where there are entries for them, one per token where there are tokens
    enough; none of them is idle.
    """
    part = split_length(tokens, reads)
    num_parts = -(-reads // part)
    assert (num_parts - 1) * part < reads
    assert tokens * num_parts <= max(tokens, 2 * 256)
    assert num_parts == 1 if tokens >= 256 else part >= 16


def test_a_bank_of_whole_tables_reads_in_pairs() -> None:
    """The pair has the bank's activation and blocks; without pre-values one gather reads."""
    seen: list[Any] = []

    def recorded(*arguments: Any) -> Tensor:
        seen.append(arguments[5:])
        return twin(*arguments)

    kernels = replace(select_kernels("torch"), gather_pair=recorded)
    g = torch.Generator().manual_seed(0)
    rows, block = torch.randint(0, 16, (3, 5), generator=g), torch.randint(0, 4, (3, 5), generator=g)
    scores, x = torch.randn(3, 5, 2, generator=g), torch.randn(3, 6, generator=g)
    for pre_dim in (6, 0):
        memory = UltraMemV2Config(num_keys=4, top_k=4, value_dim=8, pre_value_dim=pre_dim)
        spec = BankSpec(0, 16, (0,))
        bank = Bank(spec, memory, kernels, dtype=torch.float32, device="cpu", replica_rank=0)
        for table in bank.parameters():
            torch.nn.init.normal_(table, generator=g)
        out = bank.read(rows, scores, x if pre_dim else None, block, 4)
        coef = scores
        if hasattr(bank, "pre_values"):
            coef = scores * naive_dot.gather_dot(bank.pre_values, rows, x)
        torch.testing.assert_close(out, naive_sum.gather_sum(bank.values, rows, coef, block, 4))
    assert len(seen) == 1
    assert seen[0][0] == "none"
    assert seen[0][2] == 4
