"""The memory layer against what the released code computed: forward, retrieved indices, scores, and every gradient."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from safetensors.torch import load_file
from torch import Tensor

from kernels.select import select_kernels
from megamem.bank import Bank
from megamem.config import MemoryConfig, ModelConfig, SharingConfig
from megamem.initialisation import sigma_values
from megamem.layers.ultramem_v2 import UltraMemV2Layer
from megamem.released_names import from_released
from megamem.retrieval.tucker import leading_singular_vectors
from megamem.sharing import plan_sharing

CASES = (
    "v2_perrank_h1_share1",
    "v2_perrank_h1_nopre",
    "v2_perrank_h1_gluact",
    "v2_perrank_h2_share1",
    "v2_perrank_h1_ring_share05_L4",
    "v2_single_h1_share1",
    "v2_single_h2_ring_share05_L4",
)
# What the config cannot express. Another new case in the folder fails `test_every_case_is_run_or_known`.
NOT_EXPRESSIBLE = {
    "v2_perrank_h1_keyexpand2_sum": "implicit key expansion",
    "v2_perrank_h1_balance": "key balance loss",
}
# Largest error over the largest element of the reference.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5}


@dataclass(frozen=True)
class GoldenLayers:
    """The layers and banks of one case, with the case's weights, and its recorded tensors."""

    tensors: dict[str, Tensor]
    layers: list[UltraMemV2Layer]
    banks: dict[int, Bank]
    model: ModelConfig

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """By our global names."""
        named: dict[str, torch.nn.Parameter] = {}
        for layer in self.layers:
            named |= {f"{layer.name}.{name}": p for name, p in layer.named_parameters()}
        for index, bank in self.banks.items():
            named |= {f"banks.{index}.{name}": p for name, p in bank.named_parameters()}
        return named

    def buffers(self) -> dict[str, Tensor]:
        return {f"{layer.name}.{name}": b for layer in self.layers for name, b in layer.named_buffers()}


def memory_config(ctor: dict[str, Any]) -> MemoryConfig:
    """Our config of a case's constructor arguments."""
    num_layers, ratio = ctor["mem_layer_num"], ctor["share_ratio"]
    assert ctor["mem_key_expand_time"] == ctor["value_expand_time"] == 1
    assert ctor["mem_key_balance_reg_coef"] == 0
    group = round(ratio * num_layers)
    return MemoryConfig(
        num_keys=ctor["knum"],
        key_dim=ctor["kdim"],
        value_dim=ctor["vdim"],
        pre_value_dim=ctor["pre_vdim"],
        top_k=ctor["knn"],
        num_heads=ctor["head"],
        tucker_rank=ctor["tucker_rank"],
        num_cores=ctor["tucker_multihead"],
        query="per_rank" if ctor["mem_q_for_each_tucker_rank"] else "single",
        pre_value_activation="gelu" if ctor["mem_use_glu_act"] else "none",
        shuffle="table",
        sharing=SharingConfig("ring", group, "released") if num_layers > 1 else SharingConfig(),
    )


def released_name(name: str) -> str | None:
    """The name in a released model of a tensor of a layer case; None for inputs and results."""
    if (match := re.fullmatch(r"layer(\d+)\.(.+)", name)) is not None:
        return f"transformer.mem_blocks.{match[1]}.{match[2]}"
    if (match := re.fullmatch(r"table\.(.+)", name)) is not None:
        return f"transformer.full_memory_layer.{match[1]}_for_look_up"
    return None


def ours(tensors: dict[str, Tensor], model: ModelConfig, prefix: str = "") -> dict[str, Tensor]:
    """The recorded tensors `<prefix><released layer name>` by our global names."""
    renamed = {released_name(name.removeprefix(prefix)): t for name, t in tensors.items() if name.startswith(prefix)}
    return from_released({name: t for name, t in renamed.items() if name is not None}, model)


