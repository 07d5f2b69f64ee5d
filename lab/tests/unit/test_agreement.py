"""Predictions of plans beside counts of dry runs: what ranks hold and compute with, and what they send, agree; what is off
is told.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lab.bench.mean_traffic import attention_bytes, exchanged_bytes
from lab.maintenance.agreement import figures
from lab.maintenance.stage_sent import ids_ahead_bytes, stages_sent
from megamem.families.move.config import MoveConfig
from pretrain.config.optimizer import OptimizerConfig, TrainedRowsConfig
from pretrain.planning.bytes.memory import stage_bytes
from pretrain.planning.bytes.memory_parts import MemoryPart
from pretrain.planning.counts.pipeline_stages import Division
from tests.deadline import launch_within
from tests.rotation import in_rotation, named_in_rotation
from tests.unit.dry_runs import (
    CONFIGS,
    COPIES_OF_ROWS,
    CUT,
    FILED,
    LONGER,
    MEMORY,
    SPLIT,
    WORLD,
    Reports,
    of_all_stages,
)

SENDING = in_rotation([*CONFIGS], parts=2)
"""Models whose sent bytes are held to formulas; the product's tests hold what all of them keep."""


@pytest.fixture(scope="module")
def reports() -> Reports:
    return Reports(dict.fromkeys(("split", *CUT, *SENDING)))


