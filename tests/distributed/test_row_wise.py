"""Tables updated by row are the same bits on every layout, in bf16 with stochastic rounding too.

Gradients are planted after the reduction, as multiples of 2^-8 whose squares add up without rounding: what then differs
between layouts is the update's own doing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from test_checkpoint_layouts import read_all
from test_layouts import shards
from tiny_runs import MEMORY, SHARED, TinyRun, on, tiny_run
from torch import Tensor

from megamem.placement.sharing import SharingConfig
from pretrain.config.schema import RunConfig
from pretrain.engine.tables.row_wise import RowWise

NUM_STEPS = 3
LR, DECAY, BETA2, EPSILON = 0.01, 0.3, 0.9, 1e-4


def by_row(config: RunConfig, precision: Literal["fp32", "bf16"]) -> RunConfig:
    optimizer = replace(config.optimizer, tables="row_wise", beta2=BETA2, epsilon=EPSILON)
    return replace(config, optimizer=optimizer, train=replace(config.train, precision=precision))


# Rows and widths by which ranges of replicas end within rows.
MEMORY = replace(MEMORY, num_keys=13, value_dim=28, pre_value_dim=44, sharing=SharingConfig("block", 2))
ODD = replace(SHARED, model=replace(SHARED.model, memory=MEMORY))
LAYOUTS: dict[str, tuple[int, dict[str, int]]] = {
    "memory 2": (2, {"memory": 2}),
    "data 4": (4, {}),
    "pipeline 2 x data 2": (4, {"pipeline": 2}),
    "tensor 2 x data 2 x memory 4, 2 of rows": (4, {"tensor": 2, "memory": 4, "memory_rows": 2}),
    "data 8 x memory 2 of rows": (8, {"memory": 2, "memory_rows": 2}),
    "pipeline 2 x tensor 2 x data 2 x memory 2": (8, {"pipeline": 2, "tensor": 2, "memory": 2}),
}
WITH_CUT_ROWS = {name for name in LAYOUTS if "data" in name and "memory 4" not in name}


def planted(shape: tuple[int, ...], step: int) -> Tensor:
    """A whole table's gradient: a row in three is 0, as if it had not been read."""
    generator = torch.Generator().manual_seed(step)
    gradient = torch.randint(-8, 9, shape, generator=generator) * 2.0**-8
    return gradient * (torch.randint(0, 3, shape[:1], generator=generator) > 0).unsqueeze(1)


def last_read(shape: tuple[int, ...], row: int) -> float:
    """Number of the last update in which a row's planted gradient is not 0; 0: none."""
    return max([step + 1 for step in range(NUM_STEPS) if planted(tuple(shape), step)[row].any()], default=0)


def update(run: TinyRun, step: int) -> None:
    """One update of the tables, with planted gradients."""
    run.update(lambda key, shape: planted(shape, step) if key.startswith("banks.") else None, lr=LR, weight_decay=DECAY)


@dataclass(frozen=True)
class Outcome:
    """Results of a rank.

    Attributes:
        num_cut: rows that several replicas own parts of.
        num_rows: rows that the rank has state of.
    """

    num_cut: int
    num_rows: int


def updated(config: RunConfig, folder: Path) -> Outcome:
    with tiny_run(config) as run:
        for step in range(NUM_STEPS):
            update(run, step)
        run.save(folder)
        rules = [rule for rule in run.optimizer.rules if isinstance(rule, RowWise)]
        return Outcome(sum(rule.num_cut for rule in rules), sum(rule.num_rows for rule in rules))


