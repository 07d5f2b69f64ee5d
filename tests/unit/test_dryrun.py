"""Ranks that are dry-run: what they hold and exchange is what the closed formulas say, and what real ones allocate; ranks
that differ are told.
"""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest

from megamem.families.move.config import MoveConfig
from pretrain.config.optimizer import OptimizerConfig
from pretrain.config.schema import ParallelConfig
from pretrain.errors import ConfigError
from pretrain.planning.bytes.held import held_bytes
from pretrain.planning.bytes.launches import (
    LAUNCHES_DENSE,
    LAUNCHES_EXPERT,
    LAUNCHES_MEETING,
    LAUNCHES_MEMORY,
    LAUNCHES_MIXTURE,
    LAUNCHES_ROW_PARTS,
    LAUNCHES_SITES,
    LAUNCHES_STATIC_SITES,
    launches_across_ranks,
)
from pretrain.planning.bytes.memory import stage_bytes
from pretrain.planning.bytes.memory_parts import STATE_PARTS, MemoryPart, StageBytes
from pretrain.planning.bytes.row_bytes import fetched_bytes
from pretrain.planning.counts.formulas import count_parameters
from pretrain.planning.counts.pipeline_stages import Division, stages_of
from pretrain.planning.dryrun.fewest_microbatches import with_fewest_microbatches
from pretrain.planning.dryrun.parts import BY_MODULE, part_of_module
from pretrain.planning.seconds.traffic import context_bytes, lookup_bytes_of_ways
from tests.deadline import launch_within
from tests.rotation import in_turn
from tests.unit.dry_runs import (
    ACROSS_RANKS,
    CONFIGS,
    CUT,
    FILED,
    IN_FILES,
    INTERLEAVED,
    LAUNCHED_STREAMS,
    LONGER,
    MEMORY,
    MIXTURE,
    PARTS,
    QUERIED,
    READ_TOGETHER,
    REAL,
    SPLIT,
    WORLD,
    Reports,
    of_all_stages,
)


@pytest.fixture(scope="module")
def reports() -> Reports:
    return Reports()


@in_turn(0, 3)
def test_the_fullest_rank_has_the_state_of_muon_that_plans_count() -> None:
    """Ranges that ranks own have other shares of matrices; an embedding is in one rank's."""
    config = replace(
        MIXTURE,
        model=replace(MIXTURE.model, tied_embeddings=True),
        parallel=ParallelConfig(memory=2),
        optimizer=OptimizerConfig(matrices="muon"),
        train=replace(MIXTURE.train, global_batch_size=4),
    )

    def main() -> list[Any]:
        from pretrain.planning.dryrun.rank import dry_run

        return list(dry_run(config, 4, range(4)))

    (found,) = launch_within(main, 1, timeout_s=280, num_threads=1)
    (predicted,) = stage_bytes(config, 4)
    for part in (MemoryPart.OPTIMIZER, MemoryPart.TABLE_OPTIMIZER):
        counted = max(report.held.by_part[part] for report in found)
        # Routers and norms are in the shares of others.
        assert counted * 0.999 <= predicted.by_part[part] <= 1.03 * counted
        adamw = stage_bytes(replace(config, optimizer=OptimizerConfig()), 4)[0].by_part[part]
        assert counted < 0.95 * adamw


@pytest.mark.parametrize("name", FILED)
def test_what_files_have_is_what_the_device_has_without_them(name: str) -> None:
    config = FILED[name]
    stages = stage_bytes(config, WORLD)
    resident = replace(config, optimizer=replace(config.optimizer, table_folder=None))
    for stage, on_device in zip(stages, stage_bytes(resident, WORLD), strict=True):
        assert on_device.held - stage.held == pytest.approx(stage.files)
    assert held_bytes(config, WORLD).files == max(stage.files for stage in stages)


def test_layers_that_share_a_bank_fetch_its_rows_once() -> None:
    """A step reads 64 samples of 512 tokens, of 2^20 ids with two rows each, of which 4 columns are here; two steps are."""
    memory = MoveConfig(vocab_size=1 << 20, value_dim=256, num_gate_heads=8, num_slots=2)
    config = replace(
        IN_FILES, model=replace(IN_FILES.model, memory=memory), parallel=ParallelConfig(tensor=2, memory=64)
    )
    (stage,) = stages_of(config)
    rows = 64 * 512 * 2
    assert fetched_bytes(config, stage, Division.of(config, WORLD)) == 2 * rows * (4 * 2 + 8 + 8 + 16)


