"""Local ranks that must have ended by a time, and otherwise show where each of them stands."""

from __future__ import annotations

import faulthandler
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from parallel.processes.launch import LaunchError, launch_ranks
from parallel.processes.ranks import current_ranks
from tests.patience import patience

T = TypeVar("T")


def launch_within(
    main: Callable[[], T], num_ranks: int, *, timeout_s: float, num_threads: int = 1, **options: Any
) -> list[T]:
    """`launch_ranks`. Ranks that are still there after `timeout_s`, of an idle machine, are killed, and the error notes
    where they stood.

    Each has one thread, as several test processes share the cores: threads would wait for each other at every barrier.
    """
    timeout_s *= patience()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)

        def watched() -> T:
            ranks = current_ranks()
            assert ranks is not None
            with (folder / f"{ranks.rank:04d}").open("w") as stacks:
                # By a thread that needs nothing of the interpreter: a rank that hangs in native code answers too.
                faulthandler.dump_traceback_later(timeout_s, file=stacks)
                # Later, as a rank that is gone would show in the stacks of the others.
                signal.setitimer(signal.ITIMER_REAL, timeout_s + 2)
                try:
                    return main()
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
                    faulthandler.cancel_dump_traceback_later()

        try:
            return launch_ranks(watched, num_ranks, num_threads=num_threads, **options)
        except LaunchError as error:
            for path in sorted(folder.iterdir()):
                if stacks := path.read_text(errors="replace"):
                    error.add_note(f"rank {int(path.name)} stood at:\n{stacks}")
            raise
