"""`megamem submit`: queue a run on a Slurm cluster, after looking at everything that can be looked at before."""

from __future__ import annotations

import argparse
import os
import shlex
import stat
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pretrain.checkpoint.folder import SavedState
from pretrain.config.schema import RunConfig
from pretrain.config.stages import names_of, read_run
from pretrain.errors import ConfigError
from pretrain.run.folder import RunFolder
from pretrain.run.preflight import check_submission
from pretrain.run.saved_run import starting_checkpoint, starting_point
from pretrain.run.trained_stages import refuse_edited_past
from slurm.profile import ClusterConfig, find_profile, load_profile
from slurm.queue import QueuedJob, check_free, job_of_run, queue_array, queue_chain, queue_job, submitting
from slurm.records import JobsFolder, jobs_folders
from slurm.script import render_array
from tools.common.parsers import add_command, add_config
from tools.common.ranks import at_least_one_rank
from tools.sweep import axis, grid

_EPILOG = """\
examples:
  megamem submit configs/quickstart.yaml --cluster local --dry-run
  megamem submit CONFIG --cluster example-h100 --nodes 64 --time 2-00:00:00 train.num_steps=200000
  megamem submit configs/stages/2.5b_25b.yaml --cluster example-h100 --chain --nodes 32 --nodes long=64
  megamem submit CONFIG --cluster example-h100 --sweep optimizer.lr=1e-3,2e-3 --sweep seed=1,2,3 --at-once 4

The configuration, the code and the script go into RUN/slurm, so later edits do not reach a job that waits or is
requeued. The same command again, when no job of the run is left, goes on from its newest checkpoint. See docs/slurm.md.
"""


def add_parser(subparsers: Any) -> None:
    """Adds `submit` to the commands of `megamem`."""
    parser = add_command(subparsers, "submit", "queue a run on a Slurm cluster", _EPILOG)
    add_config(parser, "YAML file, as for `megamem train`", "set a key of the configuration")
    parser.add_argument(
        "--cluster", required=True, metavar="PROFILE", help="a profile of configs/clusters by name, or a YAML file"
    )
    parser.add_argument(
        "--nodes",
        action="append",
        default=[],
        metavar="[STAGE=]N",
        help="nodes (default: the profile's); with --chain also those of one stage",
    )
    parser.add_argument(
        "--time",
        action="append",
        default=[],
        metavar="[STAGE=]LIMIT",
        help="time limit of an attempt (default: the profile's); with --chain also that of one stage",
    )
    parser.add_argument(
        "--run-dir", type=Path, metavar="DIR", help="the run's folder (default: <name> in the profile's runs_path)"
    )
    parser.add_argument(
        "--from",
        dest="start",
        type=Path,
        metavar="CHECKPOINT",
        help="start a new run from the weights, moments and counters of a checkpoint, as `megamem train --from` does",
    )
    parser.add_argument("--dry-run", action="store_true", help="check everything, print the script, queue nothing")
    several = parser.add_mutually_exclusive_group()
    several.add_argument(
        "--chain", action="store_true", help="a job for each stage, which begins when the one before it is done"
    )
    several.add_argument(
        "--sweep",
        type=axis,
        action="append",
        default=[],
        metavar="key=a,b,c",
        help="a run for each value, as a job array; given several times: for each combination",
    )
    parser.add_argument(
        "--at-once", type=at_least_one_rank, metavar="N", help="most runs of a sweep at the same time (default: all)"
    )
    parser.set_defaults(func=run_submit)


def run_submit(args: argparse.Namespace) -> int:
    """Checks, renders, and queues."""
    path = find_profile(args.cluster)
    profile, cluster = load_profile(path), path.stem
    if args.at_once is not None and not args.sweep:
        raise ConfigError(f"--at-once is {args.at_once}, and there is no --sweep: remove it")
    name = read_run(args.config, args.overrides).name
    base = (args.run_dir or Path(profile.runs_path) / name).absolute()
    if args.sweep:
        return _submit_sweep(args, profile, cluster, base, name)
    run = RunFolder(base)
    stages, start = _stages_and_start(args, run)
    if args.chain:
        return _submit_chain(args, links_of(stages, run, profile, cluster, args.nodes, args.time, start))
    job = job_of_run(JobsFolder(run), stages, asked_for(profile, args.nodes, args.time), cluster, start=start)
    check(job)
    if args.dry_run:
        print(job.script, end="")
        return 0
    with submitting(run):
        check_free(jobs_folders(run))
        number = queue_job(job)
    print(_queued(job, number))
    print(_what_next(run.path, job))
    return 0


def _submit_chain(args: argparse.Namespace, links: Sequence[QueuedJob]) -> int:
    for link in links:
        check(link)
    if args.dry_run:
        print("\n".join(link.script for link in links), end="")
        return 0
    run = links[0].records.run
    with submitting(run):
        check_free(jobs_folders(run))
        numbers = queue_chain(links)
    for link, number in zip(links, numbers, strict=True):
        print(_queued(link, number))
    print(_what_next(run.path, links[0]))
    return 0


