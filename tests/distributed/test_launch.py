"""Ranks of one machine: their results come back, their first failure is named, and nothing of them is left behind."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import psutil
import pytest
import torch
import torch.distributed as dist

from parallel.processes.launch import LaunchError, RankError, launch_ranks
from parallel.processes.ranks import RankEnvironment, current_ranks
from parallel.processes.stop_signals import STOP_SIGNALS
from pretrain.errors import DataError
from tests.deadline import launch_within

# Long enough for the slowest machine; reached only when something hangs.
DEADLINE_S = 60.0


def wait_until(condition: Callable[[], object], what: str) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline_s, f"waited {DEADLINE_S:g} s for {what}"
        time.sleep(0.01)


def is_gone(pid: int) -> bool:
    try:
        # Orphans of a container without an init process stay as zombies.
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def pids_in(folder: Path) -> list[int]:
    return [int(path.name.rsplit(".", 1)[1]) for path in folder.glob("pid.*")]


def leave_pid(folder: Path, pid: int) -> None:
    (folder / f"pid.{pid}").touch()


def my_ranks() -> RankEnvironment:
    ranks = current_ranks()
    assert ranks is not None
    return ranks


def join_gloo() -> RankEnvironment:
    ranks = my_ranks()
    dist.init_process_group("gloo", init_method=ranks.init_method, rank=ranks.rank, world_size=ranks.world_size)
    return ranks


def sum_of_ranks() -> float:
    join_gloo()
    total = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(total)
    dist.barrier()
    return total.item()


def sleep_forever() -> NoReturn:
    """Sleep in short pieces: a signal that comes just before a pause would not end it, nor have its handler called."""
    while True:
        time.sleep(0.1)


def kill_me() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_results_come_back_by_rank() -> None:
    ranks = launch_ranks(my_ranks, 3)
    assert [(r.rank, r.local_rank, r.world_size) for r in ranks] == [(rank, rank, 3) for rank in range(3)]
    assert {r.init_method.partition(":")[0] for r in ranks} == {"file"}


def test_collectives_and_large_results() -> None:
    def main() -> tuple[float, torch.Tensor]:
        return sum_of_ranks(), torch.full((1_000_000,), float(dist.get_rank()))

    results = launch_within(main, 4, timeout_s=DEADLINE_S)
    assert [total for total, _ in results] == [6.0] * 4
    assert [tensor.mean().item() for _, tensor in results] == [0.0, 1.0, 2.0, 3.0]


@pytest.mark.parametrize("num_threads", [1, 2])
def test_threads_work_after_the_parent_computed_with_one(num_threads: int) -> None:
    x = torch.randn(300, 300, generator=torch.Generator().manual_seed(0))
    expected = x @ x

    def main() -> tuple[int, str, torch.Tensor]:
        return torch.get_num_threads(), os.environ["OMP_NUM_THREADS"], x @ x

    for threads, variable, product in launch_within(main, 2, num_threads=num_threads, timeout_s=DEADLINE_S):
        assert (threads, variable) == (num_threads, str(num_threads))
        torch.testing.assert_close(product, expected)


def test_threads_by_default_share_the_cores() -> None:
    num_cores = len(os.sched_getaffinity(0))
    assert launch_ranks(torch.get_num_threads, 2) == [max(1, num_cores // 2)] * 2


def test_a_rank_may_end_by_sys_exit() -> None:
    assert launch_ranks(lambda: sys.exit(0), 2) == [None, None]


def test_ranks_meet_on_the_loopback_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    """The name of this machine may resolve to nothing, or to a VPN."""
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    assert launch_ranks(lambda: os.environ.get("GLOO_SOCKET_IFNAME"), 1, num_threads=1) == ["lo"]
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "another")
    assert launch_ranks(lambda: os.environ.get("GLOO_SOCKET_IFNAME"), 1, num_threads=1) == ["another"]


def test_a_rank_has_handlers_of_its_own_and_no_input() -> None:
    """Neither its parent's signal handlers nor typed input reach a rank."""

    def state() -> tuple[bool, bool, bytes]:
        is_python_s = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        return is_python_s, signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, os.read(0, 10)

    read_end, write_end = os.pipe()
    os.write(write_end, b"typed")
    os.close(write_end)
    own_input = os.dup(0)
    handlers = {number: signal.signal(number, lambda *_: None) for number in STOP_SIGNALS}
    os.dup2(read_end, 0)
    try:
        states = launch_within(state, 2, timeout_s=DEADLINE_S)
    finally:
        os.dup2(own_input, 0)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        os.close(own_input)
        os.close(read_end)
    assert states == [(True, True, b"")] * 2