def test_weights_move_to_their_buffer_before_gradients_in_bf16_have_one() -> None:
    """Weights, their copy and gradients together would be half as much again as what is held."""
    config = replace(
        SPLIT,
        model=replace(SPLIT.model, memory=replace(MEMORY, num_keys=512)),
        parallel=replace(SPLIT.parallel, memory=4, memory_rows=4),
        optimizer=OptimizerConfig(tables="row_wise", table_gradient_dtype="bf16"),
    )
    (found, _) = launch_within(lambda: of_all_stages(config, WORLD, as_gpu=False), 1, timeout_s=280, num_threads=1)[0]
    tables = found.held.by_part[MemoryPart.TABLES]
    assert found.held.by_part[MemoryPart.TABLE_GRADIENTS] == tables
    assert found.held.total < 2.5 * tables
    assert found.peak_of_building.total < 1.02 * found.held.total


def test_what_is_stepped_on_the_host_is_there_and_not_on_the_device(reports: dict[str, list[Any]]) -> None:
    for report in reports["offloaded"]:
        assert "optimizer state of tables" not in {part.value for part in report.held.by_part}
        # Two memory groups share each table; two windows of gradients in fp32 and weights in bf16.
        owned = report.num_table_parameters / 2
        assert report.held.host == pytest.approx(12 * owned + 2 * 2**22 * (4 + 2), rel=0.001)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_formulas_give_what_is_counted(reports: dict[str, list[Any]], name: str) -> None:
    predicted = stage_bytes(CONFIGS[name], WORLD)
    assert len(predicted) == CONFIGS[name].parallel.pipeline
    for report, stage in zip(reports[name], predicted, strict=True):
        assert stage.held == pytest.approx(report.held.total, rel=0.02)
        assert stage.activations == pytest.approx(report.activation_bytes, rel=0.1)
        for part, num_bytes in report.held.by_part.items():
            if num_bytes > report.held.total / 50:
                assert stage.by_part[part] == pytest.approx(num_bytes, rel=0.02), part


def test_streams_that_memories_read_with_are_counted(reports: dict[str, list[Any]]) -> None:
    """Formulas say more than there is, by what pools of streams keep less than without (a sixth at this size)."""
    for report, stage in zip(reports["queried"], stage_bytes(QUERIED, WORLD), strict=True):
        assert stage.held == pytest.approx(report.held.total, rel=0.02)
        assert report.activation_bytes < stage.activations < 1.2 * report.activation_bytes


@pytest.mark.parametrize("layers", PARTS)
def test_what_is_not_trained_is_held_without_gradients_and_state(
    reports: dict[str, list[Any]], layers: tuple[int, ...]
) -> None:
    """Activations are those of blocks that are trained whole, at most."""
    trained_stage = 0 if layers == (1,) else 1
    for rank, (report, stage) in enumerate(
        zip(reports[f"layers {layers}"], stage_bytes(PARTS[layers], WORLD), strict=True)
    ):
        for part in STATE_PARTS:
            counted = report.held.by_part.get(part, 0)
            assert (counted > 0) == (rank == trained_stage or part in (MemoryPart.WEIGHTS, MemoryPart.TABLES))
            assert stage.by_part[part] == pytest.approx(counted, rel=0.02), part
        assert stage.held == pytest.approx(report.held.total, rel=0.001)
        assert 0.9 * report.activation_bytes < stage.activations < 2.5 * report.activation_bytes
        # Nothing is sent back to a first stage that has nothing to do with it.
        sends = [call for call in report.collectives if call.op == "send"]
        assert len(sends) == (report.num_microbatches if rank == 0 or layers == (1,) else 0)


def test_attention_sends_what_the_formula_says(reports: dict[str, list[Any]]) -> None:
    for way, config in CUT.items():
        for report, stage in zip(reports[way], stages_of(config), strict=True):
            sent = sum(c.sent_bytes for c in report.collectives if c.axis == "context")
            assert sent == report.num_microbatches * context_bytes(config, stage) > 0, way


