"""Memory layers of every kind against what the released codes computed: forward, retrieved indices, scores, losses, and
every gradient.
"""

from __future__ import annotations

import json
import math
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
from megamem.banks.bank import Bank
from megamem.config.memory import MemoryConfig
from megamem.config.model import ModelConfig
from megamem.families.memory_plus.config import MemoryPlusConfig
from megamem.families.peer.config import PeerConfig
from megamem.families.pkm.config import PkmConfig
from megamem.families.registry import family_of
from megamem.families.ultramem.config import UltraMemConfig
from megamem.families.ultramem_v2.config import UltraMemV2Config
from megamem.layers.layer import MemoryLayer
from megamem.layers.losses import LOSS_NAMES
from megamem.layers.product_key import ProductKeyLayer
from megamem.layers.tucker import TuckerLayer, leading_singular_vectors
from megamem.placement.sharing import SharingConfig
from megamem.releases.names import from_meta, from_released
from megamem.retrieval.initial import sigma_values
from tests.microbatch import some_inputs

CASES = (
    "v2_perrank_h1_share1",
    "v2_perrank_h1_nopre",
    "v2_perrank_h1_gluact",
    "v2_perrank_h1_keyexpand2_sum",
    "v2_perrank_h1_balance",
    "v2_perrank_h2_share1",
    "v2_perrank_h1_ring_share05_L4",
    "v2_single_h1_share1",
    "v2_single_h2_ring_share05_L4",
    "v1_h1_ve4",
    "v1_h2_ve1",
    "memplus_olmo_h2_L2",
    "meta_pkm_h2",
    "meta_memplus_h2_vauto",
    "meta_memplus_h2_shared_L3",
    "meta_memplus_h4_gated",
    "meta_peer_h2",
)
# Cases of other tests: whole models, and the gathers and the singular vectors alone.
ELSEWHERE = ("e2e_memory_plus", "e2e_v2_perrank_full", "kernels", "tucker_sign")
# Largest error over the largest element of the reference.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5}


@dataclass(frozen=True)
class GoldenLayers:
    """The layers and banks of one case, with the case's weights, and its recorded tensors."""

    tensors: dict[str, Tensor]
    layers: list[MemoryLayer]
    banks: dict[int, Bank]
    model: ModelConfig

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """Parameters by our global names."""
        named: dict[str, torch.nn.Parameter] = {}
        for layer in self.layers:
            named |= {f"{layer.name}.{name}": p for name, p in layer.named_parameters()}
        for index, bank in self.banks.items():
            named |= {f"banks.{index}.{name}": p for name, p in bank.named_parameters()}
        return named

    def buffers(self) -> dict[str, Tensor]:
        return {f"{layer.name}.{name}": b for layer in self.layers for name, b in layer.named_buffers()}


def model_config(record: dict[str, Any]) -> ModelConfig:
    """Our config of a recorded case."""
    ctor, derived = record["ctor"], record["derived"]
    match record["kind"]:
        case "UltraMemV2":
            memory, num_layers = ultramem_v2_config(ctor, derived["batch"], derived["seq"]), ctor["mem_layer_num"]
        case "UltraMemV1":
            memory, num_layers = ultramem_config(ctor), 1
        case "MemoryPlus (OLMo fork)":
            num_layers = ctor["layers_sharing_the_table"]
            memory = MemoryPlusConfig(
                num_keys=ctor["knum"],
                key_dim=ctor["kdim"],
                value_dim=ctor["vdim"],
                top_k=ctor["knn"],
                num_heads=ctor["head"],
                sharing=SharingConfig("all"),
            )
        case "Meta HashingMemory":
            memory, num_layers = meta_config(ctor, derived), ctor["n_layers"]
        case kind:
            raise AssertionError(f"a case of the unknown kind {kind}")
    hidden_size = ctor["hidden_size"] if "hidden_size" in ctor else ctor["input_dim"]
    return ModelConfig(num_layers=num_layers, hidden_size=hidden_size, memory=memory)


