"""The batch script as bash runs it, where programs that write down how they were called stand in for Slurm's."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from pretrain.config.schema import RunConfig
from pretrain.run.folder import RunFolder
from slurm.profile import ClusterConfig
from slurm.records import JobsFolder, Submission
from slurm.script import render

SUBMISSION = Submission(1, "here", 2, 1, "abc", 900, "2026-01-01T00:00:00+00:00")
# Each of them answers from a file of its name: a line per call, `exit N` first where it fails; the last one stays.
STAND_IN = """#!/bin/bash
name=${0##*/}
[[ $name != scontrol ]] || name=scontrol_$1
[[ $name != python ]] || name=job_$3
echo "$name ${*//$HOME\\//}" >>"$HOME/calls"
[[ -e $HOME/answers/$name ]] || exit 0
mapfile -t lines <"$HOME/answers/$name"
((${#lines[@]} == 1)) || printf '%s\\n' "${lines[@]:1}" >"$HOME/answers/$name"
[[ ${lines[0]} =~ ^exit\\ ([0-9]+)\\ ?(.*) ]] || { echo "${lines[0]}"; exit 0; }
echo "${BASH_REMATCH[2]}" >&2
exit "${BASH_REMATCH[1]}"
"""
AWAY = "exit 1 Unable to contact slurm controller (connect failure)"


@dataclass(frozen=True)
class Job:
    """A script of a run in a folder."""

    home: Path
    records: JobsFolder
    attempt: Path

    def run(self, profile: ClusterConfig, **answers: str | list[str]) -> tuple[int, list[str]]:
        """Runs it. Returns its exit code, and the calls without those that only look."""
        self.records.script.write_text(render([RunConfig(name="mine")], profile, SUBMISSION, self.records, time="5"))
        defaults: dict[str, str | list[str]] = {
            "job_begin": f"{self.attempt.name} 2 never n1,n2",
            "squeue": "RUNNING None 0 1:00:00",
            "scontrol_ping": "Slurmctld(primary) at here is UP",
        }
        for name, answer in (defaults | answers).items():
            lines = [answer] if isinstance(answer, str) else answer
            (self.home / "answers" / name).write_text("\n".join(lines) + "\n")
        environ = {"HOME": str(self.home), "PATH": f"{self.home}/bin:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
        done = subprocess.run(
            ["bash", str(self.records.script)], env=environ, check=False, timeout=60, capture_output=True, text=True
        )
        (self.home / "said").write_text(done.stdout + done.stderr)
        looks = ("squeue", "scontrol_ping", "scontrol_show", "sleep")
        return done.returncode, [call for call in self.calls if not call.startswith(looks)]

    @property
    def calls(self) -> list[str]:
        return (self.home / "calls").read_text().splitlines()

    @property
    def said(self) -> str:
        return (self.home / "said").read_text()


@pytest.fixture
def job(tmp_path: Path) -> Job:
    records = JobsFolder(RunFolder(tmp_path / "run"))
    attempt = records.attempts / "0001"
    for folder in (attempt, tmp_path / "answers", tmp_path / "bin", tmp_path / "venv" / "bin"):
        folder.mkdir(parents=True)
    names = ("squeue", "scontrol", "sbatch", "srun", "sleep", "timeout")
    for path in (*(tmp_path / "bin" / name for name in names), tmp_path / "venv" / "bin" / "python"):
        path.write_text(STAND_IN)
        path.chmod(0o755)
    return Job(tmp_path, records, attempt)


@pytest.fixture
def profile(job: Job) -> ClusterConfig:
    return ClusterConfig(
        ranks_per_node=1,
        shared_paths=("/",),
        runs_path="/runs",
        virtual_environment=str(job.home / "venv"),
        nodes=2,
    )


def test_what_follows_is_what_the_verdict_says(job: Job, profile: ClusterConfig) -> None:
    code, calls = job.run(profile, job_end="requeue 0 none none", srun="exit 9")
    assert code == 0
    assert [call.split()[0] for call in calls] == ["job_begin", "srun", "job_end", "scontrol_requeue"]
    assert "--exit-code 9 --standing RUNNING None 0 1:00:00" in calls[2]
    assert calls[3].endswith("requeue 7")


def test_a_controller_that_is_away_is_waited_for(job: Job, profile: ClusterConfig) -> None:
    """The wait is longer than for one that refuses, from the first look to the last request."""
    up = "Slurmctld(primary) at here is UP"
    code, calls = job.run(
        profile,
        job_end="requeue 0 none none",
        srun="exit 9",
        squeue=["59:00", AWAY, AWAY, "RUNNING None 0 1:00:00"],
        scontrol_requeue=[*[AWAY] * 22, "done"],
        scontrol_ping=[*["Slurmctld(primary) at here is DOWN"] * 24, up],
    )
    assert code == 0
    assert [call.split()[0] for call in calls] == ["job_begin", "srun", "job_end"] + 23 * ["scontrol_requeue"]
    assert "--standing RUNNING None 0 1:00:00" in calls[2]
    assert job.calls.count("sleep 15") == 24
    assert "scontrol requeue 7: Unable to contact slurm controller" in job.said
    assert not (job.attempt / "refused.txt").exists()


def test_what_is_refused_is_given_up_and_recorded(job: Job, profile: ClusterConfig) -> None:
    code, calls = job.run(
        profile, job_end="requeue 0 none none", srun="exit 9", scontrol_requeue="exit 1 Job is not to be requeued"
    )
    assert code == 9
    assert sum(call.startswith("scontrol_requeue") for call in calls) == 20
    assert "scontrol requeue 7: Job is not to be requeued" in (job.attempt / "refused.txt").read_text()


def test_a_new_job_is_recorded_whatever_else_fails(job: Job, profile: ClusterConfig) -> None:
    """It is asked for until it is there, and the job behind it waits for it from then on."""
    code, calls = job.run(
        profile,
        job_end="resubmit 60 n2 9",
        srun="exit 9",
        sbatch=[AWAY, "8;cluster"],
        scontrol_ping="Slurmctld(primary) at here is DOWN",
        scontrol_update=[AWAY, "done"],
    )
    assert code == 0
    assert [call.split()[0] for call in calls[2:]] == [
        "job_end",
        "sbatch",
        "sbatch",
        "job_queued",
        *2 * ["scontrol_update"],
    ]
    assert calls[4] == "sbatch --parsable --begin=now+60 --exclude=n2 run/slurm/job.sh"
    assert calls[5].endswith("queued run/slurm 8")
    assert calls[6].endswith("JobId=9 Dependency=afterok:8")


@pytest.mark.parametrize(("question", "code"), [("begin", 2), ("end", 1)])
def test_a_reason_that_nobody_could_write_down_is_left_in_slurm(
    job: Job, profile: ClusterConfig, question: str, code: int
) -> None:
    answer = f"exit {code} megamem: error: /run: No space left on device"
    # Its words on stdout are the reason.
    stand_in = job.home / "venv" / "bin" / "python"
    stand_in.write_text(STAND_IN.replace('" >&2', '"'))
    ended, calls = job.run(profile, srun="exit 9", **{f"job_{question}": answer})
    assert ended == code
    assert calls[-1] == "scontrol_update update JobId=7 Comment=megamem: error: /run: No space left on device"
