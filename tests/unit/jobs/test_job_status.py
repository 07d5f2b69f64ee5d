"""Answers of `megamem status` about a run's jobs, where a table stands in for Slurm's controller."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from pretrain.config.loader import to_yaml
from pretrain.config.schema import RunConfig, TrainConfig
from pretrain.run.folder import RunFolder
from pretrain.run.history import End, Start, now, write_event
from pretrain.run.owner import Claim
from slurm import commands, job_status
from slurm.commands import JobState, SlurmError
from slurm.job import JobNow, begin, end
from slurm.profile import ClusterConfig
from slurm.records import AttemptFolder, JobsFolder, Submission
from tools.status import line_of

ASKED = Submission(1, "here", 1, 1, "abc", 100, "2026-01-01T00:00:00+00:00")
LONG_AGO = "2020-01-01T00:00:00+00:00"


class Run:
    """A run of 5 steps that was submitted as job 10.

    Attributes:
        states: answers of the controller on jobs.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = RunFolder(folder)
        self.folder.make()
        self.jobs = JobsFolder(self.folder)
        self.jobs.path.mkdir()
        for path in (self.folder.config, self.jobs.config):
            path.write_text(to_yaml(RunConfig(train=TrainConfig(num_steps=5))))
        self.jobs.profile.write_text(to_yaml(ClusterConfig(ranks_per_node=1, shared_paths=("/",), runs_path="/runs")))
        self.jobs.write_submission(ASKED)
        self.jobs.add_job("10", "submitted")
        self.states: dict[str, JobState] = {}

    def begin(self) -> AttemptFolder:
        plan = begin(self.jobs, ("n1",), "1:00:00", {"SLURM_JOB_ID": "10"})
        assert plan is not None
        plan.folder.log_of(0).touch()
        return plan.folder

    def trains(self, step: int, at: str | None = None) -> None:
        write_event(self.folder, Start(0, 0, at or now(), "n1", 1))
        self.folder.metrics.write_text(json.dumps({"step": step, "loss": 1.0}) + "\n")

    def saves(self, step: int) -> None:
        write_event(self.folder, End(step, 0, now()))

    def says(self, job: str, state: str, reason: str = "None", comment: str = "") -> tuple[str, str]:
        """The state and the details of the run, when the controller says so of the job."""
        self.states[job] = JobState(state, reason, comment)
        line = line_of(self.folder.path)
        return line.state, line.detail


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    run = Run(tmp_path)
    monkeypatch.setattr(job_status, "is_there", lambda: True)
    monkeypatch.setattr(job_status, "job_state", lambda job: run.states.get(job))
    return run


def test_a_job_that_starts_is_no_run_that_failed(run: Run) -> None:
    """Neither before its first attempt nor in a later one."""
    assert run.says("10", "PENDING", "Priority") == ("queued", "before its first step, job 10 pending (Priority)")
    assert run.says("10", "RUNNING") == ("starting", "before its first step, job 10 running")
    first = run.begin()
    assert run.says("10", "RUNNING") == ("starting", "before its first step, job 10 running, attempt 1")
    run.trains(3)
    # Nobody owns the run any more, and the script has not decided.
    assert run.says("10", "RUNNING") == ("ending", "at step 3, job 10 running, attempt 1")
    assert end(run.jobs, first, 1, asked_to_stop=False, job=JobNow("RUNNING", "None", 0)).action == "requeue"
    assert run.says("10", "COMPLETING")[0] == "queued"
    run.folder.history.write_text("")
    run.trains(3, LONG_AGO)
    run.begin()
    assert run.says("10", "RUNNING") == ("starting", "at step 3, job 10 running, attempt 2")


def test_a_cancelled_job_is_not_one_that_is_queued_again(run: Run) -> None:
    assert run.says("10", "CANCELLED") == ("cancelled", "before its first step, job 10 cancelled")
    first = run.begin()
    run.trains(3)
    assert run.says("10", "COMPLETING")[0] == "ending"
    assert run.says("10", "CANCELLED")[0] == "cancelled"
    run.saves(3)
    end(run.jobs, first, 0, asked_to_stop=True, job=JobNow("COMPLETING", "None", 0))
    assert run.says("10", "CANCELLED") == (
        "stopped",
        "at step 3, job 10 cancelled, attempt 1, not started again: it was cancelled by scancel, or as Slurm cancels jobs",
    )


@pytest.mark.parametrize("state", ["REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT", "REQUEUE_FED"])
def test_a_job_that_is_held_is_in_the_queue(run: Run, state: str) -> None:
    assert run.says("10", state)[0] == "queued"
    assert not JobState(state, "").is_over


def test_a_job_whose_end_is_awaited_is_not_over() -> None:
    for state in ("SIGNALING", "STAGE_OUT", "RESIZING"):
        assert not JobState(state, "").is_over
    for state in ("COMPLETED", "CANCELLED", "REVOKED", "BOOT_FAIL", "DEADLINE"):
        assert JobState(state, "").is_over