def test_the_parents_environment_and_output_are_untouched() -> None:
    before, stdout = dict(os.environ), sys.stdout
    handlers = [signal.getsignal(number) for number in STOP_SIGNALS]
    launch_ranks(my_ranks, 2)
    assert dict(os.environ) == before
    assert sys.stdout is stdout
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == handlers


def fail_on(rank: int, how: Callable[[], Any]) -> Callable[[], None]:
    """A rank function: `rank` does `how` while the others are blocked in a collective that waits for it."""

    def main() -> None:
        join_gloo()
        dist.barrier()
        if dist.get_rank() == rank:
            how()
        dist.all_reduce(torch.ones(1))

    return main


def failure_of(main: Callable[[], Any], num_ranks: int = 4, **options: Any) -> RankError:
    with pytest.raises(RankError) as caught:
        launch_within(main, num_ranks, timeout_s=DEADLINE_S, **options)
    return caught.value


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that hang after a failure are killed sooner than a user's."""
    monkeypatch.setattr("parallel.processes.launch._PATIENCE_S", 0.5)


def raise_key_error() -> None:
    raise KeyError("no such layer")


def test_the_first_cause_is_named_and_ends_the_report() -> None:
    error = failure_of(fail_on(2, raise_key_error))
    assert (error.failure.rank, error.exit_code, error.failure.is_user_error) == (2, 1, False)
    assert str(error).startswith("rank 2 failed with KeyError: ")
    assert str(error).endswith("KeyError: 'no such layer'")
    assert "raise_key_error" in error.failure.traceback
    # The frames of the launcher are no news.
    assert "rank_process.py" not in error.failure.traceback


def test_a_killed_rank_is_named_although_the_others_lost_their_connections() -> None:
    error = failure_of(fail_on(2, kill_me))
    assert str(error).startswith("rank 2 was killed by SIGKILL (out of memory?)")
    assert (error.failure.rank, error.exit_code) == (2, 1)


def test_ranks_that_ignore_sigterm_are_killed() -> None:
    def main() -> None:
        if my_ranks().rank == 0:
            raise ValueError("first")
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        sleep_forever()

    assert failure_of(main).failure.message == "rank 0 failed with ValueError: first"


def test_failures_that_the_takedown_causes_do_not_count() -> None:
    def main() -> None:
        def complain(*_: object) -> None:
            raise DataError("asked to end")

        signal.signal(signal.SIGTERM, complain)
        join_gloo()
        dist.barrier()
        if dist.get_rank() == 1:
            raise ValueError("first")
        sleep_forever()

    assert failure_of(main).failure.message == "rank 1 failed with ValueError: first"


def test_a_users_error_keeps_its_message_and_exit_code() -> None:
    def raise_data_error() -> None:
        raise DataError("corpus.jsonl line 3: no field 'text'")

    error = failure_of(fail_on(1, raise_data_error))
    assert (str(error), error.exit_code, error.failure.rank) == ("corpus.jsonl line 3: no field 'text'", 3, 1)


@pytest.mark.parametrize(
    ("how", "message", "exit_code"),
    [
        pytest.param(lambda: os._exit(5), "exited with code 5", 5, id="os._exit(5)"),
        pytest.param(lambda: os._exit(0), "exited with code 0", 1, id="os._exit(0)"),
        pytest.param(lambda: sys.exit(16), "SystemExit: 16", 16, id="sys.exit(16)"),
        pytest.param(os.abort, "SIGABRT", 1, id="abort"),
    ],
)
def test_ranks_that_leave_without_a_result(how: Callable[[], Any], message: str, exit_code: int) -> None:
    error = failure_of(fail_on(1, how))
    assert message in str(error)
    assert (error.failure.rank, error.exit_code) == (1, exit_code)


def test_a_result_that_cannot_be_sent_is_an_error() -> None:
    error = failure_of(lambda: lambda: None, 1)
    assert "pickle" in str(error)


def test_a_report_longer_than_a_pipe_holds_is_shortened() -> None:
    def fail() -> None:
        raise ValueError("first " + 200_000 * "\N{GREEK SMALL LETTER ALPHA}")

    message = failure_of(fail, 2).failure.message
    assert "failed with ValueError: first \N{GREEK SMALL LETTER ALPHA}" in message
    assert len(message) > 10_000


