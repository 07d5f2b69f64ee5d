"""The commands that look ahead: dry runs as people read them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import Megamem

from tests.rotation import in_turn

SIZED = ("model.vocab_size=512", "train.micro_batch_size=1", "train.global_batch_size=8")


@in_turn(0, 3)
def test_the_stages_of_a_run_are_dry_run_and_meet(megamem: Megamem, config_file: Path) -> None:
    words = (
        "dryrun",
        config_file,
        "--world-size",
        8,
        "--all-stages",
        "parallel.pipeline=2",
        "parallel.memory=4",
        *SIZED,
    )
    shown, data = megamem(*words), megamem(*words, "--json")
    assert shown.code == data.code == 0, shown.output + data.output
    assert "The calls of 2 stages match, in order and size." in shown.output
    found = json.loads(data.output[data.output.index("{") :])
    assert found["mismatches"] == []
    assert [rank["stage"] for rank in found["ranks"]] == [0, 1]
    for rank in found["ranks"]:
        assert f"{rank['parameters']:,} parameters" in shown.output
        assert sum(rank["held_bytes"].values()) < sum(rank["peak_bytes"].values())
        # The formulas are for bf16, and this is fp32.
        assert sum(rank["predicted_bytes"].values()) == pytest.approx(sum(rank["peak_bytes"].values()), rel=0.2)
        of_memory = [call for call in rank["collectives"] if call["group"] == "memory"]
        assert {call["op"] for call in of_memory} == {"all_gather", "all_to_all"}


@in_turn(1, 3)
def test_a_plan_counts_its_best_layouts_as_dry_runs_do(megamem: Megamem, config_file: Path) -> None:
    words = ("plan", config_file, "--gpus", 8, "--gpu", "h100-80g", *SIZED)
    counted, shown = megamem(*words, "--count", 2, "--json"), megamem(*words)
    assert counted.code == shown.code == 0, counted.output + shown.output
    found = json.loads(counted.output[counted.output.index("[\n") :])
    assert len([each for each in found if each["counted_bytes"] is not None]) == 2
    (best,) = (each for each in found if each["recommended"])
    counted_bytes = sum(best["counted_bytes"].values())
    keys = (f"{key}={'null' if value is None else value}" for key, value in best["overrides"].items())
    ran = megamem("dryrun", config_file, "--world-size", 8, "--all-stages", "--as-gpu", "--json", *SIZED, *keys)
    ranks = json.loads(ran.output[ran.output.index("{") :])["ranks"]
    totals = [sum(stage["bytes"].values()) for stage in best["stages"]]
    fullest = ranks[totals.index(max(totals))]
    # Of a microbatch that was left out a step keeps the loss and the number of tokens.
    assert counted_bytes == pytest.approx(sum(fullest["peak_bytes"].values()), abs=16 * fullest["microbatches"])
    assert f"in all {max(totals) / 1e9:.2f} {counted_bytes / 1e9:.2f}".split() == next(
        line.split() for line in shown.output.splitlines() if line.startswith("  in all")
    )


def test_dry_runs_that_make_no_sense_are_refused(megamem: Megamem, config_file: Path) -> None:
    for words, said in (
        (("--world-size", 8, "--rank", 8, *SIZED), "--rank is 8, and --world-size 8"),
        (("--world-size", 2, "parallel.pipeline=4", *SIZED), "the run has 2 ranks"),
        (
            ("--world-size", 1, "data.datasets.0.path=gone"),
            f"leaves model.vocab_size to the tokenizer of its data, and {Path('gone').absolute()} is not there: prepare",
        ),
        (("--world-size", 1, "data.datasets=[]"), "tokenizer of its data, and it names no data sets: prepare that, or"),
    ):
        result = megamem("dryrun", config_file, *words)
        assert result.code == 2
        assert said in " ".join(result.output.split())


@in_turn(2, 3)
def test_a_vocabulary_that_is_left_to_the_data_is_theirs(megamem: Megamem, config_file: Path) -> None:
    """257 ids of bytes, padded as in training; a number that is given counts wherever the data are."""
    counts = {}
    for key in ("model.vocab_size=null", "model.vocab_size=257", "model.vocab_size=1024"):
        result = megamem("dryrun", config_file, "--world-size", 1, "--json", key)
        assert result.code == 0, result.output
        counts[key] = json.loads(result.output[result.output.index("{") :])["ranks"][0]["parameters"]
    of_data, given, larger = counts.values()
    assert of_data == given < larger
    result = megamem("plan", config_file, "--gpus", 2, "--gpu", "h100-80g", "--top", 1)
    assert result.code == 0, result.output
