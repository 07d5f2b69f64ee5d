"""Several jobs of a real Slurm cluster that belong together: a chain of stages, an array of runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from commands import TINY, Megamem, assert_same_tensors, checkpoint, last_step, steps
from slurm_cluster import Cluster
from slurm_site import Site

from pretrain.run.folder import RunFolder
from slurm.policy import Cause
from slurm.records import JobsFolder
from tests.rotation import in_turn

_ENDS = {"first": 40, "second": 64, "third": 70}


@pytest.fixture(scope="module")
def staged_file(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    """Three stages of three layouts, the last one of which is of one rank."""
    config: dict[str, Any] = {
        **TINY,
        "train": {"global_batch_size": 8, "micro_batch_size": 2, "sequence_length": 32},
        "checkpoint": {"every_steps": 4},
        "data": {"datasets": [{"path": str(corpus)}]},
        "stages": [
            {"name": "first", "num_steps": 40, "parallel": {"tensor": 2}},
            {"name": "second", "num_steps": 24, "parallel": {"pipeline": 2}, "optimizer": {"lr": 1e-3}},
            {"name": "third", "num_steps": 6, "train": {"sequence_length": 64, "global_batch_size": 2}},
        ],
    }
    path = tmp_path_factory.mktemp("staged") / "tiny.yaml"
    path.write_text(yaml.safe_dump(config, sort_keys=False))
    return path


@pytest.fixture(scope="module")
def straight(megamem: Megamem, staged_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The stages one after the other on this machine, each on ranks of its own number."""
    path = tmp_path_factory.mktemp("straight") / "run"
    for stage, num_ranks in (("first", 2), ("second", 2), ("third", 1)):
        result = megamem("train", staged_file, "--stage", stage, "--nproc", num_ranks, "--run-dir", path)
        assert result.code == 0, result.output
        assert last_step(path) == _ENDS[stage]
    return path


@in_turn(0, 3)
def test_a_chain_of_stages_is_that_run_whatever_happens_to_its_jobs(
    site: Site, cluster: Cluster, staged_file: Path, straight: Path
) -> None:
    """The first job's first srun fails, then its ranks are killed: it goes on as another job, which the next one has to
    wait for. The second loses a node that is not rank 0's."""
    links = [JobsFolder(RunFolder(site.run), number) for number in (1, 2, 3)]
    chain = ("--chain", "--nodes", "third=1")
    # With less than two leads left, an attempt does not start again in its job.
    through_the_queue: dict[str, Any] = {"time": "30", "lead_s": 1000}
    retry = {"starts_without_checkpoint": 4, "backoff_s": 1.0}
    environment = site.with_an_srun_that_fails_once()
    said = site.submit(
        *chain, config=staged_file, ranks_per_node=1, retry=retry, environment=environment, **through_the_queue
    )
    first, second, third = (link.job_ids()[0] for link in links)
    assert f"job {third}: tiny, stage third on 1 nodes, 1 ranks" in said
    assert cluster.job(second)["Dependency"].startswith(f"afterok:{first}")
    site.wait_until(lambda: last_step(site.run) >= 5, "step 5")
    cluster.run("scancel", "--signal=KILL", f"{first}.0")
    site.wait_until(lambda: len(links[0].job_ids()) == 2, "another job")
    after = f"afterok:{links[0].job_ids()[1]}"
    site.wait_until(lambda: cluster.job(second)["Dependency"].startswith(after), "the second link to wait for it")
    # Slurm says why a job waits when it has looked at it.
    site.wait_until(lambda: cluster.job(second)["Reason"] == "Dependency", "the second link's reason")
    status = site.command("status", site.run).output
    assert f"job {second} of stage second pending (Dependency)" in status

    site.wait_until(lambda: last_step(site.run) >= 46, "the second stage")
    (attempt,) = links[1].attempt_folders()
    killed = attempt.attempt().nodes[1]
    cluster.kill_node(killed)
    try:
        site.wait_until(lambda: cluster.job(third)["JobState"] == "COMPLETED", "the last job")
    finally:
        cluster.start_node(killed)
    causes = [[ended.cause for ended in link.ended_attempts(1)] for link in links]
    assert causes[0] == [Cause.NOT_STARTED, Cause.CRASHED, Cause.FINISHED], site.told()
    assert "srun: error: it is busy" in links[0].log_of(first).read_text()
    # Its script is told to stop, or lost too, or sees its ranks fail first.
    assert causes[1][0] in (Cause.LOST, Cause.CRASHED, Cause.STOPPED)
    # Until Slurm knows that the node is dead it may give it once more, and a second failure in a row waits as a new job.
    given_again = causes[1][1:-1]
    assert set(given_again) <= {Cause.LOST, Cause.CRASHED, Cause.NOT_STARTED}
    assert [causes[1][-1], causes[2]] == [Cause.FINISHED, [Cause.FINISHED]]
    assert [link.attempt_folders()[-1].attempt().num_nodes for link in links] == [2, 2, 1]
    assert len(links[1].job_ids()) <= 1 + len(given_again)
    assert len(links[2].job_ids()) == 1
    assert steps(site.run) == steps(straight)
    assert_same_tensors(checkpoint(site.run, 70), checkpoint(straight, 70))
    told = [json.loads(line) for line in site.command("status", site.run, "--attempts", "--json").output.splitlines()]
    assert [row["stage"] for row in told] == ["first"] * 3 + ["second"] * len(causes[1]) + ["third"]
    # All but the one that no rank began, and those on the dead node.
    assert all(row["start_s"] > 0 for row in (*told[1:4], *told[-2:]))
    # Those that followed a failure; a save was never more than four steps ago, and the next step may not have been told.
    for failed, following in ((told[1], told[2]), (told[3], told[-2])):
        assert failed["lost_steps"] in range(5)
        assert following["down_s"] >= following["start_s"]
    refused = site.submit(*chain, config=staged_file, ranks_per_node=1, expect=2)
    assert "its stages end there" in " ".join(refused.split())


