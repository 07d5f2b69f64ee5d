"""Runs as jobs of a real Slurm cluster: they start, survive what happens to them, and end as if nothing had."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from commands import Megamem, assert_same_tensors, checkpoint, last_step, steps
from slurm_cluster import Cluster
from slurm_site import Site

from pretrain.run.folder import RunFolder
from slurm.policy import Cause
from slurm.records import JobsFolder

_NUM_STEPS = 40
# Enough for something to happen in between, few enough to be quick.
_SHORT = (f"train.num_steps={_NUM_STEPS}", "train.micro_batch_size=2", "checkpoint.every_steps=5")


def train_here(megamem: Megamem, config: Path, num_ranks: int, run: Path, *overrides: str) -> Path:
    """A run on this machine, without Slurm."""
    result = megamem(
        "train",
        config,
        "--nproc",
        num_ranks,
        "--run-dir",
        run,
        *overrides,
        # A core: as many threads as a rank has in the jobs, so that sums are taken in the same order.
        before=lambda: os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}),
    )
    assert result.code == 0, result.output
    return run


@pytest.fixture(scope="module")
def straight(megamem: Megamem, config_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny run on two ranks."""
    return train_here(megamem, config_file, 2, tmp_path_factory.mktemp("straight") / "run", *_SHORT)


def test_a_run_of_stages_on_two_nodes_is_that_of_one_machine(site: Site, megamem: Megamem, tmp_path: Path) -> None:
    """One job trains them all, on four ranks whose layout changes."""
    config = yaml.safe_load(site.config_file.read_text())
    config["train"] = {**config["train"], "micro_batch_size": 2}
    del config["train"]["num_steps"]
    config["stages"] = [
        {"name": "wide", "num_steps": 5, "parallel": {"tensor": 2}},
        {"name": "deep", "num_steps": 5, "parallel": {"pipeline": 2}},
    ]
    staged = tmp_path / "tiny.yaml"
    staged.write_text(yaml.safe_dump(config, sort_keys=False))
    said = site.submit(config=staged, check={"timeout_s": 240.0, "all_reduce_mb": 1})
    assert f"job {site.job}" in said
    straight = train_here(megamem, staged, 4, tmp_path / "straight")
    assert site.wait_for_state("COMPLETED", "FAILED")["JobState"] == "COMPLETED", site.told()
    assert steps(site.run) == steps(straight)
    assert_same_tensors(checkpoint(site.run, 10), checkpoint(straight, 10))


def test_a_run_survives_its_time_limit_a_dead_node_and_being_requeued(
    site: Site, cluster: Cluster, straight: Path
) -> None:
    """One run, four attempts. Limits are looked at every 30 s, so the signal that comes before one is sent by hand."""
    site.submit(*_SHORT, ranks_per_node=1)
    site.wait_for_step(3)
    cluster.run("scancel", "--batch", "--signal=USR1", site.job)
    site.wait_for_attempt(2)
    assert site.causes() == [Cause.STOPPED]
    first, second = site.attempts()
    # A stop saves what it came to.
    assert (second.attempt().saved_step or 0) > 2
    assert second.attempt().saved_step == first.ended().saved_step  # type: ignore[union-attr]

    site.wait_for_step(12)
    # That of rank 0 and the batch script.
    cluster.kill_node("n1")
    try:
        site.wait_for_attempt(3)
        assert "n1" not in site.attempts()[2].attempt().nodes
        site.wait_for_step(24)
        cluster.run("scontrol", "requeue", site.job)
        cluster.stop_controller()
        cluster.start_controller()
        site.wait_for_attempt(4)
        job = site.wait_for_state("COMPLETED", "FAILED")
    finally:
        cluster.start_node("n1")
    assert job["JobState"] == "COMPLETED", site.told()
    # A rank may have lived long enough to say that it lost its peers; being requeued is a stop like others.
    assert site.causes()[1] in (Cause.LOST, Cause.CRASHED)
    assert site.causes()[2:] == [Cause.STOPPED, Cause.FINISHED]
    assert steps(site.run) == steps(straight)
    assert_same_tensors(checkpoint(site.run, _NUM_STEPS), checkpoint(straight, _NUM_STEPS))
    for folder in site.attempts():
        assert [path.name for path in sorted(folder.path.glob("rank_*.log"))] == [f"rank_{i}.log" for i in range(2)]
    assert site.jobs.latest.resolve() == site.jobs.attempt_folders()[-1].path
    assert len(site.jobs.job_ids()) == 1


def test_an_elastic_run_goes_on_with_fewer_nodes(site: Site, cluster: Cluster, straight: Path) -> None:
    """The same job, without one of its nodes; the batch stays what it was."""
    site.submit(*_SHORT, ranks_per_node=1, min_nodes=1)
    site.wait_for_step(7)
    killed = site.attempts()[0].attempt().nodes[1]
    cluster.kill_node(killed)
    try:
        site.wait_for_attempt(2)
        job = site.wait_for_state("COMPLETED", "FAILED")
    finally:
        cluster.start_node(killed)
    assert job["JobState"] == "COMPLETED", site.told()
    assert site.attempts()[1].attempt().restart == 0
    assert [folder.attempt().num_nodes for folder in site.attempts()] == [2, 1]
    for row, expected in zip(steps(site.run), steps(straight), strict=True):
        assert row["consumed_samples"] == expected["consumed_samples"]
        assert row["loss"] == pytest.approx(expected["loss"], rel=1e-5)


