"""The comparison that the GPU tests and the benchmark rely on: passes for every implementation, and sees what is wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import parity
from kernels.implementations import Implementation, unavailable
from kernels.parity import (
    backbone_problems,
    hash_problems,
    loss_problems,
    parity_problems,
    selection_problems,
    stream_problems,
    update_problems,
)
from kernels.select import Kernels, select_kernels
from tests.rotation import in_rotation

PROBLEMS: dict[str, Callable[[Kernels, torch.dtype], Iterable[str]]] = {
    "streams": lambda kernels, dtype: stream_problems(kernels, "cpu", dtype),
    "backbone": lambda kernels, dtype: backbone_problems(kernels, "cpu", dtype),
    "loss": lambda kernels, dtype: loss_problems(kernels, "cpu", dtype),
    "table kernels": lambda kernels, dtype: parity_problems(kernels, "cpu", dtype),
    "hashes": lambda kernels, _: hash_problems(kernels, "cpu"),
}


# Triton's interpreter is slow: fp32 is compared in `test_kernels_gather.py` and its neighbours.
@pytest.mark.parametrize(
    ("implementation", "dtype"),
    [
        *((name, dtype) for name in ("torch", "cpu") for dtype in (torch.float32, torch.bfloat16)),
        ("triton", torch.bfloat16),
    ],
)
def test_every_implementation_passes(
    implementation: Implementation, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    if reason := unavailable(implementation, "cpu"):
        pytest.skip(f"{implementation} {reason}")
    if implementation == "triton":
        # A minute of the interpreter as shipped. Programs still add up several tiles of heads, the last of which is not full.
        shipped, *others = parity.HEADS_SHAPES
        monkeypatch.setattr(parity, "HEADS_SHAPES", (replace(shipped, s=11), *others))
        (_, *wide), *narrow = parity.STREAM_SHAPES
        # Two programs of matrices.
        monkeypatch.setattr(parity, "STREAM_SHAPES", ((9, *wide), *narrow))
        monkeypatch.setattr("kernels.common.tiles._GAIN_PROGRAMS", 3)
    kernels = select_kernels(implementation, device_type="cpu")
    for name in in_rotation(list(PROBLEMS)) if implementation == "triton" else PROBLEMS:
        assert list(PROBLEMS[name](kernels, dtype)) == [], name


def test_heads_that_turn_the_other_way_are_seen() -> None:
    good = select_kernels("torch")

    def other_way(query: Tensor, key: Tensor, turns: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        cos, sin = turns.unbind(2)
        return good.rotated_heads(query, key, torch.stack((cos, -sin), 2), *rest)

    problems = list(backbone_problems(replace(good, rotated_heads=other_way), "cpu", torch.float32))
    assert problems
    assert all(problem.startswith("rotated_heads") for problem in problems)


def test_matrices_that_are_turned_are_seen() -> None:
    good = select_kernels("torch")

    def turned(logits: Tensor, *rest: Any) -> Tensor:
        return good.doubly_stochastic(logits.mT, *rest)

    problems = list(stream_problems(replace(good, doubly_stochastic=turned), "cpu", torch.float32))
    assert problems
    assert all(problem.startswith("doubly_stochastic") for problem in problems)


def test_a_wrong_output_is_seen() -> None:
    good = select_kernels("torch")

    def doubled(
        table: Tensor, ids: Tensor, operand: Tensor, /, block: Tensor | None = None, num_blocks: int = 1
    ) -> Tensor:
        return 2 * good.gather_sum(table, ids, operand, block, num_blocks)

    problems = list(parity_problems(replace(good, gather_sum=doubled), "cpu", torch.float32))
    assert problems
    assert all(problem.startswith("gather_sum") for problem in problems)


def test_a_table_gradient_that_goes_nowhere_is_seen() -> None:
    good = select_kernels("torch")

    def detached(table: Tensor, ids: Tensor, x: Tensor, /, num_groups: int = 1, block: Tensor | None = None) -> Tensor:
        return good.gather_dot(table.detach(), ids, x, num_groups, block)

    problems = list(parity_problems(replace(good, gather_dot=detached), "cpu", torch.float32))
    assert problems
    assert all("gather_dot" in problem and "main_grad is off" in problem for problem in problems)


def test_rows_of_another_shuffle_are_seen() -> None:
    good = select_kernels("torch")

    def unshuffled(entries: Tensor, *where: Any) -> tuple[Tensor, Tensor]:
        num_rows, first_row, num_bank_rows = where[2:5]
        return (entries % num_rows + first_row) % num_bank_rows, entries // num_rows

    problems = list(selection_problems(replace(good, shuffled_rows=unshuffled), "cpu"))
    assert problems
    assert all(problem.startswith("shuffled_rows") for problem in problems)


def test_hashes_of_tokens_behind_a_boundary_are_seen() -> None:
    good = select_kernels("torch")

    def uncut(*operands: Any) -> Tensor:
        *others, _, missing_row = operands
        return good.ngram_hashes(*others, False, missing_row)

    problems = list(hash_problems(replace(good, ngram_hashes=uncut), "cpu"))
    assert problems
    assert all(problem.startswith("ngram_hashes") and "True" in problem for problem in problems)


def test_entries_in_another_order_are_seen() -> None:
    good = select_kernels("torch")

    def reordered(*arguments: Any) -> tuple[Tensor, Tensor]:
        stage_ids, retrieved = good.tucker_topk(*arguments)
        return stage_ids, retrieved.flip(3)

    assert list(selection_problems(good, "cpu")) == []
    problems = list(selection_problems(replace(good, tucker_topk=reordered), "cpu"))
    assert problems
    assert all(
        problem.startswith("tucker_topk") and problem.endswith("entries differ from the twin's") for problem in problems
    )


def test_an_update_that_rounds_otherwise_is_seen() -> None:
    good = select_kernels("torch")

    def to_nearest(weights: Tensor, gradient: Tensor, factors: Tensor, /, keep: float = 1.0, *others: Any) -> None:
        weights[:20] = (weights[:20] * keep + factors.unsqueeze(1) * gradient).to(weights.dtype)

    assert list(update_problems(good, "cpu")) == []
    problems = list(update_problems(replace(good, row_update=to_nearest), "cpu"))
    assert problems
    assert all(problem.startswith("row_update") for problem in problems)
    problems = list(update_problems(replace(good, row_squares=lambda gradient: gradient.sum(1)), "cpu"))
    assert problems
    assert all(problem.startswith("row_squares") for problem in problems)


def test_a_loss_that_forgets_its_target_is_seen() -> None:
    good = select_kernels("torch")

    def softmax(logits: Tensor, places: Tensor, *others: Tensor) -> Tensor:
        return good.softmax_gradient(logits, torch.full_like(places, -1), *others)

    problems = list(loss_problems(replace(good, softmax_gradient=softmax), "cpu", torch.float32))
    assert problems
    assert all(problem.startswith("softmax_gradient") for problem in problems)

    def one_more(logits: Tensor, places: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        top, total, of_target = good.softmax_sums(logits, places)
        return top, total + 1, of_target

    problems = list(loss_problems(replace(good, softmax_sums=one_more), "cpu", torch.float32))
    assert any(problem.startswith("softmax_sums") and "total is off" in problem for problem in problems)