def test_stages_hold_the_model(reports: dict[str, list[Any]]) -> None:
    counts = count_parameters(SPLIT.model)
    # Retrieval, projections and norms are on every tensor-parallel rank.
    split = counts.embedding + counts.attention + counts.ffn
    expected = split / 2 + counts.norms + counts.retrieval + counts.memory_projections + counts.tables / 16
    assert sum(report.num_parameters for report in reports["split"]) == expected
    assert sum(report.num_table_parameters for report in reports["split"]) == counts.tables / 16


def test_exchanged_bytes_are_those_of_the_formula(reports: dict[str, list[Any]]) -> None:
    for report, stage in zip(reports["split"], stages_of(LONGER), strict=True):
        sent = sum(c.sent_bytes for c in report.collectives if c.axis == "memory")
        ways = lookup_bytes_of_ways(LONGER, stage, Division.of(LONGER, WORLD))
        assert sent == report.num_microbatches * sum(way.total for way in ways) > 0


def test_weights_gradients_and_optimizer_state_are_what_is_held(reports: dict[str, list[Any]]) -> None:
    for report in reports["split"]:
        by_part = {part.value: num_bytes for part, num_bytes in report.held.by_part.items()}
        tables, dense = report.num_table_parameters, report.num_parameters - report.num_table_parameters
        assert by_part["tables"] == 2 * tables
        assert by_part["table gradients"] == 4 * tables
        # The 32 ranks of a stage are two memory groups of 16; dense weights are split over 16 data-parallel ranks.
        assert by_part["optimizer state of tables"] == pytest.approx(12 * tables / 2, rel=0.001)
        # Buffers are padded so that they divide.
        assert by_part["weights"] == pytest.approx(2 * dense, rel=0.01)
        assert by_part["gradients"] == pytest.approx(4 * dense, rel=0.01)
        assert by_part["optimizer state"] == pytest.approx(12 * dense / 16, rel=0.05)


def test_the_stages_meet_and_one_that_differs_is_told(reports: dict[str, list[Any]]) -> None:
    from pretrain.planning.dryrun.peers import mismatches

    for name in CONFIGS:
        assert mismatches(reports[name]) == []
    first, second = reports["split"]
    sends = [index for index, call in enumerate(second.collectives) if call.op == "send"]
    fewer = replace(second, collectives=tuple(c for i, c in enumerate(second.collectives) if i != sends[-1]))
    assert "nothing sent" in mismatches([first, fewer])[0]
    calls = list(second.collectives)
    last = max(index for index, call in enumerate(calls) if call.axis == "world")
    calls[last] = replace(calls[last], content="float64 [1]")
    assert "in group world" in mismatches([first, replace(second, collectives=tuple(calls))])[0]


@in_turn(1, 3)
def test_blocks_launch_as_many_kernels_as_plans_count_on(reports: dict[str, list[Any]]) -> None:
    for way in (0, 1):
        counts = (counted[way] for counted in reports["launches"])
        meeting, dense, memory, by_rows, mixture, larger, *across = counts
        assert dense == pytest.approx(LAUNCHES_DENSE[way], rel=0.05)
        assert memory - dense == pytest.approx(LAUNCHES_MEMORY[way], rel=0.05)
        assert by_rows - memory == pytest.approx(LAUNCHES_ROW_PARTS[way], rel=0.05)
        assert meeting - by_rows == LAUNCHES_MEETING[way]
        # Four experts on each rank, and eight.
        assert (larger - mixture) / 4 == pytest.approx(LAUNCHES_EXPERT[way], rel=0.05)
        assert 2 * mixture - larger - dense == pytest.approx(LAUNCHES_MIXTURE[way], rel=0.05)
        for config, counted in zip(ACROSS_RANKS.values(), across, strict=True):
            assert counted - dense == launches_across_ranks(config, way)


@in_turn(2, 3)
def test_sites_of_streams_launch_as_many_kernels_as_plans_count_on(reports: dict[str, list[Any]]) -> None:
    for kind, counted in zip(LAUNCHED_STREAMS, reports["launches of streams"], strict=True):
        for way in (0, 1):
            of_sites = LAUNCHES_STATIC_SITES if kind == "static" else LAUNCHES_SITES[kind]
            assert counted[way] - LAUNCHES_DENSE[way] == pytest.approx(of_sites[way], rel=0.05)


