"""Rows by their own clock (`optimizer.row_clock: reads`): one rank's run on other layouts, in files and after a resume.

Their formula is in `tests/unit/test_row_clock_golden.py`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from test_read_rows import MODELS, config_of
from test_stored_tables import on_samples, steps_on_layouts
from tiny_runs import TinyRun, joined, tiny_run
from torch import Tensor

from kernels.common.table_scale import scale_of
from megamem.parameters.shards import walk_shards
from pretrain.config.schema import RunConfig
from tests.rotation import in_rotation

NUM_STEPS = 4
KINDS = {
    "tensor 2 x memory 4, 2 of rows": "private",
    "pipeline 2": "move",
    "context 2 x memory 2": "move by n-grams",
    "pipeline 2 x data 2": "move",
    "data 4 x memory 2 of rows": "private",
}


def by_reads(kind: str, precision: Literal["fp32", "bf16"] = "fp32", **optimizer: Any) -> RunConfig:
    """A run whose rows lose a tenth when they are read."""
    config = config_of(MODELS[kind], "rows", precision)
    settings = replace(config.optimizer, row_clock="reads", row_beta2=0.8, value_weight_decay=0.1, **optimizer)
    return replace(config, optimizer=settings)


def tables_of(run: TinyRun) -> dict[str, Tensor]:
    """This rank's parts of tables, by name and place."""
    found = {}
    for table, leaf in walk_shards([chunk.sharded_state_dict() for chunk in run.bare]):
        if leaf.key.startswith("banks."):
            scale = scale_of(table)
            assert scale is not None
            assert scale.value == 1, "the decay is that of rows"
            found[f"{leaf.key} {leaf.global_offset}"] = table.detach().clone()
    return found


@pytest.mark.parametrize("num_ranks", in_rotation([2, 4], 2))
def test_every_layout_takes_the_steps_of_one_rank(run_ranks: Any, num_ranks: int) -> None:
    steps_on_layouts(run_ranks, num_ranks, KINDS, by_reads, NUM_STEPS)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_files_and_a_resume_change_no_bits(run_ranks: Any, tmp_path: Path, precision: Literal["fp32", "bf16"]) -> None:
    on_device = by_reads("move by n-grams", precision)
    in_files = by_reads("move by n-grams", precision, table_folder=str(tmp_path))

    def main() -> list[str]:
        with joined(on_device) as groups:
            runs = [on_samples(config, groups) for config in (on_device, in_files)]
            straight, filed = (str(run.train(NUM_STEPS)) for run in runs)
        wrong = [] if straight == filed else [f"steps in files: {filed}, not {straight}"]
        with tiny_run(on_device) as run:
            steps = run.train(2)
            run.save(tmp_path / "saved")
            steps += run.train(2)
            expected = tables_of(run)
        with tiny_run(on_device) as run:
            run.resume(tmp_path / "saved" / "step_00000002")
            again = run.train(2)
            found = tables_of(run)
        wrong += [] if again == steps[2:] else [f"steps of a resumed run: {again}, not {steps[2:]}"]
        return wrong + [name for name in expected if not torch.equal(expected[name], found[name])]

    assert run_ranks(main, 1) == [[]]
