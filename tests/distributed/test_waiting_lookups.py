"""Lookups of layers that share tables, in training: added up once per table and backward pass, with the same bits."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from tiny_runs import SHARED, on, tiny_run
from torch import Tensor

from kernels.common.joined_lookups import Lookup
from kernels.common.main_grad import MainGradient
from megamem.placement.sharing import SharingConfig
from pretrain.config.schema import RunConfig
from tests.distributed.conftest import RunRanks

RING = replace(
    SHARED,
    model=replace(
        SHARED.model,
        memory=replace(SHARED.model.memory, sharing=SharingConfig(pattern="ring", group=2)),  # type: ignore[type-var]
    ),
)
# Tables of the model are values and pre-values of two banks, or of one ring; a step has two microbatches.
CASES: dict[str, tuple[RunConfig, int, int]] = {
    "two layers share": (SHARED, 8, 16),
    "all layers share": (RING, 4, 16),
    "blocks are computed again": (on(SHARED, recompute="full"), 16, 16),
}


@pytest.mark.parametrize("name", CASES)
def test_a_table_is_added_to_once_per_backward_pass(run_ranks: RunRanks, name: str) -> None:
    config, num_waiting, num_each = CASES[name]

    def main() -> tuple[tuple[int, list[Tensor]], tuple[int, list[Tensor]]]:
        additions: Counter[str] = Counter()
        add = MainGradient._add

        def counted(gradient: MainGradient, lookup: Lookup) -> None:
            additions["all"] += 1
            add(gradient, lookup)

        def gradients() -> tuple[int, list[Tensor]]:
            additions.clear()
            with tiny_run(config) as run:
                run.train(1)
                tables = [table for bank in run.bare[0].own_banks for table in bank.parameters()]
                return additions["all"], [table.detach().clone() for table in tables]

        with patch.object(MainGradient, "_add", counted):
            waiting = gradients()
            with patch("pretrain.engine.build.add_after_last_lookup"):
                return waiting, gradients()

    ((waiting, tables), (each, expected)) = run_ranks(main, 1)[0]
    assert (waiting, each) == (num_waiting, num_each)
    assert len(tables) == len(expected) > 0
    for table, other in zip(tables, expected, strict=True):
        assert torch.equal(table, other)
