"""The selections of retrieval in every implementation against their twins, and the twins against Python's own sort.

Scores are often quantised: equal ones then are everywhere, and decide. Triton's kernels run in its interpreter where
there is no GPU (`conftest.py`).

Legend: T tokens, H heads, N keys per side, R Tucker rank, M rows kept by the first stage, K retrieved.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.implementations import Implementation, automatic, unavailable
from kernels.list_topk import naive as naive_list
from kernels.list_topk.op import torch_list_topk
from kernels.product_topk import naive as naive_product
from kernels.select import implementation_of, select_kernels
from kernels.tucker_topk import naive as naive_tucker
from megamem.layers import product_key, tucker
from tests.unit.kernels.cases import TRACED

Selection = Callable[..., tuple[Tensor, Tensor]]

needs_triton = pytest.mark.skipif(
    unavailable("triton", "cpu") is not None, reason=f"triton {unavailable('triton', 'cpu')}"
)
needs_compiler = pytest.mark.skipif(unavailable("cpu", "cpu") is not None, reason=f"C++ {unavailable('cpu', 'cpu')}")
ON_CPU: tuple[Any, ...] = ("torch", pytest.param("cpu", marks=needs_compiler))
IMPLEMENTATIONS: tuple[Any, ...] = (*ON_CPU, pytest.param("triton", marks=needs_triton))


@dataclass(frozen=True)
class Case:
    """Sizes and scores: `levels` distinct values per unit (0: normal numbers as they are), and shares of special ones."""

    tokens: int
    heads: int
    keys: int
    row_top_k: int
    top_k: int
    rank: int = 2
    levels: float = 0
    nan: float = 0
    zero: float = 0
    infinite: float = 0
    seed: int = 0

    def scores(self, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """Row and column scores [T, H, N, R] with the strides that the layers give them."""
        g = torch.Generator().manual_seed(self.seed)
        scores = torch.randn(2, self.rank, self.tokens, self.heads, self.keys, generator=g, dtype=torch.float64)
        if self.levels:
            scores = (scores * self.levels).round() / self.levels
        for share, value in ((self.zero, -0.0), (self.infinite, -math.inf), (self.nan, math.nan)):
            scores[torch.rand(scores.shape, generator=g) < share] = value
        rows, columns = scores.to(dtype).permute(0, 2, 3, 4, 1).unbind(0)
        return rows, columns

    def tucker(self, dtype: torch.dtype = torch.float32) -> tuple[object, ...]:
        g = torch.Generator().manual_seed(self.seed + 1)
        core = torch.randn(self.heads, self.rank, self.rank, generator=g, dtype=torch.float64)
        u, v = torch.randn(2, self.heads, self.rank, generator=g, dtype=torch.float64)
        if self.levels:
            core, u, v = core.round(), u.round(), v.round()
        return *self.scores(dtype), core.to(dtype), u.to(dtype), v.to(dtype), self.row_top_k, self.top_k

    def product(self, dtype: torch.dtype = torch.float32) -> tuple[object, ...]:
        rows, columns = self.scores(dtype)
        return rows[..., 0], columns[..., 0], self.row_top_k, self.top_k


CASES = (
    Case(tokens=2, heads=2, keys=20, row_top_k=5, top_k=7),
    Case(tokens=3, heads=1, keys=16, row_top_k=1, top_k=1),
    # Everything is kept; K and M are no powers of two.
    Case(tokens=1, heads=2, keys=12, row_top_k=12, top_k=144, levels=1),
    Case(tokens=2, heads=1, keys=33, row_top_k=21, top_k=50, rank=3, levels=2),
    Case(tokens=2, heads=1, keys=20, row_top_k=12, top_k=30, rank=1, levels=1, nan=0.05, zero=0.3),
    Case(tokens=2, heads=1, keys=40, row_top_k=33, top_k=80, levels=0.5, infinite=0.3),
    # All scores equal, and all NaN.
    Case(tokens=1, heads=1, keys=70, row_top_k=40, top_k=100, zero=1),
    Case(tokens=1, heads=1, keys=40, row_top_k=20, top_k=33, nan=1),
    # The largest of the papers.
    Case(tokens=1, heads=1, keys=150, row_top_k=128, top_k=768),
    Case(tokens=1, heads=1, keys=150, row_top_k=128, top_k=768, levels=1),
    Case(tokens=0, heads=2, keys=20, row_top_k=5, top_k=7),
)


def both(implementation: Implementation) -> Iterator[tuple[Selection, Selection, Callable[[Case], tuple[object, ...]]]]:
    """Each selection with its twin and its arguments."""
    yield implementation_of("tucker_topk", implementation), naive_tucker.tucker_topk, Case.tucker
    yield implementation_of("product_topk", implementation), naive_product.product_topk, Case.product


def assert_same(actual: tuple[Tensor, Tensor], reference: tuple[Tensor, Tensor]) -> None:
    for ours, twins in zip(actual, reference, strict=True):
        assert ours.dtype == torch.int64
        assert torch.equal(ours, twins)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_selections_equal_their_twins(implementation: Implementation, case: Case) -> None:
    for select, twin, arguments in both(implementation):
        assert_same(select(*arguments(case)), twin(*arguments(case)))


@pytest.mark.parametrize("implementation", ["naive", "torch", IMPLEMENTATIONS[-1]])
def test_products_in_bf16_are_selected_as_widened_ones(implementation: Implementation) -> None:
    """A layer on a GPU hands them on as they are; a CPU's layers widen them."""
    select = implementation_of("tucker_topk", implementation)
    for case in CASES:
        wide, narrow = case.tucker(), case.scores(torch.bfloat16)
        widened = tuple(side.float() for side in narrow)
        assert_same(select(*narrow, *wide[2:]), naive_tucker.tucker_topk(*widened, *wide[2:]))  # type: ignore[arg-type]


