"""`python -m tools.job`: what runs inside of a Slurm job, started by the script that `megamem submit` wrote."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Collection, Sequence
from pathlib import Path

from parallel.machine.atomic_write import atomic_write
from parallel.machine.devices import hide_gpus
from parallel.processes.ranks import RankEnvironment, current_ranks
from pretrain.errors import StoppedEarly, UserError
from pretrain.run.stop import StopRequest
from slurm.job import JobNow, begin, end, goes_on_in_place
from slurm.policy import Action, Decision
from slurm.profile import ClusterConfig, load_profile
from slurm.records import AttemptFolder, FirstFailure, JobsFolder
from slurm.rendezvous import meeting_point
from tools import cli
from tools.common.words import ending

_BAD_NODES_FOUND = 1
# Seconds for rank 0's start, where no check says it: importing from a busy disk takes minutes.
_START_TIMEOUT_S = 600.0


def main(argv: Sequence[str] | None = None) -> int:
    """Answer one of the script's questions. The script reads the last line of stdout, which after an error is the
    reason; people are told on stderr."""
    args = _parser().parse_args(argv)
    try:
        return int(args.func(JobsFolder.at(args.records), args))
    except UserError as error:
        message, exit_code = ending(error, error.exit_code), error.exit_code
    except OSError as error:
        message, exit_code = ending(f"{error.filename or args.records}: {error.strerror}", 1), 1
    _tell(message)
    print(" ".join(message.split()))
    return exit_code


def _tell(message: str) -> None:
    """Write on stderr, which is a file, and its disk may be full: then the script has to say it elsewhere."""
    with contextlib.suppress(OSError):
        print(message, file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tools.job", description=__doc__)
    commands = parser.add_subparsers(required=True)

    def add(name: str, func: object) -> argparse.ArgumentParser:
        command = commands.add_parser(name)
        command.add_argument("records", type=Path)
        command.set_defaults(func=func)
        return command

    starting = add("begin", _begin)
    starting.add_argument("--nodes", required=True)
    starting.add_argument("--time-left", required=True)
    add("rank", _rank).add_argument("attempt", type=Path)
    ending_ = add("end", _end)
    ending_.add_argument("attempt", type=Path)
    ending_.add_argument("--exit-code", type=int, required=True)
    ending_.add_argument("--asked-to-stop", action="store_true")
    ending_.add_argument("--standing", type=JobNow.read, required=True)
    ending_.add_argument("--nodes", required=True)
    add("queued", _queued).add_argument("job")
    return parser


def _begin(jobs: JobsFolder, args: argparse.Namespace) -> int:
    """Prints the attempt's number, how many nodes, seconds to its end, and the nodes; nothing if there must be none."""
    plan = begin(jobs, _names(args.nodes), args.time_left, os.environ)
    if plan is not None:
        attempt = plan.folder.attempt()
        _tell(f"attempt {plan.folder.path.name} on {', '.join(attempt.nodes)}")
        print(
            plan.folder.path.name, plan.num_nodes, "never" if plan.stop_after_s is None else plan.stop_after_s, end=" "
        )
        print(",".join(attempt.nodes))
    return 0


def _end(jobs: JobsFolder, args: argparse.Namespace) -> int:
    """Prints what to do, after how many seconds, without which nodes, and which job waits for the success of this one."""
    folder = AttemptFolder(args.attempt)
    decision = end(jobs, folder, args.exit_code, asked_to_stop=args.asked_to_stop, job=args.standing)
    _tell(f"attempt {folder.path.name} has ended, {decision.action}: {decision.reason}")
    if decision.action is Action.REQUEUE and args.standing.is_started_again_by_slurm(folder.attempt()):
        _tell("Slurm itself starts this job again")
        print("leave")
    elif goes_on_in_place(
        jobs, folder, decision, _names(args.nodes), asked_to_stop=args.asked_to_stop, job=args.standing
    ):
        print("again")
    else:
        profile = load_profile(jobs.profile)
        print(_in_script(decision, _found_bad_by_job(jobs, folder), profile.excluded_nodes, _waiting_job(jobs)))
    return 0


