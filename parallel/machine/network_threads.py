"""Priority of the threads with which gloo receives."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

_NAME = "gloo_tcp_loop"
_NICENESS = 10


def lower_network_threads() -> None:
    """Let the machine's other threads run before those with which gloo receives in this process, of all its groups.

    A message that comes while another thread has the lock of its connection makes gloo ask again at once, until the lock
    is free. Where ranks are more than cores, it asks for as long as the lock's owner waits for a core: a fifth of what small
    ranks compute. With a lower priority it leaves the core to the owner. Threads of groups made later are not reached, nor
    those of torch before 2.13, which have no name.
    """
    for task in Path("/proc/self/task").glob("*"):
        # It may have ended meanwhile.
        with suppress(OSError):
            if (task / "comm").read_text().strip() == _NAME:
                os.setpriority(os.PRIO_PROCESS, int(task.name), _NICENESS)
