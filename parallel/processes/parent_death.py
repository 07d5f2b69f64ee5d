"""Processes that end with the one that started them, however that one ends."""

from __future__ import annotations

import ctypes
import os

_PR_SET_PDEATHSIG = 1


def signal_on_parent_death(number: int, parent_pid: int) -> None:
    """Have Linux send this process a signal when its parent (the thread that started it, to be exact) is gone.

    Args:
        number: the signal. A process may be without its parent already: then it comes at once.
        parent_pid: the parent, as it knows itself.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), number)
