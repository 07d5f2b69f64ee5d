"""What the batch script hears at the end of its ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from pretrain.config.loader import to_yaml
from pretrain.config.schema import RunConfig
from pretrain.folder import RunFolder
from slurm.job import begin
from slurm.profile import ClusterConfig
from slurm.records import JobsFolder, Submission
from tools.job import main


@pytest.mark.parametrize(
    ("min_nodes", "exit_code", "state", "verdict"),
    [
        (None, 0, "RUNNING", "done 0 none none"),
        (None, 137, "RUNNING", "requeue 0 none none"),
        # scontrol would bring a cancelled job back.
        (None, 137, "COMPLETING", "leave"),
        (None, 3, "COMPLETING", "stop 0 none none"),
        (1, 137, "RUNNING", "again"),
        (1, 137, "COMPLETING", "leave"),
    ],
)
def test_verdicts(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    min_nodes: int | None,
    exit_code: int,
    state: str,
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
    words = ["end", str(jobs.path), str(plan.folder.path), "--exit-code", str(exit_code), "--state", state]
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
    words = ["end", str(jobs.path), str(jobs.attempts / number), "--exit-code", "1", "--state", "RUNNING"]
    assert main([*words, "--nodes", "n1,n2"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "resubmit 0 n2 none"
