"""Updates of the rows that were read by their own clock, against recorded tables and states."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kernels.common.row_gradient import DistinctRows, RowGradient
from kernels.common.table_gradient import give_gradient
from kernels.common.table_scale import TableScale, give_scale
from kernels.implementations import Implementation
from kernels.select import select_kernels
from pretrain.config.optimizer import OptimizerConfig
from pretrain.engine.tables.read_rows import ReadRows
from pretrain.engine.tables.row_wise import OwnedRectangle
from pretrain.engine.update_rules import Share
from tests.golden import OneRank, read_case

IMPLEMENTATIONS: tuple[Implementation, ...] = ("naive", "torch", "cpu")


class Table:
    """One layer's table, zero at first, and its rule."""

    def __init__(self, config: dict[str, Any], implementation: Implementation) -> None:
        table: Any = nn.Parameter(torch.zeros(config["rows"], config["width"]))
        self.gradient = RowGradient(*table.shape)
        give_gradient(table, self.gradient)
        give_scale(table, TableScale())
        group = {"lr": config["rate"], "weight_decay": config["decay"]}
        self.share = Share(table, 0, group, table.detach().view(-1), torch.empty(0))
        settings = OptimizerConfig(
            tables="row_wise",
            table_gradients="rows",
            row_clock="reads",
            row_beta2=config["beta"],
            epsilon=config["eps"],
        )
        kernels = select_kernels(implementation, device_type="cpu")
        alone: Any = SimpleNamespace(columns=OneRank(), replicas=OneRank())
        places = {table: OwnedRectangle("table", 0, 0, config["width"], kernels)}
        self.rule = ReadRows([self.share], [], settings=settings, seed=1, places=places, groups=alone)

    def step(self, rows: Tensor, sources: Tensor | None, sums: Tensor) -> None:
        self.gradient.read, self.gradient.sums = DistinctRows(rows, sources), sums
        self.rule.step()

    @property
    def weights(self) -> Tensor:
        return self.share.parameter.detach()


@pytest.mark.parametrize("as_on_gpu", [False, True])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_rows_that_were_read_move_as_recorded(
    golden_dir: Path, implementation: Implementation, as_on_gpu: bool
) -> None:
    """On a GPU the list has places behind the rows, which repeat the first."""
    config, tensors = read_case(golden_dir / "ngram", "row_wise_updates")
    tables = [Table(config, implementation) for _ in range(config["layers"])]
    for number in range(6):
        found = {name: tensors[f"step.{number}.{name}"] for name in ("touched", "grad", "table", "state")}
        num = len(found["touched"])
        sources = torch.tensor([*range(num), 0, 0]) if as_on_gpu else None
        rows = found["touched"] if sources is None else found["touched"][sources]
        for layer, table in enumerate(tables):
            sums = torch.zeros(len(rows), config["width"])
            sums[:num] = found["grad"][:, layer]
            table.step(rows, sources, sums)
            torch.testing.assert_close(table.weights.double(), found["table"][:, layer], rtol=2e-6, atol=1e-8)
            moments = table.rule.state_of(table.share)[0].double()
            torch.testing.assert_close(moments, found["state"][:, layer], rtol=1e-6, atol=0)
    # Rows that no step has read are as they began, whatever the decay.
    never = sorted(
        set(range(config["rows"])) - {row for n in range(6) for row in tensors[f"step.{n}.touched"].tolist()}
    )
    assert never
    assert not any(table.weights[never].any() for table in tables)
