"""Plans, beside steps that were measured on one H100 (lab/docs/log.md, the entry of 2026-11-27)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pretrain.config.stages import load_config
from pretrain.planning.seconds.hardware import load_hardware
from pretrain.planning.seconds.time_parts import TimePart
from pretrain.planning.seconds.timing import step_time

CONFIGS = Path(__file__).parents[2] / "configs" / "ultramemv2"
H100 = load_hardware("h100-80g")
SMALL, LARGE = "227m_1.2b.yaml", "1b_7b.yaml"
TWIN, LARGE_TWIN = ((key, f"model.ffn_hidden_size={width}") for key in ("model.memory=null",) for width in (3008, 8256))
BY_ROW = ("optimizer.tables=row_wise", "optimizer.table_gradients=rows", "optimizer.value_weight_decay=0.0")
UNSAVED = "train.recompute=none"

# Config, sequences per step and microbatch, other overrides, and the milliseconds for which the device was busy.
BUSY: dict[str, tuple[str, int, int, tuple[str, ...], float]] = {
    "microbatches of 4": (SMALL, 8, 4, (), 234.0),
    "of 8": (SMALL, 8, 8, (), 219.8),
    "of 16": (SMALL, 16, 16, (), 402.1),
    "eight of 8": (SMALL, 64, 8, (), 1577.9),
    "dense twin": (SMALL, 8, 8, TWIN, 143.4),
    "dense twin, eight of 8": (SMALL, 64, 8, TWIN, 1150.5),
    "1B/7B, rows that were read": (LARGE, 8, 4, (UNSAVED, *BY_ROW), 1005.5),
    "1B/7B, dense twin": (LARGE, 8, 4, (UNSAVED, *LARGE_TWIN), 511.7),
}
# Milliseconds of a step, on the faster of two hosts.
WALLS = {"microbatches of 4": 369.7, "of 8": 247.8}
# Milliseconds of a step whose microbatches are replayed from a graph.
REPLAYED = {
    "microbatches of 1": (4, 1, (), 179.7),
    "of 4": (8, 4, (), 236.6),
    "of 8": (8, 8, (), 219.1),
    "dense twin": (8, 8, TWIN, 156.1),
}
# Milliseconds of parts of two steps, by the names of their kernels.
PARTS: dict[str, dict[tuple[TimePart, ...], float]] = {
    "of 8": {
        (TimePart.ATTENTION,): 37.9,
        (TimePart.MEMORY_SELECTION,): 16.7,
        (TimePart.MEMORY_GATHERS,): 10.8,
        (TimePart.MEMORY_GRADIENTS,): 16.6,
        (TimePart.UPDATE, TimePart.MEMORY_UPDATE): 26.2,
    },
    "1B/7B, rows that were read": {
        (TimePart.ATTENTION,): 67.2,
        (TimePart.MEMORY_SELECTION,): 126.3,
        (TimePart.MEMORY_GATHERS,): 114.1,
        (TimePart.MEMORY_GRADIENTS,): 183.4,
        (TimePart.UPDATE, TimePart.MEMORY_UPDATE): 107.5,
    },
}


@pytest.fixture(autouse=True)
def _lookups_are_added_up_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """As they were in what was measured."""
    monkeypatch.setattr("pretrain.planning.bytes.row_bytes.MOST_JOINED_ENTRIES", 1)


def milliseconds(name: str, launch_us: float = H100.launch_us) -> dict[TimePart, float]:
    file, sequences, micro, overrides, _ = BUSY[name]
    sizes = (f"train.global_batch_size={sequences}", f"train.micro_batch_size={micro}")
    time = step_time(load_config(CONFIGS / file, [*sizes, *overrides]), 1, replace(H100, launch_us=launch_us))
    return {part: 1e3 * seconds for part, seconds in time.by_part.items()}


@pytest.mark.parametrize("name", BUSY)
def test_the_device_is_busy_for_as_long_as_was_measured(name: str) -> None:
    assert sum(milliseconds(name, launch_us=0).values()) == pytest.approx(BUSY[name][-1], rel=0.15)


@pytest.mark.parametrize("name", WALLS)
def test_a_step_takes_as_long_as_was_measured(name: str) -> None:
    assert sum(milliseconds(name).values()) == pytest.approx(WALLS[name], rel=0.15)


@pytest.mark.parametrize("name", REPLAYED)
def test_a_step_from_a_graph_takes_as_long_as_was_measured(name: str) -> None:
    sequences, micro, overrides, measured = REPLAYED[name]
    sizes = (f"train.global_batch_size={sequences}", f"train.micro_batch_size={micro}", "train.cuda_graph=microbatch")
    time = step_time(load_config(CONFIGS / SMALL, [*sizes, *overrides]), 1, H100)
    assert 1e3 * time.total_s == pytest.approx(measured, rel=0.15)


@pytest.mark.parametrize("name", PARTS)
def test_parts_of_a_step_take_as_long_as_was_measured(name: str) -> None:
    planned = milliseconds(name, launch_us=0)
    for parts, measured in PARTS[name].items():
        assert sum(planned[part] for part in parts) == pytest.approx(measured, rel=0.2), parts


def test_small_microbatches_are_bound_by_the_host() -> None:
    steps = {
        micro: step_time(
            load_config(CONFIGS / SMALL, ["train.global_batch_size=8", f"train.micro_batch_size={micro}"]), 1, H100
        )
        for micro in (1, 4, 8)
    }
    assert steps[1].total_s > 1.5 * steps[4].total_s > 1.5 * 1.3 * steps[8].total_s
    waits = {micro: time.by_part[TimePart.LAUNCHES] / time.total_s for micro, time in steps.items()}
    assert waits[1] > 0.5 > waits[4] > 0.2 > 0.05 > waits[8]
