"""The order in which Triton's `segment_accumulate` adds: a function of each row's own entries, to the bit, however they
are shared out; and the runs, which are alike whatever is read.

Legend: R table rows, T tokens, J rows read per token, C coefficient groups, W columns, M = T J entries.
"""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.implementations import unavailable

if reason := unavailable("triton", "cpu"):
    pytest.skip(f"triton {reason}", allow_module_level=True)

from kernels.common.tiles import ACCUMULATE_AHEAD, accumulate_tile, slots_per_run
from kernels.segment_accumulate import triton_op

MODULE = "kernels.segment_accumulate.triton_op"


def blocked(total: Tensor, items: list[Tensor], block: int) -> Tensor:
    """The first `block` items added one by one; of the others, sums of so many each, which are items again."""
    while items:
        for item in items[:block]:
            total = total + item
        later = items[block:]
        items = []
        for first in range(0, len(later), block):
            items.append(torch.zeros_like(total))
            for item in later[first : first + block]:
                items[-1] = items[-1] + item
    return total


def expected(accumulator: Tensor, ids: Tensor, coef: Tensor, vec: Tensor, bins: Tensor | None, block: int) -> Tensor:
    """The accumulator, each row in the order of `blocked`."""
    groups, width = coef.shape[2], accumulator.shape[1]
    vectors = vec.unflatten(1, (-1, groups, width // groups)).to(accumulator.dtype)
    of_bin = torch.zeros_like(ids) if bins is None else bins
    terms = coef.to(accumulator.dtype).unsqueeze(3) * vectors[torch.arange(len(ids)).unsqueeze(1), of_bin]
    out = accumulator.clone()
    for row in range(len(accumulator)):
        out[row] = blocked(out[row], list(terms[ids == row].flatten(1)), block)
    return out


def skewed_ids(num_rows: int, tokens: int, reads: int, exponent: float, generator: torch.Generator) -> Tensor:
    """[T, J]: the n-th most frequent row is read n^-exponent as often as the first; rows lie anywhere."""
    frequency = torch.arange(1, num_rows + 1, dtype=torch.float64) ** -exponent
    ranks = torch.searchsorted(
        frequency.cumsum(0) / frequency.sum(), torch.rand(tokens * reads, generator=generator).double()
    )
    return torch.randperm(num_rows, generator=generator)[ranks.clamp_max(num_rows - 1)].view(tokens, reads)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    num_rows=st.sampled_from([1, 2, 5, 40]),
    tokens=st.integers(1, 12),
    reads=st.sampled_from([1, 3, 4]),
    exponent=st.sampled_from([0.0, 0.8, 3.0]),
    width=st.sampled_from([1, 10, 20, 60, 240]),
    groups=st.sampled_from([1, 2]),
    num_bins=st.sampled_from([1, 3]),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    block=st.sampled_from([2, 3, 128]),
    others=st.sampled_from([0, 1, 9]),
    slots=st.integers(1, 3),
    ahead=st.sampled_from([1, 4]),
    seed=st.integers(0, 1000),
)
# Three levels of sums of blocks.
@example(1, 12, 4, 0.0, 10, 1, 1, torch.float32, 2, 0, 1, 4, 0)
def test_order_is_that_of_a_rows_own_entries(
    num_rows: int,
    tokens: int,
    reads: int,
    exponent: float,
    width: int,
    groups: int,
    num_bins: int,
    dtype: torch.dtype,
    block: int,
    others: int,
    slots: int,
    ahead: int,
    seed: int,
) -> None:
    """To the bit, for any share of a run and any number of loads under way, and with so many rows of others at each end."""
    if width % groups:
        groups = 1
    g = torch.Generator().manual_seed(seed)
    ids = skewed_ids(num_rows + 2 * others, tokens, reads, exponent, g) - others
    coef = torch.randn(tokens, reads, groups, generator=g).to(dtype)
    vec = torch.randn(tokens, num_bins * width, generator=g).to(dtype)
    bins = torch.randint(0, num_bins, (tokens, reads), generator=g) if num_bins > 1 else None
    start = torch.randn(num_rows, width, generator=g)
    actual = start.clone()
    with (
        patch(f"{MODULE}.BLOCK", block),
        patch(f"{MODULE}.ACCUMULATE_AHEAD", ahead),
        patch(f"{MODULE}.slots_per_run", lambda num_slots: slots),
    ):
        triton_op.segment_accumulate(actual, ids, coef, vec, bins)
    assert torch.equal(actual, expected(start, ids, coef, vec, bins, block))


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    counts=st.lists(st.integers(1, 40), min_size=1, max_size=20),
    block=st.integers(1, 9),
    below=st.integers(0, 30),
    behind=st.integers(0, 30),
)
def test_every_block_begins_in_one_slot(counts: list[int], block: int, below: int, behind: int) -> None:
    """Blocks found one by one, for rows that are read so many times each, and rows of others on either side."""
    own = torch.repeat_interleave(torch.arange(len(counts)) * 3, torch.tensor(counts))
    num_rows = 3 * len(counts)
    rows = torch.cat([torch.arange(-below, 0) // 3, own, num_rows + torch.arange(behind) // 5]).int()
    begins, numbers, position = [], [], below
    for count in counts:
        for number, offset in enumerate(range(0, count, block)):
            begins.append(position + offset)
            numbers.append(number)
        position += count
    with patch(f"{MODULE}.BLOCK", block):
        cuts, found = triton_op.block_starts(rows, num_rows)
    num_slots = -(-len(rows) // block)
    assert cuts.tolist() == [min([b for b in begins if b >= s * block] or [position]) for s in range(num_slots)] + [
        position
    ]
    # At most one of a slot's blocks has a sum in scratch.
    later = [(begin // block, number) for begin, number in zip(begins, numbers, strict=True) if number > 0]
    assert len({slot for slot, _ in later}) == len(later)
    assert found.tolist() == [dict(later).get(slot, 0) for slot in range(num_slots)]


@pytest.mark.parametrize(("exponent", "least"), [(0.0, 0.98), (0.6, 0.95), (0.8, 0.93), (1.0, 0.93)])
def test_runs_are_alike_whatever_is_read(exponent: float, least: float) -> None:
    """The share of a tile's steps in which its runs have an entry: 1 / 16 of the largest model's entries and rows."""
    g = torch.Generator().manual_seed(0)
    ids = skewed_ids(22_861_824 // 16, 131_072 // 16, 256, exponent, g)
    _, _, cuts, _ = triton_op.sort_by_row(ids, 22_861_824 // 16)
    lengths = cuts[:: slots_per_run(cuts.numel() * 16)].diff()
    for width in (60, 20):
        runs = accumulate_tile(width).entries
        tiles = lengths[: len(lengths) // runs * runs].view(-1, runs)
        # A last step closes a run's last block.
        steps = (tiles.amax(1) + 1 + ACCUMULATE_AHEAD - 1) // ACCUMULATE_AHEAD * ACCUMULATE_AHEAD
        assert tiles.sum() / (steps.sum() * runs) >= least


def test_what_cannot_be_added_up_is_refused() -> None:
    ids, coef, vec = torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1, 1), torch.ones(1, 8)
    with pytest.raises(ValueError, match=r"the accumulator is torch.bfloat16"):
        triton_op.segment_accumulate(torch.zeros(1, 8, dtype=torch.bfloat16), ids, coef, vec)
    with pytest.raises(ValueError, match=r"2147483648 rows are read at once"):
        triton_op.segment_accumulate(torch.zeros(1, 8), ids.expand(2**16, 2**15), coef, vec)