def ultramem_v2_config(ctor: dict[str, Any], batch: int, sequence_length: int) -> MemoryConfig:
    num_layers, expansion = ctor["mem_layer_num"], ctor["mem_key_expand_time"]
    group = round(ctor["share_ratio"] * num_layers)
    return UltraMemV2Config(
        num_keys=ctor["knum"],
        key_dim=ctor["kdim"],
        value_dim=ctor["vdim"],
        pre_value_dim=ctor["pre_vdim"],
        top_k=ctor["knn"],
        num_heads=ctor["head"],
        tucker_rank=ctor["tucker_rank"],
        num_cores=ctor["tucker_multihead"],
        query="per_rank" if ctor["mem_q_for_each_tucker_rank"] else "single",
        key_expansion=expansion,
        value_blocks="projected" if ctor["value_expand_time"] > 1 else "summed",
        pre_value_activation="gelu" if ctor["mem_use_glu_act"] else "none",
        shuffle="table",
        # Ours counts once per token, the release's once per microbatch.
        key_balance_weight=ctor["mem_key_balance_reg_coef"] / (batch * sequence_length),
        # It takes all of a microbatch together.
        key_balance_sequences=batch,
        sharing=SharingConfig("ring", group, "released") if num_layers > 1 else SharingConfig(),
    )


def ultramem_config(ctor: dict[str, Any]) -> MemoryConfig:
    return UltraMemConfig(
        num_keys=ctor["knum"],
        key_dim=ctor["kdim"],
        value_dim=ctor["vdim"],
        top_k=ctor["knn"],
        num_heads=ctor["head"],
        tucker_rank=ctor["tucker_rank"],
        num_cores=ctor["tucker_multihead"],
        key_expansion=math.isqrt(ctor["value_expand_time"]),
        shuffle="table",
    )


def meta_config(ctor: dict[str, Any], derived: dict[str, Any]) -> MemoryConfig:
    common: Any = {
        "num_keys": ctor["mem_n_keys"],
        # Theirs is that of both sides together.
        "key_dim": ctor["mem_k_dim"] // 2,
        "value_dim": derived["v_dim"],
        "top_k": ctor["mem_knn"],
        "num_heads": ctor["mem_heads"],
        "query_norm": False,
        "biases": True,
        "sharing": SharingConfig("all" if ctor.get("mem_share_values") else "none"),
    }
    if derived["peer"]:
        return PeerConfig(**common)
    if derived["swilu"]:
        return MemoryPlusConfig(output_gate=derived["gated"], **common)
    return PkmConfig(value_projection=derived["v_proj"], output_gate=derived["gated"], **common)


def released_name(name: str, kind: str) -> str | None:
    """The name in a released model of a tensor of a layer case; None for inputs and results."""
    meta = kind == "Meta HashingMemory"
    if (match := re.fullmatch(r"layer(\d+)\.(.+)", name)) is not None:
        return f"layers.{match[1]}.feed_forward.{match[2]}" if meta else f"transformer.mem_blocks.{match[1]}.{match[2]}"
    if (match := re.fullmatch(r"table\.(.+)", name)) is not None:
        if meta:
            return f"layers.0.feed_forward.{match[1]}.weight"
        owner = "mem_blocks.0" if kind == "UltraMemV1" else "full_memory_layer"
        return f"transformer.{owner}.{match[1]}_for_look_up"
    return None


def ours(tensors: dict[str, Tensor], record: dict[str, Any], model: ModelConfig, prefix: str = "") -> dict[str, Tensor]:
    """The recorded tensors `<prefix><released layer name>` by our global names."""
    kind = record["kind"]
    renamed = {
        released_name(name.removeprefix(prefix), kind): t for name, t in tensors.items() if name.startswith(prefix)
    }
    translate = from_meta if kind == "Meta HashingMemory" else from_released
    return translate({name: t for name, t in renamed.items() if name is not None}, model)


def read_record(folder: Path, case: str) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((folder / f"{case}.json").read_text())
    return record


