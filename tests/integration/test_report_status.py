"""`megamem report` and `megamem status` on runs as they are trained, stopped, killed and resumed."""

from __future__ import annotations

import json
import os
import signal
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from commands import Megamem, Start, last_step, steps, wait_until


class Texts(HTMLParser):
    """Texts of a page, by tag."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.tag, self.found = "", dict[str, list[str]]()
        self.feed(page.read_text(encoding="utf-8"))
        self.close()

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tag = tag

    def handle_data(self, data: str) -> None:
        self.found.setdefault(self.tag, []).append(data)


def status(megamem: Megamem, *runs: Path) -> list[dict[str, Any]]:
    result = megamem("status", "--json", *runs)
    assert result.code == 0, result.output
    return [json.loads(line) for line in result.output.splitlines()]


def test_a_finished_run(saved_run: Path, trained: Path, megamem: Megamem, tmp_path: Path) -> None:
    (found,) = status(megamem, saved_run)
    assert (found["name"], found["state"], found["step"], found["num_steps"]) == ("tiny", "finished", 6, 6)
    assert (found["checkpoint"], found["tokens"]) == (6, 6 * 256)
    assert found["loss"] == steps(saved_run)[-1]["loss"]
    assert found["validation_loss"] is not None
    page = tmp_path / "page.html"
    # Two folders of one name.
    assert megamem("report", trained, saved_run, "--output", page).code == 0
    text = Texts(page).found
    assert text["h1"] == [f"{trained}, {saved_run}"]
    assert [word for word in text["dd"] if word == "finished"] == ["finished"] * 2
    assert "160 of 160" in text["dd"]
    assert any(word.startswith("ultramem_v2, 2 blocks of width 32") for word in text["dd"])
    for caption in ("Training loss; dots: validation (nats per token)", "Coverage (share of rows that a step reads)"):
        assert caption in text["figcaption"]
    assert "train.num_steps" in text["td"]
    assert "http" not in page.read_text()


def test_a_run_that_is_stopped_resumed_killed_and_resumed(
    megamem: Megamem, start: Start, config_file: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    straight = tmp_path / "straight"
    options = ("checkpoint.every_steps=4",)
    command = start("train", config_file, "--run-dir", run, *options)
    wait_until(lambda: last_step(run) >= 2, "step 2")
    (rank,) = command.ranks()
    rank.suspend()
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    (found,) = status(megamem, run)
    assert found["state"] == "running"
    assert found["detail"].startswith(f"process {rank.pid} on ")
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    assert megamem("report", run).code == 0
    said = Texts(run / "report.html").found
    assert any(word.startswith(f"running (process {rank.pid} on ") for word in said["dd"])
    assert "time left" in said["dt"]
    os.kill(command.pid, signal.SIGINT)
    rank.resume()
    assert command.wait().code == 75
    stopped = last_step(run)
    (found,) = status(megamem, run)
    assert (found["state"], found["checkpoint"]) == ("stopped", stopped)

    command = start("train", config_file, "--run-dir", run, *options)
    wait_until(lambda: last_step(run) > stopped, "one more step")
    (rank,) = command.ranks()
    rank.kill()
    assert command.wait().code == 1
    (found,) = status(megamem, run)
    assert found["state"] == "killed"

    assert megamem("train", config_file, "--run-dir", run, *options).code == 0
    (found,) = status(megamem, run)
    assert (found["state"], found["step"]) == ("finished", 20)
    assert megamem("report", run).code == 0
    marks = "; ".join(Texts(run / "report.html").found["title"])
    assert f"run: start 2 at step {stopped}, " in marks
    assert "run: start 3 at step " in marks
    assert "start 4" not in marks
    # Recording starts leaves the metrics those of an uninterrupted run.
    assert megamem("train", config_file, "--run-dir", straight, *options).code == 0
    assert steps(run) == steps(straight)


def test_what_has_no_metrics(megamem: Megamem, tmp_path: Path) -> None:
    for words in (("report", tmp_path / "nowhere"), ("report", tmp_path), ("status", tmp_path / "nowhere")):
        result = megamem(*words)
        assert result.code == 2
        assert str(tmp_path) in result.output
