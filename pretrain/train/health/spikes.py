"""Spikes: a loss or a gradient norm far above those of the steps before it.

A pure function of numbers that every rank knows and that the run's state keeps, so all ranks decide alike, and a resumed
run decides as the uninterrupted one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean

from pretrain.config.health import SpikeConfig

Recent = tuple[tuple[float, float], ...]
"""Loss and gradient norm of the last steps, oldest first."""


def find_spike(rule: SpikeConfig, recent: Recent, loss: float, grad_norm: float) -> str | None:
    """Say why a step is a spike; None: it is not, or nothing is judged yet.

    x is a spike if x > mean + k sqrt(mean((x_i - mean)^2)), over the last `window_steps` steps i.
    """
    if rule.action == "none" or len(recent) < rule.window_steps:
        return None
    losses, norms = zip(*recent, strict=True)
    judged = (
        ("loss", loss, losses, rule.loss_deviations),
        ("gradient norm", grad_norm, norms, rule.grad_norm_deviations),
    )
    found = [_excess(name, value, before, limit) for name, value, before, limit in judged if limit is not None]
    return ", and ".join(text for text in found if text is not None) or None


def remember(rule: SpikeConfig, recent: Recent, loss: float, grad_norm: float) -> Recent:
    """The last steps with one more.

    A spike that was skipped counts too: a level that stays is accepted after a few steps. Steps that are not finite, or have
    no target, do not.
    """
    if rule.action == "none":
        return ()
    if not (math.isfinite(loss) and math.isfinite(grad_norm)):
        return recent[-rule.window_steps :]
    return (*recent, (loss, grad_norm))[-rule.window_steps :]


def _excess(name: str, value: float, before: Sequence[float], limit: float) -> str | None:
    mean = fmean(before)
    deviation = math.sqrt(fmean((x - mean) ** 2 for x in before))
    if not value > mean + limit * deviation:
        return None
    return f"{name} {value:.4g} is above {mean:.4g} + {limit:g} x {deviation:.3g} of the last {len(before)} steps"
