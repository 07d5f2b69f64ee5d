"""The gathers against the released fused operations, recorded alone: sums and products per block, ring offsets,
padding.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from kernels.segment_accumulate import naive as naive_accumulate
from kernels.segment_accumulate.op import torch_segment_accumulate
from kernels.select import Kernels, select_kernels

# Largest error over the largest element of the reference.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5}
IMPLEMENTATIONS: tuple[Literal["auto", "naive"], ...] = ("auto", "naive")


@dataclass(frozen=True)
class Case:
    """One recorded call: what the release was given, in our terms."""

    tensors: dict[str, Tensor]
    ids: Tensor
    """[T, J], rows of the table; 0 where the entry is padding."""
    present: Tensor
    """[T, J], 0 where the entry is padding."""
    block: Tensor
    """[T, J]."""
    num_blocks: int


def read_cases(folder: Path, prefix: str, dtype: torch.dtype) -> dict[str, Case]:
    """The recorded calls of one operation by name."""
    settings = json.loads((folder / "kernels.json").read_text())["cases"]
    recorded = load_file(folder / "kernels.safetensors")
    cases = {}
    for name, setting in settings.items():
        if not name.startswith(prefix):
            continue
        tensors = {
            key.removeprefix(f"{name}."): t.to(dtype) if t.is_floating_point() else t.long()
            for key, t in recorded.items()
            if key.startswith(f"{name}.")
        }
        cases[name] = in_our_terms(tensors, setting, dtype)
    return cases


def in_our_terms(tensors: dict[str, Tensor], setting: dict[str, Any], dtype: torch.dtype) -> Case:
    """Release: row = (index % per-layer rows + shift) % rows, block = index // per-layer rows, of which there may be
    more than are summed.
    """
    index, per_layer = tensors["indices"], setting["per_layer_vocab_size"]
    present = index != setting["padding_idx"] if setting["padding_idx"] is not None else torch.ones_like(index).bool()
    index = torch.where(present, index, 0)
    num_blocks = setting["group_size"]
    block = index // per_layer if num_blocks > 1 else torch.zeros_like(index)
    ids = (index % per_layer + setting["shift"]) % setting["vocab_size"]
    return Case(tensors, ids, present.to(dtype), block, num_blocks)


def worst_error(pairs: dict[str, tuple[Tensor, Tensor]]) -> float:
    errors = []
    for name, (actual, reference) in pairs.items():
        assert actual.shape == reference.shape, name
        errors.append(float((actual.double() - reference.double()).abs().max() / reference.double().abs().max()))
    return max(errors)


def lookup_error(case: Case, kernels: Kernels) -> float:
    t = case.tensors
    weight, scores = t["weight"].clone().requires_grad_(), t["scores"].clone().requires_grad_()
    # [C, T, J] there, and [T, J] with one score per entry.
    coef = (scores if scores.dim() == 3 else scores.unsqueeze(0)).permute(1, 2, 0) * case.present.unsqueeze(2)
    out = kernels.gather_sum(weight, case.ids, coef, case.block, case.num_blocks)
    (out * t["r"]).sum().backward()
    assert weight.grad is not None
    assert scores.grad is not None
    return worst_error(
        {
            "out": (out.detach(), t["out"]),
            "weight": (weight.grad, t["grad_weight"]),
            "scores": (scores.grad, t["grad_scores"]),
        }
    )


def product_error(case: Case, kernels: Kernels) -> float:
    t = case.tensors
    weight, x = t["weight"].clone().requires_grad_(), t["p_input"].clone().requires_grad_()
    out = kernels.gather_dot(weight, case.ids, x, 1, case.block).squeeze(2) * case.present
    (out * t["r"]).sum().backward()
    assert weight.grad is not None
    assert x.grad is not None
    return worst_error(
        {
            "out": (out.detach(), t["out"]),
            "weight": (weight.grad, t["grad_weight"]),
            "p_input": (x.grad, t["grad_p_input"]),
        }
    )


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize(("prefix", "error_of", "count"), [("lookup.", lookup_error, 7), ("glu.", product_error, 5)])
def test_gathers_compute_what_the_release_computes(
    golden_dir: Path, prefix: str, error_of: Any, count: int, dtype: torch.dtype, implementation: Any
) -> None:
    cases = read_cases(golden_dir, prefix, dtype)
    assert len(cases) == count
    errors = {name: error_of(case, select_kernels(implementation)) for name, case in cases.items()}
    assert max(errors.values()) <= TOLERANCE[dtype], errors


@pytest.mark.parametrize(
    "accumulate", [torch_segment_accumulate, naive_accumulate.segment_accumulate], ids=["op", "naive"]
)
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_the_released_scatter_is_an_accumulation(golden_dir: Path, accumulate: Any, dtype: torch.dtype) -> None:
    """out[b, group[b, k]] += values[b, k]: every entry a token of its own, rows (b, group)."""
    tensors = load_file(golden_dir / "kernels.safetensors")
    group, values = tensors["scatter_add.group"], tensors["scatter_add.values"].to(dtype)
    expected = tensors["scatter_add.out"]
    num_blocks, width = expected.shape[1:]
    rows = torch.arange(group.shape[0]).unsqueeze(1) * num_blocks + group
    out = torch.zeros(group.shape[0] * num_blocks, width, dtype=dtype)
    ones = torch.ones(rows.numel(), 1, 1, dtype=dtype)
    accumulate(out, rows.view(-1, 1), ones, values.flatten(0, 1))
    gradient = tensors["scatter_add.r"].flatten(0, 1)[rows]
    pairs = {"out": (out.view(expected.shape), expected), "values": (gradient, tensors["scatter_add.grad_values"])}
    assert worst_error(pairs) <= TOLERANCE[dtype]