def tables_in(folder: Path) -> dict[str, Tensor]:
    tensors = read_all(folder / "step_00000000")
    return {name: tensor for name, tensor in tensors.items() if ".banks." in name}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_every_layout_has_the_bits_of_one_rank(
    run_ranks: Any, tmp_path: Path, precision: Literal["fp32", "bf16"]
) -> None:
    config = by_row(ODD, precision)
    run_ranks(lambda: updated(config, tmp_path / "one"), 1)
    expected = tables_in(tmp_path / "one")
    dtypes = {tensor.dtype for key, tensor in expected.items() if ".param." in key}
    assert dtypes == {torch.bfloat16 if precision == "bf16" else torch.float32}
    cut: dict[str, int] = {}
    # Which rows are cut does not follow from their dtype, and neither do bits of eight ranks that four could not have.
    tried = [name for name, (size, _) in LAYOUTS.items() if precision == "fp32" or size < 8]
    for num_ranks in sorted({LAYOUTS[name][0] for name in tried}):
        names = [name for name in tried if LAYOUTS[name][0] == num_ranks]

        def main(names: list[str] = names) -> list[Outcome]:
            return [updated(on(config, micro_batch_size=1, **LAYOUTS[name][1]), tmp_path / name) for name in names]

        by_rank = run_ranks(main, num_ranks)
        cut |= {name: max(of_rank[index].num_cut for of_rank in by_rank) for index, name in enumerate(names)}
    for name in cut:
        actual = tables_in(tmp_path / name)
        assert actual.keys() == expected.keys()
        different = [key for key in expected if not torch.equal(actual[key], expected[key])]
        assert not different, name
    assert {name for name, num in cut.items() if num} == WITH_CUT_ROWS & cut.keys()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_one_rank_is_the_formula_in_fp64(run_ranks: Any, tmp_path: Path, precision: Literal["fp32", "bf16"]) -> None:
    def main() -> dict[str, Tensor]:
        with tiny_run(by_row(ODD, precision)) as run:
            before = {shard.key: shard.data for shard in shards(run.bare) if shard.key.startswith("banks.")}
        updated(by_row(ODD, precision), tmp_path)
        return before

    (before,) = run_ranks(main, 1)
    after = tables_in(tmp_path)
    for name, initial in before.items():
        weight, square = initial.double(), torch.zeros(initial.shape[0], 1, dtype=torch.float64)
        largest = weight.abs()
        for step in range(NUM_STEPS):
            gradient = planted(tuple(initial.shape), step).double()
            square = BETA2 * square + (1 - BETA2) * gradient.square().mean(1, keepdim=True)
            root = (square / (1 - BETA2 ** (step + 1))).sqrt()
            weight = weight - LR * DECAY * weight - LR * gradient / (root + EPSILON)
            largest = torch.maximum(largest, weight.abs())
        actual = after[f"optimizer.state.param.{name}"].double()
        moments = after[f"optimizer.state.row_exp_avg_sq.{name}"].double()
        last_updates = after[f"optimizer.state.row_last_update.{name}"]
        assert torch.equal(last_updates, torch.tensor([last_read(initial.shape, row) for row in range(len(initial))]))
        assert torch.allclose(moments * BETA2 ** (NUM_STEPS - last_updates), square.squeeze(1), rtol=1e-6, atol=0)
        if precision == "fp32":
            assert torch.allclose(actual, weight, rtol=1e-6, atol=1e-8)
        else:
            # Three roundings, each by less than a last bit, whose mean is 0.
            errors = (actual - weight) / torch.ldexp(torch.ones_like(weight), torch.frexp(largest)[1] - 8)
            assert 0.1 < float(errors.abs().max()) < 2 * NUM_STEPS
            assert abs(float(errors.mean())) < 5 * float(errors.std()) / errors.numel() ** 0.5


def test_a_resumed_run_rounds_the_same_way(run_ranks: Any, tmp_path: Path) -> None:
    """To the bit, with a rounding of another update for every step."""
    config = on(by_row(ODD, "bf16"), micro_batch_size=2, memory=2)

    def main() -> tuple[list[str], bool]:
        with tiny_run(config) as run:
            run.train(2)
            run.save(tmp_path)
            run.train(2)
            straight = {shard.key: shard.data for shard in shards(run.bare)}
        with tiny_run(config) as run:
            run.resume(tmp_path / "step_00000002")
            before = {shard.key: shard.data for shard in shards(run.bare)}
            run.train(2)
            resumed = {shard.key: shard.data for shard in shards(run.bare)}
        moved = all(not torch.equal(resumed[key], before[key]) for key in before if key.startswith("banks."))
        return [key for key in straight if not torch.equal(straight[key], resumed[key])], moved

    assert run_ranks(main, 2) == [([], True)] * 2


def test_another_update_goes_on_with_what_there_is_of_the_state(run_ranks: Any, tmp_path: Path) -> None:
    """AdamW's tables become rows' on another layout, and elements' again on a third; other parameters keep all."""
    rows = by_row(ODD, "bf16")
    elements = replace(rows, optimizer=replace(rows.optimizer, tables="adamw"))

    def train() -> None:
        with tiny_run(elements) as run:
            run.train(2)
            run.save(tmp_path / "elements")

    def change(config: RunConfig, source: str, target: str) -> None:
        with tiny_run(config) as run:
            # Nothing of these may be left.
            for optimizer in run.optimizer.chained_optimizers:
                for state in optimizer.device_state():
                    state.detach().fill_(7.0)
            run.resume(tmp_path / source / "step_00000002")
            assert {share.num_updates for rule in run.optimizer.rules for share in rule.shares} <= {2}
            run.save(tmp_path / target)

    run_ranks(train, 1)
    to_rows = on(rows, micro_batch_size=1, memory=4, memory_rows=2)
    run_ranks(lambda: change(to_rows, "elements", "rows"), 4)
    run_ranks(lambda: change(on(elements, memory=2), "rows", "elements again"), 2)
    before, by_rows, after = (
        read_all(tmp_path / name / "step_00000002") for name in ("elements", "rows", "elements again")
    )
    assert before.keys() == after.keys()
    tables = {name.removeprefix("optimizer.state.param.") for name in before if ".param.banks." in name}
    assert len(tables) == 4
    others = {name for name in before if not name.endswith(tuple(tables))}
    assert all(torch.equal(before[name], by_rows[name]) and torch.equal(before[name], after[name]) for name in others)
    for name in tables:
        main, first, second = (f"optimizer.state.{part}.{name}" for part in ("param", "exp_avg", "exp_avg_sq"))
        assert torch.equal(by_rows[main], before[main].bfloat16())
        assert torch.equal(after[main], by_rows[main].float())
        row = by_rows[f"optimizer.state.row_exp_avg_sq.{name}"]
        assert torch.equal(by_rows[f"optimizer.state.row_last_update.{name}"], torch.where(row > 0, 2.0, 0.0))
        assert row.any()
        assert torch.allclose(row.double(), before[second].double().mean(1), rtol=1e-6, atol=0)
        assert torch.equal(after[second], row.unsqueeze(1).expand_as(after[second]))
        assert before[first].any()
        assert not after[first].any()
