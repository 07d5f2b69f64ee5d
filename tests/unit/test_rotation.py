"""Every case of a long list has its turn."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.rotation import in_rotation, in_turn, named_in_rotation


@given(num_cases=st.integers(1, 60), parts=st.integers(1, 60), week=st.integers(0, 10**5))
def test_shares_are_as_large_as_each_other_and_together_all(num_cases: int, parts: int, week: int) -> None:
    cases = [f"case {number}" for number in range(num_cases)]
    if parts > num_cases:
        with pytest.raises(AssertionError, match=f"{num_cases} cases cannot be spread over {parts} weeks"):
            in_rotation(cases, parts, week)
        return
    shares = [in_rotation(cases, parts, each) for each in range(week, week + parts)]
    assert sorted(case for share in shares for case in share) == sorted(cases)
    assert {len(share) for share in shares} <= {num_cases // parts, -(-num_cases // parts)}
    assert all(share == [case for case in cases if case in share] for share in shares)


def test_no_week_takes_all() -> None:
    cases = {name: name.upper() for name in "abcdefg"}
    assert named_in_rotation(cases, 3, None) == cases
    assert [named_in_rotation(cases, 3, week) for week in (3, 4, 5)] == [
        {name: cases[name] for name in in_rotation(list(cases), 3, week)} for week in (0, 1, 2)
    ]


def test_neighbours_are_spread() -> None:
    cases = [(kind, layout) for kind in range(6) for layout in range(3)]
    for week in range(3):
        assert len({layout for _, layout in in_rotation(cases, 3, week)}) > 1


def test_tests_that_take_turns_are_run_in_one_of_so_many_weeks() -> None:
    marks = [[in_turn(number, 3, week) for number in range(3)] for week in range(7, 10)]
    assert [[mark.args[0] for mark in of_week] for of_week in marks] == [
        [True, False, True],
        [True, True, False],
        [False, True, True],
    ]
    assert in_turn(1, 3, None).args == (False,)
