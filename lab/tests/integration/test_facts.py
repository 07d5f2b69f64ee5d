"""A tiny model learns a few facts by heart and is asked for them; what is finished is kept."""

from __future__ import annotations

import json
import math
from pathlib import Path

import yaml
from commands import TINY, Megamem, steps

from tests.rotation import in_turn


@in_turn(1)
def test_facts_that_were_learnt_are_known(tmp_path: Path, megamem: Megamem) -> None:
    train = {"num_steps": 80, "global_batch_size": 8, "micro_batch_size": 4, "sequence_length": 48}
    model = {**TINY["model"], "ffn_hidden_size": 96}
    (tmp_path / "memory.yaml").write_text(
        yaml.safe_dump({**TINY, "name": "memory", "model": model, "train": train, "logging": {"memory_every_steps": 0}})
    )
    command = (
        "recall",
        tmp_path / "memory.yaml",
        "optimizer.lr=1e-2",
        "--facts",
        "4,2000",
        "--run-dir",
        tmp_path / "runs",
    )
    result = megamem(*command)
    assert result.code == 0, result.output
    assert "run 1 of 2: memory, 4 facts, seed 1: 80 steps to go" in result.output
    assert "run 2 of 2: memory, 2,000 facts, seed 1" in result.output
    page = (tmp_path / "runs" / "recall.md").read_text()
    assert "| memory |" in page
    assert "4 facts | 2,000 facts" in page
    few, many = (
        json.loads((tmp_path / "runs" / "memory" / f"facts_{number}" / "seed_1" / "recall.json").read_text())
        for number in (4, 2000)
    )
    # A handful is learnt in no time; thousands, each of which was stated three times or four, cannot be.
    assert few["accuracy"] > 0.7
    assert many["accuracy"] < 0.1
    assert few["nats"] < 1.0 < 0.5 * 2 * math.log(26) < many["nats"]
    losses = steps(tmp_path / "runs" / "memory" / "facts_4" / "seed_1")
    again = megamem(*command)
    assert again.code == 0, again.output
    assert again.output.count(": finished") == 2
    assert steps(tmp_path / "runs" / "memory" / "facts_4" / "seed_1") == losses
    assert (tmp_path / "runs" / "recall.md").read_text() == page


@in_turn(0)
def test_controls_are_told_the_same_facts_side_by_side(tmp_path: Path, megamem: Megamem) -> None:
    train = {"num_steps": 4, "global_batch_size": 4, "micro_batch_size": 4, "sequence_length": 48}
    memory = {**TINY, "name": "memory", "train": train, "logging": {"memory_every_steps": 0}}
    (tmp_path / "memory.yaml").write_text(yaml.safe_dump(memory))
    dense = {"base": "memory.yaml", "name": "dense", "model": {"memory": None}}
    (tmp_path / "dense.yaml").write_text(yaml.safe_dump(dense))
    options = ("--controls", "--facts", "8", "--seeds", "2", "--at-once", "2", "--run-dir", tmp_path / "runs")
    result = megamem("recall", tmp_path / "dense.yaml", tmp_path / "memory.yaml", *options)
    assert result.code == 0, result.output
    controls = ("one_row", "random_rows", "others_rows", "equal_flops", "equal_parameters", "experts")
    names = ["dense", "memory", *(f"memory.{name}" for name in controls)]
    page = (tmp_path / "runs" / "recall.md").read_text()
    assert [line.split()[1] for line in page.splitlines() if line.startswith(("| dense", "| memory"))] == names
    assert "8 of 8 done" in result.output
    assert (
        "step 4/4" in (tmp_path / "runs" / "memory.one_row" / "facts_8" / "seed_2" / "logs" / "screen.log").read_text()
    )
    assert "--controls" in page
    refused = megamem("recall", tmp_path / "dense.yaml", *options)
    assert refused.code == 2
    assert "no model has a memory" in refused.output