cases = st.builds(
    lambda tokens, heads, keys, share, depth, **rest: Case(
        tokens, heads, keys, (m := 1 + round(share * (keys - 1))), 1 + round(depth * (m * m - 1)), **rest
    ),
    st.integers(0, 4),
    st.integers(1, 3),
    st.integers(1, 30),
    st.floats(0, 1),
    st.floats(0, 1),
    rank=st.integers(1, 3),
    levels=st.sampled_from([0, 0.5, 1, 3]),
    nan=st.sampled_from([0, 0, 0.1]),
    zero=st.sampled_from([0, 0.5]),
    seed=st.integers(0, 10_000),
)


@pytest.mark.parametrize("implementation", ON_CPU)
@settings(max_examples=100, deadline=None, derandomize=True)
@given(case=cases, dtype=st.sampled_from([torch.float32, torch.float64]))
def test_selections_on_the_cpu_equal_their_twins_at_any_shape(
    implementation: Implementation, case: Case, dtype: torch.dtype
) -> None:
    for select, twin, arguments in both(implementation):
        assert_same(select(*arguments(case, dtype)), twin(*arguments(case, dtype)))


def before(score: float, position: int) -> tuple[bool, float, int]:
    """A key by which Python sorts into the order of retrieval."""
    return not math.isnan(score), 0.0 if math.isnan(score) else -score, position


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    scores=st.lists(
        st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.5, math.nan, -math.nan, math.inf, -math.inf]) | st.floats(width=32),
        min_size=1,
        max_size=40,
    ),
    fraction=st.floats(0, 1),
)
def test_the_order_is_what_it_says(scores: list[float], fraction: float) -> None:
    top_k = 1 + round(fraction * (len(scores) - 1))
    expected = sorted(range(len(scores)), key=lambda position: before(scores[position], position))[:top_k]
    assert naive_list.list_topk(torch.tensor(scores), top_k).tolist() == expected
    assert torch_list_topk(torch.tensor(scores).view(1, -1), top_k).tolist() == [expected]


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    entries=st.integers(40, 700),
    top_k=st.integers(1, 30),
    levels=st.sampled_from([0, 2, 1000]),
    seed=st.integers(0, 99),
)
def test_long_lists_are_selected_in_groups(entries: int, top_k: int, levels: float, seed: int) -> None:
    scores = Case(3, 2, entries, 1, 1, rank=1, levels=levels, seed=seed).scores()[0][..., 0]
    assert torch.equal(torch_list_topk(scores, top_k), naive_list.list_topk(scores, top_k))


def test_the_twins_are_brute_force() -> None:
    """Every candidate of the whole grid, scored and sorted in Python."""
    case = Case(tokens=3, heads=2, keys=6, row_top_k=6, top_k=11, levels=1)
    rows, columns, core, u, v = (t.double() for t in case.tucker()[:5])  # type: ignore[attr-defined]
    stage_ids, retrieved = naive_tucker.tucker_topk(rows, columns, core, u, v, 6, 11)
    sums, of_sums = naive_product.product_topk(rows[..., 0], columns[..., 0], 6, 11)
    for t in range(3):
        for h in range(2):
            by_rank = [(rows[t, h] @ u[h]).tolist(), (columns[t, h] @ v[h]).tolist()]
            order = [sorted(range(6), key=lambda n, r=ranks: before(r[n], n)) for ranks in by_rank]
            assert stage_ids[:, t, h].tolist() == order
            grid = rows[t, h] @ core[h] @ columns[t, h].T
            places = [(a, b) for a in order[0] for b in order[1]]
            best = sorted(range(36), key=lambda i, p=places, s=grid: before(float(s[p[i]]), i))[:11]
            assert retrieved[:, t, h].T.tolist() == [list(places[i]) for i in best]
            x, y = rows[t, h, :, 0], columns[t, h, :, 0]
            order = [sorted(range(6), key=lambda n, s=side: before(float(s[n]), n)) for side in (x, y)]
            assert sums[:, t, h].tolist() == order
            places = [(a, b) for a in order[0] for b in order[1]]
            best = sorted(range(36), key=lambda i, p=places, a=x, b=y: before(float(a[p[i][0]] + b[p[i][1]]), i))[:11]
            assert of_sums[:, t, h].T.tolist() == [list(places[i]) for i in best]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_no_memory_is_read_before_it_is_written(implementation: Implementation) -> None:
    """Whatever is allocated holds the largest integer at first, which would come before every entry."""
    torch.use_deterministic_algorithms(True)
    try:
        assert (torch.empty(8, dtype=torch.int64) == torch.iinfo(torch.int64).max).all()
        for select, twin, arguments in both(implementation):
            assert_same(select(*arguments(CASES[0])), twin(*arguments(CASES[0])))
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_strides_do_not_matter(implementation: Implementation) -> None:
    for select, twin, arguments in both(implementation):
        rows, columns, *others = arguments(CASES[0])
        assert isinstance(rows, Tensor)
        expected = twin(rows, columns, *others)
        assert_same(select(rows.contiguous(), columns, *others), expected)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_operators_are_what_tracing_is_told(implementation: Implementation) -> None:
    for select, _, arguments in both(implementation):
        for case in (CASES[0], CASES[-1]):
            torch.library.opcheck(select, arguments(case), test_utils=("test_schema", "test_faketensor"))


