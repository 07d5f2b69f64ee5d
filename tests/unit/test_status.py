"""Answers of `megamem status` about runs, and of one look at a folder about its owner."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from pretrain.checkpoint import folder as checkpoints
from pretrain.config.loader import to_yaml
from pretrain.config.schema import RunConfig, TrainConfig
from pretrain.errors import ConfigError
from pretrain.run.folder import RunFolder
from pretrain.run.history import End, Start, read_history, write_event
from pretrain.run.owner import LAPSE_S, Claim, look, owned
from tools import status
from tools.cli import main
from tools.common.run_status import duration, find_runs, standing_of
from tools.status import line_of, newest_row

AT = "2026-01-01T00:00:00+00:00"
START, END = Start(0, 0, AT, "node-1", 4), End(2, 20, AT)


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., RunFolder]:
    """Makes the folder of a run of 5 steps that has taken some."""

    def make(name: str, steps: int = 3) -> RunFolder:
        folder = RunFolder(tmp_path / "runs" / name)
        folder.make()
        folder.config.write_text(to_yaml(RunConfig(name=folder.path.name, train=TrainConfig(num_steps=5))))
        rows: list[dict[str, Any]] = [
            {"step": step, "loss": 5.0 - step, "consumed_tokens": 10 * step} for step in range(1, steps + 1)
        ]
        if steps > 1:
            rows.insert(1, {"step": 1, "validation_loss": 4.5, "bits_per_byte": 2.0})
        folder.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 9, "loss": 0.')
        return folder

    return make


def put_down(folder: RunFolder, life: str, **changes: Any) -> Path:
    """A claim that is not this process's."""
    folder.owner.mkdir()
    path = folder.owner / "000003.json"
    path.write_text(json.dumps({**asdict(replace(Claim.of_this_process(), **changes)), "life": life}))
    return path


def test_nobody_ever_owned(make: Callable[..., RunFolder]) -> None:
    folder = make("a")
    assert look(folder) is None
    assert str(standing_of(folder, 0, 5)) == "new (nobody has started it)"
    assert standing_of(folder, 3, 5).state == "unknown"
    assert standing_of(folder, 5, 5).state == "finished"


def test_an_owner_is_seen_without_a_trace(make: Callable[..., RunFolder]) -> None:
    folder = make("a")
    with owned(folder) as owner:
        before = {path: path.read_bytes() for path in folder.owner.iterdir()}
        presence = look(folder)
        assert presence is not None
        assert presence.alive is True
        assert presence.claim is not None
        assert presence.claim.pid == os.getpid()
        assert str(standing_of(folder, 5, 5)).startswith(f"running (process {os.getpid()} on ")
        assert {path: path.read_bytes() for path in folder.owner.iterdir()} == before
        owner.check()
    ended = look(folder)
    assert ended is not None
    assert (ended.ended, ended.alive) == (True, False)


def test_a_process_that_is_gone_was_killed(make: Callable[..., RunFolder]) -> None:
    folder = make("a")
    put_down(folder, "7", started=1)
    assert standing_of(folder, 3, 5).state == "killed"
    assert standing_of(folder, 5, 5).state == "killed"


def test_an_owner_elsewhere_is_told_by_its_beat(make: Callable[..., RunFolder]) -> None:
    folder = make("a")
    claim = put_down(folder, "7", machine="another", host="node-9", job="42")
    assert standing_of(folder, 3, 5).state == "running"
    then = claim.stat().st_mtime - LAPSE_S - 7200
    os.utime(claim, (then, then))
    standing = standing_of(folder, 3, 5)
    assert standing.state == "silent"
    assert "on node-9" in standing.detail
    assert "Slurm job 42, no beat for 2.0 h" in standing.detail


def test_a_claim_that_cannot_be_read_is_somebodys(make: Callable[..., RunFolder]) -> None:
    folder = make("a")
    put_down(folder, "7").write_text("{")
    assert str(standing_of(folder, 3, 5)) == "running (somebody)"


@pytest.mark.parametrize(
    ("events", "state"),
    [((START, END), "stopped"), ((START,), "failed"), ((START, END, START), "failed"), ((), "unknown")],
)
def test_how_a_run_ended_is_told_by_its_history(
    make: Callable[..., RunFolder], events: tuple[Start | End, ...], state: str
) -> None:
    folder = make("a")
    put_down(folder, "ended")
    for event in events:
        write_event(folder, event)
    assert standing_of(folder, 3, 5).state == state
    assert standing_of(folder, 3, None).state == state
    # The last step may have been taken, and not saved.
    assert standing_of(folder, 5, 5).state == ("failed" if state == "failed" else "finished")


def test_a_history_survives_bad_lines(make: Callable[..., RunFolder], capsys: pytest.CaptureFixture[str]) -> None:
    folder = make("a")
    assert read_history(folder) == ()
    write_event(folder, START)
    with folder.history.open("a") as stream:
        stream.write('{"event": "en')
    write_event(folder, END)
    write_event(folder, START)
    assert read_history(folder) == (START, END, START)
    with folder.history.open("a") as stream:
        stream.write('{"event": "party", "step": 3}\n')
    write_event(folder, END)
    capsys.readouterr()
    assert read_history(folder) == (START, END, START, END)
    assert "history.jsonl, line 5: the row is no event of a run ('party'), and is left out" in capsys.readouterr().err


