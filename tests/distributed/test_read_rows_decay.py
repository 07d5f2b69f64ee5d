"""A weight decay of tables whose updates touch the rows that were read alone: that of dense gradients, on every layout, and the
same run after a resume.

Dense gradients decay every row in every step, so they are the oracle; their own is in `test_row_wise.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from test_checkpoint_layouts import read_all
from test_layouts import shards
from test_read_rows import LAYOUTS, MODELS, config_of
from test_stored_tables import on_samples
from tiny_runs import TinyRun, build, joined, on, save_run, tiny_run
from torch import Tensor

from kernels.common import table_scale
from kernels.common.row_gradient import DistinctRows
from kernels.common.table_scale import FOLD, TableScale, scale_of
from megamem.parameters.shards import walk_shards
from pretrain.checkpoint.derived import SCALE_PREFIX, main_name
from pretrain.checkpoint.run_entries import load_weights
from pretrain.config.schema import RunConfig
from pretrain.config.validate import validate
from pretrain.convert.listing import native_listing
from pretrain.convert.native.format import NativeFormat
from pretrain.engine.tables.row_gradients import row_gradient_of
from tests.rotation import in_rotation

# 1.2e-6 on one processor, less on others: products round as their libraries choose.
NUM_STEPS, TOLERANCE = 5, 3e-6
# With rates of 6e-3 at most: a row keeps 0.9 of itself.
DECAY = 5.0
# Gates of n-grams take the root of a product, whose slope has no bound at zero: roundings grow tenfold in a few steps.
OF_ENGRAM, ENGRAM_DECAY = (4, 1e-5), 2.0
KINDS = {
    # Each way to read a table: learned keys with pre-values, blocks, n-grams, values of attention.
    "one rank": ("shared", "ultramem", "engram, ple", "move"),
    # One of each update on each layout: `test_read_rows.py` has the others, without a decay.
    "one rank, two microbatches, recomputed": ("ultramem",),
    "memory 2 of rows": ("shared",),
    "tensor 2 x memory 4, 2 of rows": ("shared",),
    "pipeline 2 x virtual 2 x memory 2": ("private",),
    "context 2 x memory 2": ("two families",),
    "pipeline 2": ("tide", "move, unevenly"),
}


def decayed(
    kind: str, way: Literal["dense", "rows"], precision: Literal["fp32", "bf16"] = "fp32", **optimizer: Any
) -> RunConfig:
    config = config_of(MODELS[kind], way, precision)
    return replace(config, optimizer=replace(config.optimizer, value_weight_decay=decay_of(kind), **optimizer))


def weights_of(run: TinyRun) -> dict[str, Tensor]:
    """This rank's weights as they are meant."""
    found = {}
    for number, chunk in enumerate(run.bare):
        for name, parameter in chunk.named_parameters():
            scale = scale_of(parameter)
            found[f"{number} {name}"] = parameter.detach().double() * (1 if scale is None else scale.value)
    return found


def has_engram(kind: str) -> bool:
    return kind.startswith("engram") or kind == "two families"


def decay_of(kind: str) -> float:
    return ENGRAM_DECAY if has_engram(kind) else DECAY


def steps_and_tolerance(kind: str) -> tuple[int, float]:
    return OF_ENGRAM if has_engram(kind) else (NUM_STEPS, TOLERANCE)


def scales_of(run: TinyRun) -> list[float]:
    found = [scale_of(table) for chunk in run.bare for bank in chunk.own_banks for table in bank.parameters()]
    return [scale.value for scale in found if scale is not None]


