"""What a worker of the preparation does before its first batch."""

from __future__ import annotations

import os
import signal
from typing import Any, Self

import pytest

from pretrain.data.tokenizer import ByteTokenizer
from pretrain.data.workers import _worker_main


class Closed:
    """A connection whose other end is gone; notes what the worker had set up when it first asked."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def recv(self) -> Any:
        self.interrupt = signal.getsignal(signal.SIGINT)
        self.parallelism = os.environ["TOKENIZERS_PARALLELISM"]
        raise EOFError


def test_ctrl_c_is_the_parents_and_cores_are_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parent ends its workers itself; there is a worker per core, so none starts threads of its own."""
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    before = signal.getsignal(signal.SIGINT)
    connection: Any = Closed()
    try:
        _worker_main(connection, ByteTokenizer(), "text")
    finally:
        signal.signal(signal.SIGINT, before)
    assert connection.interrupt == signal.SIG_IGN
    assert connection.parallelism == "false"
