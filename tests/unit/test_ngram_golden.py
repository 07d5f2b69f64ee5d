"""Memories whose rows token ids or their n-grams address against recorded tensors: outputs and every gradient.

A case is the layers' own part of a model alone: each has a recorded input, so that there is neither attention nor a norm.

Legend: b sequences, s tokens, D hidden size, F inner width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from megamem.bank import Bank
from megamem.families.stem.config import StemConfig
from megamem.inputs import Inputs
from tests.golden import TOLERANCE, build_memory, check, megatron, read_case

Kernels = Literal["auto", "naive"]
Outcome = tuple[Tensor, Callable[[], dict[str, Tensor]]]
"""The output in the recorded layout, and what gives the gradients in theirs once it has gone backward."""


def inputs_of(tensors: Mapping[str, Tensor]) -> Inputs:
    ids = tensors["in.tokens"].T
    return Inputs(torch.stack((ids, torch.zeros_like(ids))))


def stem(config: Mapping[str, Any], tensors: Mapping[str, Tensor], dtype: torch.dtype, kernels: Kernels) -> Outcome:
    """Layers with a table each; weights are recorded as [inputs, outputs]."""
    memory = StemConfig(vocab_size=config["vocab"], value_dim=config["ffn"])
    of_megatron = megatron({"d": config["width"], "H": 1}, dtype)
    layers, banks = build_memory(memory, of_megatron, config["layers"], kernels)
    x = tensors["param.x"].to(dtype, copy=True).requires_grad_()
    with torch.no_grad():
        for index, layer in enumerate(layers):
            layer.gate_proj.copy_(tensors["param.W_gate"][index].T)
            layer.down_proj.copy_(tensors["param.W_down"][index].T)
            table_of(banks, index).copy_(tensors["param.table"][index])
    inputs = inputs_of(tensors)
    out = torch.stack([layer(x[i].transpose(0, 1), inputs).transpose(0, 1) for i, layer in enumerate(layers)])

    def gradients() -> dict[str, Tensor]:
        return {
            "x": gradient(x),
            "W_gate": torch.stack([gradient(layer.gate_proj).T for layer in layers]),
            "W_down": torch.stack([gradient(layer.down_proj).T for layer in layers]),
            "table": torch.stack([gradient(table_of(banks, index)) for index in range(len(layers))]),
        }

    return out, gradients


def table_of(banks: list[Bank], index: int) -> Tensor:
    return banks[index].get_parameter("values")


def gradient(leaf: Tensor) -> Tensor:
    assert leaf.grad is not None
    return leaf.grad


CASES = {"stem_ffn": stem}
"""By the case's name, what computes it with the product's layers."""
# Families that are not here.
ELSEWHERE = {
    "longcat_embedding",
    "mome_bigrams",
    "mome_tokens",
    "move_bigrams",
    "published_addresses",
    "residual_bigrams_lambda",
    "row_wise_updates",
    "sign_bigrams",
    "sign_bigrams_trigrams",
    "value_ngrams_documents_isolated",
    "value_ngrams_gated",
    "value_ngrams_one_head",
}


@pytest.mark.parametrize("kernels", ["auto", "naive"])
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("name", CASES)
def test_a_memory_computes_what_is_recorded(golden_dir: Path, name: str, dtype: torch.dtype, kernels: Kernels) -> None:
    config, tensors = read_case(golden_dir / "ngram", name)
    out, gradients = CASES[name](config, tensors, dtype, kernels)
    (out * tensors["r"].to(dtype)).sum().backward()
    check(out, gradients(), tensors)


def test_every_recorded_case_is_tested(golden_dir: Path) -> None:
    recorded = {path.stem for path in (golden_dir / "ngram").glob("*.safetensors")}
    assert recorded == CASES.keys() | ELSEWHERE
