"""Work of a preparation's worker before its first batch."""

from __future__ import annotations

import multiprocessing
import os
import signal
from concurrent.futures import ProcessPoolExecutor

from pretrain.data.tokenizer import ByteTokenizer
from pretrain.data.workers import Tokenizing, _start_worker


def set_up() -> tuple[signal.Handlers, str]:
    handler = signal.getsignal(signal.SIGINT)
    assert isinstance(handler, signal.Handlers)
    return handler, os.environ["TOKENIZERS_PARALLELISM"]


def test_ctrl_c_is_the_parents_and_cores_are_shared() -> None:
    """The parent ends its workers itself; there is a worker per core, so none starts threads of its own."""
    job = (Tokenizing(ByteTokenizer(), "text"), os.getpid())
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork"), _start_worker, job) as pool:
        assert pool.submit(set_up).result() == (signal.SIG_IGN, "false")
