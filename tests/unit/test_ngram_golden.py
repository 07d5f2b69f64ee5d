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
import torch.nn.functional as F
from torch import Tensor

from megamem.addresses.ngrams import NgramAddressConfig
from megamem.bank import Bank
from megamem.families.ngram_embedding.config import NgramEmbeddingConfig
from megamem.families.stem.config import StemConfig
from megamem.inputs import Inputs, pack
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


def longcat(config: Mapping[str, Any], tensors: Mapping[str, Tensor], dtype: torch.dtype, kernels: Kernels) -> Outcome:
    """Sub-tables are ranges of one table's rows, and their projections stand side by side."""
    recorded, tables = config["addresses"], config["addresses"]["tables"]
    memory = NgramEmbeddingConfig(
        value_dim=tensors["param.table.0"].shape[1],
        address=NgramAddressConfig(
            rules="polynomial",
            max_order=max(table["order"] for table in tables),
            heads_per_order=1 + max(table["k"] for table in tables),
            num_rows=tables[0]["rows"] - 1,
            base=recorded["base"],
            boundary_id=recorded["eos_id"],
        ),
    )
    (layer,), banks = build_memory(memory, megatron({"d": config["width"], "H": 1}, dtype), 1, kernels)
    embedding = tensors["param.embedding"].to(dtype, copy=True).requires_grad_()
    numbers = range(len(tables))
    with torch.no_grad():
        layer.up_proj.copy_(torch.cat([tensors[f"param.projection.{number}"] for number in numbers]).T)
        table_of(banks, 0).copy_(torch.cat([tensors[f"param.table.{number}"] for number in numbers]))
    ids = tensors["in.tokens"]
    inputs = layer.alone(Inputs(pack(ids, torch.arange(ids.shape[1]).expand_as(ids))))
    out = layer(F.embedding(ids.T, embedding), inputs).transpose(0, 1)

    def gradients() -> dict[str, Tensor]:
        of_tables = gradient(table_of(banks, 0)).split([table["rows"] for table in tables])
        of_projections = gradient(layer.up_proj).T.chunk(len(tables))
        return {
            "embedding": gradient(embedding),
            **{f"table.{number}": of_tables[number] for number in numbers},
            **{f"projection.{number}": of_projections[number] for number in numbers},
        }

    return out, gradients


def table_of(banks: list[Bank], index: int) -> Tensor:
    return banks[index].get_parameter("values")


def gradient(leaf: Tensor) -> Tensor:
    assert leaf.grad is not None
    return leaf.grad


CASES = {"stem_ffn": stem, "longcat_embedding": longcat}
"""By the case's name, what computes it with the product's layers."""
# Families that are not here.
ELSEWHERE = {
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