def build(folder: Path, case: str, dtype: torch.dtype, kernels: Literal["auto", "naive"] = "auto") -> GoldenLayers:
    ctor = json.loads((folder / f"{case}.json").read_text())["ctor"]
    tensors = load_file(folder / f"{case}.safetensors")
    memory = memory_config(ctor)
    model = ModelConfig(num_layers=ctor["mem_layer_num"], hidden_size=ctor["hidden_size"], memory=memory)
    config = TransformerConfig(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        num_attention_heads=model.num_attention_heads,
        layernorm_epsilon=model.norm_epsilon,
        use_cpu_initialization=True,
        params_dtype=dtype,
    )
    plan = plan_sharing(memory, model.num_layers)
    implementation = select_kernels(kernels)
    banks = {
        spec.index: Bank(spec, memory, implementation, dtype=dtype, device="cpu", replica_rank=0) for spec in plan.banks
    }
    layers = [
        UltraMemV2Layer(
            config,
            memory,
            view,
            # Not the module itself: the bank belongs to the model, not to the layer.
            SimpleNamespace(read=banks[view.bank].read),
            num_bank_rows=plan.banks[view.bank].num_rows,
            name=f"decoder.layers.{index}.mlp.memory",
            seed=1,
        )
        for index, view in enumerate(plan.views)
    ]
    result = GoldenLayers(tensors, layers, banks, model)
    targets = {**result.parameters(), **result.buffers()}
    weights = ours(tensors, model)
    assert set(weights) == set(targets)
    with torch.no_grad():
        for name, target in targets.items():
            assert target.shape == weights[name].shape, name
            target.copy_(weights[name])
    return result


def relative_error(actual: Tensor, reference: Tensor) -> float:
    assert actual.shape == reference.shape
    actual, reference = actual.detach().double(), reference.double()
    return float((actual - reference).abs().max() / reference.abs().max())


@pytest.mark.parametrize("kernels", ["auto", "naive"])
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("case", CASES)
def test_layers_compute_what_the_release_computes(
    golden_dir: Path, case: str, dtype: torch.dtype, kernels: Literal["auto", "naive"]
) -> None:
    golden = build(golden_dir, case, dtype, kernels)
    tensors, errors = golden.tensors, {}
    loss = torch.zeros((), dtype=dtype)
    inputs = []
    for index, layer in enumerate(golden.layers):
        # Ours is [s, b, D], the release's [b, s, D].
        hidden = tensors[f"x{index}"].to(dtype).transpose(0, 1).contiguous().requires_grad_()
        inputs.append(hidden)
        out = layer(hidden)
        errors[f"y{index}"] = relative_error(out.transpose(0, 1), tensors[f"y{index}"])
        loss = loss + (out * tensors[f"r{index}"].to(dtype).transpose(0, 1)).sum()
    errors["loss"] = relative_error(loss.detach(), tensors["loss"])
    loss.backward()
    gradients = ours(tensors, golden.model, "grad.")
    parameters = golden.parameters()
    assert set(gradients) == set(parameters)
    for name, parameter in parameters.items():
        assert parameter.grad is not None
        errors[f"grad {name}"] = relative_error(parameter.grad, gradients[name])
    for index, hidden in enumerate(inputs):
        assert hidden.grad is not None
        errors[f"grad x{index}"] = relative_error(hidden.grad.transpose(0, 1), tensors[f"grad.x{index}"])
    too_large = {name: error for name, error in errors.items() if not error <= TOLERANCE[dtype]}
    assert not too_large


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("case", CASES)
def test_layers_retrieve_what_the_release_retrieves(golden_dir: Path, case: str, dtype: torch.dtype) -> None:
    golden = build(golden_dir, case, dtype)
    tensors = golden.tensors
    for index, layer in enumerate(golden.layers):
        x = tensors[f"x{index}"].to(dtype).flatten(0, 1)
        with torch.no_grad():
            found = layer.retrieve(x)
        mid = f"mid{index}."
        assert torch.equal(found.row_ids, tensors[f"{mid}row_top"])
        assert torch.equal(found.column_ids, tensors[f"{mid}col_top"])
        assert torch.equal(found.slots.flatten(1), tensors[f"{mid}best_index"])
        assert torch.equal(layer.permutation[found.slots].flatten(1), tensors[f"{mid}best_virtual"])
        rows = layer.table_rows(found.slots).flatten(1)
        assert torch.equal(rows, tensors[f"{mid}table_row"])
        assert relative_error(found.scores.flatten(1, 2), tensors[f"{mid}best_scores"]) <= TOLERANCE[dtype]
        bank = golden.banks[layer.view.bank]
        if bank.pre_values is not None:
            assert layer.pre_value_proj is not None
            with torch.no_grad():
                products = bank.kernels.gather_dot(bank.pre_values, rows, x @ layer.pre_value_proj.T)
            assert relative_error(products, tensors[f"{mid}pre_score"]) <= TOLERANCE[dtype]


