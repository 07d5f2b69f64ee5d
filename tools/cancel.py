"""`megamem cancel`: end the Slurm jobs of a run."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import Any

from pretrain.errors import ConfigError
from pretrain.run.folder import RunFolder
from slurm.commands import cancel, job_state
from slurm.records import jobs_folders
from tools.common.parsers import add_command
from tools.common.run_status import find_runs

_EPILOG = """\
examples:
  megamem cancel runs/mine
  megamem cancel runs/a-sweep

A run that trains is told to stop: it finishes its step and saves, as far as the cluster's KillWait lets it. It is not
requeued; `megamem submit` goes on with it.
"""


def add_parser(subparsers: Any) -> None:
    """Adds `cancel` to the commands of `megamem`."""
    parser = add_command(subparsers, "cancel", "end the Slurm jobs of a run", _EPILOG)
    parser.add_argument("run", metavar="RUN", type=Path, help="the run's folder, or one that holds runs")
    parser.set_defaults(func=run_cancel)


def run_cancel(args: argparse.Namespace) -> int:
    """Cancels every job that is not over, of all stages and of all runs below the folder."""
    unreadable: list[str] = []
    records = {path: jobs_folders(RunFolder(path)) for path in find_runs(args.run, unreadable)}
    if not any(records.values()) and not unreadable:
        raise ConfigError(
            f"{args.run} has no Slurm jobs: `megamem status {shlex.quote(str(args.run))}` says what it does"
        )
    for path, folders in records.items():
        for jobs in folders:
            # Before the job hears of it, so that it does not queue itself again.
            jobs.cancelled.touch()
        # Those first that wait for others.
        ids = [job for jobs in reversed(folders) for job in reversed(jobs.job_ids())]
        live = [job for job in ids if (state := job_state(job)) is not None and not state.is_over]
        for job in live:
            cancel(job)
            print(f"cancelled job {job} of {path}")
        if folders and not live:
            print(f"no job of {path} is left")
    if unreadable:
        raise ConfigError(f"jobs of runs that cannot be seen were not cancelled: {'; '.join(unreadable)}")
    return 0