def test_last_lines_of_the_failed_rank_are_shown() -> None:
    def main() -> None:
        print(f"rank {my_ranks().rank} was here")
        os.system("echo from a child")
        if my_ranks().rank == 1:
            kill_me()

    text = str(failure_of(main, 2))
    assert "rank 1 was here" in text
    assert "from a child" in text
    assert "rank 0 was here" not in text


def test_logs_of_ranks(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def main() -> None:
        print(f"out of {my_ranks().rank}")
        print(f"err of {my_ranks().rank}", file=sys.stderr)

    for _ in range(2):
        launch_ranks(main, 2, log_dir=tmp_path / "logs")
    captured = capfd.readouterr()
    assert (captured.out, captured.err) == ("out of 0\n" * 2, "err of 0\n" * 2)
    # A run that goes on must not lose what its first part said.
    assert (tmp_path / "logs" / "rank_1.log").read_text() == "out of 1\nerr of 1\n" * 2
    assert not (tmp_path / "logs" / "rank_0.log").exists()


def test_a_hang_shows_where_every_rank_stands() -> None:
    def main() -> None:
        join_gloo()
        dist.barrier()
        if dist.get_rank() == 1:
            sleep_forever()
        if dist.get_rank() != 2:
            dist.all_reduce(torch.ones(1))

    with pytest.raises(RankError, match="was killed by SIGALRM") as caught:
        launch_within(main, 3, timeout_s=3)
    first, second = caught.value.__notes__
    assert first.startswith("rank 0 stood at:\n")
    assert "all_reduce" in first
    assert second.startswith("rank 1 stood at:\n")
    assert "sleep_forever" in second


def test_what_cannot_work_is_refused() -> None:
    with pytest.raises(ValueError, match="0 ranks"):
        launch_ranks(my_ranks, 0)

    def nested() -> None:
        join_gloo()
        launch_ranks(my_ranks, 1)

    assert "already has a process group" in str(failure_of(nested, 1))


def start_children(folder: Path) -> None:
    """Start one child in the rank's process group and one that left it, as some loggers' helpers do."""
    for new_session in (False, True):
        leave_pid(folder, subprocess.Popen(["sleep", "1000"], start_new_session=new_session).pid)


def test_no_grandchild_survives_a_failure(tmp_path: Path) -> None:
    def main() -> None:
        start_children(tmp_path)
        leave_pid(tmp_path, os.getpid())
        join_gloo()
        dist.barrier()
        if dist.get_rank() == 0:
            raise ValueError("done")
        sleep_forever()

    failure_of(main, 3)
    assert len(pids_in(tmp_path)) == 9
    assert all(map(is_gone, pids_in(tmp_path)))


def test_a_rank_that_is_done_waits_for_no_child(tmp_path: Path) -> None:
    """Python joins the processes of `multiprocessing` where one ends by itself, and workers may wait for more work."""

    def work(rank: int) -> None:
        time.sleep(10)
        (tmp_path / f"awaited.{rank}").touch()

    def main() -> int:
        rank = my_ranks().rank
        worker = multiprocessing.get_context("fork").Process(target=work, args=(rank,))
        worker.start()
        assert worker.pid is not None
        leave_pid(tmp_path, worker.pid)
        return rank

    assert launch_within(main, 2, timeout_s=DEADLINE_S) == [0, 1]
    assert len(pids_in(tmp_path)) == 2
    assert all(map(is_gone, pids_in(tmp_path)))
    assert not list(tmp_path.glob("awaited.*"))


def test_no_grandchild_survives_a_killed_rank(tmp_path: Path) -> None:
    def main() -> None:
        start_children(tmp_path)
        kill_me()

    failure_of(main, 2)
    assert len(pids_in(tmp_path)) == 4
    assert all(map(is_gone, pids_in(tmp_path)))


def test_ranks_do_not_outlive_a_killed_supervisor(tmp_path: Path) -> None:
    def main() -> None:
        leave_pid(tmp_path, os.getpid())
        sleep_forever()

    def launch() -> None:
        with pytest.raises(LaunchError, match="watches over the ranks died"):
            launch_ranks(main, 2)

    parent = fork_parent(launch)
    wait_until(lambda: len(pids_in(tmp_path)) == 2, "the ranks to start")
    psutil.Process(parent).children()[0].kill()
    assert exit_code_of(parent) == 0
    wait_until(lambda: all(map(is_gone, pids_in(tmp_path))), "the ranks to be gone")


def fork_parent(launch: Callable[[], Any], ignored: Sequence[int] = ()) -> int:
    """Run `launch` in a process of its own, which exits as the command line would. Returns its pid.

    Its stop signals are those of a command in a terminal, but for `ignored`: the test process may itself be a job in
    the background, for which shells ignore SIGINT.
    """
    pid = os.fork()
    if pid != 0:
        return pid
    code = 1
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        for number in ignored:
            signal.signal(number, signal.SIG_IGN)
        launch()
        code = 0
    except Exception as error:
        code = getattr(error, "exit_code", 1)
    finally:
        os._exit(code)


def exit_code_of(pid: int) -> int:
    """Exit code of a process of `fork_parent`. One that does not end fails the test, and is killed."""
    statuses: list[int] = []

    def ended() -> bool:
        found, status = os.waitpid(pid, os.WNOHANG)
        statuses.extend([status] * bool(found))
        return bool(found)

    try:
        wait_until(ended, "the launching process to end")
    finally:
        if not statuses:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(statuses[0])


@pytest.mark.parametrize("ignored", [[], [signal.SIGHUP]], ids=["", "nohup"])
def test_nothing_outlives_a_killed_parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ignored: list[int]) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(scratch))

    def main() -> None:
        start_children(tmp_path)
        leave_pid(tmp_path, os.getpid())
        sleep_forever()

    parent = fork_parent(lambda: launch_ranks(main, 2), ignored)
    wait_until(lambda: len(pids_in(tmp_path)) == 6, "the ranks to start")
    (supervisor,) = psutil.Process(parent).children()
    os.kill(parent, signal.SIGKILL)
    assert exit_code_of(parent) == -signal.SIGKILL
    wait_until(
        lambda: all(map(is_gone, [*pids_in(tmp_path), supervisor.pid])),
        "ranks, their children and the supervisor to be gone",
    )
    assert list(scratch.iterdir()) == []