def test_each_layers_share_of_a_shared_tables_gradient(golden_dir: Path) -> None:
    golden = build(golden_dir, "v2_perrank_h1_ring_share05_L4", torch.float64)
    tensors = golden.tensors
    for index, layer in enumerate(golden.layers):
        for bank in golden.banks.values():
            bank.zero_grad()
        out = layer(tensors[f"x{index}"].double().transpose(0, 1).contiguous())
        (out * tensors[f"r{index}"].double().transpose(0, 1)).sum().backward()
        expected = ours(tensors, golden.model, f"grad_only{index}.")
        assert set(expected) == {"banks.0.values", "banks.0.pre_values"}
        for name, table in golden.banks[0].named_parameters():
            assert table.grad is not None
            assert relative_error(table.grad, expected[f"banks.0.{name}"]) <= TOLERANCE[torch.float64]


def test_every_case_is_run_or_known(golden_dir: Path) -> None:
    there = {path.stem for path in golden_dir.glob("v2_*.json")}
    assert there == {*CASES, *NOT_EXPRESSIBLE}


def test_singular_vectors_follow_the_release(golden_dir: Path) -> None:
    """Eight updates with sign changes in between; the first sign is LAPACK's there and fixed here."""
    t = {name: value.double() for name, value in load_file(golden_dir / "tucker_sign.safetensors").items()}
    heads, rank = t["step0.core0"].shape[:2]

    def update(step: int) -> tuple[Tensor, Tensor]:
        before = (t[f"step{step}.prev_{side}"].reshape(heads, rank) for side in "uv")
        return leading_singular_vectors(t[f"step{step}.core0"] + t[f"step{step}.core1"], *before)

    u, v = update(0)
    joint_sign = (u * t["step0.u"].reshape(heads, rank)).sum(-1, keepdim=True).sign()
    torch.testing.assert_close(u * joint_sign, t["step0.u"].reshape(heads, rank), rtol=0, atol=1e-9)
    torch.testing.assert_close(v * joint_sign, t["step0.v"].reshape(heads, rank), rtol=0, atol=1e-9)
    assert ((u.sum(-1) + v.sum(-1)) > 0).all()
    for step in range(1, 8):
        for side, actual in zip("uv", update(step), strict=True):
            torch.testing.assert_close(actual, t[f"step{step}.{side}"].reshape(heads, rank), rtol=0, atol=1e-9)


def test_sigma_of_the_values(golden_dir: Path) -> None:
    table = json.loads((golden_dir / "sigma_v.json").read_text())["table"]
    assert len(table) >= 8
    for row in table:
        memory = MemoryConfig(
            num_keys=512,
            top_k=row["k"],
            num_heads=row["n_head"],
            pre_value_dim=row["d_prev"],
            value_dim=row["d_v"],
        )
        model = ModelConfig(
            num_layers=row["L"],
            hidden_size=row["h"],
            ffn_hidden_size=round(row["k_inner"] * row["h"]),
            memory=memory,
        )
        assert model.ffn_hidden_size == pytest.approx(row["k_inner"] * row["h"], abs=1e-6)
        assert sigma_values(model, memory, row["sigma_s"]) == pytest.approx(row["sigma_V"], rel=1e-12)