def links_of(
    stages: Sequence[RunConfig],
    run: RunFolder,
    profile: ClusterConfig,
    cluster: str,
    nodes: Sequence[str],
    time: Sequence[str],
    start: SavedState | None = None,
) -> list[QueuedJob]:
    """The jobs of a chain: of the stages that are not done.

    Raises:
        ConfigError: the run has no stages, or none is left.
    """
    names = names_of(stages)
    if not names:
        raise ConfigError("--chain queues a job for each stage, and the run has no `stages`: leave it out")
    saved_step = JobsFolder(run).newest_saved_step() or 0
    links = [
        job_of_run(JobsFolder(run, number), stages, asked_for(profile, nodes, time, name, names), cluster, name, start)
        for number, (name, config) in enumerate(zip(names, stages, strict=True), start=1)
        if saved_step < config.train.num_steps
    ]
    if not links:
        raise ConfigError(
            f"{run.path} has a checkpoint of step {saved_step}, and its stages end there: add a stage to go on"
        )
    return links


def _submit_sweep(args: argparse.Namespace, profile: ClusterConfig, cluster: str, base: Path, swept: str) -> int:
    if RunFolder(base).config.exists():
        raise ConfigError(f"{base} is the folder of a run, and a sweep wants one for its runs: use another --run-dir")
    profile = asked_for(profile, args.nodes, args.time)
    jobs = []
    for point in grid(args.sweep):
        name = f"{swept}-{point.name}"
        run = RunFolder(base / name)
        stages, start = _stages_and_start(args, run, [*point.overrides, f"name={name}"])
        job = job_of_run(JobsFolder(run), stages, profile, cluster, start=start)
        if _is_finished(job):
            print(f"{job.records.run.path} is finished, and left out", file=sys.stderr)
            continue
        jobs.append(job)
        check(job)
    if not jobs:
        raise ConfigError(f"all runs of {base} are finished: raise train.num_steps, or use another --run-dir")
    # They are one script to Slurm.
    lead_s = max(job.submission.lead_s for job in jobs)
    jobs = [replace(job, submission=replace(job.submission, lead_s=lead_s)) for job in jobs]
    if args.dry_run:
        first = jobs[0]
        records = [job.records for job in jobs]
        print(render_array(swept, records, profile, first.submission, base, args.at_once))
        print(first.script, end="")
        return 0
    with submitting(RunFolder(base)):
        for job in jobs:
            check_free(jobs_folders(job.records.run))
        number = queue_array(jobs, swept, base, args.at_once)
    for place, job in enumerate(jobs):
        print(_queued(job, f"{number}_{place}"))
    print(_what_next(base, None))
    return 0


def _stages_and_start(
    args: argparse.Namespace, run: RunFolder, overrides: Sequence[str] = ()
) -> tuple[tuple[RunConfig, ...], SavedState | None]:
    """The stages of a run, and the checkpoint that it goes on from."""
    # The ranks hold its contents against their hashes, together.
    start = starting_checkpoint(args.start, run, check_hashes=False)
    return read_run(args.config, [*args.overrides, *overrides]).stages(starting_point(start)), start


def check(job: QueuedJob) -> None:
    """Look at all that a job will meet, as far as this machine can see it.

    Raises:
        UserError: the job would fail, for the reason that is told.
    """
    _check_secrets(job.profile)
    _check_unfinished(job)
    # Rendered here so that what no script can hold is refused before anything is written.
    assert job.script
    check_seen_by_nodes(job.trained, job.records.run, job.profile, job.start)
    profile = job.profile
    gpu_bytes = None if profile.gpu_memory_gb is None else 1e9 * profile.gpu_memory_gb
    refuse_edited_past(job.stages, job.records.run)
    check_submission(job.trained, profile.nodes * profile.ranks_per_node, job.records.run, gpu_bytes, job.start)


def _is_finished(job: QueuedJob) -> bool:
    return (job.records.newest_saved_step() or 0) >= job.stages[0].run_steps


def _check_unfinished(job: QueuedJob) -> None:
    """Refuse a run whose steps are all done: its job would do nothing.

    Raises:
        ConfigError: all steps are done; the message says so, and how to go on.
    """
    if _is_finished(job):
        saved_step, run_steps = job.records.newest_saved_step(), job.stages[0].run_steps
        longer = "raise train.num_steps" if job.stages[0].stage is None else "add a stage"
        raise ConfigError(
            f"{job.records.run.path} is finished: {saved_step} of {run_steps} steps are done. To go on, {longer}; to start "
            "anew, use another --run-dir"
        )


