"""Tables that are updated every few steps (`optimizer.tables_every`): where nothing else moves, an update is that of one step
on all tokens since the last one, to the bit; steps between leave tables and their gradients out.

The third step of four samples has no finite loss.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from test_read_rows import MODELS, REPLICAS, Trained, config_of, differences
from test_stored_tables import Samples, in_files, on_samples, steps_on_layouts, trained
from tiny_runs import joined, on, tiny_run

from megamem.attention.documents import DOCUMENT_BOUNDS, document_bounds
from pretrain.config.schema import RunConfig
from pretrain.config.validate import validate
from pretrain.engine.step import Batch
from tests.rotation import in_rotation, named_in_rotation

EVERY = 2
KINDS = {
    2: named_in_rotation({"pipeline 2": "move, unevenly", "context 2 x memory 2": "move by n-grams"}, 2),
    4: named_in_rotation(
        {
            "tensor 2 x memory 4, 2 of rows": "shared",
            "data 4 x memory 2 of rows": "private",
            "pipeline 2 x data 2": "move",
        }
    ),
}
"""Kinds by layouts, by numbers of ranks."""
# Without mome, whose routers begin with ties that the least step decides.
AT_ONCE = in_rotation(("two families", "move", "engram, ple", "residual n-grams"), 2)


def updated_every(kind: str, every: int, precision: Literal["fp32", "bf16"] = "fp32", **optimizer: Any) -> RunConfig:
    config = config_of(MODELS[kind], "rows", precision)
    return replace(config, optimizer=replace(config.optimizer, tables_every=every, **optimizer))


def of_samples(config: RunConfig, numbers: Iterable[int]) -> Iterator[Batch]:
    """Microbatches of four samples."""
    samples = Samples(config)
    wanted = [samples[number] for number in numbers]
    for first in range(0, len(wanted), 4):
        batch = {name: torch.stack([each[name] for each in wanted[first : first + 4]]) for name in wanted[0]}
        yield {**batch, DOCUMENT_BOUNDS: document_bounds(batch["position_ids"])}


def tables_behind(config: RunConfig, groups: Any, numbers: Iterable[int], num_steps: int) -> Trained:
    """Tables and their state behind steps on these samples."""
    run = on_samples(config, groups)
    run.batches = [of_samples(config, numbers)]
    found = trained(run, num_steps)
    return Trained([], {name: each for name, each in found.weights.items() if name.startswith("banks.")}, found.state)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_an_update_is_that_of_one_step_on_all_tokens(run_ranks: Any, precision: Literal["fp32", "bf16"]) -> None:
    """Other weights stand still; a step that is skipped leaves what waits as it is, and adds nothing."""
    still = {"lr": 1e-30, "min_lr": 1e-30, "warmup_steps": 0, "value_lr": 2e-3, "clip_grad": 0.0}

    def main() -> dict[str, list[str]]:
        found = {}
        for kind in AT_ONCE:
            often = updated_every(kind, 1, precision, value_weight_decay=0.1, **still)
            often = replace(often, train=replace(often.train, global_batch_size=8))
            seldom = updated_every(kind, EVERY, precision, value_weight_decay=0.1, **still)
            with joined(often) as groups:
                one = tables_behind(often, groups, (*range(8), *range(12, 20)), 2)
                # Of the second update the first step is taken after the skipped one, and of a third one none is.
                other = tables_behind(seldom, groups, range(24), 6)
            found[kind] = differences(one, other)
        return found

    assert run_ranks(main, 1) == [{kind: [] for kind in AT_ONCE}]


def test_steps_between_move_all_but_tables_by_a_norm_without_them(run_ranks: Any) -> None:
    def main() -> None:
        with tiny_run(updated_every("two families", 1, value_clip_grad=0.0)) as run:
            apart = run.train(1)
        with tiny_run(updated_every("two families", EVERY)) as run:
            before = trained(run, 0).weights
            assert run.train(1) == apart
            behind, updated = trained(run, 0).weights, trained(run, 1).weights
        tables = {name for name in before if name.startswith("banks.")}
        moved = {name for name in before if not torch.equal(before[name], behind[name])}
        assert moved
        assert not moved & tables
        assert not any(torch.equal(behind[name], updated[name]) for name in tables)

    run_ranks(main, 1)


@pytest.mark.parametrize("num_ranks", KINDS)
def test_every_layout_takes_the_steps_of_one_rank(run_ranks: Any, num_ranks: int) -> None:
    of_one_rank = steps_on_layouts(run_ranks, num_ranks, KINDS[num_ranks], partial(updated_every, every=EVERY), 6)
    for steps in of_one_rank.values():
        assert steps.isnan().any(1).tolist() == [False, False, True, False, False, False]


@pytest.mark.parametrize("num_ranks", [1, 4])
def test_tables_in_files_wait_as_those_on_the_device_do(run_ranks: Any, tmp_path: Path, num_ranks: int) -> None:
    """To the bit, with a decay, and once the run goes on from a checkpoint. On one rank the skipped step would have updated tables,
    and the next one does, which nobody foresaw."""
    config = updated_every("two families", EVERY, "bf16", value_weight_decay=0.1)
    if num_ranks > 1:
        config = on(config, **REPLICAS["data 4 x memory 2 of rows"][1] | {"memory_rows": 1})
    else:
        optimizer = replace(config.optimizer, tables_every=3)
        config = replace(config, optimizer=optimizer, train=replace(config.train, num_steps=21))

    def main() -> tuple[list[str], list[str]]:
        stored = in_files(config, tmp_path / "tables")
        validate(stored, num_ranks)
        with joined(config) as groups:
            device, files = (on_samples(each, groups) for each in (config, stored))
            first = differences(trained(device, 7), trained(files, 7))
            files.save(tmp_path)
            assert files.run.state == device.run.state
            again = on_samples(stored, groups)
            again.resume(tmp_path / f"step_{files.run.state.step:08d}")
            return first, differences(trained(device, 4), trained(again, 4))

    assert run_ranks(main, num_ranks) == [([], [])] * num_ranks


def test_a_resumed_run_is_the_straight_one_and_may_change_the_number(run_ranks: Any, tmp_path: Path) -> None:
    """Tables count their own updates, which their moments are corrected by."""

    def main() -> None:
        config = updated_every("two families", EVERY)
        with joined(config) as groups:
            run = on_samples(config, groups)
            # Of these the third is skipped, and the last one waits behind a save.
            run.train(5)
            assert (run.run.state.num_updates, run.run.state.num_waiting) == (4, 0)
            run.save(tmp_path)
            straight = trained(run, 2)
            again = on_samples(config, groups)
            again.resume(tmp_path / "step_00000005")
            assert differences(straight, trained(again, 2)) == []
            more_often = updated_every("two families", 1)
            often = on_samples(more_often, groups)
            often.resume(tmp_path / "step_00000005")
            often.train(1)
            counts = {share.num_updates for rule in often.optimizer.rules for share in rule.shares}
            assert counts == {3}, "two of four updates were the tables', and one more"

    run_ranks(main, 1)
