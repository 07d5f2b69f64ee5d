"""Spikes, told by hand."""

from __future__ import annotations

import math

from pretrain.config.health import SpikeConfig
from pretrain.train.health.spikes import find_spike, remember

# Mean 3 and deviation 2 of the losses; mean 10 and deviation 1 of the norms.
RECENT = ((1.0, 9.0), (5.0, 11.0), (1.0, 11.0), (5.0, 9.0))
RULE = SpikeConfig(action="skip", window_steps=4, loss_deviations=2.5, grad_norm_deviations=4.0)


def test_a_spike_is_so_many_deviations_above_the_mean() -> None:
    assert find_spike(RULE, RECENT, 8.0, 14.0) is None
    assert find_spike(RULE, RECENT, math.nextafter(8.0, 9.0), 14.0) == (
        "loss 8 is above 3 + 2.5 x 2 of the last 4 steps"
    )
    found = find_spike(RULE, RECENT, 80.0, math.nextafter(14.0, 15.0))
    assert found == (
        "loss 80 is above 3 + 2.5 x 2 of the last 4 steps, and gradient norm 14 is above 10 + 4 x 1 of the last 4 steps"
    )
    # A loss that falls is none.
    assert find_spike(RULE, RECENT, -1e9, 0.0) is None


def test_what_is_not_asked_for_is_not_judged() -> None:
    of_loss = SpikeConfig(action="skip", window_steps=4, grad_norm_deviations=None)
    assert find_spike(of_loss, RECENT, 3.0, 1e9) is None
    of_norm = SpikeConfig(action="skip", window_steps=4, loss_deviations=None)
    assert find_spike(of_norm, RECENT, 1e9, 10.0) is None
    assert find_spike(SpikeConfig(), RECENT, 1e9, 1e9) is None
    assert remember(SpikeConfig(), RECENT, 1.0, 1.0) == ()


def test_nothing_is_judged_before_the_window_is_full() -> None:
    assert find_spike(RULE, RECENT[1:], 1e9, 1e9) is None


def test_the_window_moves_on_and_takes_no_nan() -> None:
    assert remember(RULE, RECENT[:2], 7.0, 8.0) == (*RECENT[:2], (7.0, 8.0))
    assert remember(RULE, RECENT, 7.0, 8.0) == (*RECENT[1:], (7.0, 8.0))
    for bad in (math.nan, math.inf):
        assert remember(RULE, RECENT, bad, 8.0) == RECENT
        assert remember(RULE, RECENT, 7.0, bad) == RECENT
    # After the rule has become a shorter one.
    shorter = SpikeConfig(action="skip", window_steps=2)
    assert remember(shorter, RECENT, 7.0, 8.0) == (RECENT[-1], (7.0, 8.0))


def test_a_level_that_stays_is_accepted_after_a_few_steps() -> None:
    rule = SpikeConfig(action="skip", window_steps=128, grad_norm_deviations=None)
    recent = tuple((2.0 + 0.01 * (-1) ** i, 1.0) for i in range(128))
    spikes = 0
    while find_spike(rule, recent, 3.0, 1.0):
        recent = remember(rule, recent, 3.0, 1.0)
        spikes += 1
    # With m of n steps at the new level, it is sqrt((n - m) / m) deviations above the mean: 6 at m = n / 37.
    assert spikes == 4


def test_a_step_without_a_target_is_no_measure_of_the_next() -> None:
    """Its loss is NaN and its gradient zero: a window of such steps would make a spike of every real one."""
    rule = SpikeConfig(action="skip", window_steps=2)
    recent = remember(rule, remember(rule, (), 3.0, 1.0), 2.9, 1.1)
    for _ in range(4):
        assert find_spike(rule, recent, math.nan, 0.0) is None
        recent = remember(rule, recent, math.nan, 0.0)
    assert recent == ((3.0, 1.0), (2.9, 1.1))
