"""Facts from a run's metrics for its job: how long before its time limit it must be told to save, and its last step."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from pathlib import Path

from pretrain.run.metric_rows import read_rows

# Slurm looks at time limits, and thus sends signals, every 30 s, and says itself that one may come 60 s late.
_LATE_BY_S = 60.0
# The slowest save so far, and not the mean: a busy file system is busiest when every job on it is told to stop.
_SAVES = 2.0
_STEPS = 2.0


def lead_seconds(metrics: Path, default_s: int) -> int:
    """Seconds before the time limit at which a run is to be told to stop.

    Two of the slowest saves that were measured, two of the slowest steps (a step is finished first), and what Slurm may
    be late by; never less than `default_s`, which alone counts while no save was measured.
    """
    rows = read_rows(metrics, step=int)
    saves_s = [row["save_s"] for row in rows if row.get("save_s")]
    if not saves_s:
        return default_s
    steps_s = [row["step_s"] for row in rows if row.get("step_s")]
    needed_s = _SAVES * max(saves_s) + _STEPS * max(steps_s, default=0.0) + _LATE_BY_S
    return max(default_s, math.ceil(needed_s))


def last_step(metrics: Path) -> tuple[int | None, str | None]:
    """The last step, and when it, or the save after it, was written: UTC, as ISO 8601 has it."""
    if not metrics.exists():
        return None, None
    heard_at = datetime.fromtimestamp(metrics.stat().st_mtime, UTC).isoformat(timespec="seconds")
    return max((row["step"] for row in read_rows(metrics, step=int) if "loss" in row), default=None), heard_at