def build(folder: Path, case: str, dtype: torch.dtype, kernels: Literal["auto", "naive"] = "auto") -> GoldenLayers:
    record, tensors = read_record(folder, case), load_file(folder / f"{case}.safetensors")
    model = model_config(record)
    memory = model.memory
    assert memory is not None
    config = TransformerConfig(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        num_attention_heads=model.num_attention_heads,
        layernorm_epsilon=model.norm_epsilon,
        use_cpu_initialization=True,
        params_dtype=dtype,
    )
    plan = memory.plan(model.num_layers)
    implementation = select_kernels(kernels)
    banks = {
        spec.index: Bank(spec, memory, implementation, dtype=dtype, device="cpu", replica_rank=0) for spec in plan.banks
    }
    layers = [
        family_of(memory).layer()(
            config,
            memory,
            view,
            # Not the module itself: the bank belongs to the model, not to the layer.
            SimpleNamespace(read=banks[view.bank].read),
            kernels=implementation,
            name=f"decoder.layers.{index}.mlp.memory",
            seed=1,
        )
        for index, view in enumerate(plan.views)
    ]
    result = GoldenLayers(tensors, layers, banks, model)
    targets = {**result.parameters(), **result.buffers()}
    weights = ours(tensors, record, model)
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
    golden_dir: Path,
    case: str,
    dtype: torch.dtype,
    kernels: Literal["auto", "naive"],
    record_property: Any,
) -> None:
    golden = build(golden_dir, case, dtype, kernels)
    tensors, errors = golden.tensors, {}
    loss = torch.zeros((), dtype=dtype)
    inputs = []
    for index, layer in enumerate(golden.layers):
        # Ours is [s, b, D], the release's [b, s, D].
        hidden = tensors[f"x{index}"].to(dtype).transpose(0, 1).contiguous().requires_grad_()
        inputs.append(hidden)
        out = layer(hidden, some_inputs(hidden))
        errors[f"y{index}"] = relative_error(out.transpose(0, 1), tensors[f"y{index}"])
        loss = loss + (out * tensors[f"r{index}"].to(dtype).transpose(0, 1)).sum()
        if f"aux{index}" in tensors:
            assert layer.losses is not None
            balance = layer.losses.sums[1 + LOSS_NAMES.index("key_balance")] / layer.losses.sums[0]
            errors[f"aux{index}"] = relative_error(balance, tensors[f"aux{index}"])
    errors["loss"] = relative_error(loss.detach(), tensors["loss"])
    loss.backward()
    gradients = ours(tensors, read_record(golden_dir, case), golden.model, "grad.")
    parameters = golden.parameters()
    assert set(gradients) == set(parameters)
    for name, parameter in parameters.items():
        assert parameter.grad is not None
        errors[f"grad {name}"] = relative_error(parameter.grad, gradients[name])
    for index, hidden in enumerate(inputs):
        assert hidden.grad is not None
        errors[f"grad x{index}"] = relative_error(hidden.grad.transpose(0, 1), tensors[f"grad.x{index}"])
    record_property("worst_error", max(errors.values()))
    too_large = {name: error for name, error in errors.items() if not error <= TOLERANCE[dtype]}
    assert not too_large


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("case", CASES)
def test_layers_retrieve_what_the_release_retrieves(golden_dir: Path, case: str, dtype: torch.dtype) -> None:
    golden = build(golden_dir, case, dtype)
    for index, layer in enumerate(golden.layers):
        recorded = {
            name.removeprefix(f"mid{index}."): t
            for name, t in golden.tensors.items()
            if name.startswith(f"mid{index}.")
        }
        x = golden.tensors[f"x{index}"].to(dtype).flatten(0, 1)
        if isinstance(layer, TuckerLayer):
            check_tucker_retrieval(layer, golden.banks[layer.view.bank], x, recorded)
        else:
            assert isinstance(layer, ProductKeyLayer)
            check_product_retrieval(layer, x, recorded)


@torch.no_grad()
def check_tucker_retrieval(layer: TuckerLayer, bank: Bank, x: Tensor, recorded: dict[str, Tensor]) -> None:
    tolerance = TOLERANCE[x.dtype]
    found = layer.retrieve(x)
    assert torch.equal(found.stage_ids[0], recorded["row_top"])
    assert torch.equal(found.stage_ids[1], recorded["col_top"])
    assert torch.equal(found.entries.flatten(1), recorded["best_index"])
    assert torch.equal(layer.permutation[found.entries].flatten(1), recorded["best_virtual"])
    rows, blocks = layer.locate(found.entries.flatten(1))
    assert torch.equal(rows, recorded["table_row"])
    assert (blocks is not None) == (layer.memory.lookup.bins > 1)
    if blocks is not None:
        assert torch.equal(blocks, recorded["group"])
    assert relative_error(found.scores.flatten(1, 2), recorded["best_scores"]) <= tolerance
    if hasattr(bank, "pre_values"):
        pre_input = layer.pre_input(x)
        assert pre_input is not None
        products = bank.kernels.gather_dot(bank.pre_values, rows, pre_input).squeeze(2)
        assert relative_error(products, recorded["pre_score"]) <= tolerance