def test_the_newest_rows_are_found_from_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    assert newest_row(path, "loss") == {}
    path.touch()
    assert newest_row(path, "loss") == {}
    rows = [{"step": step, "loss": 1.0 * step, "rest": "x" * 50} for step in range(1, 100)]
    rows.insert(1, {"step": 1, "validation_loss": 4.5})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 100, "loss": 3')
    for block_bytes in (1, 7, 64, 1 << 20):
        monkeypatch.setattr(status, "_BLOCK_BYTES", block_bytes)
        assert newest_row(path, "loss")["step"] == 99
        assert newest_row(path, "validation_loss") == {"step": 1, "validation_loss": 4.5}
    monkeypatch.setattr(status, "_BLOCK_BYTES", 64)
    monkeypatch.setattr(status, "TAIL_BYTES", 2000)
    assert newest_row(path, "validation_loss") == {}
    assert newest_row(path, "loss")["step"] == 99


def test_the_newest_rows_are_found_past_bad_ones(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1, "loss": 2.0}\n{"loss": 3.0}\n["loss": \xff\n')
    assert newest_row(path, "loss") == {"step": 1, "loss": 2.0}
    assert capsys.readouterr().err.count("near its end: the row ") == 2


def test_a_line_of_a_run(make: Callable[..., RunFolder]) -> None:
    folder = make("mine")
    for step in (2, 3):
        checkpoints.start_writing(folder.checkpoints, step)
        checkpoints.complete(
            folder.checkpoints, step, run={"step": step}, rng={}, config={}, versions={}, weights_dtype="float32"
        )
    (folder.checkpoints / "step_00000003" / "state.json").write_text("{}")
    line = line_of(folder.path)
    assert line.metric_age_s is not None
    assert line.metric_age_s >= 0
    assert replace(line, metric_age_s=None) == status.StatusLine(
        run=str(folder.path),
        name="mine",
        step=3,
        num_steps=5,
        tokens=30,
        loss=2.0,
        validation_loss=4.5,
        checkpoint=2,
        state="unknown",
        detail="how it ended was not recorded",
        metric_age_s=None,
    )


def test_runs_are_found_wherever_they_are_below(make: Callable[..., RunFolder], tmp_path: Path) -> None:
    made = [make(name) for name in ("b", "a/seed_1", "a/seed_2")]
    inner = RunFolder(made[0].path / "replay" / "run")
    inner.make()
    inner.config.touch()
    problems: list[str] = []
    assert find_runs(tmp_path, problems) == sorted(folder.path for folder in made)
    assert find_runs(made[0].path, problems) == [made[0].path]
    assert not problems


def test_a_table_and_json_of_the_runs_that_are_there(
    make: Callable[..., RunFolder],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    make("one")
    make("two", steps=0).metrics.unlink()
    assert main(["status"]) == 0
    header, one, two = capsys.readouterr().out.splitlines()
    assert header.split()[:4] == ["run", "step", "tokens", "loss"]
    assert one.split()[:6] == ["runs/one", "3/5", "30", "2.0000", "4.5000", "-"]
    assert two.split()[:7] == ["runs/two", "0/5", "0", "-", "-", "-", "-"]
    assert one.index("unknown") == two.index("new (nobody has started it)") == header.index("state")
    assert main(["status", "--json", "runs/two", "runs/one"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["run"], row["step"], row["loss"]) for row in found] == [("runs/two", 0, None), ("runs/one", 3, 2.0)]


@pytest.mark.parametrize(("words", "problem"), [([], "runs: no such folder"), (["."], "holds no run")])
def test_there_is_nothing_to_tell_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], problem: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["status", *words]) == ConfigError.exit_code
    assert problem in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("config.yaml", "train: 3\n", "config.yaml is not the configuration of a run"),
        ("config.yaml", "{", "config.yaml is not the configuration of a run"),
    ],
)
def test_a_damaged_run_does_not_hide_the_others(
    make: Callable[..., RunFolder], capsys: pytest.CaptureFixture[str], name: str, text: str, problem: str
) -> None:
    (make("bad").path / name).write_text(text)
    make("good")
    assert main(["status", str(make("good").path.parent)]) == ConfigError.exit_code
    printed = capsys.readouterr()
    assert "runs/good" in printed.out
    assert problem in " ".join(printed.err.split())


def test_a_configuration_that_may_not_be_read_is_not_called_damaged(
    make: Callable[..., RunFolder], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    closed, read = make("closed").config, Path.read_bytes

    def refuse(path: Path) -> bytes:
        if path == closed:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", refuse)
    assert main(["status", str(make("good").path.parent)]) == ConfigError.exit_code
    printed = capsys.readouterr()
    assert "runs/good" in printed.out
    assert "config.yaml cannot be opened (Permission denied): ask its owner" in " ".join(printed.err.split())


def test_durations_in_words() -> None:
    assert list(map(duration, (0, 59, 90, 3600, 86400 * 2.5))) == ["0 s", "59 s", "2 min", "1.0 h", "2.5 d"]


def test_neither_command_waits_for_torch(make: Callable[..., RunFolder]) -> None:
    """A second is not enough for its import."""
    path = make("a").path
    program = (
        "import sys\nfrom tools import cli\n"
        f"for command in ('status', 'report'):\n    assert cli.main([command, {str(path)!r}]) == 0\n"
        "    assert not {'torch', 'megatron', 'matplotlib'} & set(sys.modules), command\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    assert (path / "report.html").exists()