def allocations_of_a_real_step() -> tuple[int, int]:
    """Bytes held, and at the peak of a step, of one of two gloo ranks with data."""
    from lab.bench.synthetic_run import SyntheticRun
    from pretrain.engine.session import session
    from pretrain.planning.dryrun.recorder import Recorder

    with session(REAL) as groups, Recorder({}, answers=False).recording() as recorder:
        run = SyntheticRun(REAL, groups)
        run.steps(1)
        run.cut_graphs()
        held = recorder.now().total
        recorder.restart_peak()
        run.steps(1)
        return held, recorder.peak.total


def test_a_real_rank_allocates_what_a_dry_one_does(reports: dict[str, list[Any]]) -> None:
    (report,), (stage,) = reports["real"], stage_bytes(REAL, 2, on_gpu=False)
    assert isinstance(stage, StageBytes)
    for held, peak in launch_within(allocations_of_a_real_step, 2, timeout_s=120, num_threads=1):
        assert held == pytest.approx(report.held.total, rel=0.02)
        assert held == pytest.approx(stage.held, rel=0.02)
        assert peak == pytest.approx(report.peak_of_step.total, rel=0.1)
        assert peak == pytest.approx(stage.total, rel=0.1)


REPEATED = {
    "one stage": replace(SPLIT, parallel=ParallelConfig(memory=2), train=replace(SPLIT.train, recompute="none")),
    "values of each token": replace(READ_TOGETHER, optimizer=OptimizerConfig()),
    "two stages": replace(SPLIT, parallel=replace(SPLIT.parallel, pipeline=2)),
    "interleaved": INTERLEAVED,
}


@pytest.mark.parametrize("name", REPEATED)
def test_a_few_microbatches_hold_at_once_what_all_of_them_do(name: str) -> None:
    """But for the loss and the number of tokens of each that was left out, fp32 and int64 with what aligns them."""
    config = REPEATED[name]
    sequences = config.train.micro_batch_size * Division.of(config, WORLD).replicas
    whole = replace(config, train=replace(config.train, global_batch_size=12 * sequences))
    few = with_fewest_microbatches(whole, WORLD)
    left_out = 12 - Division.of(few, WORLD).num_microbatches
    assert left_out >= 6

    def main() -> list[list[Any]]:
        return [of_all_stages(config, WORLD, as_gpu=True) for config in (whole, few)]

    (found,) = launch_within(main, 1, timeout_s=280, num_threads=1)
    for of_all, of_few in zip(*found, strict=True):
        assert 0 <= of_all.peak_of_step.total - of_few.peak_of_step.total <= 16 * left_out


def test_steps_that_keep_what_each_microbatch_read_stay_whole() -> None:
    by_rows = replace(SPLIT, optimizer=OptimizerConfig(tables="row_wise", table_gradients="rows"))
    for config in (IN_FILES, by_rows, *PARTS.values()):
        whole = replace(config, train=replace(config.train, global_batch_size=64 * config.train.global_batch_size))
        assert with_fewest_microbatches(whole, WORLD) == whole


def test_what_a_dry_run_cannot_follow_is_refused() -> None:
    def main() -> str:
        from pretrain.planning.dryrun.rank import dry_run

        unsized = replace(SPLIT, model=replace(SPLIT.model, vocab_size=None))
        with pytest.raises(ConfigError, match=r"model\.vocab_size") as caught:
            next(dry_run(unsized, WORLD, [0]))
        return str(caught.value)

    assert "set it" in launch_within(main, 1, timeout_s=60)[0]


def test_every_module_that_decides_a_part_is_there() -> None:
    """A module that was moved would put its bytes under OTHER."""
    assert [name for name, _ in BY_MODULE if find_spec(name) is None] == []
    assert part_of_module("megamem.layers.layer") is MemoryPart.MEMORY
    assert part_of_module("megamem.model") is MemoryPart.LOSS
    assert part_of_module("megamem.model_layer") is None
    assert part_of_module("torch.autograd") is part_of_module("torch.autograd.graph") is MemoryPart.BACKWARD
    assert part_of_module("torch.autograd.function") is None
