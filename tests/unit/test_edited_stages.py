"""Stages that are trained may not be edited; those that come may."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from pretrain.config.keys import all_keys
from pretrain.config.schema import RunConfig
from pretrain.config.source import dump_yaml
from pretrain.config.stages import load_stages, to_entries
from pretrain.errors import ConfigError
from pretrain.run import trained_stages
from pretrain.run.folder import RunFolder
from pretrain.run.trained_stages import decides_weights, refuse_edited_past

RUN: dict[str, Any] = {
    "data": {"datasets": [{"path": "/old"}]},
    "optimizer": {"lr": 1e-3, "schedule": "constant"},
    "train": {"global_batch_size": 8, "micro_batch_size": 2, "sequence_length": 32},
    "stages": [
        {"name": "first", "num_steps": 10},
        {"name": "second", "num_steps": 10, "optimizer": {"schedule": "cosine"}},
        {"name": "third", "num_steps": 10},
    ],
}


def written(path: Path, *overrides: str) -> tuple[Any, ...]:
    path.write_text(yaml.safe_dump(RUN, sort_keys=False))
    return load_stages(path, overrides)


RUNS = (
    *("name", "parallel", "evaluation", "checkpoint", "logging", "health"),
    *(f"train.{key}" for key in ("micro_batch_size", "recompute", "loss_chunk_tokens", "deterministic", "apex")),
    *(f"train.{key}" for key in ("recompute_streams", "max_skipped_steps", "cuda_graph", "kernels")),
    *("data.num_workers", "data.allow_change", "optimizer.value_offload", "model.implementation"),
)
"""Keys and sections that a stage may have otherwise when it is trained."""
ELSEWHERE = ("seed", "train.num_steps", *(f"stage.{key}" for key in ("name", "steps_before", "samples_before")))
ELSEWHERE += tuple(f"stage.{key}" for key in ("tokens_before", "first_sample", "run_steps", "run_tokens"))
"""Keys of a whole run, and what follows from stages' names and lengths."""


@pytest.fixture
def trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Says whether the stages, edited, may go on after so many steps."""
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    folder.stages.write_text(dump_yaml(to_entries(written(tmp_path / "run.yaml"))))

    # The data set is not there any more.
    part = SimpleNamespace(datasets=[SimpleNamespace(path="/old", sha256="one")])
    state = SimpleNamespace(trained_on=[part])

    def edit(step: int, *overrides: str) -> None:
        monkeypatch.setattr(trained_stages, "newest_readable", lambda path: SimpleNamespace(step=step, run=state))
        refuse_edited_past(written(tmp_path / "run.yaml", *overrides), folder)

    return edit


@pytest.mark.parametrize(
    ("step", "override", "told"),
    [
        (15, "stages.first.data.datasets=[{path: /new}]", "stage first of .* is trained, and edited now: data.datasets: .*/new"),
        (10, "stages.first.data.datasets=[{path: /new}]", "stage first of"),
        (15, "stages.first.optimizer.lr=2e-3", r"optimizer.lr: 0.001 -> 0.002\. Set it back to what .*stages.yaml says"),
        # The run's sections are those of the stage that is done, too.
        (15, "optimizer.lr=2e-3", "stage first of"),
        (15, "data.seed=7", "data.seed"),
        (15, "stages.first.train.global_batch_size=4", "train.global_batch_size: 8 -> 4"),
        (25, "stages.second.optimizer.schedule=constant", "stage second of"),
        (25, "stages.second.optimizer_state=reset", "stage.optimizer_state: keep -> reset"),
        # Counters could not tell: as many steps of one batch.
        (25, "stages.first.num_steps=5", "has trained first to step 10, second to step 20, third to step 25, and as its"),
        (15, "stages.first.num_steps=15", "would have trained first to step 15"),
        (15, "stages.second.num_steps=4", "would have trained first to step 10, second to step 14, third to step 15"),
    ],
)  # fmt: skip
def test_the_past_stays(trained: Any, step: int, override: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        trained(step, override)


@pytest.mark.parametrize(
    ("step", "overrides"),
    [
        (15, ()),
        (15, ("stages.third.data.datasets=[{path: /new}]", "stages.third.num_steps=3")),
        # That of the stage that trains is a matter of resuming.
        (15, ("stages.second.optimizer.lr=2e-3",)),
        (15, ("stages.second.num_steps=5",)),
        (15, ("stages.second.num_steps=500",)),
        (9, ("data.seed=7",)),
        (25, ("train.micro_batch_size=1", "parallel.tensor=2", "checkpoint.every_steps=3", "logging.tensorboard=true")),
        (25, ("evaluation.every_steps=3", "stages.first.name=begin", "health.hang_minutes=99")),
        (30, ("stages.3={name: more, num_steps: 1}",)),
    ],
)
def test_what_comes_may_change_and_how_it_runs(trained: Any, step: int, overrides: tuple[str, ...]) -> None:
    trained(step, *overrides)


def test_every_key_is_one_or_the_other() -> None:
    """A key that is new decides the weights, or is written down here as one that does not."""
    keys = set(all_keys(RunConfig))
    leaves = {key for key in keys if not any(other.startswith(f"{key}.") for other in keys)}
    free = {key for key in leaves if not decides_weights(key)}
    known = {
        key for key in leaves if key in ELSEWHERE or any(key == each or key.startswith(f"{each}.") for each in RUNS)
    }
    assert free == known
    assert "data.documents" in leaves - free


def test_data_may_have_moved(trained: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    contents = {"/moved": "one", "/new": "two"}
    monkeypatch.setattr(
        trained_stages,
        "open_dataset",
        lambda path: SimpleNamespace(manifest=SimpleNamespace(content_fingerprint=contents[path])),
    )
    trained(15, "data.datasets=[{path: /moved}]")
    trained(15, "data.datasets=[{path: /somewhere/../old}]")
    with pytest.raises(ConfigError, match=r"edited now: data\.datasets"):
        trained(15, "data.datasets=[{path: /new}]")
    with pytest.raises(ConfigError, match=r"edited now: data\.datasets"):
        trained(15, "data.datasets=[{path: /moved}, {path: /new}]")


def test_a_record_that_cannot_be_read_is_named(trained: Any, tmp_path: Path) -> None:
    record = tmp_path / "run" / "stages.yaml"
    record.write_text("stages: [{name: first}]\n")
    with pytest.raises(ConfigError, match=r"stages.yaml tells what the run was trained with, and cannot be read"):
        trained(15)
    record.unlink()
    trained(15, "data.seed=7")
