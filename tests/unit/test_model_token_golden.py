"""Memories that are indexed by the token against recorded tensors: MoVE, LaVE and TIDE, outputs and every gradient.

Attention, norms and feed-forward of the recorded blocks are written out here, by PyTorch's operations; the layers, their
banks and what they read together are the product's.

Legend: b sequences, s tokens, d head dimension, n query heads and g key/value heads, D hidden size, M slots of a token.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from megamem.banks.bank import Bank
from megamem.chunk.inputs import Inputs
from megamem.config.memory import MemoryConfig
from megamem.families.lave.config import LaveConfig
from megamem.families.move.config import MoveConfig
from megamem.families.registry import family_of
from megamem.families.tide.config import TideConfig
from megamem.parameters.declaration import Copy
from tests.golden import (
    TOLERANCE,
    OneRank,
    attend,
    build_memory,
    check,
    megatron,
    read_case,
    recorded_weights,
    relative_error,
    rms_normalise,
    rotate,
    split_heads,
)

MIXED = (
    "move_mha_gated",
    "move_gqa_gated",
    "move_mha_same_token",
    "move_mha_zero_gate",
    "move_shared_bank_3layers",
    "lave_layer_gated",
    "lave_layer_ungated",
    "lave_x2_3layers_gated",
)
TIDE = ("tide_K1_gain", "tide_K2_gain", "tide_K2_nogain", "tide_K4_nogain", "tide_K4_null_soft")
# Latents are in tests/distributed/test_latent_attention.py, decompositions in `test_table_forms.py`; the numbers are of analyses.
ELSEWHERE = ("mla_lave_ungated", "mla_move_keys_mixed", "tide_numbers", "tide_svd")


@dataclass
class Case:
    """A recorded case, its memory built with the recorded weights, and the leaves that gradients are taken of."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    dtype: torch.dtype
    memory: MemoryConfig
    banks: list[Bank]
    layers: list[Any]
    leaves: dict[str, Tensor]

    @property
    def megatron(self) -> TransformerConfig:
        return megatron(self.config, self.dtype)

    def inputs(self) -> Inputs:
        ids = self.tensors["in.tokens"].T
        return Inputs(torch.stack((ids, torch.zeros_like(ids))))

    def check(self, out: Tensor) -> None:
        """Against the recorded output and gradients; `out` is [b, s, D]."""
        (out * self.tensors["r"].to(self.dtype)).sum().backward()
        gradients = {
            name: self.as_recorded(name, torch.zeros_like(leaf) if leaf.grad is None else leaf.grad)
            for name, leaf in self.leaves.items()
        }
        check(out, gradients, self.tensors)

    def as_recorded(self, name: str, ours: Tensor) -> Tensor:
        """One of our gradients in the recorded layout."""
        match name.split(".")[-1]:
            case "WG":
                return ours.T
            case "E" if isinstance(self.memory, TideConfig):
                return ours.unflatten(0, (-1, self.config["K"])).transpose(0, 1)
            case "E":
                return ours.unflatten(0, (self.config["vocab"], -1))
        return ours


def memory_of(name: str, config: dict[str, Any]) -> MemoryConfig:
    if name.startswith("tide"):
        return TideConfig(
            vocab_size=config["vocab"],
            value_dim=config["d"],
            num_tables=config["K"],
            row_gain=config["mem_rmsnorm_gain"],
        )
    common: dict[str, Any] = {
        "vocab_size": config["vocab"],
        "value_dim": config["Hkv"] * config["dh"],
        "num_gate_heads": config["Hkv"],
        "gated_standard_path": config["gated_standard_path"],
    }
    return LaveConfig(**common) if name.startswith("lave") else MoveConfig(num_slots=config["M"], **common)


def build(golden_dir: Path, name: str, dtype: torch.dtype, kernels: Literal["auto", "naive"]) -> Case:
    config, tensors = read_case(golden_dir / "token", name)
    memory = memory_of(name, config)
    layers, banks = build_memory(memory, megatron(config, dtype), config.get("L", 1), kernels)
    return Case(config, tensors, dtype, memory, banks, layers, recorded_weights(tensors, dtype))