@pytest.mark.parametrize("num_replicas", in_rotation([1, 4], parts=2))
def test_gradients_of_rows_take_what_plans_count_and_little_less(num_replicas: int) -> None:
    """Lookups that read far more than a rank's part of the table, whose ids are sorted together; replicas send each other
    all of it."""
    config = replace(
        SPLIT,
        model=replace(SPLIT.model, memory=replace(MEMORY, num_keys=1024, top_k=256)),
        parallel=replace(SPLIT.parallel, memory=WORLD // 2 // num_replicas, memory_rows=2),
        optimizer=OptimizerConfig(tables="row_wise", table_gradients="rows"),
        train=replace(SPLIT.train, recompute="none"),
    )
    (found, _) = launch_within(lambda: of_all_stages(config, WORLD, as_gpu=True), 1, timeout_s=280, num_threads=1)[0]
    stage, sent = stage_bytes(config, WORLD)[0], stages_sent(config, WORLD)[0]
    counted = found.peak_of_step.total
    assert counted * 0.98 <= stage.total <= 1.25 * counted
    bad = [each for each in figures(found, stage, sent) if not each.agrees]
    assert {each.name for each in bad} <= {"table gradients", "activations"}, bad


def test_rows_that_are_trained_alone_send_what_plans_count() -> None:
    """Replicas send reads beside sums, and parts of rows their scores; nothing but tables has gradients or state, and a step waits
    for the device no more often than without."""
    every = replace(
        SPLIT,
        model=replace(SPLIT.model, memory=replace(MEMORY, num_keys=128)),
        parallel=replace(SPLIT.parallel, memory=8, memory_rows=2),
        optimizer=OptimizerConfig(
            tables="row_wise", table_gradients="rows", value_weight_decay=0.0, trained_rows=TrainedRowsConfig()
        ),
    )
    some = replace(every, optimizer=replace(every.optimizer, trained_rows=TrainedRowsConfig(number=100, score="reads")))
    of_both = [
        launch_within(lambda config=config: of_all_stages(config, WORLD, as_gpu=True), 1, timeout_s=280, num_threads=1)[
            0
        ]
        for config in (every, some)
    ]
    for config, reports in zip((every, some), of_both, strict=True):
        stages, sent = stage_bytes(config, WORLD), stages_sent(config, WORLD)
        for report, stage, of_stage in zip(reports, stages, sent, strict=True):
            agreeing = {each.name for each in figures(report, stage, of_stage) if each.agrees}
            assert {"weights", "tables", "optimizer state of tables", "sent: memory", "sent: tables"} <= agreeing
            assert not {MemoryPart.GRADIENTS, MemoryPart.OPTIMIZER} & report.held.by_part.keys()
    for all_rows, fewer in zip(*of_both, strict=True):
        assert fewer.num_host_reads == all_rows.num_host_reads


@pytest.mark.parametrize(
    ("tensor", "heads", "folder", "every"),
    in_rotation([(1, 8, None, 1), (1, 8, None, 3), (2, 8, None, 1), (4, 2, None, 2), (1, 8, "/nowhere", 1)]),
)
def test_copies_send_what_plans_count_and_meet(tensor: int, heads: int, folder: str | None, every: int) -> None:
    """Stages whose copy of a bank has other numbers of readers send sums of as many rows, of all steps since the last update;
    tensor-parallel ranks hand each other heads, which two of them may share."""
    from pretrain.planning.dryrun.peers import mismatches

    assert isinstance(COPIES_OF_ROWS.model.memory, MoveConfig)
    memory = replace(COPIES_OF_ROWS.model.memory, num_gate_heads=heads, value_dim=32 * heads)
    model = replace(COPIES_OF_ROWS.model, memory=memory, num_query_groups=heads)
    config = replace(COPIES_OF_ROWS, model=model, parallel=replace(COPIES_OF_ROWS.parallel, tensor=tensor))
    config = replace(config, optimizer=replace(config.optimizer, table_folder=folder, tables_every=every))
    stages, sent = stage_bytes(config, WORLD), stages_sent(config, WORLD)
    (found,) = launch_within(lambda: of_all_stages(config, WORLD, as_gpu=True), 1, timeout_s=280, num_threads=1)
    assert mismatches(found) == []
    for report, stage, of_stage in zip(found, stages, sent, strict=True):
        # Tokens of 8 ranks and all microbatches read 2 rows of an eighth of the columns.
        rows = min(8 * 512 // tensor * report.num_microbatches * every * 2, 2 * 32_768)
        assert of_stage.copies == rows * 4 * heads * 4
        of_figures = [each for each in figures(report, stage, of_stage) if each.name.startswith("sent: ")]
        assert {each.name for each in of_figures} >= {"sent: copies", "sent: memory", "sent: tables"}
        assert [each for each in of_figures if not each.agrees] == []
        if tensor == 1:
            counted = report.peak_of_step.total
            assert counted * 0.98 <= stage.total <= 1.25 * counted


@pytest.mark.parametrize("name", named_in_rotation(FILED, parts=2))
def test_tables_in_files_take_what_plans_count_and_little_less(name: str) -> None:
    """Files, and rows of two steps, of all replicas, beside the largest moment of a step; ids are exchanged once per step. A
    step that updates tables has the rows of those that wait, too."""
    config = FILED[name]
    has_others = config.model.second_memory is not None
    stages, sent = stage_bytes(config, WORLD), stages_sent(config, WORLD)
    for report in launch_within(lambda: of_all_stages(config, WORLD, as_gpu=True), 1, timeout_s=280, num_threads=1)[0]:
        stage = stages[report.stage]
        assert report.held.files == stage.files > 0
        assert (MemoryPart.TABLES in report.held.by_part) == has_others
        counted = report.peak_of_step.total
        # Of two families plans take every lookup's operands to be the larger's, and those of joined ones to be there twice.
        assert counted * 0.96 <= stage.total <= (1.5 if has_others else 1.3) * counted
        bad = [each for each in figures(report, stage, sent[report.stage]) if not each.agrees]
        assert {each.name for each in bad} <= {"table gradients", "activations"}
        assert ids_ahead_bytes(config, Division.of(config, WORLD)) == 31 * 2 * 512 * 8


@pytest.mark.parametrize("name", SENDING)
def test_everything_that_plans_predict_of_a_rank_agrees(reports: dict[str, list[Any]], name: str) -> None:
    config = CONFIGS[name]
    stages, sent = stage_bytes(config, WORLD), stages_sent(config, WORLD)
    for report in reports[name]:
        found = {figure.name: figure for figure in figures(report, stages[report.stage], sent[report.stage])}
        assert {"weights", "gradients", "optimizer state", "activations", "sent: dense"} <= set(found)
        assert ("sent: messages" in found) == (config.parallel.pipeline > 1)
        assert ("sent: memory" in found) == (config.parallel.memory > 1)
        assert ("sent: tensor" in found) == (config.parallel.tensor > 1)
        assert ("sent: context" in found) == (config.parallel.context > 1)
        assert ("host memory" in found) == (config.optimizer.value_offload == "cpu")
        assert [figure for figure in found.values() if not figure.agrees] == []


def test_benchmarks_print_what_ranks_send(reports: dict[str, list[Any]]) -> None:
    """Stages send as much as each other."""
    for name, axis, predicted in (
        ("split", "memory", exchanged_bytes(LONGER, WORLD)),
        *((way, "context", attention_bytes(config, WORLD)) for way, config in CUT.items()),
    ):
        for report in reports[name]:
            assert sum(call.sent_bytes for call in report.collectives if call.axis == axis) == predicted > 0, name


def test_a_prediction_that_is_off_does_not_agree(reports: dict[str, list[Any]]) -> None:
    (stage, _), (sent, _), report = stage_bytes(LONGER, WORLD), stages_sent(LONGER, WORLD), reports["split"][0]
    off = replace(stage, by_part={part: 1.03 * num_bytes for part, num_bytes in stage.by_part.items()})
    bad = {figure.name for figure in figures(report, off, replace(sent, memory=sent.memory + 1e4)) if not figure.agrees}
    assert bad >= {"weights", "tables", "optimizer state of tables", "sent: memory"}