@in_turn(2, 3)
def test_a_chain_ends_with_a_job_that_fails_and_goes_on_from_there(
    site: Site, cluster: Cluster, staged_file: Path, corpus: Path
) -> None:
    """Data that are missing would be missing again, so nothing is started again: its followers are cancelled by Slurm.
    `cancel` ends those that wait with the one that runs."""
    gone = site.folder / "gone"
    gone.symlink_to(corpus)
    short = (
        "stages.first.num_steps=4",
        "stages.second.num_steps=4",
        f"stages.second.data.datasets=[{{path: {json.dumps(str(gone))}}}]",
    )
    # A rank tells what a link needs: links of more are in the test above.
    alone = ("stages.first.parallel.tensor=1", "stages.second.parallel.pipeline=1")
    options: dict[str, Any] = {"config": staged_file, "nodes": 1, "ranks_per_node": 1}
    site.submit("--chain", *short, *alone, **options)
    links = [JobsFolder(RunFolder(site.run), number) for number in (1, 2, 3)]
    jobs = [link.job_ids()[0] for link in links]
    site.wait_until(lambda: last_step(site.run) >= 1, "the first stage")
    gone.unlink()
    site.wait_until(lambda: cluster.job(jobs[2])["JobState"] == "CANCELLED", "the last job to be cancelled")
    assert [cluster.job(job)["JobState"] for job in jobs[:2]] == ["COMPLETED", "FAILED"]
    assert site.causes(links[1]) == [Cause.MISTAKE], site.told()
    status = site.command("status", site.run).output
    assert f"job {jobs[2]} of stage third cancelled" in status
    assert "exit code 3" in status
    assert str(gone) in status

    gone.symlink_to(corpus)
    said = site.submit("--chain", *short, *alone, **options)
    assert "stage first" not in said
    ended = site.command("cancel", site.run).output
    assert ended.index("cancelled job") < ended.rindex("cancelled job")
    cluster.wait_until(lambda: not cluster.run("squeue", "-h"), "all jobs to be gone")


@in_turn(2, 3)
def test_a_sweep_is_an_array_of_runs_each_with_attempts_of_its_own(site: Site, cluster: Cluster) -> None:
    """One of them is requeued, while the controller is away."""
    sweep = ("--sweep", "optimizer.lr=4e-3,1e-3", "--at-once", "2")
    steps_ = ("train.num_steps=30", "checkpoint.every_steps=5")
    assert "lr is None" not in site.submit(*sweep, *steps_, nodes=1, ranks_per_node=1)
    runs = [site.run / f"tiny-lr={lr}" for lr in ("4e-3", "1e-3")]
    records = [JobsFolder(RunFolder(run)) for run in runs]
    array = records[0].job_ids()[0].partition("_")[0]
    assert [each.job_ids() for each in records] == [[f"{array}_0"], [f"{array}_1"]]
    site.wait_until(lambda: last_step(runs[0]) >= 3, "its third step")
    cluster.run("scontrol", "requeue", f"{array}_0")
    cluster.stop_controller()
    cluster.start_controller()
    site.wait_until(lambda: all(len(site.ended(each)) == n for each, n in zip(records, (2, 1), strict=True)), "ends")
    assert site.causes(records[0]) == [Cause.STOPPED, Cause.FINISHED], site.told()
    assert site.causes(records[1]) == [Cause.FINISHED]
    assert [each.job_ids() for each in records] == [[f"{array}_0"], [f"{array}_1"]]
    output = site.command("status", site.run).output
    for run in runs:
        assert f"{run}  30/30" in output
    again: dict[str, Any] = {"expect": 2, "nodes": 1, "ranks_per_node": 1}
    assert "are finished" in site.submit(*sweep, *steps_, **again)
    refused = site.submit(*sweep, "train.num_steps=31", "train.micro_batch_size=3", **again)
    assert "micro_batch_size" in refused
