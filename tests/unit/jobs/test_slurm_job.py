"""Questions of a job before and after its ranks."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from pretrain.config.loader import to_yaml
from pretrain.config.schema import RunConfig
from pretrain.errors import ConfigError
from pretrain.run.folder import RunFolder
from slurm.job import JobNow, begin, end, goes_on_in_place, seconds, usable_nodes
from slurm.lead import lead_seconds
from slurm.policy import Action, Cause
from slurm.profile import ClusterConfig, RetryConfig
from slurm.records import FirstFailure, JobsFolder, Submission
from tools.job import main

PROFILE = ClusterConfig(ranks_per_node=2, shared_paths=("/",), runs_path="/runs", lead_s=100)
NODES = ("n1", "n2")
RUNNING = JobNow("RUNNING", "None", 1)


@pytest.fixture
def jobs(tmp_path: Path) -> JobsFolder:
    """A run that was just submitted."""
    jobs = JobsFolder(RunFolder(tmp_path))
    jobs.path.mkdir()
    submit(jobs, 1)
    jobs.add_job("10", "submitted")
    return jobs


def submit(jobs: JobsFolder, number: int) -> None:
    jobs.config.write_text(to_yaml(RunConfig()))
    jobs.profile.write_text(to_yaml(PROFILE))
    jobs.write_submission(Submission(number, "here", 2, 2, "abc", 100, "2026-01-01T00:00:00+00:00"))


def start(jobs: JobsFolder, job: str = "10", left: str = "1:00:00"):  # type: ignore[no-untyped-def]
    plan = begin(jobs, NODES, left, {"SLURM_JOB_ID": job, "SLURM_RESTART_COUNT": "1"})
    assert plan is not None
    return plan


def test_attempts_are_numbered_and_latest_is_the_newest(jobs: JobsFolder) -> None:
    first = start(jobs)
    assert (first.num_nodes, first.stop_after_s) == (2, None)
    end(jobs, first.folder, 75, asked_to_stop=True, job=RUNNING)
    second = start(jobs)
    assert [folder.path.name for folder in jobs.attempt_folders()] == ["0001", "0002"]
    assert jobs.latest.resolve() == second.folder.path.resolve()
    assert second.folder.attempt().restart == 1


def test_a_job_whose_place_another_one_took_does_nothing(jobs: JobsFolder) -> None:
    jobs.add_job("11", "queued by the job before it")
    assert begin(jobs, NODES, "1:00:00", {"SLURM_JOB_ID": "10"}) is None
    assert start(jobs, "11").num_nodes == 2
    # Slurm can be faster than whoever records the job.
    start(JobsFolder(jobs.run), "12")
    assert jobs.job_ids() == ["10", "11", "12"]


def test_a_row_of_jobs_that_a_full_disk_cut_is_passed_over(jobs: JobsFolder) -> None:
    """The job behind it says of itself that it is there."""
    for cut in (b'{"job": "11", "a', b"\xff"):
        with jobs.jobs.open("ab") as stream:
            stream.write(cut)
        assert jobs.job_ids() == ["10"]
    start(jobs, "11")
    assert jobs.job_ids() == ["10", "11"]
    jobs.add_job("12", "queued by the job before it")
    assert jobs.job_ids() == ["10", "11", "12"]
    assert len(jobs.jobs.read_bytes().splitlines()) == 4


def test_an_attempt_that_left_no_end_was_lost_and_counts(jobs: JobsFolder) -> None:
    start(jobs)
    start(jobs)
    with pytest.raises(ConfigError, match="2 starts in a row ended with no checkpoint"):
        start(jobs)
    assert [ended.cause for ended in jobs.ended_attempts(1)] == [Cause.LOST, Cause.LOST]
    # And again, should Slurm try it again.
    with pytest.raises(ConfigError, match="is not started again"):
        start(jobs)
    submit(jobs, 2)
    assert start(jobs).folder.path.name == "0003"


@pytest.mark.parametrize(
    ("failure", "srun", "standing", "cause", "action"),
    [
        (None, 0, "RUNNING None 1 1:00:00", Cause.FINISHED, Action.DONE),
        (FirstFailure(3, "n2", 3), 137, "RUNNING None 1 1:00:00", Cause.MISTAKE, Action.STOP),
        (FirstFailure(3, "n2", 1), 137, "RUNNING None 1 1:00:00", Cause.CRASHED, Action.REQUEUE),
        (FirstFailure(3, "n2", 17), 17, "RUNNING None 1 1:00:00", Cause.BAD_NODES, Action.REQUEUE),
        (None, 1, "RUNNING None 1 1:00:00", Cause.NOT_STARTED, Action.REQUEUE),
        # From srun itself, 2 says nothing about the configuration.
        (None, 2, "RUNNING None 1 1:00:00", Cause.NOT_STARTED, Action.REQUEUE),
        (None, 137, "RUNNING None 1 1:00:00", Cause.CRASHED, Action.REQUEUE),
        (None, 143, "CANCELLED None 1 1:00:00", Cause.CANCELLED, Action.STOP),
        (None, 143, "COMPLETING None 1 1:00:00", Cause.CANCELLED, Action.STOP),
        # Slurm itself starts it again: it was preempted, or lost a node.
        (None, 143, "COMPLETING None 2 1:00:00", Cause.CRASHED, Action.REQUEUE),
        # Its time was up, and the signal before that came too late.
        (None, 143, "COMPLETING TimeLimit 1 1:00:00", Cause.CRASHED, Action.REQUEUE),
        # squeue gave no answer.
        (None, 143, "", Cause.CRASHED, Action.REQUEUE),
    ],
)
def test_how_an_attempt_ended(
    jobs: JobsFolder, failure: FirstFailure | None, srun: int, standing: str, cause: Cause, action: Action
) -> None:
    folder = start(jobs).folder
    if failure is not None:
        folder.tell_failure(failure)
        # An echo.
        folder.tell_failure(FirstFailure(0, "n1", 1))
        folder.log_of(3).write_text("step 5\nmegamem: error: no such data\nrank 3 ends\n")
    elif srun > 128:
        folder.log_of(0).touch()
    decision = end(jobs, folder, srun, asked_to_stop=False, job=JobNow.read(standing))
    ended = folder.ended()
    assert ended is not None
    assert (ended.cause, decision.action) == (cause, action)
    assert decision.exclude == (("n2",) if cause is Cause.BAD_NODES else ())
    if cause is Cause.MISTAKE:
        assert "rank 3 on n2 ended with exit code 3: megamem: error: no such data" in decision.reason


def test_ranks_of_which_one_began_have_crashed_and_nobody_knows_where(jobs: JobsFolder) -> None:
    folder = start(jobs).folder
    folder.log_of(0).touch()
    end(jobs, folder, 17, asked_to_stop=False, job=RUNNING)
    ended = folder.ended()
    assert ended is not None
    assert (ended.cause, ended.bad_nodes) == (Cause.CRASHED, ())


def test_a_rank_that_was_killed_is_blamed_and_not_who_missed_it(jobs: JobsFolder) -> None:
    folder = start(jobs).folder
    folder.tell_failure(FirstFailure(0, "n1", 1))
    folder.log_of(0).write_text("RuntimeError: Connection reset by peer\n")
    (folder.path / "srun.log").write_text("srun: error: n2: task 1: Killed\n")
    decision = end(jobs, folder, 137, asked_to_stop=False, job=RUNNING)
    assert decision.reason == "crashed: rank 1 on n2 was killed (srun: Killed)"
    # Nor is the end of ranks whose script was lost with them a crash of theirs.
    folder = start(jobs).folder
    folder.log_of(0).touch()
    (folder.path / "srun.log").write_text("srun: error: n1: task 0: Terminated\n")
    with pytest.raises(ConfigError, match="the last one lost: nothing says how"):
        start(jobs)
    submit(jobs, 2)
    folder = start(jobs).folder
    (folder.path / "srun.log").write_text("srun: error: Node failure on n2\n")
    start(jobs)
    assert [ended.detail for ended in jobs.ended_attempts(2)] == ["node n2 failed"]


def test_nodes_that_were_found_bad_are_excluded(jobs: JobsFolder) -> None:
    folder = start(jobs).folder
    folder.write_bad_nodes({"n2": "its clock is +9.0 s off"})
    decision = end(jobs, folder, 1, asked_to_stop=False, job=RUNNING)
    assert (decision.action, decision.exclude) == (Action.REQUEUE, ("n2",))
    assert "n2: its clock is +9.0 s off" in decision.reason


def test_nodes_that_were_found_bad_are_never_forgotten(jobs: JobsFolder, capsys: pytest.CaptureFixture[str]) -> None:
    """Crashes later, the job is queued anew: without them, and without those of the profile."""
    jobs.profile.write_text(
        to_yaml(replace(PROFILE, excluded_nodes=("n[7-9]",), retry=RetryConfig(starts_without_checkpoint=9)))
    )
    verdicts = []
    for job, bad in (("10", "n2"), ("11", ""), ("11", ""), ("12", "n1")):
        folder = start(jobs, job).folder
        folder.log_of(0).touch()
        if bad:
            folder.write_bad_nodes({bad: "no GPU"})
        words = ["end", str(jobs.path), str(folder.path), "--exit-code", "137", "--standing", "RUNNING None 0"]
        assert main([*words, "--nodes", "n1,n2"]) == 0
        verdicts.append(capsys.readouterr().out.splitlines()[-1])
    assert verdicts == [
        "resubmit 0 n[7-9],n2 none",
        # The same job keeps what it was queued with.
        "requeue 0 none none",
        "resubmit 60 n[7-9],n2 none",
        "resubmit 0 n[7-9],n1,n2 none",
    ]


def test_the_lead_is_that_of_the_slowest_save(jobs: JobsFolder) -> None:
    assert lead_seconds(jobs.run.metrics, 100) == 100
    rows = [{"step": 1, "step_s": 3.0}, {"step": 1, "save_s": 50.5}, {"step": 2, "save_s": 20.0}]
    jobs.run.metrics.write_text("\n".join(map(json.dumps, rows)) + '\n{"step": 3, "sav')
    # Two saves, two steps and a minute.
    assert lead_seconds(jobs.run.metrics, 100) == 2 * 50.5 + 2 * 3.0 + 60
    assert lead_seconds(jobs.run.metrics, 500) == 500
    assert start(jobs, left="1:00:00").stop_after_s == 3600 - 167
    assert start(jobs, left="UNLIMITED").stop_after_s is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [("2-03:04:05", 183845), ("3:04", 184), ("1:00:00", 3600), ("UNLIMITED", None), ("INVALID", None), ("", None)],
)
def test_the_time_that_is_left(text: str, expected: int | None) -> None:
    assert seconds(text) == expected


def test_an_elastic_run_takes_the_most_nodes_that_its_batch_allows() -> None:
    config = RunConfig()
    config = replace(config, train=replace(config.train, global_batch_size=16, micro_batch_size=2))
    elastic = replace(PROFILE, nodes=4, min_nodes=1)
    assert [usable_nodes([config], elastic, number, 4) for number in (4, 3, 2, 1)] == [4, 2, 2, 1]
    with pytest.raises(ConfigError, match="no number of nodes from 3 to 3"):
        usable_nodes([config], replace(PROFILE, nodes=3), 3, 3)


@pytest.mark.parametrize(
    ("min_nodes", "live", "cause_code", "asked", "expected"),
    [
        (1, ["n1"], 137, False, True),
        (None, ["n1"], 137, False, False),
        (2, ["n1"], 137, False, False),
        # It is being requeued or cancelled: the allocation ends.
        (1, ["n1"], 137, True, False),
        (1, ["n1"], 75, False, False),
        (1, ["n1"], 3, False, False),
        (1, [], 137, False, False),
    ],
)
def test_an_elastic_run_goes_on_in_its_job(
    jobs: JobsFolder, min_nodes: int | None, live: list[str], cause_code: int, asked: bool, expected: bool
) -> None:
    jobs.profile.write_text(to_yaml(replace(PROFILE, nodes=2, min_nodes=min_nodes)))
    folder = start(jobs).folder
    folder.log_of(0).touch()
    decision = end(jobs, folder, cause_code, asked_to_stop=asked, job=RUNNING)
    assert goes_on_in_place(jobs, folder, decision, live, asked_to_stop=asked, job=RUNNING) is expected


def test_a_node_that_was_found_bad_is_not_used_again(jobs: JobsFolder) -> None:
    jobs.profile.write_text(to_yaml(replace(PROFILE, nodes=2, min_nodes=1)))
    folder = start(jobs).folder
    folder.write_bad_nodes({"n1": "no GPU"})
    decision = end(jobs, folder, 1, asked_to_stop=False, job=RUNNING)
    assert goes_on_in_place(jobs, folder, decision, NODES, asked_to_stop=False, job=RUNNING)
    assert start(jobs).folder.attempt().nodes == ("n2",)


@pytest.mark.parametrize(
    ("saved", "live", "left", "expected"),
    [
        # It saved something: the same nodes at once, without a queue.
        (5, ["n1", "n2"], "1:00:00", True),
        (5, ["n1", "n2"], "UNLIMITED", True),
        # It did not: others may do better.
        (None, ["n1", "n2"], "1:00:00", False),
        (5, ["n1"], "1:00:00", False),
        # It would be told to stop as soon as it trains: the lead is 100 s.
        (5, ["n1", "n2"], "3:19", False),
        (5, ["n1", "n2"], "3:20", True),
    ],
)
def test_ranks_that_crash_start_again_in_their_job(
    jobs: JobsFolder, monkeypatch: pytest.MonkeyPatch, saved: int | None, live: list[str], left: str, expected: bool
) -> None:
    folder = start(jobs).folder
    folder.log_of(0).touch()
    monkeypatch.setattr(JobsFolder, "newest_saved_step", lambda _: saved)
    decision = end(jobs, folder, 137, asked_to_stop=False, job=RUNNING)
    now = replace(RUNNING, time_left=left)
    assert goes_on_in_place(jobs, folder, decision, live, asked_to_stop=False, job=now) is expected
    assert not goes_on_in_place(jobs, folder, decision, live, asked_to_stop=False, job=replace(now, restarts=2))
    assert not goes_on_in_place(jobs, folder, decision, live, asked_to_stop=False, job=replace(now, state="COMPLETING"))


def test_a_spare_node_takes_the_place_of_one_that_is_gone(jobs: JobsFolder) -> None:
    """The layout stays; without another spare one, the run leaves its job."""
    jobs.profile.write_text(to_yaml(replace(PROFILE, nodes=2, spare_nodes=1)))
    environ = {"SLURM_JOB_ID": "10", "SLURM_RESTART_COUNT": "1"}
    first = begin(jobs, ("n1", "n2", "n3"), "1:00:00", environ)
    assert first is not None
    assert first.folder.attempt().nodes == ("n1", "n2")
    first.folder.log_of(0).touch()
    decision = end(jobs, first.folder, 137, asked_to_stop=False, job=RUNNING)
    assert goes_on_in_place(jobs, first.folder, decision, ["n1", "n3"], asked_to_stop=False, job=RUNNING)
    second = begin(jobs, ("n1", "n3"), "1:00:00", environ)
    assert second is not None
    assert second.folder.attempt().nodes == ("n1", "n3")
    second.folder.write_bad_nodes({"n1": "no GPU"})
    decision = end(jobs, second.folder, 1, asked_to_stop=False, job=RUNNING)
    assert not goes_on_in_place(jobs, second.folder, decision, ["n1", "n3"], asked_to_stop=False, job=RUNNING)
    assert decision.exclude == ("n1",)
