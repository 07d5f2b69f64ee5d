"""Verdicts of the check, from what its trials showed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from lab.gpu_check.plan import ShortTraining
from lab.gpu_check.trial import Observed
from pretrain.planning.bytes.held import held_bytes

State = Literal["ok", "differs", "failed", "skipped"]

HELD_SLACK = 0.10
"""Share of the formula by which the memory that stays may exceed it: padding of buffers, and workspaces."""
HELD_SLACK_BYTES = 256 * 2**20
"""Bytes that libraries hold, whatever the model."""


@dataclass(frozen=True)
class Verdict:
    """Verdict on one check.

    Attributes:
        name: name of the check.
        state: skipped: the machine cannot run it, or there was no time.
        text: figures, or the reason.
    """

    name: str
    state: State
    text: str


def judge(trial: ShortTraining, observed: Observed, like: Observed | None) -> Verdict:
    """Hold a trial against the one that it must be like, and its memory against the formula."""
    problems, parts = [], []
    first, last = observed.losses[0], observed.losses[-1]
    parts.append(f"loss {first:.4f} to {last:.4f}, {observed.tokens_per_s:,.0f} tokens/s")
    if not all(map(math.isfinite, (*observed.losses, *observed.norms))):
        problems.append("a loss or a gradient is not finite")
    elif last >= first:
        problems.append("it has learned nothing")
    if like is not None:
        difference = max(map(abs, (a - b for a, b in zip(observed.losses, like.losses, strict=True))))
        wanted = f"at most {trial.tolerance:.0e}" if trial.tolerance else "the same bits wanted"
        parts.append(f"losses within {difference:.1e} of {trial.like} ({wanted})")
        same = (observed.losses, observed.norms) == (like.losses, like.norms)
        if not (difference <= trial.tolerance if trial.tolerance else same):
            problems.append("other losses" if difference else "other gradient norms")
    if observed.peak_bytes:
        parts.append(f"{observed.held_bytes / 1e9:.3f} GB stay, {observed.peak_bytes / 1e9:.3f} GB at most")
    if trial.holds and observed.held_bytes:
        expected = held_bytes(trial.config, trial.num_ranks).total
        parts.append(f"{expected / 1e9:.3f} GB by formula")
        if not expected <= observed.held_bytes <= (1 + HELD_SLACK) * expected + HELD_SLACK_BYTES:
            problems.append("other memory than by formula")
    text = "; ".join(parts)
    return Verdict(trial.name, "differs" if problems else "ok", f"{', '.join(problems)}: {text}" if problems else text)


def judge_resumed(straight: dict[int, float], resumed: dict[int, float], num_steps: int) -> Verdict:
    """Hold the losses of a killed and resumed run against those of one that was left alone, by step."""
    name = "killed and resumed"
    if sorted(straight) != list(range(1, num_steps + 1)) or sorted(resumed) != sorted(straight):
        return Verdict(name, "differs", f"{len(straight)} and {len(resumed)} of {num_steps} steps have metrics")
    apart = [step for step in sorted(straight) if straight[step] != resumed[step]]
    if apart:
        difference = max(abs(straight[step] - resumed[step]) for step in apart)
        return Verdict(name, "differs", f"other losses from step {apart[0]} on, by up to {difference:.1e}")
    return Verdict(name, "ok", f"the same bits in all {num_steps} steps")