@torch.no_grad()
def check_product_retrieval(layer: ProductKeyLayer, x: Tensor, recorded: dict[str, Tensor]) -> None:
    tolerance = TOLERANCE[x.dtype]
    found = layer.retrieve(x)
    rows, columns = found.entries // layer.num_keys, found.entries % layer.num_keys
    row_scores, column_scores = found.stage_scores()
    sums = row_scores.gather(2, rows) + column_scores.gather(2, columns)
    assert torch.equal(layer.locate(found.entries)[0].flatten(1), recorded["indices"])
    assert relative_error(sums.flatten(1), recorded["raw_scores"]) <= tolerance
    assert relative_error(found.scores.flatten(1), recorded["scores"]) <= tolerance


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_each_layers_share_of_a_shared_tables_gradient(golden_dir: Path, dtype: torch.dtype) -> None:
    case = "v2_perrank_h1_ring_share05_L4"
    golden = build(golden_dir, case, dtype)
    tensors = golden.tensors
    for index, layer in enumerate(golden.layers):
        for bank in golden.banks.values():
            bank.zero_grad()
        x = tensors[f"x{index}"].to(dtype).transpose(0, 1).contiguous()
        out = layer(x, some_inputs(x))
        (out * tensors[f"r{index}"].to(dtype).transpose(0, 1)).sum().backward()
        expected = ours(tensors, read_record(golden_dir, case), golden.model, f"grad_only{index}.")
        assert set(expected) == {"banks.0.values", "banks.0.pre_values"}
        for name, table in golden.banks[0].named_parameters():
            assert table.grad is not None
            assert relative_error(table.grad, expected[f"banks.0.{name}"]) <= TOLERANCE[dtype]


def test_every_case_is_run(golden_dir: Path) -> None:
    assert {path.stem for path in golden_dir.glob("*.safetensors")} == {*CASES, *ELSEWHERE}


@pytest.mark.parametrize(
    ("translate", "name"),
    [
        (from_released, "transformer.mem_blocks.0.swilu_projection.weight"),
        (from_released, "transformer.blocks.0.other"),
        (from_meta, "layers.0.feed_forward.keys"),
    ],
)
def test_names_that_a_release_does_not_have_are_refused(translate: Any, name: str) -> None:
    with pytest.raises(ValueError, match=r"of kind ultramem_v2|of the kinds pkm"):
        translate({name: torch.zeros(1)}, ModelConfig(memory=UltraMemV2Config()))


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_singular_vectors_follow_the_release(golden_dir: Path, dtype: torch.dtype) -> None:
    """Eight updates with sign changes in between; the first sign is LAPACK's there and fixed here."""
    t = {name: value.to(dtype) for name, value in load_file(golden_dir / "tucker_sign.safetensors").items()}
    heads, rank = t["step0.core0"].shape[:2]

    def recorded(name: str) -> Tensor:
        return t[name].reshape(heads, rank)

    def update(step: int) -> tuple[Tensor, Tensor]:
        before = (recorded(f"step{step}.prev_{side}") for side in "uv")
        return leading_singular_vectors(t[f"step{step}.core0"] + t[f"step{step}.core1"], *before)

    u, v = update(0)
    joint_sign = (u * recorded("step0.u")).sum(-1, keepdim=True).sign()
    assert relative_error(u * joint_sign, recorded("step0.u")) <= TOLERANCE[dtype]
    assert relative_error(v * joint_sign, recorded("step0.v")) <= TOLERANCE[dtype]
    assert ((u.sum(-1) + v.sum(-1)) > 0).all()
    for step in range(1, 8):
        for side, actual in zip("uv", update(step), strict=True):
            assert relative_error(actual, recorded(f"step{step}.{side}")) <= TOLERANCE[dtype]


def test_sigma_of_the_values(golden_dir: Path) -> None:
    table = json.loads((golden_dir / "sigma_v.json").read_text())["table"]
    assert len(table) >= 8
    for row in table:
        memory = UltraMemV2Config(
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
