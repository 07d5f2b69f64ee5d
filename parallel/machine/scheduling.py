"""Turns of threads that share cores."""

from __future__ import annotations

import contextlib
import os


def finish_turns() -> None:
    """Let this thread, and those that it starts from now on, wait for a core instead of interrupting who has it.

    Gloo's thread polls its sockets without pause while another thread holds a connection. Where ranks have fewer cores
    than threads, waking it up interrupts just that thread: polling took a fourth of all time of tests with four ranks on
    two cores, which take 0.55 times as long with turns that end, and steps of two ranks are 1 to 3 % faster. Linux calls
    it `SCHED_BATCH`; a share of the cores stays what it was. Where that is not to be had, nothing changes but the time.
    """
    if hasattr(os, "SCHED_BATCH"):
        # Forbidden in some containers.
        with contextlib.suppress(OSError):
            # Somebody may have chosen: `chrt --idle 0 megamem train ...`.
            if os.sched_getscheduler(0) == os.SCHED_OTHER:
                os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
