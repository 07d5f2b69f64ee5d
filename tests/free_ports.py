"""Ports for servers of tests."""

from __future__ import annotations

import contextlib
import os
import socket


def free_ports(number: int = 1) -> int:
    """First of so many ports in a row that nobody uses, below those that the system hands out by itself.

    A port of the system's own choice, once it is closed, may go to any rank of another test. Test processes have numbers
    in a row: each looks at ports of its own first.
    """
    for first in range(21_000 + os.getpid() * number % 9_000, 32_000, number):
        with contextlib.ExitStack() as stack:
            try:
                for port in range(first, first + number):
                    stack.enter_context(socket.socket()).bind(("0.0.0.0", port))
            except OSError:
                continue
            return first
    raise AssertionError("no free ports")
