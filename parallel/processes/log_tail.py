"""The last lines of a log."""

from __future__ import annotations

import os
from typing import IO

_NUM_LINES = 30
_MOST_BYTES = 64 * 1024


def log_tail(log: IO[bytes], start: int) -> str:
    """The last lines of an open log, none before byte `start`."""
    log.seek(max(start, os.fstat(log.fileno()).st_size - _MOST_BYTES))
    return "\n".join(log.read().decode(errors="replace").splitlines()[-_NUM_LINES:])
