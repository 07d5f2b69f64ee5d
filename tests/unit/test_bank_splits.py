"""`lab.maintenance.bank_splits`: where only columns are split it counts what a plan counts, else what adds up to it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from lab.maintenance import bank_splits
from lab.maintenance.bank_splits import SPLITS, Sent, Split
from pretrain.config.schema import RunConfig
from pretrain.config.stages import load_config
from pretrain.planning.costs.hardware import load_hardware
from pretrain.planning.costs.layouts import estimate
from pretrain.planning.costs.rows import moved_bytes, row_seconds
from pretrain.planning.costs.stages import Division, stages_of
from pretrain.planning.costs.timing import TimePart
from pretrain.planning.costs.traffic import lookup_traffic

CONFIG = Path(__file__).parents[2] / "configs" / "ultramemv2" / "2.5b_120b_top256.yaml"
H100 = load_hardware("h100-80g")
COLUMNS, ROWS, TO_OWNERS = (next(s for s in SPLITS if s.name == n) for n in ("columns", "rows", "rows, to owners"))
TOKENS = 8192


@pytest.fixture(scope="module")
def config() -> RunConfig:
    return load_config(CONFIG, ["parallel.memory=16", "train.recompute=none"])


def test_columns_are_those_of_a_plan(config: RunConfig) -> None:
    """Rows, exchanges and, through a whole step, the places that a plan has for them."""
    stage, division = stages_of(config)[0], Division.of(config, 256)
    planned = estimate(config, 256, H100).time.by_part
    seconds = bank_splits.rows_s(config, COLUMNS, stage, division.rank_tokens, H100)
    microbatches = division.num_microbatches
    assert microbatches * seconds.gathers == pytest.approx(planned[TimePart.MEMORY_GATHERS])
    assert microbatches * seconds.ids == pytest.approx(planned[TimePart.MEMORY_IDS])
    gradients = seconds.sort + seconds.gradients
    assert microbatches * gradients == pytest.approx(planned[TimePart.MEMORY_GRADIENTS])
    forward, backward = bank_splits.exchange_s(config, COLUMNS, stage, division, H100)
    # Backward's run beside gradients of tables too.
    exposed = forward + max(0.0, backward - gradients)
    assert microbatches * exposed == pytest.approx(planned[TimePart.MEMORY_EXCHANGE])


def test_columns_send_what_a_plan_sends(config: RunConfig) -> None:
    memory = config.model.memory
    assert memory is not None
    bank_rows = stages_of(config)[0].families[0].lookups[0]
    traffic = lookup_traffic(memory, bank_rows, group_size=16, num_tokens=TOKENS, element_bytes=2)
    forward, backward = bank_splits.sent(config, COLUMNS, bank_rows, TOKENS)
    assert sum(forward.to_others(16, H100)) == pytest.approx(traffic.forward)
    assert sum(backward.to_others(16, H100)) == pytest.approx(traffic.backward)


def test_what_all_are_sent_crosses_between_nodes_once() -> None:
    """The 8 adapters of a node share what a ring passes on, 15 of 16 blocks."""
    assert Sent(same=8, own=0).to_others(16, H100) == (7 * 15, 15)
    assert Sent(same=0, own=1).to_others(16, H100) == (7, 8)
    assert Sent(same=1, own=1).to_others(8, H100) == (14, 0)


def test_whole_rows_move_no_byte_for_nothing(config: RunConfig) -> None:
    """A rank of 16 gathers T J rows of 1,920 and 640 bytes where columns are T J 16 times 176 and 96 bytes."""
    stage = stages_of(config)[0]
    assert (moved_bytes(1920), moved_bytes(640), moved_bytes(120), moved_bytes(40)) == (1920, 640, 176, 96)
    rows, columns = (bank_splits.rows_s(config, split, stage, TOKENS, H100) for split in (ROWS, COLUMNS))
    assert rows.gathers / columns.gathers == pytest.approx((1920 + 640) / 16 / (176 + 96))
    # Everybody's ids are walked as before, but sent to their owners alone 1/16 of them.
    to_owners = bank_splits.rows_s(config, TO_OWNERS, stage, TOKENS, H100)
    assert rows.ids > columns.ids
    assert columns.ids + columns.sort > 1.5 * (to_owners.ids + to_owners.sort)


def test_parts_of_rows_are_those_of_a_plan(config: RunConfig) -> None:
    """Plans count places in the part besides, 8 bytes per entry, each way 8 more for the scores of both cores, and 8 where
    columns meet."""
    lookups = stages_of(config)[0].families[0].lookups[:1]
    stage = bank_splits.reading(stages_of(config)[0], lookups, lookups)
    skewed = replace(H100, row_skew=0.8)
    found = bank_splits.rows_s(config, Split("", 4), stage, TOKENS, skewed)
    layout = replace(config.parallel, memory_rows=4)
    planned = row_seconds(replace(config, parallel=layout), stage, TOKENS, skewed)
    entries = 16 * TOKENS * 256
    assert planned.gathers == pytest.approx(found.gathers)
    assert planned.sort == pytest.approx(found.sort)
    assert planned.ids - found.ids == pytest.approx(40 * entries / H100.stream_bytes_per_s)
    assert planned.gradients == pytest.approx(found.gradients, rel=0.02)


def test_vectors_of_all_tokens_leave_the_cache(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache keeps 25 MB of 131,072 tokens' vectors; gradients of tables read the others once per entry."""
    stage = bank_splits.reading(stages_of(config)[0], (), stages_of(config)[0].families[0].lookups[:1])
    found = bank_splits.rows_s(config, ROWS, stage, TOKENS, H100)
    monkeypatch.setattr(bank_splits, "CACHED_BYTES", float("inf"))
    cached = bank_splits.rows_s(config, ROWS, stage, TOKENS, H100)
    missed = TOKENS * 256 * sum(width - 25e6 / (16 * TOKENS) for width in (1920, 640))
    assert found.gradients - cached.gradients == pytest.approx(missed / H100.gather_bytes_per_s)


@pytest.mark.parametrize(("parts", "group", "found"), [(0, 16, 16), (4, 16, 4), (4, 2, 2), (1, 16, 1), (4, 1, 1)])
def test_a_group_has_as_many_parts_of_rows_as_it_can(parts: int, group: int, found: int) -> None:
    assert Split("", parts).parts_of(group) == found


def test_no_token_reads_an_entry_twice() -> None:
    rates = bank_splits.reads_per_token(1000, 256, 1.5)
    assert rates.sum() == pytest.approx(256)
    assert rates.max() == 1
    assert (rates[:-1] >= rates[1:]).all()
