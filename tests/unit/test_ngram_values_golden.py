"""Memories that n-grams address, mixed into attention's values, against recorded tensors: outputs and every gradient.

Attention of the recorded blocks is written out here, by PyTorch's operations; layers, addresses and banks are the product's.

Legend: L layers, b sequences, s tokens, D hidden size, g key/value heads, d head dimension, M slots of an address.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

from megamem.addresses.ngrams import NgramAddressConfig
from megamem.banks.bank import Bank
from megamem.chunk.inputs import Inputs, pack
from megamem.config.memory import MemoryConfig
from megamem.families.mome.config import MomeConfig
from megamem.families.move.config import MoveConfig
from megamem.families.value_ngrams.config import ValueNgramsConfig
from tests.golden import TOLERANCE, attend, build_memory, check, megatron, read_case, recorded_weights, split_heads


@dataclass
class Case:
    """A recorded case, with its memory built and the leaves that gradients are taken of."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    memory: MemoryConfig
    layers: list[Any]
    banks: list[Bank]
    leaves: dict[str, Tensor]

    @property
    def apart(self) -> Tensor | None:
        """[b, s, s], True for tokens of two documents that do not see each other."""
        if self.config["documents"] == "crossed":
            return None
        documents = self.tensors["in.documents"]
        return documents.unsqueeze(1) != documents.unsqueeze(2)

    @property
    def positions(self) -> Tensor:
        """[b, s]."""
        ids = self.tensors["in.tokens"]
        places = torch.arange(ids.shape[1]).expand_as(ids)
        if self.config["documents"] == "crossed":
            return places
        documents = self.tensors["in.documents"]
        starts = torch.where(documents != documents.roll(1, 1), places, 0)
        starts[:, 0] = 0
        return places - starts.cummax(1).values


def address_of(config: dict[str, Any]) -> NgramAddressConfig | None:
    recorded = config["addresses"]
    if recorded is None:
        return None
    if recorded["hash"] == "xor":
        return NgramAddressConfig(rules="xor", num_rows=recorded["rows"])
    orders = [slot["order"] for slot in recorded["slots"]]
    return NgramAddressConfig(max_order=max(orders), heads_per_order=orders.count(2), num_rows=recorded["rows_asked"])


def move_of(config: dict[str, Any]) -> MemoryConfig:
    return MoveConfig(
        num_slots=config["slots"],
        value_dim=config["kv_heads"] * config["head_dim"],
        num_gate_heads=config["kv_heads"],
        address=address_of(config),
    )


def set_move(case: Case) -> None:
    """Gates are recorded as [D, g (M + 1)]."""
    learn(case, "table", [case.banks[0].get_parameter("values")], lambda table: table.unsqueeze(0))
    learn(case, "WG", [layer.gate_proj for layer in case.layers], lambda gates: gates.transpose(1, 2))


def value_ngrams_of(config: dict[str, Any]) -> MemoryConfig:
    return ValueNgramsConfig(
        address=address_of(config),
        value_dim=config["slot_width"],
        into="one_head" if config["into"] == "one head" else "all_heads",
        gate_channels=config["gate_channels"],
        gate_bias=config["gate_bias"],
    )


def set_value_ngrams(case: Case) -> None:
    """One recorded table has the columns of all layers, side by side."""
    tables = [bank.get_parameter("values") for bank in case.banks]
    learn(case, "table", tables, lambda table: torch.stack(table.chunk(len(tables), 1)))
    learn(case, "gate", [layer.gate for layer in case.layers], lambda gates: gates.unsqueeze(1))
    if case.config["gate_bias"]:
        learn(case, "gate_bias", [layer.gate_bias for layer in case.layers], lambda biases: biases.view(-1, 1))
    if case.config["into"] == "all heads":
        learn(case, "up", [layer.up_proj for layer in case.layers], lambda ups: ups.transpose(1, 2))