def set_weight(case: Case, name: str, parameter: nn.Parameter) -> None:
    """The recorded weight, in our layout, in the product's parameter, which becomes the leaf."""
    recorded = case.tensors[f"param.{name}"].to(case.dtype)
    with torch.no_grad():
        match name.split(".")[-1]:
            case "WG":
                parameter.copy_(recorded.T)
            case "E" if isinstance(case.memory, TideConfig):
                parameter.copy_(recorded.transpose(0, 1).flatten(0, 1))
            case "E":
                parameter.copy_(recorded.flatten(0, 1))
            case _:
                parameter.copy_(recorded)
    case.leaves[name] = parameter


def mixed_attention(case: Case, index: int, weights: Mapping[str, Tensor], x: Tensor) -> tuple[Tensor, ...]:
    """Attention of [b, s, D] over mixed values: its output, queries, keys and mixed values by heads."""
    heads, groups = case.config["H"], case.config["Hkv"]
    query, key = split_heads(x @ weights["WQ"], heads), split_heads(x @ weights["WK"], groups)
    if case.config.get("rope_theta"):
        query, key = (rotate(part, case.config["rope_theta"]) for part in (query, key))
    # Ours is [s, b, g, d].
    values = (x @ weights["WV"]).unflatten(2, (groups, -1)).transpose(0, 1)
    mixed = case.layers[index](values, case.inputs(), x.transpose(0, 1)).transpose(0, 1).transpose(1, 2)
    return attend(query, key, mixed) @ weights["WO"], query, key, mixed


def mixed_weights(case: Case) -> list[dict[str, Tensor]]:
    """Set the product's weights; the others by layer."""
    prefixes = [f"layers.{index}." for index in range(len(case.layers))] if "L" in case.config else [""]
    for prefix, layer in zip(prefixes, case.layers, strict=True):
        set_weight(case, f"{prefix}WG", layer.gate_proj)
    tables = [""] if len(case.banks) == 1 else prefixes
    for prefix, bank in zip(tables, case.banks, strict=True):
        set_weight(case, f"{prefix}E", bank.get_parameter("values"))
    return [{name: case.leaves[f"{prefix}{name}"] for name in ("WQ", "WK", "WV", "WO")} for prefix in prefixes]


@pytest.mark.parametrize("kernels", ["auto", "naive"])
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("name", MIXED)
def test_values_are_mixed_as_recorded(
    golden_dir: Path, name: str, dtype: torch.dtype, kernels: Literal["auto", "naive"]
) -> None:
    case = build(golden_dir, name, dtype, kernels)
    weights, x = mixed_weights(case), case.leaves["x"]
    if "L" not in case.config:
        case.check(mixed_attention(case, 0, weights[0], x)[0])
        return
    for index in range(len(case.layers)):
        x = x + mixed_attention(case, index, weights[index], rms_normalise(x))[0]
    case.check(x)


@pytest.mark.parametrize("name", [name for name in MIXED if "3layers" not in name])
def test_a_cache_of_mixed_values_is_enough(golden_dir: Path, name: str) -> None:
    """Token by token, with keys and mixed values kept and nothing read again for earlier tokens."""
    case = build(golden_dir, name, torch.float64, "auto")
    (weights,) = mixed_weights(case)
    with torch.no_grad():
        _, query, key, mixed = mixed_attention(case, 0, weights, case.leaves["x"])
        steps = range(1, query.shape[2] + 1)
        out = torch.cat([attend(query[:, :, t - 1 : t], key[:, :, :t], mixed[:, :, :t]) for t in steps], 1)
    assert relative_error(out @ weights["WO"], case.tensors["decode.out"]) <= 1e-12


