"""Answers to the batch script at the end of its ranks."""

from __future__ import annotations

import contextlib
import errno
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest

from pretrain.config.loader import to_yaml
from pretrain.config.schema import RunConfig
from pretrain.run.folder import RunFolder
from slurm.job import begin
from slurm.profile import ClusterConfig
from slurm.records import JobsFolder, Submission
from tools.job import main


@pytest.mark.parametrize(
    ("min_nodes", "exit_code", "standing", "verdict"),
    [
        (None, 0, "RUNNING None 0 1:00:00", "done 0 none none"),
        (None, 137, "RUNNING None 0 1:00:00", "requeue 0 none none"),
        # Slurm requeues it; somebody cancels it, and a requeue would bring it back; its time was up.
        (None, 137, "COMPLETING None 1 1:00:00", "leave"),
        (None, 137, "COMPLETING None 0 1:00:00", "stop 0 none none"),
        (None, 137, "COMPLETING TimeLimit 0 1:00:00", "requeue 0 none none"),
        (None, 3, "COMPLETING None 1 1:00:00", "stop 0 none none"),
        (1, 137, "RUNNING None 0 1:00:00", "again"),
        (1, 137, "COMPLETING None 1 1:00:00", "leave"),
    ],
)
def test_verdicts(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    min_nodes: int | None,
    exit_code: int,
    standing: str,
    verdict: str,
) -> None:
    jobs = JobsFolder(RunFolder(tmp_path))
    jobs.path.mkdir()
    jobs.config.write_text(to_yaml(RunConfig()))
    profile = ClusterConfig(ranks_per_node=2, shared_paths=("/",), runs_path="/runs", nodes=2, min_nodes=min_nodes)
    jobs.profile.write_text(to_yaml(profile))
    jobs.write_submission(Submission(1, "here", 2, 2, "abc", 100, "2026-01-01T00:00:00+00:00"))
    plan = begin(jobs, ("n1", "n2"), "1:00:00", {"SLURM_JOB_ID": "10"})
    assert plan is not None
    plan.folder.log_of(0).touch()
    words = ["end", str(jobs.path), str(plan.folder.path), "--exit-code", str(exit_code), "--standing", standing]
    assert main([*words, "--nodes", "n1"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == verdict


def test_nodes_that_were_found_bad_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    jobs = JobsFolder(RunFolder(tmp_path))
    jobs.path.mkdir()
    jobs.config.write_text(to_yaml(RunConfig()))
    jobs.profile.write_text(to_yaml(ClusterConfig(ranks_per_node=2, shared_paths=("/",), runs_path="/runs")))
    jobs.write_submission(Submission(1, "here", 2, 2, "abc", 100, "2026-01-01T00:00:00+00:00"))
    words = ["begin", str(jobs.path), "--nodes", "n1,n2", "--time-left", "UNLIMITED"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_JOB_ID", "10")
        assert main(words) == 0
    number, num_nodes, stop_after_s, nodes = capsys.readouterr().out.split()
    assert (num_nodes, stop_after_s, nodes) == ("2", "never", "n1,n2")
    jobs.attempt_folders()[0].write_bad_nodes({"n2": "no GPU"})
    words = [
        "end",
        str(jobs.path),
        str(jobs.attempts / number),
        "--exit-code",
        "1",
        "--standing",
        "RUNNING None 0 1:00:00",
    ]
    assert main([*words, "--nodes", "n1,n2"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "resubmit 0 n2 none"


def test_a_node_found_bad_beside_which_the_job_went_on_is_not_forgotten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A requeue would give it back to the job, which was never told to leave it out."""
    saved_steps = count()
    monkeypatch.setattr(JobsFolder, "newest_saved_step", lambda _: next(saved_steps))
    jobs = JobsFolder(RunFolder(tmp_path))
    jobs.path.mkdir()
    jobs.config.write_text(to_yaml(RunConfig()))
    profile = ClusterConfig(ranks_per_node=1, shared_paths=("/",), runs_path="/runs", spare_nodes=1)
    jobs.profile.write_text(to_yaml(replace(profile, excluded_nodes=("n9",))))
    jobs.write_submission(Submission(1, "here", 1, 1, "abc", 100, "2026-01-01T00:00:00+00:00"))

    def verdict(job: str, nodes: str, *words: str, bad: dict[str, str] | None = None) -> str:
        plan = begin(jobs, nodes.split(","), "1:00:00", {"SLURM_JOB_ID": job})
        assert plan is not None
        plan.folder.log_of(0).touch()
        plan.folder.write_bad_nodes(bad or {})
        standing = ("--standing", "RUNNING None 0 1:00:00")
        assert main(["end", str(jobs.path), str(plan.folder.path), *standing, *words]) == 0
        return capsys.readouterr().out.splitlines()[-1]

    assert verdict("10", "n1,n2", "--exit-code", "1", "--nodes", "n1,n2", bad={"n1": "no GPU"}) == "again"
    stopped = ("--exit-code", "75", "--asked-to-stop", "--nodes", "")
    assert verdict("10", "n1,n2", *stopped) == "resubmit 0 n9,n1 none"
    # The new job knows.
    assert verdict("11", "n2,n3", *stopped) == "requeue 0 none none"


def test_a_full_disk_leaves_a_verdict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The script passes it on to Slurm; the job's log is on that disk too. No start is left uncounted."""
    jobs = JobsFolder(RunFolder(tmp_path))
    jobs.path.mkdir()
    jobs.config.write_text(to_yaml(RunConfig()))
    jobs.profile.write_text(to_yaml(ClusterConfig(ranks_per_node=1, shared_paths=("/",), runs_path="/runs")))
    jobs.write_submission(Submission(1, "here", 1, 1, "abc", 100, "2026-01-01T00:00:00+00:00"))
    plan = begin(jobs, ("n1",), "1:00:00", {"SLURM_JOB_ID": "10"})
    assert plan is not None
    plan.folder.log_of(0).touch()

    def no_space(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "somewhere")

    monkeypatch.setattr("slurm.records.atomic_write", no_space)
    words = ["end", str(jobs.path), str(plan.folder.path), "--standing", "RUNNING None 0 1:00:00", "--nodes", "n1"]
    with contextlib.suppress(OSError), open("/dev/full", "w") as full, monkeypatch.context() as patch:
        patch.setattr("sys.stderr", full)
        code = main([*words, "--exit-code", "137"])
    assert code == 1
    (said,) = capsys.readouterr().out.splitlines()
    assert said.startswith("megamem: error: attempt 0001 has ended (crashed: ")
    assert "which cannot be recorded: " in said
    assert "No space left on device. Make room there" in said
    # A finished run needs no record.
    assert main([*words, "--exit-code", "0"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "done 0 none none"
    monkeypatch.setattr(jobs.__class__, "begin_attempt", no_space)
    monkeypatch.setenv("SLURM_JOB_ID", "10")
    jobs.path.joinpath("attempts").rename(jobs.path / "gone")
    assert main(["begin", str(jobs.path), "--nodes", "n1", "--time-left", "UNLIMITED"]) == 1
    assert capsys.readouterr().out == "megamem: error: somewhere: No space left on device\n"
