"""A bank has the tables that its family says, whichever they are."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from kernels.select import select_kernels
from megamem.banks.bank import Bank, Columns
from megamem.config.memory import LookupShape, MemoryConfig, Table
from megamem.placement.sharing import BankSpec, LayerView, SharingPlan, common_bank, private_banks


@dataclass(frozen=True)
class OwnConfig(MemoryConfig):
    """Three tables, all of one vocabulary."""

    kind: str = "own"

    @property
    def tables(self) -> tuple[Table, ...]:
        return tuple(Table(f"expert_{index}", 4 * (index + 1), "width") for index in range(3))

    @property
    def lookup(self) -> LookupShape:
        return LookupShape(1)

    def plan(self, num_layers: int) -> SharingPlan:
        return common_bank(7, num_layers)


@pytest.mark.parametrize("parts", [1, 2])
def test_tables_have_the_names_and_widths_of_the_config(parts: int) -> None:
    memory = OwnConfig()
    (spec,) = memory.plan(2).banks
    bank = Bank(
        spec,
        memory,
        select_kernels("naive"),
        dtype=torch.float32,
        device="cpu",
        replica_rank=0,
        columns=Columns(parts - 1, parts),
    )
    widths = {"expert_0": 4, "expert_1": 8, "expert_2": 12}
    assert {name: tuple(table.shape) for name, table in bank.named_parameters()} == {
        name: (7, width // parts) for name, width in widths.items()
    }
    entries = bank.sharded_state_dict(prefix="banks.0.")
    assert {entry.key: entry.global_shape for entry in entries.values()} == {
        f"banks.0.{name}": (7, width) for name, width in widths.items()
    }
    assert (memory.row_width, memory.width("expert_1"), memory.width("values")) == (24, 8, 0)


def test_a_layer_reads_the_tables_that_it_names() -> None:
    memory = OwnConfig()
    (spec,) = memory.plan(2).banks
    bank = Bank(spec, memory, select_kernels("naive"), dtype=torch.float64, device="cpu", replica_rank=0)
    g = torch.Generator().manual_seed(1)
    for table in bank.parameters():
        table.data.copy_(torch.randn(table.shape, generator=g))
    expert_1, expert_2 = bank.get_parameter("expert_1"), bank.get_parameter("expert_2")
    rows, scores = torch.tensor([[6, 0, 6]]), torch.tensor([[[1.0], [2.0], [-0.5]]], dtype=torch.float64)
    x = torch.randn(1, 12, generator=g, dtype=torch.float64)
    weights = [float(scores[0, j]) for j in range(3)]
    summed = sum(weight * expert_1[row] for weight, row in zip(weights, rows[0], strict=True))
    paired = sum(weight * (expert_2[row] @ x[0]) * expert_1[row] for weight, row in zip(weights, rows[0], strict=True))
    assert torch.allclose(bank.read(rows, scores, None, values="expert_1"), summed, rtol=1e-12)
    found = bank.read(rows, scores, x, values="expert_1", pre_values="expert_2")
    assert torch.allclose(found, paired, rtol=1e-12)


def test_banks_of_any_number_of_rows() -> None:
    assert private_banks(7, 2).banks == (BankSpec(0, 7, (0,)), BankSpec(1, 7, (1,)))
    assert private_banks(7, 2).views == (LayerView(0, 0, 7, 7), LayerView(1, 0, 7, 7))
    assert common_bank(7, 2).banks == (BankSpec(0, 7, (0, 1)),)
    assert common_bank(7, 2).views == (LayerView(0, 0, 7, 7), LayerView(0, 0, 7, 7))