def tide_weights(case: Case) -> nn.Module:
    """Set the product's weights; what the layers read together."""
    read = family_of(case.memory).shared_read()
    assert read is not None
    group: Any = OneRank()
    (bank,), options = case.banks, {"copy": Copy(), "tensor_group": group, "data_group": group}
    together = read(case.megatron, case.memory, bank, kernels=bank.kernels, **options)
    set_weight(case, "mem.E", case.banks[0].get_parameter("values"))
    if case.config["mem_rmsnorm_gain"]:
        set_weight(case, "mem.gain", together.gain)
    for index, layer in enumerate(case.layers):
        set_weight(case, f"layers.{index}.Wr", layer.router)
    return together


def tide_stream(case: Case, together: nn.Module, without: int | None) -> Tensor:
    """The residual stream [b, s, D] after the last block; one block's memory may be left out."""
    weights, config = case.leaves, case.config
    inputs = case.inputs()
    read = together(inputs, first_address=0)
    h = F.embedding(case.tensors["in.tokens"], weights["E0"])
    for index, layer in enumerate(case.layers):
        own = {name.split(".")[-1]: leaf for name, leaf in weights.items() if name.startswith(f"layers.{index}.")}
        normal = rms_normalise(h, own["attn_norm"])
        query, key, value = (
            split_heads(normal @ own[name], config[heads])
            for name, heads in (("WQ", "H"), ("WK", "Hkv"), ("WV", "Hkv"))
        )
        query, key = (rotate(part, config["rope_theta"]) for part in (query, key))
        h = h + attend(query, key, value) @ own["WO"]
        normal = rms_normalise(h, own["ffn_norm"])
        h = h + (F.silu(normal @ own["Wgate"]) * (normal @ own["Wup"])) @ own["Wdown"]
        if index != without:
            h = h + layer(normal.transpose(0, 1), Inputs(inputs.packed, read)).transpose(0, 1)
    return h


@pytest.mark.parametrize("kernels", ["auto", "naive"])
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("name", TIDE)
def test_tide_adds_what_is_recorded(
    golden_dir: Path, name: str, dtype: torch.dtype, kernels: Literal["auto", "naive"]
) -> None:
    case = build(golden_dir, name, dtype, kernels)
    together = tide_weights(case)
    case.check(tide_stream(case, together, None))
    for index in range(len(case.layers)):
        with torch.no_grad():
            ablated = tide_stream(case, together, index)
        assert relative_error(ablated, case.tensors[f"ablate_layer{index}.out"]) <= TOLERANCE[dtype][0]


@pytest.mark.parametrize("name", [name for name in MIXED if "3layers" not in name])
@torch.no_grad()
def test_weights_of_slots_are_the_recorded_gates(golden_dir: Path, name: str) -> None:
    case = build(golden_dir, name, torch.float64, "auto")
    mixed_weights(case)
    values = torch.empty(0, dtype=torch.float64)
    found = case.layers[0].slot_weights(values, case.inputs(), case.leaves["x"].transpose(0, 1))
    wanted = case.tensors["mid.gates"].transpose(0, 1).flatten(0, 1).mean(1)
    assert found.shape[1] == len(case.memory.slot_names)
    # Averaged in fp32.
    assert relative_error(found.double(), wanted) <= 1e-6


@pytest.mark.parametrize("name", TIDE)
@torch.no_grad()
def test_weights_of_slots_are_the_recorded_router(golden_dir: Path, name: str) -> None:
    case = build(golden_dir, name, torch.float64, "auto")
    together = tide_weights(case)
    found: list[Tensor] = []
    for layer in case.layers:
        layer.register_forward_hook(lambda module, arguments, out: found.append(module.slot_weights(*arguments)))
    tide_stream(case, together, None)
    recorded = json.loads((golden_dir / "token" / f"{name}.json").read_text(encoding="utf-8"))
    assert [of_layer.shape[1] for of_layer in found] == [len(case.memory.slot_names)] * len(case.layers)
    assert [float(of_layer[:, -1].mean()) for of_layer in found] == pytest.approx(
        recorded["null_weight_mean_per_layer"], rel=1e-12
    )


def test_every_recorded_case_is_tested(golden_dir: Path) -> None:
    recorded = {path.stem for path in (golden_dir / "token").glob("*.safetensors")}
    assert recorded == {*MIXED, *TIDE, *ELSEWHERE}