class Stopped(Exception):
    exit_code = 75


def stop_in_order(folder: Path) -> NoReturn:
    """A rank that notes each stop signal and ends itself with the code for "start me again"."""

    def stop(number: int, _: object) -> None:
        (folder / f"signal.{my_ranks().rank}.{number}.{time.monotonic_ns()}").touch()
        raise Stopped

    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGTERM, stop)
    leave_pid(folder, os.getpid())
    sleep_forever()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_signal_reaches_every_rank_once(tmp_path: Path, number: int) -> None:
    parent = fork_parent(lambda: launch_ranks(lambda: stop_in_order(tmp_path), 3))
    wait_until(lambda: len(pids_in(tmp_path)) == 3, "the ranks to start")
    os.kill(parent, number)
    assert exit_code_of(parent) == 75
    received = sorted(path.name.split(".")[1:3] for path in tmp_path.glob("signal.*"))
    assert received == [[str(rank), str(int(signal.SIGTERM))] for rank in range(3)]


@pytest.mark.parametrize("ignored", STOP_SIGNALS)
def test_a_stop_signal_that_is_ignored_stays_so(tmp_path: Path, ignored: int) -> None:
    """SIGINT is ignored for a job in the background. One that counted would be the first of two, which kill."""
    heeded = next(number for number in STOP_SIGNALS[::-1] if number != ignored)

    def launch() -> None:
        try:
            launch_ranks(lambda: stop_in_order(tmp_path), 2)
        finally:
            handlers = signal.getsignal(ignored), signal.getsignal(heeded)
            (tmp_path / "restored").write_text(repr(handlers == before))

    before = signal.SIG_IGN, signal.default_int_handler if heeded == signal.SIGINT else signal.SIG_DFL
    parent = fork_parent(launch, ignored=[ignored])
    wait_until(lambda: len(pids_in(tmp_path)) == 2, "the ranks to start")
    os.kill(parent, ignored)
    os.kill(parent, heeded)
    assert exit_code_of(parent) == 75
    received = sorted(path.name.split(".")[1:3] for path in tmp_path.glob("signal.*"))
    assert received == [[str(rank), str(int(signal.SIGTERM))] for rank in range(2)]
    assert (tmp_path / "restored").read_text() == "True"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_ranks_without_a_handler_end_as_asked(tmp_path: Path, number: int, code: int) -> None:
    def main() -> None:
        leave_pid(tmp_path, os.getpid())
        sleep_forever()

    parent = fork_parent(lambda: launch_ranks(main, 2))
    wait_until(lambda: len(pids_in(tmp_path)) == 2, "the ranks to start")
    os.kill(parent, number)
    assert exit_code_of(parent) == code


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_a_second_stop_signal_kills(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, second: signal.Signals) -> None:
    """Another one at once, and the same one later than copies of the first may come."""
    if second == signal.SIGTERM:
        monkeypatch.setattr("parallel.processes.launch._SAME_REQUEST_S", 0.0)

    def main() -> None:
        signal.signal(signal.SIGTERM, lambda *_: (tmp_path / f"signal.{my_ranks().rank}").touch())
        leave_pid(tmp_path, os.getpid())
        sleep_forever()

    parent = fork_parent(lambda: launch_ranks(main, 2))
    wait_until(lambda: len(pids_in(tmp_path)) == 2, "the ranks to start")
    os.kill(parent, signal.SIGTERM)
    wait_until(lambda: len(list(tmp_path.glob("signal.*"))) == 2, "the first signal to arrive")
    os.kill(parent, second)
    assert exit_code_of(parent) == 143
    assert all(map(is_gone, pids_in(tmp_path)))


