"""Tokenizers that fail, in a module that workers import without torch."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from typing import NoReturn

from pretrain.data.tokenizer import ByteTokenizer


class KillsItself(ByteTokenizer):
    """Stands for a worker that the kernel kills for lack of memory."""

    def tokenize_batch(self, texts: Sequence[str]) -> NoReturn:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("still alive")


class Fails(ByteTokenizer):
    """Stands for a defect."""

    def tokenize_batch(self, texts: Sequence[str]) -> NoReturn:
        raise ArithmeticError("a defect of ours")