def mome_of(config: dict[str, Any]) -> MemoryConfig:
    return MomeConfig(
        num_heads=config["kv_heads"],
        num_slots=config["slots"],
        active_slots=config["active"],
        value_dim=config["head_dim"],
        router_input=config["router_input"],
        gate_channels=config["gate_channels"],
        one_table=config["one_table"],
        vocab_size=config["vocab"] if config["addresses"] is None else None,
        address=address_of(config),
    )


def set_mome(case: Case) -> None:
    """Routers are recorded as [D, g M]."""
    learn(case, "table", [bank.get_parameter("values") for bank in case.banks], lambda tables: tables)
    learn(case, "router", [layer.router for layer in case.layers], lambda routers: routers.transpose(1, 2))
    learn(case, "router_bias", [layer.router_bias for layer in case.layers], lambda biases: biases)
    learn(case, "value_gate", [layer.gate for layer in case.layers], lambda gates: gates.transpose(1, 2))


def learn(case: Case, name: str, parameters: list[nn.Parameter], ours: Callable[[Tensor], Tensor]) -> None:
    """Give parameters recorded weights, of which `ours` makes one of each, and remember how to compare gradients."""
    recorded = case.leaves[name]
    with torch.no_grad():
        for parameter, weight in zip(parameters, ours(recorded), strict=True):
            parameter.copy_(weight)
    # A function of what is recorded that is linear and of one element each: its gradient is the other way round.
    views = ours(recorded)

    def back() -> Tensor:
        found = torch.stack([parameter.grad for parameter in parameters if parameter.grad is not None])
        assert len(found) == len(parameters)
        (gradient,) = torch.autograd.grad(views, recorded, found)
        return gradient

    case.config.setdefault("gradients", {})[name] = back


CASES: dict[str, tuple[Callable[[dict[str, Any]], MemoryConfig], Callable[[Case], None]]] = {
    "move_bigrams": (move_of, set_move),
    "value_ngrams_gated": (value_ngrams_of, set_value_ngrams),
    "value_ngrams_one_head": (value_ngrams_of, set_value_ngrams),
    "value_ngrams_documents_isolated": (value_ngrams_of, set_value_ngrams),
    "mome_tokens": (mome_of, set_mome),
    "mome_bigrams": (mome_of, set_mome),
}


@pytest.mark.parametrize("kernels", ["auto", "naive"])
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("name", CASES)
def test_values_are_as_recorded(
    golden_dir: Path, name: str, dtype: torch.dtype, kernels: Literal["auto", "naive"]
) -> None:
    config, tensors = read_case(golden_dir / "ngram", name)
    memory_of, set_weights = CASES[name]
    memory = memory_of(config)
    of_megatron = megatron({"d": config["width"], "H": config["heads"]}, dtype)
    of_megatron.num_query_groups = config["kv_heads"]
    layers, banks = build_memory(memory, of_megatron, config["layers"], kernels)
    case = Case(config, tensors, memory, layers, banks, recorded_weights(tensors, dtype))
    set_weights(case)
    leaves, inputs = case.leaves, case.layers[0].alone(Inputs(pack(tensors["in.tokens"], case.positions)))
    outputs = []
    for index, layer in enumerate(case.layers):
        x = leaves["x"][index]
        query = split_heads(x @ leaves["WQ"][index], config["heads"])
        key = split_heads(x @ leaves["WK"][index], config["kv_heads"])
        # Ours is [s, b, g, d].
        values = (x @ leaves["WV"][index]).unflatten(2, (config["kv_heads"], -1)).transpose(0, 1)
        changed = layer(values, inputs, x.transpose(0, 1)).permute(1, 2, 0, 3)
        outputs.append(attend(query, key, changed, case.apart) @ leaves["WO"][index])
    out = torch.stack(outputs)
    (out * tensors["r"].to(dtype)).sum().backward()
    back: dict[str, Callable[[], Tensor]] = config["gradients"]
    gradients = {name: back[name]() if name in back else leaf.grad for name, leaf in leaves.items()}
    check(out, gradients, tensors)