def apart(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """The largest difference between tensors, as a part of the largest element of each."""
    assert one.keys() == other.keys()
    return max(float((one[key] - other[key]).abs().max() / one[key].abs().max().clamp(min=1e-30)) for key in one)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_rows_decay_as_dense_gradients_have_them(run_ranks: Any, num_ranks: int) -> None:
    cases = [(layout, kind) for layout, kinds in KINDS.items() for kind in kinds if LAYOUTS[layout][0] == num_ranks]

    def main() -> dict[tuple[str, str], tuple[float, float, list[float]]]:
        found = {}
        for layout, kind in in_rotation(cases, 2):
            configs = [on(decayed(kind, way), **LAYOUTS[layout][1]) for way in ("dense", "rows")]
            validate(configs[1], num_ranks)
            with joined(configs[0]) as groups:
                runs = [build(config, groups) for config in configs]
                num_steps, _ = steps_and_tolerance(kind)
                dense, rows = (torch.tensor(run.train(num_steps), dtype=torch.float64) for run in runs)
            assert not scales_of(runs[0])
            of_steps = float((rows / dense - 1).abs().max())
            found[layout, kind] = of_steps, apart(*map(weights_of, runs)), scales_of(runs[1])
        return found

    for by_case in run_ranks(main, num_ranks):
        assert by_case
        for (layout, kind), (of_steps, of_weights, scales) in by_case.items():
            num_steps, tolerance = steps_and_tolerance(kind)
            assert max(of_steps, of_weights) < tolerance, (layout, kind)
            assert scales
            assert all(0.8 < scale < (0.95 if num_steps == NUM_STEPS else 1) for scale in scales)


def test_a_scale_leaves_the_rest_of_its_size_to_the_rows() -> None:
    scale, stored = TableScale(), 1.0
    for step in range(1, 200):
        fold = scale.decay(0.5)
        stored *= 1 if fold is None else fold
        assert FOLD <= scale.value <= 1
        # Powers of two: exact.
        assert stored * scale.value == 0.5**step
    # Several at once.
    assert scale.decay(2.0**-70) in (FOLD**2, FOLD**3)


def test_a_fold_changes_no_bits(run_ranks: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Steps that fold, as others would do after 2^32: in bf16 and fp32, on the device and in files."""

    def main() -> list[tuple[object, dict[str, Tensor], list[float]]]:
        found = []
        for precision, folder in (("bf16", None), ("fp32", None), ("bf16", str(tmp_path))):
            for fold in (FOLD, 0.5):
                monkeypatch.setattr(table_scale, "FOLD", fold)
                # A third of a row stays in a step.
                config = decayed("engram", "rows", precision, table_folder=folder, value_lr=0.01)
                config = replace(config, optimizer=replace(config.optimizer, value_weight_decay=67.0))
                with joined(config) as groups:
                    run = on_samples(config, groups)
                    found.append((str(run.train(2)), weights_of(run), scales_of(run)))
        return found

    (found,) = run_ranks(main, 1)
    for plain, folded in zip(found[::2], found[1::2], strict=True):
        assert plain[0] == folded[0]
        assert [name for name, weight in plain[1].items() if not torch.equal(weight, folded[1][name])] == []
        assert all(one < 0.2 and other > 0.5 for one, other in zip(plain[2], folded[2], strict=True))


def test_a_resumed_run_is_the_straight_one_and_others_read_the_weights(run_ranks: Any, tmp_path: Path) -> None:
    """By itself to the bit; by dense gradients, AdamW and readers of weights to the rounding of scale times row."""
    rows, dense = (decayed("shared", way) for way in ("rows", "dense"))
    adamw = replace(dense, optimizer=replace(dense.optimizer, tables="adamw", table_gradients="dense"))
    copied = replace(rows, checkpoint=replace(rows.checkpoint, weights_copy=True))
    at = "step_00000004"

    def main() -> list[str]:
        wrong = []
        for config, name in ((rows, "rows"), (dense, "dense")):
            with tiny_run(config) as run:
                run.train(4)
                run.save(tmp_path / name)
                if config is rows:
                    save_run(copied, run.run.state, run.chunks, run.optimizer, tmp_path / "copied")
                    weights = weights_of(run)
                    steps, after = run.train(2), weights_of(run)
        for saved, config, exact in (
            ("rows", rows, True),
            ("copied", rows, True),
            ("rows", dense, False),
            ("copied", adamw, False),
            ("dense", rows, False),
        ):
            with tiny_run(config) as run:
                run.resume(tmp_path / saved / at)
                bound = 0 if exact else TOLERANCE
                if apart(weights, weights_of(run)) > bound:
                    wrong.append(f"{saved} loaded for {config.optimizer.tables} {config.optimizer.table_gradients}")
                if config.optimizer.tables == "row_wise":
                    again = run.train(2)
                    if apart(after, weights_of(run)) > bound or (exact and again != steps):
                        wrong.append(f"{saved} gone on with by {config.optimizer.table_gradients}")
        for saved in ("rows", "copied"):
            with tiny_run(adamw) as run:
                load_weights(tmp_path / saved / at, run.bare)
                parts = shards(run.bare)
                if apart(weights, weights_of(run)) > TOLERANCE:
                    wrong.append(f"weights of {saved}")
            reader = NativeFormat().open(tmp_path / saved / at, None, None).reader
            listed = native_listing(tmp_path / saved / at, None).tensors
            assert listed.keys() == reader.tensors.keys()
            for shard in parts:
                for name in (shard.key, main_name(shard.key)) if shard.key.startswith("banks.") else ():
                    found = reader.read(reader.tensors[name].whole(name))
                    if apart({name: shard.data}, {name: found}) > TOLERANCE:
                        wrong.append(f"{name} of {saved}")
        return wrong

    assert run_ranks(main, 1) == [[]]
    stored = read_all(tmp_path / "rows" / at)
    scales = {name: float(tensor) for name, tensor in stored.items() if name.startswith(SCALE_PREFIX)}
    assert len(scales) == 4
    assert all(0.9 < scale < 1 for scale in scales.values())

    def elsewhere() -> None:
        with tiny_run(on(rows, memory=2, micro_batch_size=2)) as run:
            run.resume(tmp_path / "rows" / at)
            run.save(tmp_path / "elsewhere")

    run_ranks(elsewhere, 2)
    again = read_all(tmp_path / "elsewhere" / at)
    assert again.keys() == stored.keys()
    assert [name for name in stored if not torch.equal(stored[name], again[name])] == []


def test_in_bf16_dense_and_rows_are_as_far_apart_as_their_roundings(run_ranks: Any) -> None:
    """Both are the exact updates in the mean. A stochastic rounding of w moves it by at most an ulp, 2^-7 of w, with a
    deviation of half of that, so one of T updates leaves sqrt(T) 2^-8 of w at most: of dense gradients all updates round, of
    rows those that read the row. A decay is less than half an ulp: rounded to nearest it would do nothing.
    """
    num_updates, lr, keep = 40, 1e-3, 1 - 2.0**-10

    def main() -> dict[str, list[Tensor]]:
        found: dict[str, list[Tensor]] = {}
        for way in ("dense", "rows"):
            config = config_of(MODELS["shared"], way, "bf16")
            with joined(config) as groups:
                run = build(config, groups)
                tables = {shard.key: table for table, shard in walk_shards([c.sharded_state_dict() for c in run.bare])}
                tables = {name: table for name, table in tables.items() if name.startswith("banks.")}
                before = {name: table.detach().double() for name, table in tables.items()}
                for update in range(num_updates):
                    for name, table in tables.items():
                        read, sums = planted(name, table.shape, update)
                        if (gradient := row_gradient_of(table)) is None:
                            table.main_grad.zero_().index_copy_(0, read, sums)  # type: ignore[attr-defined]
                        else:
                            gradient.read, gradient.sums = DistinctRows(read, None), sums
                    run.optimizer.prepare_grads()
                    for group in run.optimizer.param_groups:
                        group.update(lr=lr, weight_decay=(1 - keep) / lr)
                    run.optimizer.step_with_ready_grads()
                    run.run.complete_weights()
                for name, table in tables.items():
                    scale = scale_of(table)
                    weights = table.detach().double() * (1 if scale is None else scale.value)
                    found.setdefault(name, [*exact(name, before[name], config)]).append(weights)
        return found

    def exact(name: str, weights: Tensor, config: RunConfig) -> tuple[Tensor, Tensor, Tensor]:
        """Weights in fp64, and variances of their roundings: of all updates, and of those that read a row."""
        beta2, epsilon = config.optimizer.beta2, config.optimizer.epsilon
        moments = torch.zeros(len(weights), 1, dtype=torch.float64)
        of_dense, of_rows = torch.zeros_like(weights), torch.zeros_like(weights)
        for update in range(num_updates):
            read, sums = planted(name, weights.shape, update)
            gradient = torch.zeros_like(weights).index_copy_(0, read, sums.double())
            moments = beta2 * moments + (1 - beta2) * gradient.square().mean(1, keepdim=True)
            rms = (moments / (1 - beta2 ** (update + 1))).sqrt() + epsilon
            weights = keep * weights - lr * gradient / rms
            rounding = (2.0**-8 * weights).square()
            is_read = torch.zeros(len(weights), 1, dtype=torch.float64).index_fill_(0, read, 1)
            of_dense, of_rows = keep**2 * of_dense + rounding, keep**2 * of_rows + is_read * rounding
        return weights, of_dense, of_rows

    def planted(name: str, shape: Sequence[int], update: int) -> tuple[Tensor, Tensor]:
        """A quarter of the rows of a table, and their gradients."""
        generator = torch.Generator().manual_seed(1000 * len(name) + sum(map(ord, name)) + 7919 * update)
        read = torch.randperm(shape[0], generator=generator)[: shape[0] // 4].sort().values
        return read, torch.randn(len(read), shape[1], generator=generator)

    (found,) = run_ranks(main, 1)
    together = [torch.cat([each.flatten() for each in parts]) for parts in zip(*found.values(), strict=True)]
    weights, of_dense, of_rows, dense, rows = together
    for apart_by, variance in (
        (dense - weights, of_dense),
        (rows - weights, of_rows),
        (dense - rows, of_dense + of_rows),
    ):
        some = variance > 0
        deviations = (apart_by * weights.sign())[some] / variance[some].sqrt()
        # A mean of so many independent ones of deviation 1, at four sigma.
        assert abs(float(deviations.mean())) < 4 / len(deviations) ** 0.5
        assert 0.1 < float(deviations.square().mean()) < 1
