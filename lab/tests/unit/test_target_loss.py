"""Tokens and seconds to a target loss, and the exact test of paired seeds: against counts by hand."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest

from lab.studies.compare.runs import RunResult
from lab.studies.compare.target import (
    Reached,
    check_target,
    crossing,
    lead,
    reached,
    seeds_needed,
    sign_flip_p,
    target_section,
    verdict,
)
from pretrain.config.schema import DataConfig, DatasetEntry, EvaluationConfig, RunConfig, TrainConfig
from pretrain.errors import ConfigError
from tools.common.metrics import Curves

CONFIG = RunConfig(
    name="a",
    train=TrainConfig(num_steps=4, global_batch_size=2, micro_batch_size=2, sequence_length=50),
    data=DataConfig((DatasetEntry("data/x"),)),
    evaluation=EvaluationConfig(every_steps=2),
)
OTHER = replace(CONFIG, name="b")
"""Steps of 100 tokens."""


def run(*losses: float, step_s: tuple[float, ...] = (1.0, 2.0, 4.0, 8.0)) -> RunResult:
    """One that was evaluated after steps 2 and 4."""
    validation = tuple(zip((200.0, 400.0), losses, strict=True))
    return RunResult(losses[-1], 1.0, Curves((), validation, {}, {}, 1.0), step_s)


def test_crossings_by_hand() -> None:
    points = [(200.0, 5.0), (400.0, 3.0), (600.0, 3.5), (800.0, 2.5)]
    assert crossing(points, 4.5) == 250.0
    assert crossing(points, 3.0) == 400.0
    # For the first time, whatever comes after.
    assert crossing(points, 3.25) == 375.0
    assert crossing(points, 2.75) == pytest.approx(750.0)
    assert crossing(points, 5.5) == 200.0
    assert crossing(points, 2.0) is None
    assert crossing([], 2.0) is None


def test_seconds_are_those_of_the_steps_before_and_of_a_part_of_one() -> None:
    # Half way from 5 to 4: after three steps, 1 + 2 + 4 s; a quarter: after half of the third.
    assert reached(run(5.0, 4.0), 4.5, CONFIG) == Reached(300.0, 7.0)
    assert reached(run(5.0, 4.0), 4.75, CONFIG) == Reached(250.0, 5.0)
    assert reached(run(5.0, 4.0), 4.0, CONFIG) == Reached(400.0, 15.0)
    assert reached(run(5.0, 4.0), 3.9, CONFIG) is None
    assert reached(run(5.0, 4.0, step_s=(1.0,)), 4.5, CONFIG) == Reached(300.0, None)


def test_the_p_value_is_a_count_of_signs() -> None:
    assert sign_flip_p([1.0]) == 1 / 2
    assert sign_flip_p([-1.0]) == 1.0
    # Sums of +-1 +-2 +-3: 6 and 4, 2, 0, 0, -2, -4, -6; of 1, -2 and 3 it is 2.
    assert sign_flip_p([1.0, 2.0, 3.0]) == 1 / 8
    assert sign_flip_p([1.0, -2.0, 3.0]) == 3 / 8
    assert sign_flip_p([0.1] * 7) == float(Fraction(1, 2**7))
    # Equal but for rounding.
    assert sign_flip_p([0.1, 0.2, -0.3]) == sign_flip_p([1.0, 2.0, -3.0]) == 5 / 8
    assert seeds_needed() == 7


def test_leads_are_shares_of_the_reference() -> None:
    assert lead([80.0, 90.0], [100.0, 100.0]) == (pytest.approx(0.15), 1 / 4)


def pairs(own: list[float], reference: list[float]) -> tuple[list[Reached], list[Reached]]:
    return [Reached(x, x / 10) for x in own], [Reached(x, x / 10) for x in reference]


END = Reached(1000.0, 100.0)


def test_seven_seeds_may_show_it_and_three_cannot() -> None:
    own, reference = pairs([80.0 + n for n in range(7)], [100.0 + n for n in range(7)])
    text = verdict("b", own, "a", reference, END)
    assert text == (
        "b needs 19.4% fewer tokens (p = 0.0078) and 19.4% fewer seconds (p = 0.0078) than a: faster at p < 0.01."
    )
    few = verdict("b", own[:3], "a", reference[:3], END)
    assert "not shown to be faster" in few
    assert "3 seeds cannot give less than p = 0.12, and 7 can go below 0.01" in few
    slower = verdict("a", reference, "b", own, END)
    assert "24.1% more tokens (p = 1)" in slower
    assert "not shown to be faster" in slower


def test_fewer_tokens_in_more_seconds_are_not_faster_in_both() -> None:
    own, reference = pairs([80.0] * 7, [100.0] * 7)
    slow = [Reached(each.tokens, 2 * each.tokens) for each in own]
    assert "not shown to be faster in both" in verdict("b", slow, "a", reference, END)


def test_what_does_not_reach_it() -> None:
    own, reference = pairs([80.0] * 7, [100.0] * 7)
    assert verdict("b", [*own[:6], None], "a", reference, END).startswith("b does not reach it with 1 of 7 seeds")
    # A reference that does not is taken to need a whole run.
    text = verdict("b", own, "a", [*reference[:6], None], END)
    assert "a does not reach it with 1 of 7 seeds, and counts as if at its end" in text
    # 7 x 80 of 6 x 100 + 1000.
    assert "65.0% fewer tokens (p = 0.0078)" in text


def test_the_section() -> None:
    results = {"a": [run(5.0, 4.0), run(5.0, 4.2)], "b": [run(4.5, 4.0)]}
    text = target_section(4.5, [CONFIG, OTHER], results)
    assert "| a | 2 of 2 | 0.000 (0.000 to 0.000) | 8.0 (7.0 to 9.0) |" in text
    assert "| b | 1 of 1 | 0.000 | 3.0 |" in text
    # Pairs that are done.
    assert "- b needs 33.3% fewer tokens (p = 0.5) and 57.1% fewer seconds (p = 0.5) than a:" in text
    assert "No seed of all models is done yet" in target_section(4.5, [CONFIG, OTHER], {"a": results["a"]})


@pytest.mark.parametrize("every", [0, 4, 5])
def test_runs_that_are_evaluated_at_their_end_alone_are_refused(every: int) -> None:
    config = replace(CONFIG, evaluation=EvaluationConfig(every_steps=every))
    with pytest.raises(ConfigError, match=f"^evaluation.every_steps is {every} for a, "):
        check_target([CONFIG, config], (1, 2))


def test_too_many_seeds_are_refused() -> None:
    check_target([CONFIG], range(20))
    with pytest.raises(ConfigError, match=r"^--seeds names 21 seeds"):
        check_target([CONFIG], range(21))
