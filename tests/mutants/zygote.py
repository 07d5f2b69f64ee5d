"""A process that has paid for the imports of everything that is not ours, and forks one process per mutant from itself.

Reads requests from standard input, one JSON object per line (`module`, `tests`, `timeout_s`, `log`, `collect_only`),
and answers each with one: `outcome` is `caught`, `survived`, `timeout`, `broken` (the module cannot be imported) or
`unknown` (one of the tests is not there); `by` is the test that failed.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import time
from typing import Any, NoReturn

BROKEN = 99
# Neither a copy of an old module nor one of another mutant may be found.
sys.dont_write_bytecode = True

THIRD_PARTY = (
    "torch",
    "torch.distributed.checkpoint",
    "megatron.core.dist_checkpointing",
    "megatron.core.distributed",
    "megatron.core.models.gpt",
    "megatron.core.optimizer",
    "megatron.core.pipeline_parallel",
    "triton.language",
    "hypothesis",
    "pytest",
    "tokenizers",
    "pyarrow.parquet",
    "psutil",
    "safetensors.torch",
)


class FirstFailure:
    """A pytest plugin that keeps the name of the first test that failed."""

    def __init__(self) -> None:
        self.test: str | None = None

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed and self.test is None:
            self.test = report.nodeid

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed and self.test is None:
            self.test = f"{report.nodeid} (collection)"


def main() -> None:
    import torch

    for name in THIRD_PARTY:
        importlib.import_module(name)
    torch.set_num_threads(1)
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    # The output of tests belongs into their logs.
    os.dup2(2, 1)
    print(json.dumps({"ready": True}), file=answers)
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps(attempt(**request)), file=answers)


def attempt(module: str | None, tests: list[str], timeout_s: float, log: str, collect_only: bool) -> dict[str, Any]:
    """Run the tests in a fork."""
    read_end, write_end = os.pipe()
    started = time.monotonic()
    pid = os.fork()
    if pid == 0:
        os.close(read_end)
        _test(module, [*tests, "--collect-only"] if collect_only else tests, log, write_end)
    os.close(write_end)
    status = None
    while status is None and time.monotonic() - started < timeout_s:
        done, found = os.waitpid(pid, os.WNOHANG)
        if done:
            status = found
        else:
            time.sleep(0.02)
    if status is None:
        _end(pid)
        os.waitpid(pid, 0)
    # A process that was left behind may hold the other end open: what is there is there.
    os.set_blocking(read_end, False)
    by = ""
    with contextlib.suppress(BlockingIOError):
        by = os.read(read_end, 65536).decode()
    os.close(read_end)
    code = None if status is None else os.waitstatus_to_exitcode(status)
    # pytest's 4: it does not know one of the tests. Any other code is a failed test or the death of the process.
    outcome = {None: "timeout", 0: "survived", 4: "unknown", BROKEN: "broken"}.get(code, "caught")
    return {"outcome": outcome, "by": by, "seconds": round(time.monotonic() - started, 2)}


def _test(module: str | None, tests: list[str], log: str, answer: int) -> NoReturn:
    code = BROKEN
    try:
        os.setsid()
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        import pytest

        if module is not None:
            importlib.import_module(module)
        code = 1
        first = FirstFailure()
        code = int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", *tests], plugins=[first]))
        os.write(answer, (first.test or "").encode())
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _end(pid: int) -> None:
    """Kill a process and all below it, whatever sessions they have opened."""
    import psutil

    with contextlib.suppress(psutil.NoSuchProcess):
        family = [*psutil.Process(pid).children(recursive=True), psutil.Process(pid)]
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


if __name__ == "__main__":
    main()
