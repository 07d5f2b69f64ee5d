"""`megamem submit`: queue a run on a Slurm cluster, after looking at everything that can be looked at before."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pretrain.config.loader import to_yaml
from pretrain.config.schema import RunConfig
from pretrain.config.source import dump_yaml
from pretrain.config.stages import load_stages, to_entries
from pretrain.errors import ConfigError
from pretrain.folder import RunFolder
from pretrain.history import now
from pretrain.owner import look
from pretrain.preflight import check_submission
from slurm.commands import job_state, submit
from slurm.lead import lead_seconds
from slurm.profile import ClusterConfig, find_profile, load_profile
from slurm.records import JobsFolder, Submission
from slurm.script import render
from slurm.snapshot import code_hash, take_snapshot
from tools.parsers import add_command
from tools.ranks import at_least_one_rank

_EPILOG = """\
examples:
  megamem submit configs/quickstart.yaml --cluster local --dry-run
  megamem submit CONFIG --cluster example-h100 --nodes 64 --time 2-00:00:00 train.num_steps=200000

The configuration, the code and the script go into RUN/slurm, so later edits do not reach a job that waits or is
requeued. The same command again, when no job of the run is left, goes on from its newest checkpoint. See docs/slurm.md.
"""


def add_parser(subparsers: Any) -> None:
    """Adds `submit` to the commands of `megamem`."""
    parser = add_command(subparsers, "submit", "queue a run on a Slurm cluster", _EPILOG)
    parser.add_argument("config", metavar="CONFIG", help="YAML file, as for `megamem train`")
    parser.add_argument("overrides", metavar="key=value", nargs="*", default=[], help="set a key of the configuration")
    parser.add_argument(
        "--cluster", required=True, metavar="PROFILE", help="a profile of configs/clusters by name, or a YAML file"
    )
    parser.add_argument("--nodes", type=at_least_one_rank, metavar="N", help="nodes (default: the profile's)")
    parser.add_argument("--time", metavar="LIMIT", help="time limit of an attempt (default: the profile's)")
    parser.add_argument(
        "--run-dir", type=Path, metavar="DIR", help="the run's folder (default: <name> in the profile's runs_path)"
    )
    parser.add_argument("--dry-run", action="store_true", help="check everything, print the script, queue nothing")
    parser.set_defaults(func=run_submit)


def run_submit(args: argparse.Namespace) -> int:
    """Checks, renders, and queues."""
    path = find_profile(args.cluster)
    profile = load_profile(path)
    profile = asked_for(profile, args.nodes, args.time)
    stages = tuple(absolute_data(config) for config in load_stages(args.config, args.overrides))
    config = stages[0]
    folder = RunFolder((args.run_dir or Path(profile.runs_path) / config.name).absolute())
    jobs = JobsFolder(folder)
    check_seen_by_nodes(stages, folder, profile)
    check_submission(stages, profile.nodes * profile.ranks_per_node, folder)
    last = jobs.submission()
    submission = Submission(
        number=1 if last is None else last.number + 1,
        cluster=path.stem,
        nodes=profile.nodes,
        ranks_per_node=profile.ranks_per_node,
        code=code_hash(),
        lead_s=lead_seconds(folder.metrics, profile.lead_s),
        at=now(),
    )
    script = render(config, profile, submission, jobs, time=profile.time)
    if args.dry_run:
        print(script, end="")
        return 0
    _check_free(jobs)
    _write(jobs, stages, profile, submission, script)
    job = submit(jobs.script)
    jobs.add_job(job, "submitted")
    ranks = submission.nodes * submission.ranks_per_node
    print(
        f"job {job}: {config.name} on {submission.nodes} nodes, {ranks} ranks; told to save {submission.lead_s} s before "
        f"its time limit\n"
        f"follow it:  megamem status {folder.path}\n"
        f"            tail -F {jobs.path}/job_{job}.log {jobs.latest}/rank_0.log\n"
        f"end it:     megamem cancel {folder.path}"
    )
    return 0


def asked_for(profile: ClusterConfig, nodes: int | None, time: str | None) -> ClusterConfig:
    """The profile with what the command line says instead.

    Raises:
        ConfigError: the profile cannot have it.
    """
    try:
        return replace(profile, nodes=nodes or profile.nodes, time=time or profile.time)
    except ValueError as error:
        raise ConfigError(f"the command line does not fit the profile: {error}") from error


def absolute_data(config: RunConfig) -> RunConfig:
    """The configuration with data sets that are found from any folder."""
    data = tuple(replace(entry, path=_absolute(entry.path)) for entry in config.data.datasets)
    evaluated = tuple(replace(entry, path=_absolute(entry.path)) for entry in config.evaluation.datasets)
    return replace(
        config, data=replace(config.data, datasets=data), evaluation=replace(config.evaluation, datasets=evaluated)
    )


def _absolute(path: str) -> str:
    # Of an empty path, validation speaks.
    return str(Path(path).absolute()) if path else ""


def check_seen_by_nodes(stages: Sequence[RunConfig], folder: RunFolder, profile: ClusterConfig) -> None:
    """Refuse what lies outside of the folders that all nodes see.

    Raises:
        ConfigError: naming it, and the folders.
    """
    named = [("the run folder", str(folder.path))]
    for config in stages:
        named += [(f"data.datasets.{number}.path", entry.path) for number, entry in enumerate(config.data.datasets)]
        named += [
            (f"evaluation.datasets.{number}.path", entry.path)
            for number, entry in enumerate(config.evaluation.datasets)
        ]
    if profile.virtual_environment is not None and profile.container is None:
        named.append(("virtual_environment of the profile", profile.virtual_environment))
    for what, path in named:
        if not any(Path(path).is_relative_to(shared) for shared in profile.shared_paths):
            raise ConfigError(
                f"{what} is {path}, which lies in none of the folders that all nodes see (shared_paths: "
                f"{', '.join(profile.shared_paths)}): move it there, or add its folder to the profile"
            )


def _check_free(jobs: JobsFolder) -> None:
    """Refuse a run that runs, or waits to."""
    for job in reversed(jobs.job_ids()):
        state = job_state(job)
        if state is not None and not state.is_over:
            raise ConfigError(
                f"job {job} of {jobs.run.path} is {state.state.lower()}: `megamem status {jobs.run.path}` shows it, "
                f"and `megamem cancel {jobs.run.path}` ends it"
            )
    presence = look(jobs.run)
    if presence is not None and not presence.ended and presence.alive:
        raise ConfigError(f"{jobs.run.path} is in use by {presence.claim}: stop it, or use another --run-dir")


def _write(
    jobs: JobsFolder, stages: Sequence[RunConfig], profile: ClusterConfig, submission: Submission, script: str
) -> None:
    """Put down all that the job reads, the script last."""
    jobs.run.make()
    jobs.path.mkdir(exist_ok=True)
    jobs.cancelled.unlink(missing_ok=True)
    take_snapshot(jobs.code)
    staged = stages[0].stage is not None
    jobs.config.write_text(dump_yaml(to_entries(stages)) if staged else to_yaml(stages[0]), encoding="utf-8")
    if not jobs.run.config.exists():
        # So that `megamem status` finds a run that still waits.
        jobs.run.config.write_text(to_yaml(stages[0]), encoding="utf-8")
    jobs.profile.write_text(to_yaml(profile), encoding="utf-8")
    jobs.write_submission(submission)
    jobs.script.write_text(script, encoding="utf-8")
    jobs.script.chmod(0o755)
