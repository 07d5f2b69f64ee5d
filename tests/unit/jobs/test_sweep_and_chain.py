"""A sweep's grid, a chain's links, and what the command line says for one stage of it."""

from __future__ import annotations

import argparse
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from pretrain.config.loader import to_yaml
from pretrain.config.schema import RunConfig
from pretrain.config.source import dump_yaml
from pretrain.config.stages import load_stages, to_entries
from pretrain.errors import ConfigError
from pretrain.run.folder import RunFolder
from slurm import queue
from slurm.commands import JobState, SlurmError
from slurm.job import begin
from slurm.profile import ClusterConfig
from slurm.queue import QueuedJob, job_of_run, queue_array, queue_chain
from slurm.records import JobsFolder, jobs_folders, submitted_last
from tools import cli
from tools.job import main
from tools.submit import asked_for, links_of
from tools.sweep import SweepAxis, axis, grid

PROFILE = ClusterConfig(ranks_per_node=2, shared_paths=("/",), runs_path="/runs", nodes=2, lead_s=100)
STAGED = """\
name: mine
data: {datasets: [{path: /data}]}
stages:
- {name: warm, num_steps: 4}
- {name: decay, num_steps: 6, train: {sequence_length: 64}}
"""


@pytest.fixture
def stages(tmp_path: Path) -> tuple[RunConfig, ...]:
    path = tmp_path / "staged.yaml"
    path.write_text(STAGED)
    return load_stages(path)


@pytest.fixture
def links(tmp_path: Path, stages: tuple[RunConfig, ...]) -> list[QueuedJob]:
    return links_of(stages, RunFolder(tmp_path / "run"), PROFILE, "here", ["decay=4", "2"], ["decay=2:00:00"])


def test_a_sweep_is_every_combination() -> None:
    axes = [
        axis("optimizer.lr=1e-3,2e-3"),
        axis("model.memory.top_k=8"),
        axis("data.datasets=[{path: a, weight: 1}],[]"),
    ]
    assert axes[2].values == ("[{path: a, weight: 1}]", "[]")
    points = grid(axes)
    assert [point.name for point in points] == [
        f"lr={lr}-top_k=8-datasets={path}" for lr in ("1e-3", "2e-3") for path in ("_path_a_weight_1_", "_")
    ]
    assert points[3].overrides == ("optimizer.lr=2e-3", "model.memory.top_k=8", "data.datasets=[]")
    both = grid([SweepAxis("train.a", ("1",)), SweepAxis("model.a", ("1",))])
    assert both[0].name == "train.a=1-model.a=1"


