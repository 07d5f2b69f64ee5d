"""Tables that a layer reads: the paper's Table 7, the release's windows, and what a pipeline chunk may hold."""

from __future__ import annotations

import math
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megamem.config.memory import MemoryConfig
from megamem.families.ultramem_v2.config import UltraMemV2Config
from megamem.placement.sharing import LayerView, SharingConfig

Pattern = Literal["none", "block", "ring", "no_ring"]
NUM_KEYS = 10


def memory(
    pattern: Pattern, group: int, window: Literal["paper", "released"] = "paper", num_keys: int = NUM_KEYS
) -> MemoryConfig:
    return UltraMemV2Config(num_keys=num_keys, top_k=4, sharing=SharingConfig(pattern, group, window))


def tables_of(view: LayerView, config: MemoryConfig, num_layers: int) -> list[int]:
    """The tables in a layer's window, numbered from 1 over the whole model, as in Table 7."""
    group, own_rows = config.sharing.group, config.num_keys**2
    if config.sharing.pattern == "block":
        assert view.first_row == 0
        return [view.bank * group + table + 1 for table in range(group)]
    assert view.bank == 0
    assert view.first_row % own_rows == 0
    return [(view.first_row // own_rows + table) % num_layers + 1 for table in range(group)]


# Layer -> tables, both counted from 1; L = 24.
TABLE_7: dict[Pattern, dict[int, list[int]]] = {
    "no_ring": {
        1: [1, 2, 3, 4],
        2: [1, 2, 3, 4],
        3: [2, 3, 4, 5],
        4: [3, 4, 5, 6],
        5: [4, 5, 6, 7],
        24: [21, 22, 23, 24],
    },
    "ring": {
        1: [24, 1, 2, 3],
        2: [1, 2, 3, 4],
        3: [2, 3, 4, 5],
        4: [3, 4, 5, 6],
        5: [4, 5, 6, 7],
        24: [23, 24, 1, 2],
    },
    "block": {
        1: [1, 2, 3, 4],
        2: [1, 2, 3, 4],
        3: [1, 2, 3, 4],
        4: [1, 2, 3, 4],
        5: [5, 6, 7, 8],
        24: [21, 22, 23, 24],
    },
}


@pytest.mark.parametrize("pattern", TABLE_7)
def test_table_7(pattern: Pattern) -> None:
    config = memory(pattern, 4)
    plan = config.plan(24)
    actual = {layer: tables_of(plan.views[layer - 1], config, 24) for layer in TABLE_7[pattern]}
    assert actual == TABLE_7[pattern]


@pytest.mark.parametrize(
    ("pattern", "layer", "tables"),
    [
        ("ring", 1, [1, 2, 3, 4]),
        ("ring", 24, [24, 1, 2, 3]),
        ("no_ring", 1, [1, 2, 3, 4]),
        ("no_ring", 23, [21, 22, 23, 24]),
    ],
)
def test_released_windows_start_at_the_layers_own_table(pattern: Pattern, layer: int, tables: list[int]) -> None:
    config = memory(pattern, 4, "released")
    assert tables_of(config.plan(24).views[layer - 1], config, 24) == tables


@pytest.mark.parametrize(
    ("group", "tables"), [(1, [7]), (2, [7, 8]), (3, [6, 7, 8]), (9, [3, 4, 5, 6, 7, 8, 9, 10, 11])]
)
def test_windows_of_other_sizes_are_centred(group: int, tables: list[int]) -> None:
    config = memory("ring", group)
    assert tables_of(config.plan(24).views[6], config, 24) == tables


@pytest.mark.parametrize(("group", "num_keys"), [(4, 1928), (9, 2892), (16, 3856), (2, 1363)])
def test_keys_of_a_shared_window(group: int, num_keys: int) -> None:
    """Section 4.2.8 with n = 964; the paper rounds the nine-table window up to 2896, which would not fit into it."""
    plan = memory("ring", group, num_keys=964).plan(24)
    assert {view.num_keys for view in plan.views} == {num_keys}


def test_private_tables() -> None:
    plan = memory("none", 1).plan(3)
    assert [(bank.index, bank.num_rows, bank.layers) for bank in plan.banks] == [
        (0, 100, (0,)),
        (1, 100, (1,)),
        (2, 100, (2,)),
    ]
    assert plan.views == tuple(LayerView(layer, 0, 100, 100) for layer in range(3))


def test_one_table_for_all_layers_does_not_grow_with_them() -> None:
    config = UltraMemV2Config(num_keys=NUM_KEYS, top_k=4, sharing=SharingConfig("all"))
    for num_layers in (1, 3, 20):
        plan = config.plan(num_layers)
        assert [(bank.num_rows, bank.layers) for bank in plan.banks] == [(100, tuple(range(num_layers)))]
        assert plan.views == (LayerView(0, 0, NUM_KEYS**2, NUM_KEYS**2),) * num_layers
    with pytest.raises(ValueError, match="share memory bank 0"):
        plan.banks_of(range(10))


@st.composite
def configs(draw: st.DrawFn) -> tuple[MemoryConfig, int]:
    pattern: Pattern = draw(st.sampled_from(["none", "block", "ring", "no_ring"]))
    group = draw(st.integers(1, 7)) if pattern != "none" else 1
    num_layers = group * draw(st.integers(1, 5)) if pattern == "block" else group + draw(st.integers(0, 20))
    window: Literal["paper", "released"] = draw(st.sampled_from(["paper", "released"]))
    return memory(pattern, group, window, draw(st.integers(4, 2000))), num_layers


@settings(max_examples=200, deadline=None, derandomize=True)
@given(configs())
def test_plans_are_sound(case: tuple[MemoryConfig, int]) -> None:
    config, num_layers = case
    pattern, group, own_rows = config.sharing.pattern, config.sharing.group, config.num_keys**2
    plan = config.plan(num_layers)
    assert len(plan.views) == num_layers
    assert [bank.index for bank in plan.banks] == list(range(len(plan.banks)))
    assert sum(bank.num_rows for bank in plan.banks) == num_layers * own_rows
    readers = {bank.index: set(bank.layers) for bank in plan.banks}
    for layer, view in enumerate(plan.views):
        bank = plan.banks[view.bank]
        assert layer in readers[view.bank]
        assert 0 <= view.first_row < bank.num_rows
        # The largest square grid that fits into the window.
        assert view.num_keys == math.floor(math.sqrt(group * own_rows) + 1e-9)
        assert view.num_rows <= group * own_rows < (view.num_keys + 1) ** 2
        assert view.num_rows <= bank.num_rows
        if pattern != "ring":
            assert view.first_row + view.num_rows <= bank.num_rows
        if pattern in ("ring", "no_ring"):
            assert layer + 1 in tables_of(view, config, num_layers)


def test_a_chunk_gets_the_banks_of_its_layers() -> None:
    plan = memory("block", 2).plan(8)
    assert [bank.index for bank in plan.banks_of(range(4, 8))] == [2, 3]
    assert [bank.index for bank in plan.banks_of(range(2, 4))] == [1]
    assert plan.banks_of(range(8, 8)) == ()


@pytest.mark.parametrize("layers", [range(3), range(3, 6), range(1, 2)])
def test_a_split_bank_is_refused(layers: range) -> None:
    with pytest.raises(ValueError, match=r"share memory bank .* multiple of model\.memory\.sharing\.group"):
        memory("block", 2).plan(8).banks_of(layers)


@pytest.mark.parametrize("pattern", ["ring", "no_ring"])
def test_a_ring_needs_all_its_layers(pattern: Pattern) -> None:
    plan = memory(pattern, 2).plan(8)
    assert [bank.index for bank in plan.banks_of(range(8))] == [0]
    with pytest.raises(ValueError, match="share memory bank 0"):
        plan.banks_of(range(4))
