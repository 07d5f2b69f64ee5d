"""Runs as jobs of a real Slurm cluster: they start, survive what happens to them, and end as if nothing had."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from commands import Megamem, Result, assert_same_tensors, checkpoint, last_step, steps
from slurm_cluster import Cluster, missing_programs

from pretrain.folder import RunFolder
from slurm.policy import Cause
from slurm.records import AttemptFolder, JobsFolder

# Reached only when something hangs.
_DEADLINE_S = 240.0
_NUM_STEPS = 40
# Enough for something to happen in between, few enough to be quick.
_SHORT = (f"train.num_steps={_NUM_STEPS}", "train.micro_batch_size=2", "checkpoint.every_steps=5")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Three nodes of two cores. Where Slurm is not installed its tests are skipped, but not in CI."""
    if missing := missing_programs():
        message = f"not installed: {', '.join(missing)} (apt-get install slurmctld slurmd slurm-client munge)"
        pytest.fail(message) if os.environ.get("CI") else pytest.skip(message)
    # Not pytest's own folder: sockets have short names.
    with (
        tempfile.TemporaryDirectory(prefix="slurm", ignore_cleanup_errors=True) as folder,
        Cluster(Path(folder), 3) as it,
    ):
        yield it


def profile(cluster: Cluster, shared: Sequence[Path], **changes: Any) -> dict[str, Any]:
    """Of the tests' cluster."""
    return {
        "ranks_per_node": 2,
        "nodes": 2,
        "shared_paths": [*map(str, shared), sys.prefix],
        "runs_path": str(shared[0] / "runs"),
        "virtual_environment": sys.prefix,
        "cpu_binding": "none",
        "time": "10",
        "lead_s": 60,
        "check": None,
        "environment": [
            {"name": "CUDA_VISIBLE_DEVICES", "value": "", "reason": "these runs are of CPUs"},
        ],
        **changes,
    }


class Site:
    """A place to submit from."""

    def __init__(self, cluster: Cluster, megamem: Megamem, config_file: Path, folder: Path) -> None:
        self.cluster, self._megamem, self._config_file, self._folder = cluster, megamem, config_file, folder
        self.run = folder / "runs" / "tiny"
        self.jobs = JobsFolder(RunFolder(self.run))
        self._corpus = Path(yaml.safe_load(config_file.read_text())["data"]["datasets"][0]["path"])

    def command(self, *args: object) -> Result:
        return self._megamem(*args, before=lambda: os.environ.update(self.cluster.environment))

    def submit(self, *overrides: str, expect: int = 0, **changes: Any) -> str:
        """Submits the tiny run; returns what was said."""
        path = self._folder / "here.yaml"
        path.write_text(yaml.safe_dump(profile(self.cluster, [self._folder, self._corpus], **changes)))
        result = self.command("submit", self._config_file, "--cluster", path, *_SHORT, *overrides)
        assert result.code == expect, result.output
        return result.output

    @property
    def job(self) -> str:
        return self.jobs.job_ids()[-1]

    def wait_for_state(self, *states: str) -> dict[str, str]:
        try:
            self.cluster.wait_until(
                lambda: self.cluster.job(self.job)["JobState"] in states, f"job in {states}", _DEADLINE_S
            )
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.told()}") from error
        return self.cluster.job(self.job)

    def wait_for_step(self, step: int) -> None:
        self.cluster.wait_until(lambda: last_step(self.run) >= step, f"step {step}", _DEADLINE_S)

    def attempts(self) -> list[AttemptFolder]:
        """Those that came as far as ranks, or still may: on a busy machine Slurm fails to start some, which is held by
        itself."""
        return [folder for folder in self.jobs.attempt_folders() if folder.any_rank_began() or not folder.ended()]

    def wait_for_attempt(self, number: int) -> None:
        """Until its ranks are built and about to train: what they print first."""

        def trains() -> bool:
            folders = self.attempts()
            log = folders[number - 1].log_of(0) if len(folders) >= number else None
            return log is not None and log.exists() and "memory kernels" in log.read_text()

        try:
            self.cluster.wait_until(trains, f"attempt {number}", _DEADLINE_S)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.told()}") from error

    def told(self) -> str:
        """All that jobs and ranks have said."""
        logs = [*self.jobs.path.glob("job_*.log"), *sorted(self.jobs.attempts.glob("*/*.*"))]
        return "\n".join(f"--- {path}\n{path.read_text(errors='replace')[-3000:]}" for path in logs)

    def causes(self) -> list[str]:
        return [ended.cause.value for folder in self.attempts() if (ended := folder.ended())]


