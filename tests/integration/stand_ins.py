"""Stand-ins for packages that need a GPU, found before the packages that are installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]
TRANSFORMER_ENGINE = Path(__file__).parent / "stand_in_te"
APEX = Path(__file__).parent / "stand_in_apex"
_CALLED = "called.txt"

# Modules imported without the stand-ins cannot learn of them, so an interpreter of their own imports them, once.
_INTERPRETER = """
import json, os, sys
from tools.cli import main
from tools.common.ranks import import_engine
import_engine()
for line in sys.stdin:
    words, log, calls = json.loads(line)
    pid = os.fork()
    if pid == 0:
        code = 70
        try:
            os.environ["STAND_IN_LOG"] = calls
            output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(output, 1)
            os.dup2(output, 2)
            code = main(words)
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code & 0xFF)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


class WithStandIns:
    """An interpreter in which stand-ins can be imported, and which trains in forks of itself."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self._process, self._log = process, log

    def train(self, run: Path, *arguments: object) -> str:
        """Train, and return what was said."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        words = ["train", *map(str, (*arguments, "--run-dir", run))]
        print(json.dumps([words, str(self._log), str(run / _CALLED)]), file=self._process.stdin, flush=True)
        code, said = self._process.stdout.readline().strip(), self._log.read_text(errors="replace")
        assert code == "0", said
        return said


@contextmanager
def with_stand_ins(folder: Path, *stand_ins: Path) -> Iterator[WithStandIns]:
    """The interpreter, which is gone afterwards."""
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", _INTERPRETER],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, stand_ins))},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        yield WithStandIns(process, folder / "said.log")


def called(run: Path) -> Counter[str]:
    """Calls of the stand-ins by the ranks of a run: modules that were made, functions that were called."""
    return Counter((run / _CALLED).read_text().split())
