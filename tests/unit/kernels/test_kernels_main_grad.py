"""Gradients of tables that Megatron's DDP holds: into `main_grad` in fp32, and nothing dense in `grad`."""

from __future__ import annotations

import importlib

import pytest
import torch
from torch import Tensor

from kernels.gather_dot import naive as naive_dot
from kernels.gather_sum import naive as naive_sum
from kernels.select import Kernels
from tests.unit.kernels.cases import SHAPES, Shape, assert_close, draw, fitting, main_grad_table, wide, with_grads


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_table_gradient_goes_to_main_grad(kernels: Kernels, shape: Shape, dtype: torch.dtype) -> None:
    """Two uses of one table in one graph, two backward passes: everything adds up in fp32, nothing dense is left in
    `grad`.
    """
    c = draw(fitting(kernels, shape), dtype)
    table = main_grad_table(c.table)
    reference = c.table.double().requires_grad_()
    for _ in range(2):
        (kernels.gather_sum(table, c.ids, c.coef) * c.grad_sum).sum().add(
            (kernels.gather_dot(table, c.ids.flip(1), c.x) * c.grad_dot).sum()
        ).backward()
        coef, x, grad_sum, grad_dot = wide(c.coef, c.x, c.grad_sum, c.grad_dot)
        (naive_sum.gather_sum(reference, c.ids, coef) * grad_sum).sum().add(
            (naive_dot.gather_dot(reference, c.ids.flip(1), x) * grad_dot).sum()
        ).backward()
    assert reference.grad is not None
    # The products are exact in fp32 for bf16 inputs: the sum is as good as fp32's, whatever the table's dtype.
    assert_close(table.main_grad, reference.grad, torch.float32)
    assert table.grad_added_to_main_grad is True
    assert table.grad is not None
    assert table.grad.is_sparse
    assert table.grad._nnz() == 0


def test_gradient_of_the_other_input_is_the_same_with_main_grad(kernels: Kernels) -> None:
    c = draw(SHAPES[1], torch.float32)
    for gather, other, grad in ((kernels.gather_sum, c.coef, c.grad_sum), (kernels.gather_dot, c.x, c.grad_dot)):
        _, _, plain = with_grads(gather, c.table, c.ids, other, grad)
        leaf = other.clone().requires_grad_()
        gather(main_grad_table(c.table), c.ids, leaf).backward(grad)
        assert torch.equal(leaf.grad, plain)  # type: ignore[arg-type]


def test_backward_hooks_of_the_table_still_fire(kernels: Kernels) -> None:
    """Megatron's DDP counts on them to know that a gradient is ready."""
    c = draw(SHAPES[0], torch.float32)
    table = main_grad_table(c.table)
    ready: list[bool] = []
    table.register_post_accumulate_grad_hook(lambda p: ready.append(p.grad_added_to_main_grad))
    kernels.gather_sum(table, c.ids, c.coef).sum().backward()
    assert ready == [True]


def sorts_from_now_on(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by a number of rows with every sort of entries; skips where none are sorted."""
    name = kernels.implementations["segment_accumulate"]
    if name == "torch":
        pytest.skip("PyTorch's index_add_ sorts nothing")
    function = "triton_op.sort_by_row" if name == "triton" else "op._bucket_order"
    target = f"kernels.segment_accumulate.{function}"
    module, attribute = target.rsplit(".", 1)
    original = getattr(importlib.import_module(module), attribute)
    calls: list[int] = []

    def counted(ids: Tensor, num_rows: int) -> tuple[Tensor, ...]:
        calls.append(num_rows)
        return original(ids, num_rows)

    monkeypatch.setattr(target, counted)
    return calls


def test_values_and_pre_values_share_one_sort(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = sorts_from_now_on(kernels, monkeypatch)
    c = draw(SHAPES[1], torch.float32)
    values, pre_values, ids = main_grad_table(c.table), main_grad_table(c.table), c.ids.clone()
    kernels.gather_sum(values, ids, kernels.gather_dot(pre_values, ids, c.x).expand(-1, -1, 2)).sum().backward()
    assert len(calls) == 1
    # Ids that were written to are sorted again.
    first = values.main_grad.clone()
    ids.fill_(0)
    kernels.gather_sum(values, ids, c.coef).sum().backward()
    assert len(calls) == 2
    assert torch.equal(values.main_grad[1:], first[1:])
