"""The command that watches a rank on a stand-in for a GPU."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from commands import Megamem

SIZED = ("--world-size", 2, "model.vocab_size=257", "train.global_batch_size=8")


def test_what_passes_is_told_with_its_line_and_allowance(megamem: Megamem, config_file: Path) -> None:
    found, shown = (
        megamem("study", "watch", config_file, "--json", *SIZED),
        megamem("study", "watch", config_file, *SIZED),
    )
    assert found.code == shown.code == 0, found.output + shown.output
    (rank,) = json.loads(found.output[found.output.index("{") :])["ranks"]
    assert {each["command"] for each in rank["traffic"]} == {
        "training",
        "evaluation",
        "saving",
        "restoring",
        "generation",
    }
    assert all(each["calls"] <= each["allowed"] for each in rank["traffic"])
    assert rank["races"] == []
    for each in rank["traffic"]:
        assert each["line"] in shown.output
    assert "of two steps and the rest: 0" in shown.output


@contextmanager
def a_step_that_waits() -> Iterator[None]:
    import torch

    from pretrain.planning.dryrun import rank

    step = rank.train_step

    def wait(*args: Any, **options: Any) -> Any:
        torch.cuda.synchronize()
        return step(*args, **options)

    with patch.object(rank, "train_step", wait):
        yield


def test_more_than_is_allowed_ends_with_2(megamem: Megamem, config_file: Path) -> None:
    with a_step_that_waits():
        result = megamem("study", "watch", config_file, *SIZED)
    assert result.code == 2
    assert "host and GPU would wait for each other" in result.output
    assert "lab/tests/integration/test_watch.py" in result.output


@pytest.mark.parametrize(("words", "said"), [
    (("--world-size", 2, "--rank", 2, "model.vocab_size=257"), "--rank is 2, and --world-size 2: ranks are 0 to N - 1"),
    (("--world-size", 0, "model.vocab_size=257"), "--rank is 0, and --world-size 0"),
    (("--world-size", 3, "parallel.pipeline=2", "model.vocab_size=257"), "the run has 3 ranks"),
])  # fmt: skip
def test_places_that_are_not_there_are_refused(megamem: Megamem, config_file: Path, words: Any, said: str) -> None:
    result = megamem("study", "watch", config_file, *words)
    assert result.code == 2
    assert said in " ".join(result.output.split())
