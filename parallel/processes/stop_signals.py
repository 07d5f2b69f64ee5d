"""The signals that ask a run to stop."""

from __future__ import annotations

import signal

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""Signals that ask a run to save and stop; the last one is what Slurm is told to send ahead of its time limit."""
