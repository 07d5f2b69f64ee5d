"""Patience of tests: their limits are for idle machines, and right code takes longer on a crowded one."""

from __future__ import annotations

import os

# The suite itself makes so many processes per core.
_OWN_LOAD = 2.0
_MOST = 8.0


def patience() -> float:
    """Times by which a limit is longer just now: `MEGAMEM_PATIENCE`, else by the machine's load per core."""
    if named := os.environ.get("MEGAMEM_PATIENCE"):
        return float(named)
    load = os.getloadavg()[0] / (os.cpu_count() or 1)
    return min(_MOST, max(1.0, load / _OWN_LOAD))