@pytest.fixture
def site(cluster: Cluster, megamem: Megamem, config_file: Path, tmp_path: Path) -> Iterator[Site]:
    site = Site(cluster, megamem, config_file, tmp_path)
    yield site
    cluster.end_all_jobs()


@pytest.fixture(scope="module")
def straight(megamem: Megamem, config_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run on four ranks of this machine, without Slurm."""
    path = tmp_path_factory.mktemp("straight") / "run"
    result = megamem(
        "train",
        config_file,
        "--nproc",
        4,
        "--run-dir",
        path,
        *_SHORT,
        # A core: as many threads as a rank has in the jobs, so that sums are taken in the same order.
        before=lambda: os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}),
    )
    assert result.code == 0, result.output
    return path


def test_a_run_on_two_nodes_is_that_of_one_machine(site: Site, straight: Path) -> None:
    said = site.submit(check={"timeout_s": 120.0, "all_reduce_mb": 1})
    assert f"job {site.job}" in said
    job = site.wait_for_state("COMPLETED", "FAILED")
    assert job["JobState"] == "COMPLETED", site.told()
    assert steps(site.run) == steps(straight)
    assert_same_tensors(checkpoint(site.run, _NUM_STEPS), checkpoint(straight, _NUM_STEPS))


def test_a_run_survives_its_time_limit_a_dead_node_and_being_requeued(
    site: Site, cluster: Cluster, straight: Path
) -> None:
    """One run, four attempts. Limits are looked at every 30 s, so the signal that comes before one is sent by hand."""
    site.submit()
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
        assert [path.name for path in sorted(folder.path.glob("rank_*.log"))] == [f"rank_{i}.log" for i in range(4)]
    assert site.jobs.latest.resolve() == site.jobs.attempt_folders()[-1].path
    assert len(site.jobs.job_ids()) == 1


def test_an_elastic_run_goes_on_with_fewer_nodes(site: Site, cluster: Cluster, straight: Path) -> None:
    """The same job, without one of its nodes; the batch stays what it was."""
    site.submit(ranks_per_node=1, min_nodes=1)
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


def test_what_will_fail_again_is_not_started_again(site: Site, corpus: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    shutil.copytree(corpus, data)
    site.submit(f"data.datasets.0.path={data}", nodes=1, ranks_per_node=1)
    shutil.rmtree(data)
    site.wait_for_state("FAILED")
    assert site.causes() == [Cause.MISTAKE], site.told()
    output = site.command("status", site.run).output
    assert "exit code 3" in output
    assert str(data) in output


def test_a_run_that_never_reaches_a_save_is_stopped(site: Site, cluster: Cluster) -> None:
    """Its ranks are killed in each of two starts."""
    site.submit("checkpoint.every_steps=0", "train.num_steps=100000", nodes=1, ranks_per_node=1)
    for attempt in (1, 2):
        site.wait_for_attempt(attempt)
        cluster.run("scancel", "--signal=KILL", f"{site.job}.0")
    site.wait_for_state("FAILED")
    assert site.causes() == [Cause.CRASHED, Cause.CRASHED], site.told()
    assert "2 starts in a row ended with no checkpoint" in site.command("status", site.run).output
