"""`megamem cancel`: end the Slurm jobs of a run."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from pretrain.errors import ConfigError
from pretrain.folder import RunFolder
from slurm.commands import cancel, job_state
from slurm.records import JobsFolder
from tools.parsers import add_command

_EPILOG = """\
examples:
  megamem cancel runs/mine

A run that trains is told to stop: it finishes its step and saves, as far as the cluster's KillWait lets it. It is not
requeued; `megamem submit` goes on with it.
"""


def add_parser(subparsers: Any) -> None:
    """Adds `cancel` to the commands of `megamem`."""
    parser = add_command(subparsers, "cancel", "end the Slurm jobs of a run", _EPILOG)
    parser.add_argument("run", metavar="RUN", type=Path, help="the run's folder")
    parser.set_defaults(func=run_cancel)


def run_cancel(args: argparse.Namespace) -> int:
    """Cancels every job that is not over."""
    jobs = JobsFolder(RunFolder(args.run))
    if not jobs.job_ids():
        raise ConfigError(f"{args.run} has no Slurm jobs: `megamem status {args.run}` says what it does")
    # Before the job hears of it, so that it does not queue itself again.
    jobs.cancelled.touch()
    states = {job: job_state(job) for job in jobs.job_ids()}
    live = [job for job, state in states.items() if state is not None and not state.is_over]
    for job in live:
        cancel(job)
        print(f"cancelled job {job}")
    if not live:
        print(f"no job of {args.run} is left")
    return 0