def test_a_stop_signal_to_all_processes_is_one_request(tmp_path: Path) -> None:
    """A service manager signals the supervisor and the ranks beside the launcher, which passes its own on."""

    def main() -> None:
        num_signals = 0

        def stop(*_: object) -> None:
            nonlocal num_signals
            num_signals += 1

        signal.signal(signal.SIGTERM, stop)
        leave_pid(tmp_path, os.getpid())
        # Ended by the test alone: time for all copies to arrive.
        wait_until(lambda: num_signals and (tmp_path / "saved").exists(), "the test to let the ranks go")
        raise Stopped

    parent = fork_parent(lambda: launch_ranks(main, 2))
    wait_until(lambda: len(pids_in(tmp_path)) == 2, "the ranks to start")
    launcher = psutil.Process(parent)
    for process in (launcher, *launcher.children(recursive=True)):
        process.terminate()
    launcher.terminate()
    (tmp_path / "saved").touch()
    assert exit_code_of(parent) == 75


def test_threads_of_the_parent_do_not_block_its_ranks() -> None:
    def use_threads() -> None:
        torch.randn(1_000_000).exp().sum()

    def launch() -> None:
        torch.set_num_threads(2)
        use_threads()
        num_threads = len(os.listdir("/proc/self/task"))
        launch_within(use_threads, 2, num_threads=2, timeout_s=DEADLINE_S)
        use_threads()
        assert len(os.listdir("/proc/self/task")) == num_threads > 1
        assert torch.get_num_threads() == 2

    assert exit_code_of(fork_parent(launch)) == 0


def test_launches_side_by_side_do_not_meet(tmp_path: Path) -> None:
    def launch(name: str, num_ranks: int) -> None:
        totals = launch_within(sum_of_ranks, num_ranks, timeout_s=DEADLINE_S)
        (tmp_path / name).write_text(repr(totals))

    parents = [fork_parent(lambda name=name, n=n: launch(name, n)) for name, n in (("a", 2), ("b", 3), ("c", 4))]  # type: ignore[misc]
    assert [exit_code_of(parent) for parent in parents] == [0, 0, 0]
    texts = [(tmp_path / name).read_text() for name in "abc"]
    assert texts == [repr([1.0] * 2), repr([3.0] * 3), repr([6.0] * 4)]


def test_a_command_ends_with_the_traceback_and_runs_its_exit_handlers_once() -> None:
    script = """
import atexit, sys
from parallel.processes.launch import RankError, launch_ranks
atexit.register(lambda: print("exit handler"))
print("buffered")
def main():
    raise KeyError("broken")
try:
    launch_ranks(main, 2)
except RankError as error:
    print(error, file=sys.stderr)
    sys.exit(error.exit_code)
"""
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=root, timeout=2 * DEADLINE_S, check=False
    )
    assert done.returncode == 1
    assert done.stdout == "buffered\nexit handler\n"
    assert done.stderr.rstrip().endswith("KeyError: 'broken'")


def test_run_ranks_joins_a_process_group(run_ranks: Any) -> None:
    def main() -> tuple[int, float]:
        total = torch.ones(1)
        dist.all_reduce(total)
        return dist.get_rank(), total.item()

    assert run_ranks(main, 3) == [(0, 3.0), (1, 3.0), (2, 3.0)]


def test_run_ranks_starts_megatron(run_ranks: Any) -> None:
    from megatron.core import parallel_state

    def main() -> tuple[int, int]:
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
        return parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_data_parallel_rank()

    assert run_ranks(main, 4) == [(0, 0), (1, 0), (0, 1), (1, 1)]
