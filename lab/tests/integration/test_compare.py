"""Two tiny models are compared end to end; what is finished is kept, what was interrupted goes on, and what is of
something else is refused.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import yaml
from commands import TINY, Megamem, Result, Start, checkpoint, evaluations, last_step, rows, steps, wait_until

from pretrain.checkpoint.newest import newest_complete
from tests.rotation import in_turn

SHORT = ("train.num_steps=4", "checkpoint.every_steps=2", "checkpoint.keep_last=0", "evaluation.max_sequences=4")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> list[Path]:
    """The base, the tiny model with its memory, and one without."""
    folder = tmp_path_factory.mktemp("models")
    base = {**TINY, "data": {"datasets": [{"path": str(corpus)}]}, "logging": {"memory_every_steps": 0}}
    own = {
        "base": base,
        "memory": {"base": "base.yaml", "name": "memory"},
        "dense": {"base": "base.yaml", "name": "dense", "model": {"memory": None}},
    }
    for name, values in own.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(values))
    return [folder / f"{name}.yaml" for name in own]


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory, megamem: Megamem, models: list[Path]) -> tuple[Path, Result]:
    """Both models with one seed. Copy the folder to change it."""
    folder = tmp_path_factory.mktemp("compared") / "runs"
    return folder, compare(megamem, models, folder, "--seeds", 1)


def compare(megamem: Megamem, models: list[Path], folder: Path, *options: object) -> Result:
    result = megamem("compare", *models, "--run-dir", folder, *options, *SHORT)
    assert result.code == 0, result.output
    return result


def test_the_report_holds_what_the_runs_reached(compared: tuple[Path, Result]) -> None:
    folder, result = compared
    assert "run 1 of 2: memory, seed 1: 4 steps to go" in result.output
    assert "run 2 of 2: dense, seed 1: 4 steps to go" in result.output
    page = (folder / "comparison.md").read_text()
    for name in ("memory", "dense"):
        (evaluation,) = evaluations(folder / name / "seed_1")
        assert f"| {evaluation['validation_loss']:.4f} | {evaluation['bits_per_byte']:.4f} |" in page
    assert "2 models on 1,024 tokens" in page
    # The memory costs what the dense model does not have, and nobody has evened it out.
    assert "departures in brackets" in page
    assert "warning: dense has -" in result.output
    assert all(f">{name}</text>" in (folder / "comparison.svg").read_text() for name in ("memory", "dense"))


def test_a_fit_reads_finished_runs_and_says_what_is_missing(
    compared: tuple[Path, Result], tmp_path: Path, megamem: Megamem
) -> None:
    folder, _ = compared
    result = megamem("fit", folder)
    assert result.code == 0, result.output
    (evaluation,) = evaluations(folder / "memory" / "seed_1")
    # Four layers' tables of 256 rows, of which a token reads 4 each.
    (row,) = [line for line in result.output.splitlines() if line.startswith("| memory |")]
    assert row.startswith("| memory | ultramem_v2 | ")
    assert row.endswith(f" | 1024 | 16 | 1 | {evaluation['validation_loss']:.4f} |")
    assert "- dense, no fit: compute: 3 more different amounts" in result.output
    nothing = megamem("fit", tmp_path)
    assert nothing.code == 2
    assert "no finished run NAME/seed_N is there" in nothing.output


def test_finished_runs_are_kept_and_interrupted_ones_resumed(
    compared: tuple[Path, Result], tmp_path: Path, megamem: Megamem, models: list[Path]
) -> None:
    folder = tmp_path / "runs"
    shutil.copytree(compared[0], folder)
    kept, interrupted = folder / "memory" / "seed_1", folder / "dense" / "seed_1"
    before, uninterrupted = rows(kept), steps(interrupted)
    shutil.rmtree(checkpoint(interrupted, 4))
    page = tmp_path / "page.md"
    page.write_text("mine\n<!-- comparison -->\n<!-- end of comparison -->\n")
    result = compare(megamem, models, folder, "--seeds", "1,2", "--report", page)
    assert "run 1 of 4: memory, seed 1: finished" in result.output
    assert "run 2 of 4: dense, seed 1: 2 steps to go" in result.output
    assert "run 4 of 4: dense, seed 2: 4 steps to go" in result.output
    assert rows(kept) == before
    assert steps(interrupted) == uninterrupted
    assert " to " in page.read_text()
    assert page.read_text().startswith("mine\n")
    assert page.with_suffix(".svg").is_file()
    # Seeds share the order of the data.
    runs = [folder / "memory" / f"seed_{seed}" for seed in (1, 2)]
    first, second = (yaml.safe_load((run / "config.yaml").read_text()) for run in runs)
    assert (first["seed"], second["seed"]) == (1, 2)
    assert first["data"] == second["data"]
    assert first["data"]["seed"] == 1
    assert steps(runs[0])[0]["loss"] != steps(runs[1])[0]["loss"]


@in_turn(0)
def test_models_are_tuned_alike_on_a_seed_of_its_own(tmp_path: Path, megamem: Megamem, models: list[Path]) -> None:
    tuning = tmp_path / "tuning.yaml"
    keys = {"model.memory.key_balance_weight": [0.5], "optimizer.lr": [1.0e-9, 1.0e-2]}
    tuning.write_text(yaml.safe_dump({"trials": 3, "steps": 3, "seed": 1, "keys": keys}))
    options = ("--tune", tuning, "--seeds", 2, "optimizer.min_lr=0", "checkpoint.every_steps=0")
    folder = tmp_path / "runs"
    result = compare(megamem, models, folder, *options)
    assert "run 1 of 8: memory, trial 1: 3 steps to go" in result.output
    assert "run 6 of 8: dense, trial 3: 3 steps to go" in result.output
    assert "run 8 of 8: dense, seed 2: 4 steps to go" in result.output
    page = (folder / "comparison.md").read_text()
    for name in ("memory", "dense"):
        settings = [yaml.safe_load((folder / name / f"trial_{n}" / "config.yaml").read_text()) for n in (1, 2, 3)]
        assert {(s["seed"], s["data"]["seed"], s["train"]["num_steps"]) for s in settings} == {(1, 1, 3)}
        losses = [evaluations(folder / name / f"trial_{n}")[-1]["validation_loss"] for n in (1, 2, 3)]
        assert all(f"{loss:.4f}" in page for loss in losses)
        best = settings[losses.index(min(losses))]
        reported = yaml.safe_load((folder / name / "seed_2" / "config.yaml").read_text())
        assert (reported["seed"], reported["train"]["num_steps"]) == (2, 4)
        assert (reported["model"], reported["optimizer"]) == (best["model"], best["optimizer"])
    balances = [
        yaml.safe_load((folder / "memory" / f"trial_{n}" / "config.yaml").read_text())["model"]["memory"][
            "key_balance_weight"
        ]
        for n in (1, 2)
    ]
    assert balances == [0.0, 0.5]
    assert "| dense | 2 | optimizer.lr=1.0e-09 |" in page
    again = compare(megamem, models, folder, *options)
    assert again.output.count(": finished") == 8
    assert (folder / "comparison.md").read_text() == page
    refused = megamem("compare", *models, "--run-dir", folder, "--tune", tuning, "--seeds", "1,2", *SHORT)
    assert refused.code == 2
    assert "tunes with seed 1, which is one of --seeds" in refused.output


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (("optimizer.lr=1e-2",), 4, "holds a run of another comparison: optimizer.lr: 0.004 -> 0.01"),
        (("train.num_steps=8",), 4, "train.num_steps: 4 -> 8"),
        (("seed=3",), 2, "--seeds"),
        (("--seeds", "1,1"), 2, "names a seed twice"),
        (("--grow", "ways.yaml", "--controls"), 2, "--controls does not go with --grow"),
        (("--grow", "ways.yaml", "--target-loss", "1"), 2, "--target-loss does not go with --grow"),
        (("--grow", "ways.yaml", "--at-once", "2"), 2, "--at-once does not go with --grow"),
        (("--report", "chart.svg"), 2, "markdown"),
        (("--controls", "one_row,two_rows"), 2, "two_rows is none of one_row, random_rows, others_rows"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_is_refused(
    compared: tuple[Path, Result],
    megamem: Megamem,
    models: list[Path],
    options: tuple[str, ...],
    code: int,
    words: str,
) -> None:
    result = megamem("compare", *models, *SHORT, "--run-dir", compared[0], "--seeds", 1, *options)
    assert result.code == code, result.output
    assert words in " ".join(result.output.split())
    assert "Traceback" not in result.output


def test_a_stopped_comparison_says_how_to_go_on(tmp_path: Path, start: Start, models: list[Path]) -> None:
    folder = tmp_path / "runs"
    command = start("compare", *models, "train.num_steps=2000", "--run-dir", folder, "--seeds", 1)
    wait_until(lambda: command.poll() is not None or last_step(folder / "memory" / "seed_1") > 0, "the first step", 60)
    assert command.poll() is None, command.log.read_text()
    os.kill(command.pid, signal.SIGTERM)
    result = command.wait()
    assert result.code == 75, result.output
    assert "run the same command again" in result.output
    saved, problems = newest_complete(folder / "memory" / "seed_1" / "checkpoints")
    assert not problems
    assert saved is not None
    # Where it stopped: no step that has a row is lost.
    assert saved.step == last_step(folder / "memory" / "seed_1")
    assert not (folder / "dense").exists()


def test_runs_side_by_side_are_those_of_one_after_the_other(
    compared: tuple[Path, Result], tmp_path: Path, megamem: Megamem, models: list[Path]
) -> None:
    """Bits stay, and the page but for where the runs are; what is finished is not trained again."""
    alone, _ = compared
    result = compare(megamem, models, tmp_path, "--seeds", 1, "--at-once", 2, "--nproc", 1)
    assert "2 of 2 done" in result.output
    assert "run 2 of 2: dense, seed 1: finished" in result.output
    for name in ("memory", "dense"):
        assert "step 4/4" in (tmp_path / name / "seed_1" / "logs" / "screen.log").read_text()
        losses = [
            [row["validation_loss"] for row in evaluations(folder / name / "seed_1")] for folder in (alone, tmp_path)
        ]
        assert losses[0] == losses[1]
    again = compare(megamem, models, tmp_path, "--seeds", 1, "--at-once", 2, "--nproc", 1)
    assert "started" not in again.output


@in_turn(1)
def test_searches_side_by_side(tmp_path: Path, megamem: Megamem, models: list[Path]) -> None:
    tuning = tmp_path / "tuning.yaml"
    tuning.write_text("trials: 2\nsteps: 3\nseed: 1\nkeys:\n  optimizer.lr: [1.0e-3]\n")
    result = compare(megamem, models, tmp_path, "--seeds", 2, "--tune", tuning, "--at-once", 2, "--nproc", 1)
    assert "search of dense, in " in result.output
    assert "](comparison_search.svg)" in (tmp_path / "comparison.md").read_text()
    assert all(f">{name}</text>" in (tmp_path / "comparison_search.svg").read_text() for name in ("memory", "dense"))
    assert "memory, trial 2: finished" in result.output
    assert "memory, trial 2: 3 steps to go" in (tmp_path / "memory" / "search.log").read_text()
    assert (tmp_path / "dense" / "seed_2" / "logs" / "screen.log").exists()


def test_a_stopped_neighbour_saves_too(tmp_path: Path, start: Start, models: list[Path]) -> None:
    folder = tmp_path / "runs"
    command = start(
        "compare", *models, "train.num_steps=2000", "--run-dir", folder, "--seeds", 1, "--at-once", 2, "--nproc", 1
    )
    runs = [folder / name / "seed_1" for name in ("memory", "dense")]
    wait_until(lambda: command.poll() is not None or all(last_step(run) > 0 for run in runs), "the first steps", 60)
    assert command.poll() is None, command.log.read_text()
    os.kill(command.pid, signal.SIGTERM)
    result = command.wait()
    assert result.code == 75, result.output
    assert "run the same command again" in result.output
    for run in runs:
        saved, problems = newest_complete(run / "checkpoints")
        assert not problems
        assert saved is not None
        assert saved.step == last_step(run)


@in_turn(0)
def test_a_model_is_grown_in_several_ways_and_goes_on(megamem: Megamem, models: list[Path], tmp_path: Path) -> None:
    """A way that adds nothing at first begins as the base; only trained parts change; finished runs are kept."""
    ways = {
        "unchanged": {"trained": "all"},
        "inserted": {
            "insert": "memory",
            "blocks": 2,
            "trained": "inserted",
            "keys": {
                "model.memory.kind": "midus",
                "model.memory.num_heads": 4,
                "model.memory.num_keys": 8,
                "model.memory.value_dim": 16,
                "optimizer.value_lr": 0.01,
            },
        },
        "copies": {"insert": "solar", "blocks": 2, "trained": "all"},
    }
    growth, folder = tmp_path / "growth.yaml", tmp_path / "runs"
    growth.write_text(yaml.safe_dump({"continued": {"data.seed": 9, "optimizer.lr": 0.002}, "ways": ways}))
    result = compare(megamem, [models[2]], folder, "--grow", growth, "--seeds", 1)
    page = (folder / "growth.md").read_text()
    for name in ("dense", *ways):
        (evaluation,) = evaluations(folder / name / "seed_1")
        assert f"| {evaluation['validation_loss']:.4f} | {evaluation['bits_per_byte']:.4f} |" in page
    assert f"--grow {growth} --seeds 1 " in page
    assert all(f">{name}</text>" in (folder / "growth.svg").read_text() for name in ways)
    first = {name: steps(folder / name / "seed_1")[0]["loss"] for name in ways}
    assert first["unchanged"] == first["inserted"] != first["copies"]
    assert steps(folder / "dense" / "seed_1")[0]["loss"] != first["unchanged"]
    grown = folder / "dense" / "seed_1" / "grown" / "inserted"
    difference = megamem("checkpoint", "diff", grown, folder / "inserted" / "seed_1", "--weights-only")
    changed = {line.split()[0] for line in difference.output.splitlines() if " differs in " in line}
    assert "banks.0.values" in changed
    assert [name for name in changed if not name.startswith(("decoder.layers.1.", "decoder.layers.4.", "banks."))] == []

    again = compare(megamem, [models[2]], folder, "--grow", growth, "--seeds", 1)
    assert again.output.count(": finished") == 4
    assert (folder / "growth.md").read_text() == page
    for words, reason in (
        ((*models[1:], "--grow", growth), "--grow grows one model, and there are 2"),
        ((models[1], "--grow", growth), "has a memory of kind"),
        ((models[2], "--grow", growth, "--tune", growth), "--tune has no effect on --grow"),
    ):
        refused = megamem("compare", *words, "--run-dir", tmp_path / "none", *SHORT)
        assert refused.code == 2
        assert reason in refused.output
    assert not (tmp_path / "none").exists()
    assert "run 3 of 4: inserted, seed 1: 4 steps to go" in result.output


@in_turn(1)
def test_controls_are_trained_and_judged(tmp_path: Path, megamem: Megamem, models: list[Path]) -> None:
    """With the model's own losses after training; a second call trains and measures nothing."""
    memory, options = models[1], ("--seeds", 1, "--controls", "--at-once", 2, "--nproc", 1)
    refused = megamem("compare", models[2], "--run-dir", tmp_path, *options, *SHORT)
    assert refused.code == 2
    assert "no model has a memory" in refused.output
    result = compare(megamem, [memory], tmp_path, *options)
    assert "7 of 7 done" in result.output
    assert "memory, addresses, seed 1, in " in result.output
    assert "run 7 of 7: memory, experts, seed 1: finished" in result.output
    page = (tmp_path / "comparison.md").read_text()
    found = json.loads((tmp_path / "memory" / "seed_1" / "addresses.json").read_text())
    (evaluation,) = evaluations(tmp_path / "memory" / "seed_1")
    assert found["own"] == pytest.approx(evaluation["validation_loss"], rel=1e-6)
    assert found["others"] != found["own"] != found["without"]
    controls = ("one_row", "random_rows", "others_rows", "equal_flops", "equal_parameters", "experts")
    (line,) = (
        line for line in page.splitlines() if line.startswith(f"| memory | {found['own']:.4f} |") and "%" not in line
    )
    losses = [evaluations(tmp_path / f"memory.{name}" / "seed_1")[0]["validation_loss"] for name in controls]
    assert line.split(" | ")[2:] == [
        *(f"{loss:.4f}" for loss in (*losses, found["others"])),
        f"{found['without']:.4f} |",
    ]
    assert "- **memory**: " in page
    assert "--controls --run-dir" in page
    assert "![Leads over controls](comparison_controls.svg)" in page
    assert "one_row" in (tmp_path / "comparison_controls.svg").read_text()
    again = compare(megamem, [memory], tmp_path, *options)
    assert "steps to go" not in again.output
    assert "memory, experts, seed 1, in " not in again.output
    assert (tmp_path / "comparison.md").read_text() == page
    some = compare(megamem, [memory], tmp_path, *options, "--controls", "experts,one_row")
    assert "steps to go" not in some.output
    page = (tmp_path / "comparison.md").read_text()
    assert "--controls one_row,experts --run-dir" in page
    assert "| model | as it is | one_row | experts | after" in page
    assert "not judged, without random_rows, others_rows, equal_flops" in page


def test_models_race_to_a_loss(tmp_path: Path, megamem: Megamem, models: list[Path]) -> None:
    """Every loss is below the target, so both are there at their first evaluation, of a step of 256 tokens."""
    folder = tmp_path / "runs"
    result = compare(megamem, models, folder, "--seeds", 1, "--target-loss", 1000, "evaluation.every_steps=1")
    assert "| memory | 1 of 1 | 0.000 |" in result.output
    assert "- dense needs 0.0% more tokens (p = 1)" in (folder / "comparison.md").read_text()
    assert "--target-loss 1000" in (folder / "comparison.md").read_text()
    refused = megamem("compare", *models, "--run-dir", folder, "--target-loss", 5, "evaluation.every_steps=0", *SHORT)
    assert refused.code == 2
    assert "evaluation.every_steps is 0 for memory, which is then evaluated at its end alone" in refused.output
