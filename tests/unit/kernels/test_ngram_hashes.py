"""Hashes of n-grams: every implementation, the twin among them, gives those of a loop over ids in Python's integers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.implementations import Implementation, unavailable
from kernels.select import implementation_of

IMPLEMENTATIONS: tuple[Implementation, ...] = ("naive", "torch", "cpu", "triton")
LARGEST = 2**63 - 1


def op(implementation: Implementation) -> Any:
    if implementation != "naive" and (reason := unavailable(implementation, "cpu")):
        pytest.skip(f"{implementation} {reason}")
    return implementation_of("ngram_hashes", implementation)


@dataclass(frozen=True)
class Group:
    """Hashes of n-grams of one order.

    Attributes:
        multipliers: one for each of N tokens, also behind the group's own.
        heads: modulus and offset of each hash.
    """

    order: int
    multipliers: tuple[int, ...]
    heads: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Case:
    """Tokens and hashes.

    Attributes:
        stretches: [b][c][N - 1 + L] ids.
        positions: [b][s] places.
    """

    stretches: Sequence[Sequence[Sequence[int]]]
    positions: Sequence[Sequence[int]]
    groups: Sequence[Group]
    missing_id: int = 0
    boundary_id: int = 2
    operation: str = "sum"
    cut_at_boundary: bool = False
    missing_row: int | None = None

    def arguments(self) -> tuple[Any, ...]:
        """Arguments of the op."""
        # [b, c, N - 1 + L] and [G, K, 2].
        stretches = torch.tensor(self.stretches, dtype=torch.int64)
        heads = torch.tensor([group.heads for group in self.groups])
        return (
            stretches.flatten(1).t(),
            # As layers give them: a sequence's are consecutive in memory.
            torch.tensor(self.positions, dtype=torch.int64).t(),
            torch.tensor([group.multipliers for group in self.groups]),
            *heads.unbind(2),
            torch.tensor([group.order for group in self.groups]),
            torch.tensor(self.missing_id),
            torch.tensor(self.boundary_id),
            *(self.operation, self.cut_at_boundary, self.missing_row),
        )

    def hashes(self) -> list[list[list[int]]]:
        """[G K][s][b] by a loop over ids."""
        num_tokens = len(self.positions[0])
        return [
            [
                [self._hash(group, *head, sequence, token) for sequence in range(len(self.positions))]
                for token in range(num_tokens)
            ]
            for group in self.groups
            for head in group.heads
        ]

    def window(self, sequence: int, token: int, order: int) -> list[int]:
        """Ids of an n-gram, the last token's first."""
        halo = len(self.groups[0].multipliers) - 1
        length = len(self.stretches[sequence][0]) - halo
        ids, end = self.stretches[sequence][token // length], halo + token % length
        found = [ids[end]]
        for lag in range(1, order):
            starts = self.positions[sequence][token] < lag
            cut = self.cut_at_boundary and self.boundary_id in ids[end - lag : end]
            found.append(self.missing_id if starts or cut else ids[end - lag])
        return found

    def _hash(self, group: Group, modulus: int, offset: int, sequence: int, token: int) -> int:
        if self.missing_row is not None and self.positions[sequence][token] < group.order - 1:
            return offset + self.missing_row
        mixed = 0
        for id, factor in zip(self.window(sequence, token, group.order), group.multipliers, strict=False):
            mixed = mixed + id * factor if self.operation == "sum" else mixed ^ id * factor
        # As 64 bits with a sign hold it.
        mixed = (mixed + 2**63) % 2**64 - 2**63
        return offset + mixed % modulus


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Few ids, so that many are boundaries, and documents that begin anywhere; or ids and factors that overflow."""
    max_order, num_heads, num_sequences = draw(st.integers(2, 5)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    num_stretches, length = draw(st.integers(1, 2)), draw(st.integers(1, 9))
    wide = draw(st.booleans())
    ids = st.integers(-(2**62), LARGEST) if wide else st.integers(0, 4)
    factors = st.integers(-LARGEST, LARGEST) if wide else st.integers(0, 2**60)
    moduli, offsets = st.integers(1, LARGEST if wide else 97), st.integers(0, 0 if wide else 10**12)
    groups = [
        Group(
            draw(st.integers(2, max_order)),
            draw(st.tuples(*[factors] * max_order)),
            draw(st.tuples(*[st.tuples(moduli, offsets)] * num_heads)),
        )
        for _ in range(draw(st.integers(1, 3)))
    ]
    size = max_order - 1 + length
    stretch = st.lists(ids, min_size=size, max_size=size)
    num_tokens = num_stretches * length
    return Case(
        [[draw(stretch) for _ in range(num_stretches)] for _ in range(num_sequences)],
        [draw(st.lists(st.integers(0, 5), min_size=num_tokens, max_size=num_tokens)) for _ in range(num_sequences)],
        groups,
        missing_id=draw(ids),
        boundary_id=draw(ids),
        operation=draw(st.sampled_from(["sum", "xor"])),
        cut_at_boundary=draw(st.booleans()),
        missing_row=draw(st.none() | st.integers(0, 10**12)),
    )


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_hashes_are_those_of_a_loop(implementation: Implementation) -> None:
    hashes_of = op(implementation)

    @settings(max_examples=40 if implementation == "triton" else 200, deadline=None, derandomize=True)
    @given(cases())
    def check(case: Case) -> None:
        assert hashes_of(*case.arguments()).tolist() == case.hashes()

    check()


def numbers(num: int, limit: int, seed: int) -> list[int]:
    drawn: list[int] = torch.randint(0, limit, (num,), generator=torch.Generator().manual_seed(seed)).tolist()
    return drawn


# Two tiles, and a third that is not full; heads of two orders.
LONG = Case(
    [[numbers(2 + 273, 50_000, 2 * number), numbers(2 + 273, 50_000, 2 * number + 1)] for number in range(2)],
    [numbers(546, 900, number) for number in (4, 5)],
    [
        Group(2, (2**46 + 1, 2**46 - 3, 5), ((104_729, 0), (104_743, 104_729))),
        Group(3, (2**46 + 1, 2**46 - 3, 2**45 + 7), ((104_759, 209_472), (2**40 + 15, 314_231))),
    ],
    operation="xor",
)


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"operation": "sum", "missing_row": 7},
        {"cut_at_boundary": True, "boundary_id": LONG.stretches[0][1][7], "missing_id": 3},
    ],
    ids=str,
)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_tokens_fill_several_tiles(implementation: Implementation, changed: dict[str, Any]) -> None:
    case = replace(LONG, **changed)
    assert op(implementation)(*case.arguments()).tolist() == case.hashes()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_boundary_hides_itself_and_all_before_it_from_those_behind_it(implementation: Implementation) -> None:
    """Numbers are the windows themselves, digit by digit."""
    digits = Group(4, (1, 10, 100, 1000), ((10**6, 0),))
    case = Case([[[0, 0, 0, 5, 2, 7, 9, 6]]], [list(range(5))], [digits], missing_id=8, cut_at_boundary=True)
    expected = [8885, 8852, 8887, 8879, 8796]
    assert op(implementation)(*case.arguments()).flatten().tolist() == expected
    assert [each for (each,) in case.hashes()[0]] == expected
    crossed = replace(case, cut_at_boundary=False)
    assert op(implementation)(*crossed.arguments()).flatten().tolist() == [8885, 8852, 8527, 5279, 2796]
    # The missing row is that of starts alone.
    with_row = replace(case, missing_row=4)
    assert op(implementation)(*with_row.arguments()).flatten().tolist() == [4, 4, 4, 8879, 8796]


@pytest.mark.parametrize("shape", [(0, 3), (4, 0)])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_there_may_be_no_tokens(implementation: Implementation, shape: tuple[int, int]) -> None:
    _, _, *rest = LONG.arguments()
    extended, positions = (torch.zeros(size, shape[1], dtype=torch.int64) for size in (2 + shape[0], shape[0]))
    assert op(implementation)(extended, positions, *rest).shape == (4, *shape)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_numbers_may_have_strides(implementation: Implementation) -> None:
    arguments = LONG.arguments()

    def apart(x: Any) -> Any:
        return torch.stack((x, x - 1), -1)[..., 0] if isinstance(x, Tensor) else x

    assert torch.equal(op(implementation)(*map(apart, arguments)), op("naive")(*arguments))


@pytest.mark.parametrize("implementation", ["cpu", "triton"])
def test_custom_ops_are_what_they_declare(implementation: Implementation) -> None:
    torch.library.opcheck(op(implementation), LONG.arguments())
