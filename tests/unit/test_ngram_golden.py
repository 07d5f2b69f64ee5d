"""Memories whose rows token ids or their n-grams address against recorded tensors: outputs and every gradient.

A case is the layers' own part of a model alone: each has a recorded input, so that there is neither attention nor a norm.

Legend: b sequences, s tokens, D hidden size, F inner width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megamem.addresses.ngrams import NgramAddressConfig
from megamem.banks.bank import Bank
from megamem.chunk.inputs import Inputs, pack
from megamem.families.ngram_embedding.config import NgramEmbeddingConfig
from megamem.families.residual_ngrams.config import ResidualNgramsConfig
from megamem.families.residual_ngrams.layer import SummedRows
from megamem.families.stem.config import StemConfig
from megamem.parameters.declaration import Copy
from tests.golden import TOLERANCE, OneRank, build_memory, check, megatron, read_case, recorded_weights

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


def residual(config: Mapping[str, Any], tensors: Mapping[str, Tensor], dtype: torch.dtype, kernels: Kernels) -> Outcome:
    """Blocks stand for F_i; the weights of the stream itself are the backbone's, and no part of a memory."""
    recorded, signs = config["addresses"], config.get("signs")
    address = NgramAddressConfig(
        rules="xor",
        max_order=1 + len(recorded),
        num_rows=recorded[0]["rows"],
        signs="none" if signs is None else "ids" if signs[0]["multipliers"] == [1, 1] else "hashed",
        num_sign_patterns=8192 if signs is None else signs[0]["modulus"],
    )
    memory = ResidualNgramsConfig(value_dim=config["rows_width"], address=address)
    of_megatron = megatron({"d": config["width"], "H": 1}, dtype)
    layers, banks = build_memory(memory, of_megatron, config["layers"], kernels)
    group: Any = OneRank()
    options: dict[str, Any] = {"copy": Copy(), "tensor_group": group, "data_group": group}
    together = SummedRows(of_megatron, memory, banks[0], kernels=kernels, **options)
    leaves = recorded_weights(tensors, dtype)
    if signs is not None:
        # Published ones are drawn by a library.
        together.patterns = leaves.pop("sign_table").detach().to(torch.int8)
    with torch.no_grad():
        table_of(banks, 0).copy_(leaves["table"])
        for layer, weight in zip(layers, leaves["lambda_rows"], strict=True):
            layer.gain.copy_(weight)
    ids = tensors["in.tokens"]
    inputs = layers[0].alone(Inputs(pack(ids, torch.arange(ids.shape[1]).expand_as(ids))))
    inputs = replace(inputs, read=together(inputs, first_address=0))
    if dtype == torch.float64:
        assert torch.equal(inputs.shared.transpose(0, 1), tensors["mid.b"])

    def normal(x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + config["eps"])

    def block(x: Tensor, index: int) -> Tensor:
        return F.silu(normal(x) @ leaves["A"][index]) @ leaves["B"][index]

    start = normal(F.embedding(ids.T, leaves["embedding"]))
    if config["added"] == "before every block":
        x = start
        for index, layer in enumerate(layers):
            x = leaves["lambda_residual"][index] * x + leaves["lambda_start"][index] * start + layer(x, inputs)
            x = x + block(x, index)
    else:
        x = start + layers[0](start, inputs)
        for index, layer in enumerate(layers):
            joined = leaves["lambda_residual"][index] * x + leaves["lambda_out"][index] * block(x, index)
            x = joined + layer(x, inputs) if index else joined

    def gradients() -> dict[str, Tensor]:
        return {
            **{name: gradient(leaf) for name, leaf in leaves.items() if name not in ("table", "lambda_rows")},
            "table": gradient(table_of(banks, 0)),
            "lambda_rows": torch.cat([gradient(layer.gain) for layer in layers]),
        }

    return x.transpose(0, 1), gradients


CASES = {
    "stem_ffn": stem,
    "longcat_embedding": longcat,
    "residual_bigrams_lambda": residual,
    "sign_bigrams": residual,
    "sign_bigrams_trigrams": residual,
}
"""By the case's name, what computes it with the product's layers."""
# Families that are not here.
ELSEWHERE = {
    "mome_bigrams",
    "mome_tokens",
    "move_bigrams",
    "published_addresses",
    # In `test_row_clock_golden`.
    "row_wise_updates",
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