def test_a_job_that_slurm_forgot_before_it_began_has_not_failed(run: Run) -> None:
    """It was cancelled, as likely as not. One with a log did begin."""
    line = line_of(run.folder.path)
    assert (line.state, line.detail) == ("unknown", "before its first step, job 10 is over")
    run.jobs.log_of("10").touch()
    assert line_of(run.folder.path).state == "failed"


def test_what_was_to_go_on_and_does_not_is_told_with_what_to_type(run: Run) -> None:
    first = run.begin()
    run.trains(3)
    run.saves(3)
    first.stopped.touch()
    end(run.jobs, first, 0, asked_to_stop=True, job=JobNow("RUNNING", "None", 0))
    state, detail = run.says("10", "TIMEOUT")
    path = run.folder.path
    command = f"megamem submit {path}/slurm/config.yaml --cluster {path}/slurm/profile.yaml --run-dir {path}"
    assert state == "stopped"
    assert f"it was asked to stop, and saved, the run is not started again: `{command}` goes on" in detail
    (first.path / "refused.txt").write_text("12:00 scontrol requeue 10: Access denied\n")
    assert (
        "not started again (12:00 scontrol requeue 10: Access denied): `megamem submit" in run.says("10", "FAILED")[1]
    )
    # The controller forgets jobs.
    run.states.clear()
    assert "job 10 is over, attempt 1, stopped:" in line_of(path).detail


def test_the_end_of_a_stage_is_not_that_of_a_chain(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    links = [JobsFolder(run.folder, number) for number in (1, 2)]
    for link, job in zip(links, ("11", "12"), strict=True):
        link.path.mkdir(parents=True)
        link.write_submission(replace(ASKED, number=2, stage=f"stage{link.link}"))
        link.add_job(job, "submitted")
        link.profile.write_text(run.jobs.profile.read_text())
        link.config.write_text(run.jobs.config.read_text())
    monkeypatch.setattr("slurm.job.stages_of", lambda *_: (RunConfig(),))
    monkeypatch.setattr("slurm.job._is_left_to_train", lambda *_: True)
    plan = begin(links[0], ("n1",), "1:00:00", {"SLURM_JOB_ID": "11"})
    assert plan is not None
    run.trains(2)
    run.saves(2)
    end(links[0], plan.folder, 0, asked_to_stop=False, job=JobNow("RUNNING", "None", 0))
    run.says("11", "COMPLETED")
    assert run.says("12", "RUNNING")[0] == "starting"
    state, detail = run.says("12", "CANCELLED")
    assert state == "stopped"
    assert "all steps are done, the stage after stage1 is not started again: `megamem submit" in detail
    assert "--chain` goes on" in detail


def test_an_owner_on_a_node_is_gone_when_slurm_says_so(run: Run) -> None:
    """Its claim, which nobody ended, cannot be looked for from here."""
    run.begin()
    run.trains(3)
    run.folder.owner.mkdir()
    claim = run.folder.owner / "000001.json"
    there = replace(Claim.of_this_process(), machine="another", host="n1", job="10")
    claim.write_text(json.dumps({**asdict(there), "life": "3"}))
    assert run.says("10", "RUNNING")[0] == "running"
    assert run.says("10", "NODE_FAIL")[0] == "killed"
    assert run.says("10", "CANCELLED")[0] == "cancelled"
    os.utime(claim, (0, 0))
    assert run.says("10", "RUNNING")[0] == "silent"
    assert run.says("10", "NODE_FAIL")[0] == "killed"
    # A run that was started by hand in the same folder.
    claim.write_text(json.dumps({**asdict(replace(there, job="")), "life": "3"}))
    assert run.says("10", "NODE_FAIL")[0] == "running"


def test_what_only_slurm_could_keep_is_told(run: Run) -> None:
    run.begin()
    said = "megamem: error: attempt 0001 has ended (crashed: why), which cannot be recorded"
    assert run.says("10", "FAILED", comment=said) == (
        "failed",
        f"before its first step, job 10 failed, attempt 1, {said}",
    )
    # A site's own comment is none of ours.
    assert run.says("10", "FAILED", comment="project 7")[1].endswith("attempt 1")


def test_a_comment_may_hold_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    said = (
        "JobId=7 JobState=FAILED Reason=NonZeroExitCode Comment=megamem: error: JobState=x of 2 StdErr=/tmp/x Power= "
    )
    monkeypatch.setattr(commands, "run_command", lambda *_: said)
    assert commands.job_state("7") == JobState("FAILED", "NonZeroExitCode", "megamem: error: JobState=x of 2")


def test_without_an_answer_nothing_is_made_up(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_answer(job: str) -> JobState:
        raise SlurmError("timed out")

    monkeypatch.setattr(job_status, "job_state", no_answer)
    run.begin()
    run.trains(3)
    line = line_of(run.folder.path)
    assert (line.state, line.detail) == ("failed", "at step 3, job 10 (Slurm does not answer), attempt 1")
