"""Times for which attempts waited, took to start, and were without steps, from what a run's folder keeps."""

from __future__ import annotations

import json
import os
from datetime import datetime
from pathlib import Path

import pytest

from pretrain.config.loader import to_yaml
from pretrain.config.schema import RunConfig
from pretrain.run.folder import RunFolder
from pretrain.run.history import Start, write_event
from slurm import job, records
from slurm.job import begin, end
from slurm.profile import ClusterConfig
from slurm.records import JobsFolder, Submission
from slurm.times import AttemptTimes, attempt_times
from tools.cli import main


def at(second: int) -> str:
    return f"2026-01-01T00:{second // 60:02d}:{second % 60:02d}+00:00"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """Three attempts: one that is killed after 7 steps, one that Slurm does not start, and one that trains."""
    run = RunFolder(tmp_path)
    jobs = JobsFolder(run)
    jobs.path.mkdir()
    run.config.write_text(to_yaml(RunConfig()))
    jobs.config.write_text(to_yaml(RunConfig()))
    jobs.profile.write_text(to_yaml(ClusterConfig(ranks_per_node=1, shared_paths=("/",), runs_path="/runs")))
    jobs.write_submission(Submission(1, "here", 2, 1, "abc", 100, at(0)))

    def clock(second: int) -> None:
        for module in (job, records):
            monkeypatch.setattr(module, "now", lambda: at(second))

    def start(second: int) -> records.AttemptFolder:
        clock(second)
        plan = begin(jobs, ("n1", "n2"), "1:00:00", {"SLURM_JOB_ID": "10"})
        assert plan is not None
        return plan.folder

    def train(second: int, first: int, last: int) -> None:
        write_event(run, Start(first, 0, at(second), "n1", 2))
        run.metrics.write_text("".join(json.dumps({"step": step, "loss": 1.0}) + "\n" for step in range(1, last + 1)))
        moment = datetime.fromisoformat(at(second + 50)).timestamp()
        os.utime(run.metrics, (moment, moment))

    clock(0)
    jobs.add_job("10", "submitted")
    first = start(5)
    train(20, 0, 7)
    first.log_of(0).touch()
    monkeypatch.setattr(JobsFolder, "newest_saved_step", lambda self: 5)
    clock(75)
    end(jobs, first, 137, asked_to_stop=False, job=job.JobNow("RUNNING", "None", 0))
    second = start(85)
    clock(90)
    end(jobs, second, 1, asked_to_stop=False, job=job.JobNow("RUNNING", "None", 0))
    start(100)
    write_event(run, Start(5, 0, at(110), "n1", 2))
    return run


def test_times_and_lost_steps(run: RunFolder) -> None:
    assert attempt_times(run) == [
        AttemptTimes(None, 1, "10", 2, "crashed", 5.0, 15.0, None, 2),
        # It comes to no step, and the run is without since the first one's last.
        AttemptTimes(None, 2, "10", 2, "not started", 10.0, None, None, None),
        AttemptTimes(None, 3, "10", 2, None, 10.0, 10.0, 40.0, None),
    ]


def test_they_are_told(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", str(run.path), "--attempts"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert " ".join(lines[0].split()) == "run attempt job nodes ended waited to first step without steps steps lost"
    assert lines[1].split() == [str(run.path), "1", "10", "2", "crashed", "5", "s", "15", "s", "-", "2"]
    assert lines[3].split() == [str(run.path), "3", "10", "2", "-", "10", "s", "10", "s", "40", "s", "-"]
    assert main(["status", str(run.path), "--attempts", "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[2])["down_s"] == 40.0