@pytest.mark.parametrize("text", ["lr", "=1", "lr=", "lr=1,,2", "lr=1,1"])
def test_what_is_no_axis(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is no key=a,b,c"):
        axis(text)


def test_runs_that_cannot_be_told_apart() -> None:
    with pytest.raises(ConfigError, match="--sweep lr is given 2 times"):
        grid([axis("lr=1"), axis("lr=2")])
    with pytest.raises(ConfigError, match="two runs of the sweep would be called path=a_b"):
        grid([axis("path=a/b,a:b")])


def test_links_have_their_own_nodes_and_records(tmp_path: Path, links: list[QueuedJob]) -> None:
    assert [(link.submission.stage, link.profile.nodes, link.profile.time) for link in links] == [
        ("warm", 2, PROFILE.time),
        ("decay", 4, "2:00:00"),
    ]
    assert [link.records.path for link in links] == [tmp_path / "run" / "slurm" / "chain" / name for name in "12"]
    assert JobsFolder.at(links[1].records.path).path == links[1].records.path
    assert "#SBATCH --job-name=mine-decay\n#SBATCH --nodes=4\n" in links[1].script
    assert [config.train.num_steps for config in links[1].trained] == [10]
    for given, told in ((["long=2"], "no stage long: the stages are warm, decay"), (["0"], "--nodes is '0'")):
        with pytest.raises(ConfigError, match=told):
            asked_for(PROFILE, given, [], "warm", ["warm", "decay"])
    with pytest.raises(ConfigError, match="only jobs of a --chain have one"):
        asked_for(PROFILE, ["warm=2"], [])
    with pytest.raises(ConfigError, match="has no `stages`"):
        links_of([RunConfig()], RunFolder(tmp_path), PROFILE, "here", [], [])


def slurm_that_refuses(monkeypatch: pytest.MonkeyPatch, *, after: int) -> list[str]:
    """Stand in for Slurm, which takes so many jobs and no more; the list is what it is asked."""
    asked: list[str] = []

    def submit(script: Path, options: object = ()) -> str:
        if len(asked) == after:
            raise SlurmError("sbatch failed: no")
        asked.append(" ".join(map(str, options)))  # type: ignore[call-overload]
        return str(9 + len(asked))

    monkeypatch.setattr(queue, "submit", submit)
    for name in ("cancel", "release"):
        monkeypatch.setattr(queue, name, lambda job, name=name: asked.append(f"{name} {job}"))
    return asked


def test_a_chain_is_queued_as_a_whole_or_not_at_all(links: list[QueuedJob], monkeypatch: pytest.MonkeyPatch) -> None:
    asked = slurm_that_refuses(monkeypatch, after=1)
    with pytest.raises(SlurmError):
        queue_chain(links)
    assert asked == ["--hold", "cancel 10"]
    asked = slurm_that_refuses(monkeypatch, after=9)
    assert queue_chain(links) == ["10", "11"]
    assert asked == ["--hold", "--dependency=afterok:10 --kill-on-invalid-dep=yes", "release 10"]
    run = links[0].records.run
    assert [jobs.job_ids() for jobs in jobs_folders(run)] == [["10", "10"], ["11"]]
    # Nothing but the whole run, submitted anew.
    queue.write(job_of_run(JobsFolder(run), links[0].stages, PROFILE, "here"))
    assert [jobs.link for jobs in submitted_last(run)] == [None]
    assert JobsFolder(run).submission().number == 2  # type: ignore[union-attr]


def test_a_link_begins_when_it_is_its_turn(
    links: list[QueuedJob], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for link in links:
        queue.write(link)
    first, second = (link.records for link in links)

    def begins(records: JobsFolder, saved_step: int | None) -> bool:
        monkeypatch.setattr(JobsFolder, "newest_saved_step", lambda self: saved_step)
        return begin(records, ("n1", "n2", "n3", "n4"), "1:00:00", {"SLURM_JOB_ID": "10"}) is not None

    with pytest.raises(ConfigError, match="stage decay begins at step 4, and the newest checkpoint is of step 3"):
        begins(second, 3)
    assert begins(first, 3)
    assert begins(second, 4)
    assert not begins(first, 4)
    assert "stage warm is done" in capsys.readouterr().err


def test_a_link_that_queues_itself_anew_tells_who_waits_for_it(
    links: list[QueuedJob], capsys: pytest.CaptureFixture[str]
) -> None:
    for link, job in zip(links, ("10", "11"), strict=True):
        queue.write(link)
        link.records.add_job(job, "submitted")
    for link, job, waiting in zip(links, ("10", "11"), ("11", "none"), strict=True):
        monkey = pytest.MonkeyPatch()
        monkey.setattr(JobsFolder, "newest_saved_step", lambda self, job=job: 0 if job == "10" else 4)
        plan = begin(link.records, ("n1", "n2", "n3", "n4"), "1:00:00", {"SLURM_JOB_ID": job})
        monkey.undo()
        assert plan is not None
        plan.folder.write_bad_nodes({"n2": "no GPU"})
        words = [
            "end",
            str(link.records.path),
            str(plan.folder.path),
            "--exit-code",
            "1",
            "--standing",
            "RUNNING None 0 1:00:00",
        ]
        assert main([*words, "--nodes", "n1"]) == 0
        assert capsys.readouterr().out.splitlines()[-1] == f"resubmit 0 n2 {waiting}"


def test_an_array_runs_the_scripts_of_its_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slurm_that_refuses(monkeypatch, after=9)
    config = RunConfig()
    jobs = [
        job_of_run(JobsFolder(RunFolder(tmp_path / name)), [replace(config, name=name)], PROFILE, "here")
        for name in ("lr=1", "it's 2")
    ]
    assert queue_array(jobs, "mine", tmp_path, 1) == "10"
    assert [job.records.job_ids() for job in jobs] == [["10_0"], ["10_1"]]
    script = tmp_path / "array.sh"
    text = script.read_text()
    assert "#SBATCH --array=0-1%1\n" in text
    assert text.count("--output") == text.count("--chdir") == 1
    for job in jobs:
        job.records.script.write_text('echo "$0 in $PWD"\n')
    for place, job in enumerate(jobs):
        environment = {"SLURM_ARRAY_JOB_ID": "10", "SLURM_ARRAY_TASK_ID": str(place), "PATH": "/usr/bin:/bin"}
        subprocess.run(["bash", script], env=environment, check=True, timeout=60)
        log = job.records.log_of(f"10_{place}").read_text()
        assert log == f"{job.records.script} in {job.records.code / job.submission.code}\n"
    if shutil.which("shellcheck") is not None:
        subprocess.run(["shellcheck", script], check=True, timeout=60)
    first = jobs[0].records
    plan = begin(
        first, ("n1", "n2"), "1:00:00", {"SLURM_JOB_ID": "77", "SLURM_ARRAY_JOB_ID": "10", "SLURM_ARRAY_TASK_ID": "0"}
    )
    assert plan is not None
    assert plan.folder.attempt().job == "10_0"
    assert first.job_ids() == ["10_0"]


def test_what_to_type_holds_a_folder_with_spaces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records = JobsFolder(RunFolder(tmp_path / "my run"))
    records.path.mkdir(parents=True)
    records.add_job("10", "submitted")
    monkeypatch.setattr(queue, "job_state", lambda _: JobState("PENDING", "Priority"))
    with pytest.raises(ConfigError, match=r"`megamem cancel '.*/my run'` ends it"):
        queue.check_free([records])


def test_one_of_two_submissions_at_once_is_told_of_the_other(links: list[QueuedJob]) -> None:
    run = links[0].records.run
    with (
        queue.submitting(run),
        pytest.raises(ConfigError, match=r"is being submitted by process .* on"),
        queue.submitting(run),
    ):
        pass
    with queue.submitting(run):
        pass


def test_one_of_two_sweeps_at_once_is_told_of_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, cluster, runs = tmp_path / "mine.yaml", tmp_path / "here.yaml", tmp_path / "runs"
    config.write_text("name: mine\ndata: {datasets: [{path: /data}]}\n")
    cluster.write_text(to_yaml(PROFILE))
    words = ["submit", str(config), "--cluster", str(cluster), "--sweep", "seed=1,2", "--run-dir", str(runs)]
    slurm_that_refuses(monkeypatch, after=9)
    monkeypatch.setattr("tools.submit.check", lambda _: None)
    monkeypatch.setattr("tools.submit.check_free", lambda _: None)
    with queue.submitting(RunFolder(runs)):
        assert cli.main(words) == ConfigError.exit_code
    assert not (runs / "array.sh").exists()
    assert cli.main(words) == 0


def test_scripts_and_profiles_are_their_owner_s(links: list[QueuedJob]) -> None:
    records = links[0].records
    records.path.mkdir(parents=True)
    # The file is of a version that was more open.
    records.profile.touch(0o644)
    queue.write(links[0])
    assert [path.stat().st_mode & 0o777 for path in (records.script, records.profile)] == [0o700, 0o600]


def test_the_stages_of_a_link_are_written_whole(links: list[QueuedJob], stages: tuple[RunConfig, ...]) -> None:
    queue.write(links[1])
    records = links[1].records
    assert records.config.read_text() == dump_yaml(to_entries(stages))
    assert load_stages(records.config) == stages
    assert records.run.config.read_text() == to_yaml(stages[0])
