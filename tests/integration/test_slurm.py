"""Runs as jobs of a real Slurm cluster: they start, survive what happens to them, and end as if nothing had."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from commands import Megamem, assert_same_tensors, checkpoint, last_step, steps
from slurm_cluster import Cluster
from slurm_site import ENVIRONMENT, Site

from pretrain.run.folder import RunFolder
from slurm.policy import Cause
from slurm.records import JobsFolder
from tests.rotation import in_turn

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


@in_turn(1, 3)
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


def test_a_run_survives_its_time_limit_and_a_dead_node(site: Site, cluster: Cluster, straight: Path) -> None:
    """One run, three attempts. Limits are looked at every 30 s, so the signal that comes before one is sent by hand."""
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
    # That of rank 0 and the batch script: the first of those that Slurm gave this time.
    killed = second.attempt().nodes[0]
    cluster.kill_node(killed)
    try:
        site.wait_for_attempt(3)
        assert killed not in site.attempts()[2].attempt().nodes
        job = site.wait_for_state("COMPLETED", "FAILED")
    finally:
        cluster.start_node(killed)
    assert job["JobState"] == "COMPLETED", site.told()
    # A rank may have lived long enough to say that it lost its peers.
    assert site.causes()[1] in (Cause.LOST, Cause.CRASHED)
    assert site.causes()[2:] == [Cause.FINISHED]
    assert steps(site.run) == steps(straight)
    assert_same_tensors(checkpoint(site.run, _NUM_STEPS), checkpoint(straight, _NUM_STEPS))
    for folder in site.attempts():
        assert [path.name for path in sorted(folder.path.glob("rank_*.log"))] == [f"rank_{i}.log" for i in range(2)]
    assert site.jobs.latest.resolve() == site.jobs.attempt_folders()[-1].path
    assert len(site.jobs.job_ids()) == 1


@in_turn(1, 3)
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
    first, second = (folder.attempt() for folder in site.attempts())
    # Not through the queue, in which an srun that failed before may have been.
    assert (second.job, second.restart) == (first.job, first.restart)
    assert [first.num_nodes, second.num_nodes] == [2, 1]
    for row, expected in zip(steps(site.run), steps(straight), strict=True):
        assert row["consumed_samples"] == expected["consumed_samples"]
        assert row["loss"] == pytest.approx(expected["loss"], rel=1e-5)


@in_turn(2, 3)
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
    site.wait_until(
        lambda: all(cluster.job(jobs.job_ids()[0])["JobState"] == "COMPLETED" for jobs in records), "the end of both"
    )
    for jobs in records:
        first, second = site.ended(jobs)
        assert (first.cause, second.cause) == (Cause.STOPPED, Cause.FINISHED), site.told()
        # The steps done when it was told are saved, and not only those saved before.
        assert first.saved_step == first.last_step
        assert (first.last_step or 0) >= 3
        assert jobs.job_ids() == [first.attempt.job] == [second.attempt.job]


@in_turn(1, 3)
def test_a_cancelled_run_saves_and_does_not_come_back(site: Site, cluster: Cluster) -> None:
    """Its ranks are placed by a host file, the first of them on the second node."""
    hosts = site.run.parent.parent / "hosts"
    hosts.write_text("n2\nn1\n")
    entries = [
        *ENVIRONMENT,
        {"name": "SLURM_HOSTFILE", "value": str(hosts), "reason": "rank 0 on the second node"},
    ]
    placed = {
        "sbatch_options": ["--nodelist=n1,n2"],
        "srun_options": ["--distribution=arbitrary"],
        "environment": entries,
    }
    site.submit(*_SHORT, "train.num_steps=100000", "checkpoint.every_steps=0", nodes=2, ranks_per_node=1, **placed)
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

    site.submit(*_SHORT, f"train.num_steps={saved_step + 3}", nodes=1, ranks_per_node=1)
    assert site.wait_for_state("COMPLETED", "FAILED")["JobState"] == "COMPLETED", site.told()
    assert site.attempts()[1].attempt().saved_step == saved_step
