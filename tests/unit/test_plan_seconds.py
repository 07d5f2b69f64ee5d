"""Seconds of a plan: rows in granules, entries by hand, parts that hide and parts that cannot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kernels.common.tiles import accumulate_instructions
from lab.maintenance.check_plan import shipped_models
from pretrain.config.optimizer import OptimizerConfig
from pretrain.config.schema import RunConfig
from pretrain.config.stages import load_config, load_stages
from pretrain.config.updates import keeps_rows, orthogonalisation_flops, table_gradient_bytes
from pretrain.planning.bytes.added_lookups import added_together
from pretrain.planning.bytes.row_bytes import replica_bytes
from pretrain.planning.bytes.weights import trained_dense, trained_tables
from pretrain.planning.counts.pipeline_stages import Division, Stage, stages_of
from pretrain.planning.seconds.exchange_seconds import beside_backward
from pretrain.planning.seconds.hardware import load_hardware
from pretrain.planning.seconds.reductions import Piece, Weights, gather_exposed, pieces_of, reduce_exposed, ring_s
from pretrain.planning.seconds.row_seconds import (
    accumulate_s,
    distinct_rows,
    missed_share,
    moved_bytes,
    row_seconds,
)
from pretrain.planning.seconds.time_parts import TimePart
from pretrain.planning.seconds.timing import assumptions, step_time
from pretrain.planning.seconds.traffic import copies_bytes
from tools import cli
from tools.common.vocabulary import with_vocabulary

REPOSITORY = Path(__file__).parents[2]
LARGE = REPOSITORY / "configs" / "ultramemv2" / "2.5b_120b_top256.yaml"
H100 = load_hardware("h100-80g")
# The layout of pretraining on 256 GPUs.
LAYOUT = [
    *("parallel.tensor=2", "parallel.pipeline=2", "parallel.virtual_pipeline=2", "parallel.memory=16"),
    *("train.micro_batch_size=4", "train.recompute=none"),
]


def reading(stage: Stage, num_rows: int) -> Stage:
    """The stage of one family with one lookup, of a bank of so many rows, each way."""
    (family,) = stage.families
    return replace(stage, families=(replace(family, lookups=(num_rows,), backward_lookups=(num_rows,)),))


def large(*overrides: str) -> RunConfig:
    return load_config(LARGE, [*LAYOUT, *overrides])


def moved_by_hand(row_bytes: int, num_rows: int) -> float:
    """Bytes of 64-byte granules that rows of a table touch, row by row."""
    starts = np.arange(num_rows) * row_bytes
    granules = (starts + row_bytes - 1) // 64 - starts // 64 + 1
    return float(64 * granules.mean())


@pytest.mark.parametrize(("columns", "useful"), [(960, 1.0), (120, 0.83), (60, 0.68), (30, 0.5)])
def test_a_row_moves_whole_granules(columns: int, useful: float) -> None:
    """The widths that 1, 8, 16 and 32 ranks leave of a row of values, in bf16, and the share of them that is used."""
    assert moved_bytes(2 * columns) == moved_by_hand(2 * columns, 64)
    assert 2 * columns / moved_bytes(2 * columns) == pytest.approx(useful, abs=0.02)


@pytest.mark.parametrize("skew", [0.0, 0.8, 1.0])
def test_distinct_rows_are_those_of_drawn_reads(skew: float) -> None:
    weights = np.arange(1, 20_001, dtype=np.float64) ** -skew
    drawn = np.random.default_rng(1).choice(20_000, size=30_000, p=weights / weights.sum())
    assert distinct_rows(30_000, 20_000, skew) == pytest.approx(len(np.unique(drawn)), rel=0.02)


@pytest.mark.parametrize("room", [100, 2_000])
def test_popular_rows_are_read_from_a_cache_as_one_of_the_last_reads_would(room: int) -> None:
    weights = np.arange(1, 20_001, dtype=np.float64) ** -0.8
    drawn = np.random.default_rng(1).choice(20_000, size=60_000, p=weights / weights.sum())
    kept: dict[int, None] = {}
    missed = 0
    for number, row in enumerate(drawn.tolist()):
        if row in kept:
            del kept[row]
        else:
            # Counted when the cache is full.
            missed += number >= 20_000
            if len(kept) == room:
                del kept[next(iter(kept))]
        kept[row] = None
    assert missed_share(20_000, 64, 0.8, 64 * room) == pytest.approx(missed / 40_000, rel=0.02)
    assert (missed_share(20_000, 64, 0, 64 * room), missed_share(20_000, 64, 0.8, 64 * 20_000)) == (1, 0)


def test_a_layer_pass_is_what_was_computed_by_hand() -> None:
    """One of the 120B model, 8,192 tokens on each of 16 ranks: 33.6M entries in a bank of 22.9M rows."""
    config = large()
    stage = stages_of(config)[0]
    (family,) = stage.families
    (bank_rows,) = set(family.lookups)
    assert (stage.num_lookups, bank_rows) == (12, 22_861_824)
    one = row_seconds(config, stage, 8192, H100)
    entries = 16 * 8192 * 256
    # Both ways: values of 60 columns and pre-values of 20.
    assert one.gathers / 12 == pytest.approx(2 * entries * (176 + 96) / H100.gather_bytes_per_s)
    # Kernels read ids and coefficients four times; six elements are copied each way.
    per_entry = 4 * (4 + 2) + 2 * 6 * 2
    assert one.ids / 12 == pytest.approx(entries * per_entry / H100.stream_bytes_per_s)
    # One sort, for both tables.
    adding = sum(accumulate_s(entries, family.rows_seen(bank_rows), width, 1, H100) for width in (60, 20))
    assert one.sort / 12 == pytest.approx(2.5 * entries * 100 / H100.stream_bytes_per_s)
    assert one.gradients / 12 == pytest.approx(adding)


def test_layers_that_share_a_table_add_up_its_gradient_once() -> None:
    """Twenty layers of a ring, each with a window of five of its tables, in microbatches of 32,768 tokens."""
    path = REPOSITORY / "configs" / "ultramemv2" / "227m_1.2b.yaml"
    config = load_config(path)
    stage = stages_of(config)[0]
    entries, rows = 32_768 * 32, 20 * 360 * 360
    together = row_seconds(config, stage, 32_768, H100)
    # Vectors of 20 times 32,768 tokens, of which 25 MB are cached.
    missed = 384 - 25e6 / (20 * 32_768)
    of_table = accumulate_s(20 * entries, rows, 192, 1, H100) + 20 * entries * missed / H100.gather_bytes_per_s
    assert together.gradients == pytest.approx(2 * of_table, rel=0.05)
    again = replace(config, train=replace(config.train, recompute="full"))
    assert row_seconds(again, stage, 32_768, H100).gradients > 1.1 * together.gradients
    # Up to 2^25 entries: of microbatches twice as large 16 lookups.
    lookup = config.model.memories[0].lookup
    assert added_together(config, lookup, entries, 20) == 20
    assert added_together(config, lookup, 2 * entries, 20) == 16
    assert added_together(config, lookup, 2**25 + 1, 20) == 1
    assert added_together(load_config(path, ["parallel.memory=2"]), lookup, entries, 20) == 1
    # Vectors of their own are not put side by side.
    assert added_together(config, replace(lookup, bins=lookup.rows // 2), entries, 20) == 20
    assert added_together(config, replace(lookup, bins=lookup.rows // 2 + 1), entries, 20) == 1
    by_row = ["optimizer.tables=row_wise", "optimizer.table_gradients=rows", "parallel.memory=2"]
    assert added_together(load_config(path, by_row), lookup, entries, 20) == 20


def test_a_layer_pass_by_rows_and_columns_is_what_was_computed_by_hand() -> None:
    """The same in 4 parts of rows, each in 4 of columns: a quarter of the entries, in rows of 240 and 80 columns."""
    config = large("parallel.memory_rows=4")
    stage = reading(stages_of(config)[0], 22_861_824)
    one = row_seconds(config, stage, 8192, H100)
    entries = 16 * 8192 * 256
    assert one.gathers == pytest.approx(2 * entries / 4 * (512 + 192) / H100.gather_bytes_per_s, rel=0.02)
    # As with columns; places in the part, and scores of both cores; shares of the tokens are cut, and a quarter of each
    # core's sums written, sent, received and added up; four copies of the vectors of three more parts.
    per_entry = 4 * (4 + 2) + 2 * 6 * 2 + 8 + 2 * 8 + 2 * (2 * 2 + 4 * 2 * 2 / 4)
    copied = 2 * 4 * 3 * 8192 * (960 + 320) * 2
    assert one.ids == pytest.approx((entries * per_entry + copied) / H100.stream_bytes_per_s)
    adding = sum(accumulate_s(entries / 4, 22_861_824 // 4, width, 1, H100) for width in (240, 80))
    # Vectors of 131,072 tokens, of which 25 MB are cached.
    missed = sum(1280 // 2 / 640 * (2 * width - 25e6 / (16 * 8192)) for width in (240,))
    assert one.gradients == pytest.approx(adding + entries / 4 * missed / H100.gather_bytes_per_s, rel=0.02)
    # Popular rows: the busiest part reads 2.3 % more. Of the entries of others nobody takes an instruction.
    skewed = row_seconds(config, stage, 8192, replace(H100, row_skew=0.8))
    # The cache has a quarter of what is read, and a third of the shorter rows.
    moved = 512 * missed_share(22_861_824 // 4, 512, 0.8) + 192 * missed_share(22_861_824 // 4, 192, 0.8)
    assert 0.7 * (512 + 192) < moved < 0.8 * (512 + 192)
    assert skewed.gathers / one.gathers == pytest.approx(1.023 * moved / (512 + 192), rel=0.02)
    slow = row_seconds(config, stage, 8192, replace(H100, issue_g_per_s=1.0))
    issued = entries / 4 * sum(accumulate_instructions(width) for width in (240, 80)) / 1e9
    assert slow.gradients == pytest.approx(issued + entries / 4 * missed / H100.gather_bytes_per_s, rel=0.02)


def test_parts_of_rows_are_read_as_the_whole_is() -> None:
    for skew in (0.0, 0.8):
        whole, part = distinct_rows(33_554_432, 22_861_824, skew), distinct_rows(33_554_432 / 4, 22_861_824 // 4, skew)
        assert part == pytest.approx(whole / 4, rel=0.02)


def test_gradients_take_their_bytes_or_their_instructions() -> None:
    entries, rows, granules = 16 * 8192 * 256, 22_861_824, 2 * (240 + 64 - 16)
    even = accumulate_s(entries, rows, 60, 1, H100)
    # Rows once each way, and of an entry its row, its place, and a sector for its coefficient.
    read = rows * (1 - np.exp(-entries / rows))
    assert even == pytest.approx((read * granules + entries * (4 + 8 + 32)) / H100.gather_bytes_per_s)
    quick = replace(H100, issue_g_per_s=1e6)
    assert accumulate_s(entries, rows, 60, 1, quick) == even
    assert 0.5 * even < accumulate_s(entries, rows, 60, 1, replace(quick, row_skew=0.8)) < 0.8 * even
    slow = replace(H100, issue_g_per_s=1.0)
    assert accumulate_s(entries, rows, 60, 1, slow) == pytest.approx(entries * accumulate_instructions(60) / 1e9)
    # Each group of columns goes through all entries.
    assert accumulate_s(entries, rows, 60, 2, slow) == pytest.approx(entries * 2 * accumulate_instructions(30) / 1e9)


def test_what_a_lookup_takes_grows_with_ranks_and_passes() -> None:
    config = large()
    stage = stages_of(config)[0]
    alone = row_seconds(large("parallel.memory=1"), stage, 8192, H100)
    split = row_seconds(config, stage, 8192, H100)
    again = row_seconds(large("train.recompute=full"), stage, 8192, H100)
    # A row of sixteenths moves more granules than a whole one, and only split tables exchange coefficients.
    assert alone.gathers < 0.75 * split.gathers
    assert alone.ids * 16 < 0.95 * split.ids
    assert again.gathers == pytest.approx(1.5 * split.gathers)
    assert again.gradients == split.gradients


def pieces(*of_each: tuple[Weights, int, float]) -> list[Piece]:
    """Pieces that take a second each, of a kind, chunk and place."""
    return [Piece(kind, chunk, below, 1.0, 1.0) for kind, chunk, below in of_each]


T, D = Weights.TABLES, Weights.DENSE


@pytest.mark.parametrize(
    ("of_each", "block_s", "tables", "dense"),
    [
        # Complete when backward ends: nothing hides it.
        ([(T, 0, 0)], 1.0, 1.0, 0.0),
        # Three blocks lie below.
        ([(T, 0, 3)], 1.0, 0.0, 0.0),
        ([(T, 0, 3)], 0.25, 0.25, 0.0),
        # The second waits for the first on the link.
        ([(T, 0, 2), (D, 0, 1), (T, 0, 1)], 1.0, 1.0, 0.0),
        ([(T, 0, 0), (D, 0, 0)], 1.0, 1.0, 1.0),
        # All after backward.
        ([(T, 0, 9), (D, 0, 9)], 0.0, 1.0, 1.0),
    ],
)
def test_a_reduction_hides_behind_the_blocks_below(
    of_each: Sequence[tuple[Weights, int, float]], block_s: float, tables: float, dense: float
) -> None:
    assert reduce_exposed(pieces(*of_each), block_s) == {T: tables, D: dense}


@pytest.mark.parametrize(
    ("of_each", "block_s", "dense_first", "tables", "dense"),
    [
        # The first bank is needed at once.
        ([(T, 0, 0)], 1.0, False, 1.0, 0.0),
        ([(T, 0, 2)], 1.0, False, 0.0, 0.0),
        # Started when the first was needed.
        ([(T, 0, 1), (T, 0, 3)], 1.0, False, 0.0, 0.0),
        ([(T, 0, 1), (T, 0, 1.5)], 1.0, False, 0.5, 0.0),
        # Another chunk's first is started at once, and waits for the link alone.
        ([(T, 0, 1), (T, 1, 2)], 1.0, False, 0.0, 0.0),
        # Cores are decomposed before the first block.
        ([(D, 0, 5), (T, 0, 2)], 1.0, True, 0.0, 1.0),
        ([(T, 0, 9), (D, 0, 9)], 0.0, False, 1.0, 1.0),
    ],
)
def test_a_gather_hides_behind_the_blocks_before(
    of_each: Sequence[tuple[Weights, int, float]], block_s: float, dense_first: bool, tables: float, dense: float
) -> None:
    assert gather_exposed(pieces(*of_each), block_s, dense_first=dense_first) == {T: tables, D: dense}


def test_a_bank_that_six_blocks_share_is_complete_after_the_lowest() -> None:
    config = large()
    for stage in stages_of(config):
        banks = [piece for piece in pieces_of(config, stage, Division.of(config, 256), H100) if piece.kind == T]
        # One of each chunk of six blocks. Between a block's microbatches of two chunks lie those of both stages.
        assert [(bank.chunk, bank.blocks_below) for bank in banks] == [(0, 0), (1, 12)]
    hidden, alone = large(), large("parallel.overlap_grad_reduce=false", "parallel.overlap_param_gather=false")
    part = TimePart.MEMORY_REDUCTION
    # The upper chunk's hides, the lower chunk's cannot.
    exposed, whole = step_time(hidden, 256, H100).by_part[part], step_time(alone, 256, H100).by_part[part]
    assert exposed == pytest.approx(whole / 2, rel=0.01)


def test_pieces_add_up_to_all_that_is_trained() -> None:
    for path in shipped_models():
        config = with_vocabulary(load_stages(path)[0], 4096)
        num_ranks = 64 * config.parallel.tensor * config.parallel.pipeline * config.parallel.context
        division = Division.of(config, num_ranks)
        # A ring over all replicas takes as long for the sum of the parts as for the parts.
        for stage in stages_of(config):
            found = list(pieces_of(config, stage, division, H100))
            assert all(0 <= piece.chunk < len(stage.chunks) for piece in found), path
            for kind, weights, replicas, stride, size in (
                (
                    T,
                    0 if keeps_rows(config.optimizer) else trained_tables(config, stage),
                    division.table_replicas,
                    config.parallel.memory,
                    table_gradient_bytes(config.optimizer),
                ),
                (
                    D,
                    trained_dense(config, stage),
                    division.replicas * config.parallel.context,
                    config.parallel.tensor,
                    4,
                ),
            ):
                whole = ring_s(size * weights, replicas, stride, H100)
                assert sum(piece.reduce_s for piece in found if piece.kind == kind) == pytest.approx(whole), path


@pytest.mark.parametrize(("memory", "num_ranks", "in_node"), [(16, 256, 1), (4, 256, 2), (1, 256, 8), (4, 16, 2)])
def test_rows_of_replicas_cross_between_nodes_once(memory: int, num_ranks: int, in_node: int) -> None:
    """Replicas of a node share its adapters; those of one node have none between them."""
    rows = ("optimizer.tables=row_wise", "optimizer.table_gradients=rows")
    config = large(*rows, f"parallel.memory={memory}", "parallel.tensor=1", "parallel.virtual_pipeline=1")
    division, found = Division.of(config, num_ranks), step_time(config, num_ranks, H100)
    sent = replica_bytes(config, stages_of(config)[found.slowest_stage], division)
    across = sent / in_node / H100.network_bytes_per_s if division.stage_ranks > 8 else 0.0
    within = sent / H100.nvlink_bytes_per_s if in_node > 1 else 0.0
    assert 0 < found.by_part[TimePart.MEMORY_REDUCTION] == pytest.approx(max(across, within))


def test_copies_of_two_stages_in_a_node_are_added_up_there() -> None:
    keys = (
        "optimizer.tables=row_wise",
        "optimizer.table_gradients=rows",
        "parallel.pipeline=2",
        "train.global_batch_size=64",
    )
    config = load_config(REPOSITORY / "configs" / "tide" / "750m.yaml", [*keys, "parallel.memory=4"])
    for num_ranks, per_second in ((8, H100.nvlink_bytes_per_s), (16, H100.network_bytes_per_s)):
        alone = replace(config, parallel=replace(config.parallel, memory=num_ranks // 2))
        division, found = Division.of(alone, num_ranks), step_time(alone, num_ranks, H100)
        sent = copies_bytes(alone, stages_of(alone)[found.slowest_stage], division)
        assert 0 < found.by_part[TimePart.MEMORY_REDUCTION] == pytest.approx(sent / per_second)


def test_a_gather_crosses_between_nodes_once() -> None:
    """Bytes to other nodes by hand, 8,192 tokens on each of 16 ranks in two nodes; a ring shares the 8 adapters."""
    for parts, ids_and_scores, vectors in ((1, 4, 120 + 40), (4, 4 + 2 * 2, 480 + 160)):
        config = large(f"parallel.memory_rows={parts}")
        found = step_time(config, 256, H100)
        # Products and their coefficients' gradients, coefficients, and vectors both ways. Where four columns meet, within
        # a node, a quarter of each goes out: one sum per product, and one per core of the gradients.
        entries = 256 * 2 * (3 if parts == 1 else (1 + 2) / 4)
        direct = 8 * (entries + 2 * vectors)
        ring = 15 / 8 * (256 * ids_and_scores + 256 * 2)
        division = Division.of(config, 256)
        per_token = found.sent[0].exchange[1] / (12 * division.num_microbatches * division.rank_tokens)
        assert per_token == pytest.approx(direct + ring)


def test_exchanges_hide_behind_the_feed_forwards_beside_them_alone() -> None:
    part = TimePart.MEMORY_EXCHANGE
    hidden = step_time(large(), 256, H100).by_part[part]
    alone = step_time(large("parallel.overlap_memory=false"), 256, H100)
    near, far = alone.sent[alone.slowest_stage].exchange
    # Off the node at the speed of the network; a gather's ring takes longer within.
    assert alone.by_part[part] == pytest.approx(far / H100.network_bytes_per_s, rel=0.01)
    assert near / H100.nvlink_bytes_per_s < alone.by_part[part]
    assert hidden < alone.by_part[part]
    # In place of its feed-forward a memory has nothing beside it.
    instead = large("model.memory.placement.position=instead")
    assert step_time(instead, 256, H100).by_part[part] == alone.by_part[part]


@pytest.mark.parametrize(
    ("share", "gradients", "products", "exchange", "exposed", "left"),
    [
        # Whichever comes first has the whole GPU; only the links are another's.
        (1.0, 10.0, 4.0, 3.0, 10.0, 0.0),
        (1.0, 2.0, 4.0, 3.0, 2.0, 1.0),
        # Half of the multiprocessors are enough: four seconds of products take eight meanwhile.
        (0.5, 10.0, 4.0, 0.0, 6.0, 0.0),
        (0.5, 10.0, 8.0, 0.0, 5.0, 0.0),
        (0.5, 2.0, 8.0, 0.0, 1.0, 0.0),
        # A quarter makes them take twice as long.
        (0.25, 10.0, 4.0, 0.0, 16.0, 0.0),
    ],
)
def test_products_run_beside_gradients_on_the_rest_of_the_gpu(
    share: float, gradients: float, products: float, exchange: float, exposed: float, left: float
) -> None:
    hardware = replace(H100, row_sm_share=0.5)
    of_share = large() if share == 1 else large(f"parallel.gradient_sm_share={share}")
    found = beside_backward(of_share, gradients, products, exchange, hardware)
    assert (found.gradients, found.exchange) == pytest.approx((exposed, left))
    apart = beside_backward(large("parallel.overlap_memory=false"), gradients, products, exchange, hardware)
    assert (apart.gradients, apart.exchange) == (gradients, exchange)


def test_a_matrix_is_orthogonalised_by_three_products_per_step() -> None:
    """Products of X, m rows of n: X X^T, its square, and of both with X; 2 m^2 n + 2 m^3 + 2 m^2 n with m <= n."""
    per_step = 2 * (9 * 5) + 2 * 27 + 2 * (9 * 5)
    for shape in ((3, 5), (5, 3)):
        assert orthogonalisation_flops([shape], OptimizerConfig(matrices="muon", muon_ns_steps=7)) == [7 * per_step]


def test_what_hides_makes_the_bubble_smaller_too() -> None:
    whole, half = (step_time(config, 256, H100) for config in (large(), large("parallel.gradient_sm_share=0.5")))
    hidden = [whole.by_part[part] - half.by_part[part] for part in (TimePart.MEMORY_GRADIENTS, TimePart.BUBBLE)]
    products = whole.by_part[TimePart.MATMULS] + whole.by_part[TimePart.ATTENTION]
    # Two thirds of the products are backward's, attention's too. A stage of two chunks waits for half of a microbatch, of four.
    assert hidden[0] == pytest.approx(2 / 3 * products, rel=0.02)
    assert hidden[1] == pytest.approx(hidden[0] / 2 / 4)


def test_a_plan_says_what_it_takes_for_granted(capsys: pytest.CaptureFixture[str]) -> None:
    said = " / ".join(assumptions(large(), stages_of(large())[0], H100))
    assert "exchanges of 12 of 12 memories run beside" in said
    assert "backward's exchanges also run beside gradients of tables" in said
    half = " / ".join(assumptions(large("parallel.gradient_sm_share=0.5"), stages_of(large())[0], H100))
    assert "products run beside gradients of tables, which have 50 % of the multiprocessors" in half
    assert "rows of tables are read evenly" in said
    config = large("parallel.overlap_memory=false", "parallel.overlap_grad_reduce=false")
    said = " / ".join(assumptions(config, stages_of(config)[0], replace(H100, row_skew=0.8)))
    assert "exchanges of 0 of 12 memories" in said
    assert "reductions run alone (parallel.overlap_grad_reduce is false)" in said
    assert "rows of tables are read by Zipf's law with 0.8" in said
    words = ["plan", str(LARGE), "--gpus", "256", "--gpu", "h100-80g", "--as-written"]
    assert cli.main([*words, "--skew", "0.7", "--count", "0"]) == 0
    assert "by Zipf's law with 0.7" in capsys.readouterr().out
    assert cli.main([*words, "--skew", "3"]) == 2
    assert "--skew is 3: it is 0 (evenly) to 2" in capsys.readouterr().err