def _check_secrets(profile: ClusterConfig) -> None:
    """Refuse files of secrets that are not there, or that others can read.

    Raises:
        ConfigError: a file is missing, or others can read it; the message names it.
    """
    for entry in profile.environment:
        if entry.file is None:
            continue
        try:
            mode = os.stat(entry.file).st_mode
        except OSError as error:
            raise ConfigError(
                f"{entry.name} is to be read from {entry.file}: {error.strerror}. Write it there"
            ) from error
        if not stat.S_ISREG(mode) or mode & 0o077:
            raise ConfigError(
                f"{entry.name} is to be read from {entry.file}, which others than you can read, or is no file: "
                f"chmod 600 {shlex.quote(entry.file)}"
            )


def _queued(job: QueuedJob, number: str) -> str:
    asked = job.submission
    stage = "" if asked.stage is None else f", stage {asked.stage}"
    spare = f" and {job.profile.spare_nodes} to spare" if job.profile.spare_nodes else ""
    return (
        f"job {number}: {job.stages[0].name}{stage} on {asked.nodes} nodes{spare}, {asked.nodes * asked.ranks_per_node} ranks; "
        f"told to save {asked.lead_s} s before its time limit"
    )


def _what_next(path: Path, first: QueuedJob | None) -> str:
    """Commands that follow, and end, what was queued."""
    follow = f"follow it:  megamem status {shlex.quote(str(path))}\n"
    if first is not None:
        records, latest = shlex.quote(str(first.records.path)), shlex.quote(str(first.records.latest))
        follow += f"            tail -F {records}/job_*.log {latest}/rank_0.log\n"
    return f"{follow}end it:     megamem cancel {shlex.quote(str(path))}"


def asked_for(
    profile: ClusterConfig,
    nodes: Sequence[str],
    time: Sequence[str],
    stage: str | None = None,
    names: Sequence[str] = (),
) -> ClusterConfig:
    """The profile with what the command line says instead.

    Args:
        nodes, time: values of the options; the name of a stage and = come before what is meant for it alone.
        stage: name of the stage that the job trains; None: the whole run.
        names: names of all stages.

    Raises:
        ConfigError: the profile cannot have it, or there is no such stage.
    """
    asked_nodes, asked_time = _of_stage("--nodes", nodes, stage, names), _of_stage("--time", time, stage, names)
    if asked_nodes is not None and (not asked_nodes.isdecimal() or not int(asked_nodes)):
        raise ConfigError(f"--nodes is {asked_nodes!r}: give 1 or more")
    try:
        return replace(
            profile,
            nodes=profile.nodes if asked_nodes is None else int(asked_nodes),
            time=profile.time if asked_time is None else asked_time,
        )
    except ValueError as error:
        raise ConfigError(f"the command line does not fit the profile: {error}") from error


def _of_stage(option: str, given: Sequence[str], stage: str | None, names: Sequence[str]) -> str | None:
    """Text of an option for a stage: that meant for it alone, else that for all; None if it says nothing."""
    for_all, for_it = None, None
    for text in given:
        name, sign, value = text.rpartition("=")
        if not sign:
            for_all = value
        elif name not in names:
            there_are = f"the stages are {', '.join(names)}" if names else "only jobs of a --chain have one"
            raise ConfigError(f"{option} is {text}, and there is no stage {name}: {there_are}")
        elif name == stage:
            for_it = value
    return for_it if for_it is not None else for_all


def check_seen_by_nodes(
    stages: Sequence[RunConfig], folder: RunFolder, profile: ClusterConfig, start: SavedState | None = None
) -> None:
    """Refuse what lies outside of the folders that all nodes see.

    Raises:
        ConfigError: a path lies outside; the message names it, and the folders.
    """
    named = [("the run folder", str(folder.path))]
    if start is not None:
        named.append(("--from", str(start.path.resolve())))
    for config in stages:
        named += [(f"data.datasets.{number}.path", entry.path) for number, entry in enumerate(config.data.datasets)]
        named += [
            (f"evaluation.datasets.{number}.path", entry.path)
            for number, entry in enumerate(config.evaluation.datasets)
        ]
    if profile.virtual_environment is not None and profile.container is None:
        named.append(("virtual_environment of the profile", profile.virtual_environment))
        if not (interpreter := Path(profile.virtual_environment) / "bin" / "python").exists():
            raise ConfigError(
                f"virtual_environment of the profile is {profile.virtual_environment}, and there is no {interpreter}: name "
                "the folder of an environment with megamem, or submit from where it is"
            )
    named += [(f"file of {entry.name}", entry.file) for entry in profile.environment if entry.file is not None]
    for what, path in named:
        if not any(Path(path).is_relative_to(shared) for shared in profile.shared_paths):
            raise ConfigError(
                f"{what} is {path}, which lies in none of the folders that all nodes see (shared_paths: "
                f"{', '.join(profile.shared_paths)}): move it there, or add its folder to the profile"
            )