@TRACED
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_retrieval_is_traced_whole(implementation: Implementation) -> None:
    """Forward and backward in one graph each, with the gradients of an untraced one."""
    rows, columns, core, u, v, row_top_k, top_k = CASES[0].tucker()
    selections = [select for select, _, _ in both(implementation)]

    def scores(rows: Tensor, columns: Tensor) -> Tensor:
        sizes = {"row_top_k": row_top_k, "top_k": top_k}
        by_core = tucker.retrieve(torch.stack((rows, columns)), core.unsqueeze(0), u, v, **sizes, select=selections[0])
        by_sum = product_key.retrieve(rows[..., 0], columns[..., 0], **sizes, select=selections[1])
        return by_core.scores + by_sum.scores

    results = []
    for function in (scores, torch.compile(scores, backend="aot_eager", fullgraph=True)):
        leaves = [t.clone().requires_grad_() for t in (rows, columns)]  # type: ignore[attr-defined]
        out = function(*leaves)
        out.square().sum().backward()
        results.append([out.detach(), *(leaf.grad for leaf in leaves)])
    for eager, traced in zip(*results, strict=True):
        torch.testing.assert_close(traced, eager)


@pytest.mark.parametrize("implementation", ["naive", *IMPLEMENTATIONS])
def test_too_many_are_refused(implementation: Implementation) -> None:
    kernels = select_kernels(implementation, device_type="cpu")
    for row_top_k, top_k in ((21, 4), (0, 1), (3, 10), (3, 0)):
        with pytest.raises(ValueError, match="keep at least 1 and at most all"):
            kernels.tucker_topk(*CASES[0].tucker()[:5], row_top_k, top_k)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="keep at least 1 and at most all"):
            kernels.product_topk(*CASES[0].product()[:2], row_top_k, top_k)  # type: ignore[arg-type]


@needs_triton
def test_what_the_kernels_cannot_do_is_refused() -> None:
    large = Case(tokens=1, heads=1, keys=200, row_top_k=129, top_k=20)
    many = Case(tokens=1, heads=1, keys=128, row_top_k=128, top_k=1025)
    for select, _, arguments in both("triton"):
        with pytest.raises(TypeError, match=r"float64: use train\.kernels=naive"):
            select(*arguments(CASES[0], torch.float64))
    with pytest.raises(TypeError, match=r"not torch\.bfloat16"):
        implementation_of("product_topk", "triton")(*CASES[0].product(torch.bfloat16))
    for select, _, arguments in both("triton"):
        with pytest.raises(ValueError, match=r"keep at most 1024 of at most 16384 entries, not 1025"):
            select(*arguments(many))
    with pytest.raises(ValueError, match="not 20 of 65536"):
        implementation_of("tucker_topk", "triton")(*large.tucker())


def test_the_config_selects_the_selection() -> None:
    kernels = select_kernels("naive", {"product_topk": "torch"}, device_type="cpu")
    assert kernels.tucker_topk is naive_tucker.tucker_topk
    assert kernels.product_topk is implementation_of("product_topk", "torch")
    on_cpu = select_kernels("auto", device_type="cpu")
    chosen = automatic("cpu")
    assert on_cpu.tucker_topk is implementation_of("tucker_topk", chosen)
    assert on_cpu.implementations["tucker_topk"] == chosen


@needs_compiler
@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.bfloat16), (torch.float32, torch.float64)])
def test_cpp_refuses_scores_that_it_does_not_know(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    rows, columns = (torch.zeros(1, 1, 4, dtype=dtype) for dtype in dtypes)
    with pytest.raises(ValueError, match=r"all fp32 or all fp64, and these are torch\.(bfloat16|float64) on cpu"):
        implementation_of("product_topk", "cpu")(rows, columns, 2, 3)