def _found_bad_by_job(jobs: JobsFolder, folder: AttemptFolder) -> set[str]:
    """The nodes that attempts of the same job found bad. It has gone on beside them, and would get them again."""
    attempt = folder.attempt()
    ends = [ended for ended in jobs.ended_attempts(attempt.submission) if ended.attempt.job == attempt.job]
    return {node for ended in ends for node in ended.bad_nodes}


def _waiting_job(jobs: JobsFolder) -> str:
    """Id of the job of a chain's next link, or "none"."""
    following = jobs.next_link()
    ids = [] if following is None else following.job_ids()
    return ids[-1] if ids else "none"


def _names(nodes: str) -> list[str]:
    # None of an elastic job's may have answered.
    return [node for node in nodes.split(",") if node]


def _in_script(decision: Decision, found_bad: Collection[str], never_used: Sequence[str], waiting: str) -> str:
    """The verdict in words of the script.

    A job that is requeued keeps the nodes that it must not have. A new one is told all of them, those of the profile
    too: what sbatch is given beside a script takes the place of what the script says.
    """
    changes = decision.delay_s > 0 or bool(found_bad)
    action = "resubmit" if decision.action is Action.REQUEUE and changes else decision.action.value
    exclude = ",".join((*never_used, *decision.exclude)) if action == "resubmit" else ""
    return f"{action} {decision.delay_s:.0f} {exclude or 'none'} {waiting}"


def _queued(jobs: JobsFolder, args: argparse.Namespace) -> int:
    jobs.add_job(args.job, "queued by the job before it")
    return 0


def _rank(jobs: JobsFolder, args: argparse.Namespace) -> int:
    """The whole life of one rank. An end that was asked for is no bad exit, which would kill the others."""
    stop = StopRequest()
    folder, profile = AttemptFolder(args.attempt), load_profile(jobs.profile)
    rank = int(os.environ["SLURM_PROCID"])
    if not profile.gpus_per_node:
        hide_gpus()
    code = _check_and_train(jobs, folder, profile, rank, stop)
    try:
        if code == StoppedEarly.exit_code:
            if rank == 0:
                with atomic_write(folder.stopped) as stream:
                    stream.write(json.dumps({"saved_step": jobs.newest_saved_step()}).encode())
            return 0
        if code and not folder.bad_nodes.exists():
            folder.tell_failure(FirstFailure(rank, os.environ.get("SLURMD_NODENAME", ""), code))
    except OSError as error:
        # The code alone has to tell.
        _tell(f"{folder.path}: {error.strerror}")
    return code


def _check_and_train(
    jobs: JobsFolder, folder: AttemptFolder, profile: ClusterConfig, rank: int, stop: StopRequest
) -> int:
    num_ranks, submission = int(os.environ["SLURM_NTASKS"]), jobs.submission()
    assert submission is not None
    timeout_s = _START_TIMEOUT_S if profile.check is None else profile.check.timeout_s
    at = meeting_point(folder.rendezvous, rank, timeout_s)
    os.environ |= {"MASTER_ADDR": at.host, "MASTER_PORT": str(at.port)}
    if profile.check is not None and num_ranks > 1:
        from slurm.node_check import check_nodes

        ranks = current_ranks()
        assert isinstance(ranks, RankEnvironment)
        bad = check_nodes(ranks, at, folder.attempt().nodes, folder.path, profile, submission.code)
        if bad:
            if rank == 0:
                folder.write_bad_nodes(bad)
            print(
                "\n".join(f"megamem: error: node {node}: {problem}" for node, problem in bad.items()), file=sys.stderr
            )
            return _BAD_NODES_FOUND
    if stop.requested:
        return StoppedEarly.exit_code
    if num_ranks == 1:
        # A step of one task says of itself that it is no rank, and ranks that the command would start take a second
        # signal for impatience. Slurm sends one to all tasks, and the script sends another.
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    stage = [] if submission.stage is None else ["--stage", submission.stage]
    return cli.main(["train", str(jobs.config), "--run-dir", str(jobs.run.path), *stage])


if __name__ == "__main__":
    sys.exit(main())
