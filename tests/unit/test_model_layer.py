"""The memory layer as a module: what it owns, what it keeps in fp32, and what it tells Megatron."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from kernels.select import select_kernels
from megamem.banks.bank import Bank
from megamem.families.ultramem_v2.config import UltraMemV2Config
from megamem.families.ultramem_v2.layer import UltraMemV2Layer
from megamem.parameters.declaration import group_of
from megamem.placement.sharing import BankSpec, LayerView
from tests.microbatch import some_inputs

MEMORY = UltraMemV2Config(num_keys=8, key_dim=8, value_dim=16, pre_value_dim=16, top_k=4)


def build(memory: UltraMemV2Config = MEMORY, **config: Any) -> tuple[UltraMemV2Layer, Bank]:
    spec = BankSpec(0, memory.num_keys**2, (0,))
    bank = Bank(spec, memory, select_kernels("auto"), dtype=torch.float32, device="cpu", replica_rank=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        megatron = TransformerConfig(
            num_layers=1, hidden_size=32, num_attention_heads=4, use_cpu_initialization=True, **config
        )
    layer = UltraMemV2Layer(
        megatron,
        memory,
        LayerView(0, 0, memory.num_keys**2, spec.num_rows),
        SimpleNamespace(read=bank.read),
        kernels=bank.kernels,
        name="decoder.layers.0.mlp.memory",
        seed=1,
    )
    g = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in (*layer.parameters(), *bank.parameters()):
            parameter.copy_(torch.rand(parameter.shape, generator=g) - 0.3)
    layer.refresh([layer])
    return layer, bank


def tokens(count: int = 6) -> Tensor:
    return torch.randn(count, 1, 32, generator=torch.Generator().manual_seed(1))


def test_the_bank_is_not_the_layers() -> None:
    layer, _ = build()
    assert {name for name, _ in layer.named_parameters()} == {
        "query_proj",
        "query_norm",
        "keys",
        "keys_norm",
        "cores",
        "value_proj",
        "pre_value_proj",
    }


def test_optional_parts_are_left_out() -> None:
    layer, bank = build(UltraMemV2Config(num_keys=8, key_dim=8, value_dim=16, pre_value_dim=0, top_k=4))
    assert layer.pre_value_proj is None
    assert {name for name, _ in bank.named_parameters()} == {"values"}
    assert layer(tokens(), some_inputs(tokens())).shape == (6, 1, 32)


def test_singular_vectors_stay_in_fp32() -> None:
    layer, _ = build()
    u, v = layer.u.clone(), layer.v.clone()
    layer.bfloat16()
    assert layer.query_proj.dtype == torch.bfloat16
    assert torch.equal(layer.u, u)
    assert torch.equal(layer.v, v)
    assert layer.u.dtype == torch.float32
    assert dict(layer.named_buffers())["u"] is layer.u


def test_in_bf16_scores_and_selection_are_fp32() -> None:
    layer, bank = build()
    layer.bfloat16()
    bank.bfloat16()
    x = tokens().bfloat16()
    found = layer.retrieve(x.flatten(0, 1))
    assert found.scores.dtype == torch.float32
    assert layer(x, some_inputs(x)).dtype == torch.bfloat16


def test_singular_vectors_follow_the_cores_when_asked() -> None:
    layer, _ = build()
    before = layer.u.clone()
    with torch.no_grad():
        layer.cores[:, :, 0] += 3
    layer(tokens(), some_inputs(tokens()))
    assert torch.equal(layer.u, before)
    layer.refresh([layer])
    assert not torch.allclose(layer.u, before)
    assert not layer.u.requires_grad


def test_weights_and_tables_say_which_group_they_are_in_and_over_which_ranks_they_are_summed() -> None:
    layer, bank = build()
    assert {name: group_of(name, p) for name, p in (*layer.named_parameters(), *bank.named_parameters())} == {
        "query_proj": "retrieval",
        "keys": "retrieval",
        "cores": "retrieval",
        "value_proj": "retrieval",
        "pre_value_proj": "retrieval",
        "query_norm": "backbone_no_decay",
        "keys_norm": "backbone_no_decay",
        "values": "values",
        "pre_values": "pre_values",
    }
    # Tensor-parallel ranks see other tokens.
    assert {getattr(p, "sequence_parallel") for p in layer.parameters()} == {True}  # noqa: B009
    # Tables are summed over all ranks of the stage in buffers of their own.
    assert {getattr(p, "allreduce") for p in bank.parameters()} == {False}  # noqa: B009
    assert not any(getattr(p, "sequence_parallel", False) for p in bank.parameters())


@pytest.mark.parametrize("shuffle", ["keyed", "table", "none"])
def test_a_window_wraps_around_the_bank(shuffle: Any) -> None:
    memory = UltraMemV2Config(num_keys=8, key_dim=8, top_k=4, shuffle=shuffle)
    layer, _ = build(memory)
    layer.view = LayerView(0, 90, 64, 100)
    rows = layer.locate(torch.arange(64))[0]
    assert sorted(rows.tolist()) == [*range(54), *range(90, 100)]
    assert (rows.tolist() == [(90 + entry) % 100 for entry in range(64)]) == (shuffle == "none")


def test_tokens_do_not_see_each_other() -> None:
    layer, _ = build()
    x = tokens()
    together = layer(x, some_inputs(x))
    apart = torch.cat([layer(x[i : i + 1], some_inputs(x[i : i + 1])) for i in range(len(x))])
    torch.testing.assert_close(together, apart, rtol=1e-5, atol=1e-6)
