"""Tucker-decomposed retrieval against brute force over the full grid, and its singular vectors.

Legend: T tokens, H heads, N keys per side, R Tucker rank, C cores, M rows kept by the first stage, K retrieved.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megamem.families.ultramem_v2.config import UltraMemV2Config
from megamem.layers.retrieval import Retrieved
from megamem.layers.tucker import leading_singular_vectors, retrieve


@dataclass(frozen=True)
class Problem:
    rows: Tensor
    columns: Tensor
    cores: Tensor
    u: Tensor
    v: Tensor

    def retrieve(self, *, row_top_k: int, top_k: int) -> Retrieved:
        return retrieve(
            torch.stack((self.rows, self.columns)), self.cores, self.u, self.v, row_top_k=row_top_k, top_k=top_k
        )

    def full_grid(self) -> Tensor:
        """[T, H, C, N, N], every score of the grid."""
        return torch.einsum("thir,chrs,thjs->thcij", self.rows, self.cores, self.columns)


def draw(tokens: int = 5, heads: int = 2, keys: int = 6, rank: int = 2, cores: int = 2, seed: int = 0) -> Problem:
    g = torch.Generator().manual_seed(seed)
    core = torch.rand(cores, heads, rank, rank, generator=g, dtype=torch.float64)
    zeros = torch.zeros(heads, rank, dtype=torch.float64)
    u, v = leading_singular_vectors(core.sum(0), zeros, zeros)
    rows, columns = torch.randn(2, tokens, heads, keys, rank, generator=g, dtype=torch.float64)
    return Problem(rows, columns, core, u, v)


problems = st.builds(
    draw,
    tokens=st.integers(1, 5),
    heads=st.integers(1, 3),
    keys=st.integers(2, 9),
    rank=st.integers(1, 3),
    cores=st.integers(1, 3),
    seed=st.integers(0, 10_000),
)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(problem=problems, fraction=st.floats(0, 1))
def test_with_every_row_kept_it_is_brute_force(problem: Problem, fraction: float) -> None:
    keys = problem.rows.shape[2]
    top_k = 1 + round(fraction * (keys**2 - 1))
    found = problem.retrieve(row_top_k=keys, top_k=top_k)
    grid = problem.full_grid()
    best = grid.sum(2).flatten(2).topk(top_k, dim=-1)
    assert torch.equal(found.entries, best.indices)
    torch.testing.assert_close(found.scores.sum(-1), best.values, rtol=1e-12, atol=1e-12)
    of_cores = grid.flatten(3).gather(3, found.entries.unsqueeze(2).expand(-1, -1, grid.shape[2], -1))
    torch.testing.assert_close(found.scores, of_cores.transpose(2, 3), rtol=1e-12, atol=1e-12)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(problem=problems, row_top_k=st.integers(1, 9), top_k=st.integers(1, 81))
def test_the_first_stage_bounds_the_second(problem: Problem, row_top_k: int, top_k: int) -> None:
    keys = problem.rows.shape[2]
    row_top_k = min(row_top_k, keys)
    top_k = min(top_k, row_top_k**2)
    found = problem.retrieve(row_top_k=row_top_k, top_k=top_k)
    by_u = torch.einsum("thnr,hr->thn", problem.rows, problem.u).topk(row_top_k, dim=-1).indices
    by_v = torch.einsum("thnr,hr->thn", problem.columns, problem.v).topk(row_top_k, dim=-1).indices
    assert torch.equal(found.stage_ids[0], by_u)
    assert torch.equal(found.stage_ids[1], by_v)
    candidates = torch.full_like(problem.full_grid().sum(2), float("-inf"))
    for t in range(candidates.shape[0]):
        for h in range(candidates.shape[1]):
            inside = torch.meshgrid(by_u[t, h], by_v[t, h], indexing="ij")
            candidates[t, h][inside] = problem.full_grid().sum(2)[t, h][inside]
    assert torch.equal(found.entries, candidates.flatten(2).topk(top_k, dim=-1).indices)


@pytest.mark.parametrize(("keys", "top_k"), [(234, 64), (100, 32)])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_first_stage_costs_what_the_page_says(keys: int, top_k: int, seed: int) -> None:
    """Random keys and cores, as at first: pairs whose scores are both negative score well together, and are not kept."""
    problem = draw(tokens=16, heads=1, keys=keys, seed=seed)
    found = problem.retrieve(row_top_k=top_k, top_k=top_k)
    best = problem.full_grid().sum(2).flatten(2).topk(top_k, dim=-1)
    share_found = (found.entries.unsqueeze(-1) == best.indices.unsqueeze(-2)).any(-1).double().mean()
    share_of_scores = found.scores.sum() / best.values.sum()
    assert 0.35 < share_found < 0.65
    assert 0.75 < share_of_scores < 0.95


def test_rank_one_cores_make_the_first_stage_exact() -> None:
    """u and v then rank rows and columns as the grid does, so for positive scores nothing outside of the kept ones can
    win.
    """
    problem = draw(tokens=20, heads=1, keys=12, cores=1, seed=3)
    core = torch.outer(torch.tensor([0.8, 0.6]), torch.tensor([0.6, 0.8])).double().view(1, 1, 2, 2)
    u, v = leading_singular_vectors(core.sum(0), torch.zeros(1, 2).double(), torch.zeros(1, 2).double())
    exact = Problem(problem.rows.abs(), problem.columns.abs(), core, u, v)
    assert torch.equal(exact.retrieve(row_top_k=4, top_k=4).entries, exact.retrieve(row_top_k=12, top_k=4).entries)


def test_gradients_flow_through_the_retrieved_scores_only() -> None:
    problem = draw(tokens=3, heads=2, keys=6)
    leaves = [t.clone().requires_grad_() for t in (problem.rows, problem.columns, problem.cores, problem.u, problem.v)]
    found = retrieve(torch.stack(leaves[:2]), *leaves[2:], row_top_k=3, top_k=2)
    weights = torch.randn(found.scores.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    (found.scores * weights).sum().backward()
    rows, columns, cores, u, v = leaves
    assert u.grad is None
    assert v.grad is None
    assert cores.grad is not None
    assert bool((cores.grad != 0).all())
    for leaf, chosen in ((rows, found.entries // 6), (columns, found.entries % 6)):
        assert leaf.grad is not None
        touched = (leaf.grad != 0).all(-1)
        expected = torch.zeros_like(touched).scatter(2, chosen, True)
        assert torch.equal(touched, expected)
        assert not leaf.grad[~expected].any()


def test_gradcheck() -> None:
    problem = draw(tokens=2, heads=2, keys=5)
    chosen = problem.retrieve(row_top_k=3, top_k=4).entries

    def scores(rows: Tensor, columns: Tensor, cores: Tensor) -> Tensor:
        found = retrieve(torch.stack((rows, columns)), cores, problem.u, problem.v, row_top_k=3, top_k=4)
        assert torch.equal(found.entries, chosen)
        return found.scores

    assert torch.autograd.gradcheck(
        scores, tuple(t.clone().requires_grad_() for t in (problem.rows, problem.columns, problem.cores))
    )


@settings(max_examples=60, deadline=None, derandomize=True)
@given(rank=st.integers(1, 4), seed=st.integers(0, 10_000))
def test_singular_vectors_are_the_leading_ones(rank: int, seed: int) -> None:
    core = torch.randn(3, rank, rank, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    zeros = torch.zeros(3, rank, dtype=torch.float64)
    u, v = leading_singular_vectors(core, zeros, zeros)
    torch.testing.assert_close(u.norm(dim=-1), torch.ones(3, dtype=torch.float64))
    torch.testing.assert_close(v.norm(dim=-1), torch.ones(3, dtype=torch.float64))
    largest = torch.linalg.matrix_norm(core, ord=2)
    torch.testing.assert_close(torch.einsum("hr,hrs,hs->h", u, core, v), largest)
    # With nothing before, the sign is ours, not the library's.
    assert bool((u.sum(-1) + v.sum(-1) >= 0).all())


@settings(max_examples=60, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10_000), signs=st.tuples(*[st.sampled_from([-1.0, 1.0])] * 3))
def test_signs_do_not_flip_between_steps(seed: int, signs: tuple[float, ...]) -> None:
    g = torch.Generator().manual_seed(seed)
    core = torch.rand(3, 2, 2, generator=g, dtype=torch.float64)
    zeros = torch.zeros(3, 2, dtype=torch.float64)
    sign = torch.tensor(signs, dtype=torch.float64).unsqueeze(1)
    u, v = (vector * sign for vector in leading_singular_vectors(core, zeros, zeros))
    for _ in range(5):
        core = core + 0.01 * torch.rand(3, 2, 2, generator=g, dtype=torch.float64)
        u_before, v_before = u, v
        u, v = leading_singular_vectors(core, u, v)
        assert bool(((u * u_before).sum(-1) + (v * v_before).sum(-1) > 0).all())


def test_singular_vectors_keep_their_dtype() -> None:
    core = torch.rand(2, 2, 2, generator=torch.Generator().manual_seed(0))
    for core_dtype in (torch.bfloat16, torch.float32, torch.float64):
        for dtype in (torch.float32, torch.float64):
            zeros = torch.zeros(2, 2, dtype=dtype)
            u, v = leading_singular_vectors(core.to(core_dtype), zeros, zeros)
            assert (u.dtype, v.dtype) == (dtype, dtype)


def test_row_and_column_selection_is_capped() -> None:
    assert UltraMemV2Config(num_keys=512, top_k=256).row_top_k == 128
    assert UltraMemV2Config(num_keys=512, top_k=64).row_top_k == 64
    assert UltraMemV2Config(num_keys=512, top_k=64, row_top_k_limit=9).row_top_k == 9
    with pytest.raises(ValueError, match="row_top_k_limit to at least 8"):
        UltraMemV2Config(num_keys=512, top_k=64, row_top_k_limit=7)
