"""Signals that tell a run to stop. It imports no torch, so that a rank can listen before anything slow."""

from __future__ import annotations

import signal
from types import FrameType

from parallel.processes.stop_signals import STOP_SIGNALS


class StopRequest:
    """Request that this rank stop: SIGTERM, SIGINT and SIGUSR1 let the step finish and the run save.

    A signal that is ignored stays so: a shell asks for that with SIGINT when it starts a job in the background.
    """

    def __init__(self, *, heed_earlier: bool = False) -> None:
        """Listen; with `heed_earlier`, a request that an earlier listening object has received counts too."""
        self.requested = False
        for number in STOP_SIGNALS:
            earlier = signal.getsignal(number)
            if earlier is signal.SIG_IGN:
                continue
            signal.signal(number, self._on_signal)
            listener = getattr(earlier, "__self__", None)
            self.requested |= heed_earlier and isinstance(listener, StopRequest) and listener.requested

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
