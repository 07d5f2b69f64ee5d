"""Several runs of a comparison at once, each with cores and GPUs of its own and a screen that is a file."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import NoReturn

from lab.studies.compare.runs import RunStopped, time_left
from parallel.machine.devices import num_visible_gpus
from parallel.processes.log_tail import log_tail
from parallel.processes.parent_death import signal_on_parent_death
from parallel.processes.stop_signals import STOP_SIGNALS
from pretrain.errors import StoppedEarly, UserError
from tools.common.words import ending


@dataclass(frozen=True)
class Job:
    """Work that needs nothing of its neighbours.

    Attributes:
        what: name of the work, in words.
        screen: file that gets what it prints, appended to; its folder is made.
        work: raises RunStopped or UserError if it does not come to its end.
        num_steps: training steps in it, by which the time that others take is told.
    """

    what: str
    screen: Path
    work: Callable[[], object]
    num_steps: int = 0


@dataclass(frozen=True)
class _Running:
    job: Job
    place: int
    process: ForkProcess
    screen_start: int
    started_s: float


def run_side_by_side(jobs: Sequence[Job], at_once: int, num_ranks: int) -> None:
    """Do all jobs, so many at a time, each in a fork of this process.

    A job has an even share of this process's cores and, where there are GPUs, `num_ranks` of them in turn. Stop signals
    are passed on. If one fails the others are stopped as by a signal, and the end of its screen is shown.

    Args:
        jobs: jobs in the order in which they start.
        at_once: most jobs that run at a time.
        num_ranks: ranks that a job starts at a time.

    Raises:
        RunStopped: a job did not come to its end; with the code of the first.
    """
    places, cores = list(range(at_once)), core_shares(at_once)
    waiting, running, done = list(enumerate(jobs, 1)), list[_Running](), list[_Running]()
    code, began_s = 0, time.monotonic()
    with _stop_signals_for(running) as was_stopped:
        while True:
            while waiting and places and not code and not was_stopped():
                number, job = waiting.pop(0)
                print(f"job {number} of {len(jobs)}: {job.what}: started, its screen is {job.screen}", flush=True)
                place = places.pop(0)
                _start(job, place, cores[place], num_ranks, running)
            if not running:
                break
            wait([each.process.sentinel for each in running])
            for each in [each for each in running if not each.process.is_alive()]:
                running.remove(each)
                places.append(each.place)
                if not (own_code := _exit_code(each.process)):
                    done.append(each)
                    print(_progress(done, jobs, began_s), flush=True)
                elif not code:
                    code = own_code
                    print(_failed(each, code), flush=True)
                    # A second signal would kill who is saving.
                    for other in running if not was_stopped() else ():
                        other.process.terminate()
    if code or waiting:
        raise RunStopped(code or StoppedEarly.exit_code)


def core_shares(number: int) -> list[set[int]]:
    """The cores that this process may use, in so many even shares; a core is in several if there are fewer."""
    cores = sorted(os.sched_getaffinity(0))
    if number >= len(cores):
        return [{cores[place % len(cores)]} for place in range(number)]
    return [set(cores[place * len(cores) // number : (place + 1) * len(cores) // number]) for place in range(number)]


def show_gpus(first: int, number: int) -> None:
    """Hide the visible GPUs but so many from the first on, counted round. Before this process uses one.

    As many as are visible leave all, and so do more.
    """
    num_visible = num_visible_gpus()
    if number >= num_visible:
        return
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible is not None else [str(index) for index in range(num_visible)]
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(names[(first + index) % num_visible] for index in range(number))


@contextmanager
def _stop_signals_for(running: Sequence[_Running]) -> Iterator[Callable[[], bool]]:
    """Pass stop signals on to those that run. Gives whether there was one; one that is ignored stays so."""
    seen = list[int]()

    def pass_on(number: int, _: object) -> None:
        seen.append(number)
        for each in running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(each.process.pid or 0, number)

    heeded = [number for number in STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, pass_on) for number in heeded}
    try:
        yield lambda: bool(seen)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)


def _start(job: Job, place: int, cores: set[int], num_ranks: int, running: list[_Running]) -> None:
    job.screen.parent.mkdir(parents=True, exist_ok=True)
    screen_start = job.screen.stat().st_size if job.screen.exists() else 0
    process = multiprocessing.get_context("fork").Process(
        target=_live, args=(job, place, cores, num_ranks, os.getpid())
    )
    # A stop signal must find no process, or one that is in the list.
    unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        with warnings.catch_warnings():
            # Python 3.12 warns about any thread, also those that numpy's BLAS knows how to fork.
            warnings.simplefilter("ignore", DeprecationWarning)
            process.start()
        running.append(_Running(job, place, process, screen_start, time.monotonic()))
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)


def _live(job: Job, place: int, cores: set[int], num_ranks: int, parent_pid: int) -> NoReturn:
    """The whole life of a job's process."""
    # An own session: Ctrl-C reaches the first process alone, which passes it on.
    os.setsid()
    for number in STOP_SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    signal_on_parent_death(signal.SIGTERM, parent_pid)
    sys.stdout = sys.stderr = screen = job.screen.open("a", buffering=1, encoding="utf-8")
    for descriptor in (1, 2):
        os.dup2(screen.fileno(), descriptor)
    os.sched_setaffinity(0, cores)
    if num_visible_gpus():
        show_gpus(place * num_ranks, num_ranks)
    try:
        job.work()
    except RunStopped as stopped:
        code = stopped.exit_code
    except UserError as error:
        code = error.exit_code
        print(ending(error, code), file=sys.stderr)
    else:
        code = 0
    sys.exit(code)


def _exit_code(process: ForkProcess) -> int:
    """As a shell gives it: of one that a signal ended, 128 and the signal's number."""
    process.join()
    code = process.exitcode or 0
    return code if code >= 0 else 128 - code


def _progress(done: Sequence[_Running], jobs: Sequence[Job], began_s: float) -> str:
    """The last of them in words, and the time that the others take at the mean speed so far."""
    now_s, each = time.monotonic(), done[-1]
    text = f"{len(done)} of {len(jobs)} done: {each.job.what}, in {(now_s - each.started_s) / 60:.1f} min"
    steps_done = sum(one.job.num_steps for one in done)
    steps_to_go = sum(job.num_steps for job in jobs) - steps_done
    return f"{text}; {time_left(steps_done, now_s - began_s, steps_to_go)} for the others" if steps_to_go else text


def _failed(each: _Running, code: int) -> str:
    return f"{each.job.what}: exit code {code}. The end of {each.job.screen}:\n{_tail(each)}"


def _tail(each: _Running) -> str:
    """The last lines that a job printed."""
    with each.job.screen.open("rb") as screen:
        return log_tail(screen, each.screen_start)
