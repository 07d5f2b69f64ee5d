"""Rows behind entries: every implementation gives the twin's, at any size of the grid, the window and the bank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.implementations import Implementation, unavailable
from kernels.select import implementation_of
from kernels.shuffled_rows import naive
from kernels.shuffled_rows.op import reciprocal
from megamem.banks.hashing import key_of

IMPLEMENTATIONS: tuple[Implementation, ...] = ("torch", "cpu", "triton")
KEYS = tuple(key_of(1, "layer", str(number)) for number in range(naive.NUM_ROUNDS))
LARGEST = 2**31 - 1


def op(implementation: Implementation) -> Any:
    if reason := unavailable(implementation, "cpu"):
        pytest.skip(f"{implementation} {reason}")
    return implementation_of("shuffled_rows", implementation)


def some_entries(num_keys: int, *shape: int) -> Tensor:
    entries = torch.randint(0, num_keys**2, shape, generator=torch.Generator().manual_seed(0))
    entries.view(-1)[:2] = torch.tensor([0, num_keys**2 - 1])
    return entries


@pytest.mark.parametrize("with_blocks", [False, True])
@pytest.mark.parametrize(
    ("num_keys", "num_rows", "first_row", "num_bank_rows"),
    [
        (1, 1, 0, 1),
        (2, 1, 3, 4),
        (3, 9, 0, 9),
        # Four virtual blocks; a window that wraps around the bank.
        (64, 1024, 700, 1500),
        (1138, 1138**2, 1138**2 - 1, 1138**2),
        # The largest rows of 32 bits.
        (46_341, 2**31, 2**31 - 1, 2**31),
        (LARGEST, LARGEST**2 // 9, 10**15, LARGEST**2),
        (LARGEST, LARGEST, LARGEST, 2**62 - 1),
    ],
)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_rows_and_blocks_are_the_twins(
    implementation: Implementation, num_keys: int, num_rows: int, first_row: int, num_bank_rows: int, with_blocks: bool
) -> None:
    entries = some_entries(num_keys, 37, 29)
    arguments = (entries, num_keys, KEYS, num_rows, first_row, num_bank_rows, with_blocks)
    rows, blocks = op(implementation)(*arguments)
    wanted_rows, wanted_blocks = naive.shuffled_rows(*arguments)
    assert torch.equal(rows, wanted_rows)
    assert 0 <= int(rows.min()) <= int(rows.max()) < num_bank_rows
    if not with_blocks:
        assert blocks is wanted_blocks is None
    else:
        assert torch.equal(blocks, wanted_blocks)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_entries_may_be_none_or_have_strides(implementation: Implementation) -> None:
    rows_of = op(implementation)
    none, no_blocks = rows_of(torch.empty(0, 5, dtype=torch.int64), 7, KEYS, 49, 0, 49, True)
    assert none.shape == no_blocks.shape == (0, 5)
    entries = some_entries(50, 12, 10)[::2, 1::3]
    arguments = (50, KEYS, 2500, 3, 2600)
    assert torch.equal(rows_of(entries, *arguments)[0], naive.shuffled_rows(entries, *arguments)[0])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_every_round_has_its_key(implementation: Implementation) -> None:
    """The largest keys that there can be, and others for one round."""
    rows_of, entries = op(implementation), torch.arange(23**2)
    seen = set()
    for changed in (None, *range(naive.NUM_ROUNDS)):
        keys = [2**63 - 1 - (number == changed) for number in range(naive.NUM_ROUNDS)]
        rows = rows_of(entries, 23, keys, 23**2, 0, 23**2)[0]
        assert torch.equal(rows, naive.shuffled(entries, 23, keys))
        assert torch.equal(rows.sort().values, entries)
        seen.add(tuple(rows.tolist()))
    assert len(seen) == 1 + naive.NUM_ROUNDS


@settings(max_examples=200, deadline=None, derandomize=True)
@given(number=st.integers(0, 2**62 - 1), divisor=st.integers(1, 2**62 - 1))
@example(number=2**62 - 1, divisor=1)
@example(number=2**62 - 1, divisor=2**62 - 1)
@example(number=2**62 - 1, divisor=2**31)
def test_a_product_with_the_reciprocal_is_the_quotient_or_one_less(number: int, divisor: int) -> None:
    assert reciprocal(divisor) < 2**63
    assert (2 * number * reciprocal(divisor) >> 64) in (number // divisor, number // divisor - 1)
    # Multiples are where an error would show first.
    multiple = number // divisor * divisor
    assert (2 * multiple * reciprocal(divisor) >> 64) in (multiple // divisor, multiple // divisor - 1)