def test_what_slurm_did_not_start_is_started_again_and_what_will_fail_again_is_not(
    site: Site, corpus: Path, tmp_path: Path
) -> None:
    """The first srun fails, as it does where the controller does not answer in time; then the data are missing."""
    srun = tmp_path / "bin" / "srun"
    srun.parent.mkdir()
    failed = tmp_path / "failed"
    srun.write_text(
        f"#!/bin/bash\nif [[ ! -e {failed} ]]; then touch {failed}; echo 'srun: error: it is busy' >&2; exit 1; fi\n"
        f'exec {shutil.which("srun")} "$@"\n'
    )
    srun.chmod(0o755)
    entries = [
        {"name": "CUDA_VISIBLE_DEVICES", "value": "", "reason": "these runs are of CPUs"},
        {"name": "PATH", "value": f"{srun.parent}:{os.environ['PATH']}", "reason": "an srun that fails once"},
    ]
    data = site.folder / "data"
    shutil.copytree(corpus, data)
    site.submit(
        *_SHORT, f"data.datasets.0.path={json.dumps(str(data))}", nodes=1, ranks_per_node=1, environment=entries
    )
    shutil.rmtree(data)
    site.wait_for_state("FAILED")
    ends = [folder.ended() for folder in site.jobs.attempt_folders()]
    assert [ended.cause for ended in ends if ended] == [Cause.NOT_STARTED, Cause.MISTAKE], site.told()
    assert "srun: error: it is busy" in site.jobs.log_of(site.job).read_text()
    output = site.command("status", site.run).output
    assert "exit code 3" in output
    assert str(data) in output


def test_a_run_that_never_reaches_a_save_is_stopped(site: Site, cluster: Cluster) -> None:
    """Its ranks are killed in each of two starts."""
    site.submit(*_SHORT, "checkpoint.every_steps=0", "train.num_steps=100000", nodes=1, ranks_per_node=1)
    for attempt in (1, 2):
        site.wait_for_attempt(attempt)
        cluster.run("scancel", "--signal=KILL", f"{site.job}.0")
    site.wait_for_state("FAILED")
    assert site.causes() == [Cause.CRASHED, Cause.CRASHED], site.told()
    assert "2 starts in a row ended with no checkpoint" in site.command("status", site.run).output


def test_preempted_runs_go_on_when_the_other_job_is_done(site: Site, cluster: Cluster) -> None:
    """One job has the seconds of KillWait alone, the other a time of grace, in which its ranks hear of it first."""
    records = [JobsFolder(RunFolder(site.run.parent / partition)) for partition in ("low", "grace")]
    for jobs in records:
        where: dict[str, Any] = {"nodes": 1, "ranks_per_node": 1, "partition": jobs.run.path.name}
        # Enough for the second one to begin.
        site.submit(*_SHORT, "train.num_steps=100", "--run-dir", str(jobs.run.path), **where)
    site.wait_until(lambda: all(last_step(jobs.run.path) >= 3 for jobs in records), "both to train")
    other = ("sbatch", "--parsable", "--partition=high", "--nodes=3", "--exclusive", "--time=5", "--output=/dev/null")
    cluster.run(*other, "--wrap=sleep 1")
    site.wait_until(lambda: all(len(jobs.ended_attempts(1)) >= 2 for jobs in records), "the end of both")
    for jobs in records:
        first, second = jobs.ended_attempts(1)
        assert (first.cause, second.cause) == (Cause.STOPPED, Cause.FINISHED), site.told()
        # The steps done when it was told are saved, and not only those saved before.
        assert first.saved_step == first.last_step
        assert (first.last_step or 0) >= 3
        assert jobs.job_ids() == [first.attempt.job] == [second.attempt.job]


def test_a_cancelled_run_saves_and_does_not_come_back(site: Site, cluster: Cluster) -> None:
    """Its ranks are placed by a host file, the first of them on the second node."""
    hosts = site.run.parent.parent / "hosts"
    hosts.write_text("n2\nn1\n")
    entries = [
        {"name": "CUDA_VISIBLE_DEVICES", "value": "", "reason": "these runs are of CPUs"},
        {"name": "SLURM_HOSTFILE", "value": str(hosts), "reason": "rank 0 on the second node"},
    ]
    placed = {
        "sbatch_options": ["--nodelist=n1,n2"],
        "srun_options": ["--distribution=arbitrary"],
        "environment": entries,
    }
    site.submit(*_SHORT, "checkpoint.every_steps=0", nodes=2, ranks_per_node=1, **placed)
    site.wait_for_step(3)
    (attempt,) = site.attempts()
    assert json.loads(attempt.rendezvous.read_text())["host"] == "n2"
    assert f"cancelled job {site.job}" in site.command("cancel", site.run).output
    site.wait_until(lambda: not cluster.run("squeue", "-h"), "the job to be gone")
    assert cluster.job(site.job)["JobState"] == "CANCELLED"
    assert site.causes() == [Cause.CANCELLED], site.told()
    saved_step = site.jobs.newest_saved_step()
    assert saved_step is not None
    assert saved_step >= 3
    assert "cancelled" in site.command("status", site.run).output

    site.submit(*_SHORT, nodes=1, ranks_per_node=2)
    assert site.wait_for_state("COMPLETED", "FAILED")["JobState"] == "COMPLETED", site.told()
    assert site.attempts()[1].attempt().saved_step == saved_step
