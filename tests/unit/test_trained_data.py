"""A run goes on with what it was trained on: the tokenizer always, and data sets unless the configuration says
otherwise. Checkpoints are fabricated, and say what they were trained on.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pretrain.checkpoint import folder as checkpoints
from pretrain.checkpoint.folder import SavedState, read_state
from pretrain.checkpoint.index import INDEX_FILE
from pretrain.checkpoint.index_writer import pickled_index
from pretrain.config.loader import to_dict
from pretrain.config.schema import DataConfig, DatasetEntry, RunConfig, StageConfig
from pretrain.config.stages import load_config, read_run
from pretrain.data.manifest import open_dataset, save_tokenizer
from pretrain.data.prepare import prepare
from pretrain.data.tokenizer import ByteTokenizer, CodeTokenizer
from pretrain.errors import DataError
from pretrain.run.folder import RunFolder
from pretrain.run.preflight import check_submission
from pretrain.run.saved_run import starting_point
from pretrain.run.trained_data import check_trained_data, data_read, tokenizer_of
from pretrain.state import DataRead, RunState, TrainedOn
from tools import cli

A, B, C = DataRead("/data/a", "a" * 64), DataRead("/data/b", "b" * 64), DataRead("/data/c", "c" * 64)
ELSEWHERE = replace(A, path="/moved/a")
OTHER = replace(A, sha256="d" * 64)
TOKENIZER = "7" * 64


def opened(read: DataRead, tokenizer: str = TOKENIZER) -> Any:
    return SimpleNamespace(
        path=read.path,
        manifest=SimpleNamespace(content_fingerprint=read.sha256),
        tokenizer=SimpleNamespace(kind="huggingface", fingerprint=tokenizer),
    )


def saved_at(step: int, *parts: tuple[int, tuple[DataRead, ...]], tokenizer: str | None = TOKENIZER) -> SavedState:
    state = RunState(step=step, tokenizer=tokenizer, trained_on=tuple(TrainedOn(*part) for part in parts))
    return SavedState(Path(f"/runs/x/checkpoints/step_{step:08d}"), state, {}, {}, None)


def stage_from(step: int, first_sample: int = 0, *, allow_change: bool = False) -> RunConfig:
    data = DataConfig(allow_change=allow_change)
    return RunConfig(stage=StageConfig("decay", steps_before=step, first_sample=first_sample), data=data)


WHOLE = RunConfig()
AFTER_A = saved_at(5, (0, (A,)))
AFTER_A_AND_B = saved_at(9, (0, (A,)), (5, (B,)))


@pytest.mark.parametrize(
    ("config", "saved", "now"),
    [
        (WHOLE, AFTER_A, [A]),
        (WHOLE, AFTER_A, [ELSEWHERE]),
        (WHOLE, saved_at(5, (0, (A, B))), [B, ELSEWHERE]),
        (WHOLE, AFTER_A_AND_B, [B]),
        (stage_from(4), AFTER_A, [A]),
        # A stage that begins states its own.
        (stage_from(5), AFTER_A, [B]),
        (stage_from(5), AFTER_A, [A, B]),
        (stage_from(5, 40), AFTER_A, [ELSEWHERE]),
        (stage_from(9, 40), AFTER_A_AND_B, [A]),
        # One that comes later may go on in data that is still to be read.
        (stage_from(9, 40), AFTER_A, [C]),
        # The data read before step 3 are not known.
        (stage_from(9, 40), saved_at(9, (3, (B,))), [A]),
    ],
)
def test_the_same_data_is_gone_on_with_wherever_it_is(
    config: RunConfig, saved: SavedState, now: list[DataRead]
) -> None:
    assert check_trained_data(config, saved, [opened(read) for read in now]) == []


@pytest.mark.parametrize(
    ("config", "saved", "now", "said"),
    [
        (
            WHOLE,
            AFTER_A,
            [OTHER],
            "was trained on /data/a (sha256 aaaaaaaaaaaa), and data.datasets is /data/a (sha256 dddd",
        ),
        (
            WHOLE,
            AFTER_A,
            [B],
            "was trained on /data/a (sha256 aaaaaaaaaaaa), and data.datasets is /data/b (sha256 bbbb",
        ),
        (WHOLE, AFTER_A, [A, B], "and data.datasets is /data/a (sha256 aaaaaaaaaaaa), /data/b"),
        (WHOLE, AFTER_A_AND_B, [A], "was trained on /data/b"),
        (stage_from(4), AFTER_A, [B], "was trained on /data/a"),
        (
            stage_from(5),
            AFTER_A,
            [OTHER],
            "was trained on /data/a (sha256 aaaaaaaaaaaa), and what is there now is sha256 dd",
        ),
        (stage_from(20), AFTER_A, [B, OTHER], "and what is there now is sha256 dddddddddddd"),
        (stage_from(9, 40), AFTER_A_AND_B, [C], "stage decay goes on in the data of a stage before it, at sample 40"),
    ],
)
def test_other_data_is_refused_unless_the_configuration_allows_it(
    config: RunConfig, saved: SavedState, now: list[DataRead], said: str
) -> None:
    datasets = [opened(read) for read in now]
    with pytest.raises(DataError) as error:
        check_trained_data(config, saved, datasets)
    assert said in str(error.value)
    assert "data.allow_change=true" in str(error.value)
    allowed = replace(config, data=replace(config.data, allow_change=True))
    (told,) = check_trained_data(allowed, saved, datasets)
    assert said in told


def test_another_tokenizer_is_refused_whatever_the_configuration_allows() -> None:
    for config in (replace(WHOLE, data=DataConfig(allow_change=True)), stage_from(5, allow_change=True)):
        with pytest.raises(
            DataError, match=r"/data/b was prepared with another tokenizer \(huggingface, 888888888888\)"
        ):
            check_trained_data(config, AFTER_A, [opened(B, "8" * 64)])


def test_a_state_keeps_what_was_read_and_since_when() -> None:
    state = RunState().reading(TOKENIZER, (A, B))
    assert state.reading(TOKENIZER, (A, B)) == state
    later = replace(state, step=6).reading(TOKENIZER, (C,))
    assert (later.tokenizer, later.trained_on) == (TOKENIZER, (TrainedOn(0, (A, B)), TrainedOn(6, (C,))))
    assert RunState(**json.loads(json.dumps(asdict(later)))) == later


def test_a_run_that_goes_back_from_a_spike_reads_what_it_read() -> None:
    """It does so even if the checkpoint is from before its data was changed."""
    saved = RunState(step=4, consumed_samples=16).reading(TOKENIZER, (A,))
    spiked = replace(saved, step=6, consumed_samples=24).reading(TOKENIZER, (B,))
    assert spiked.back_at(saved).trained_on == (TrainedOn(4, (A,)), TrainedOn(4, (B,)))


# By command


@dataclass(frozen=True)
class Case:
    """A prepared data set, a configuration that names it, and a run's folder."""

    dataset: Path
    config: Path
    run: RunFolder

    def save(self, state: Mapping[str, Any]) -> None:
        """Give the run a checkpoint of step 3 with this about its data."""
        path = checkpoints.start_writing(self.run.checkpoints, 3)
        (path / INDEX_FILE).write_bytes(pickled_index({}, []))
        (path / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
        torch.save({}, path / "common.pt")
        content = {"rng": {}, "config": to_dict(load_config(self.config)), "versions": {}}
        checkpoints.complete(self.run.checkpoints, 3, run={"step": 3, **state}, weights_dtype="float32", **content)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    for number in range(20):
        (folder / f"{number}.txt").write_text(f"document {number} " * 20)
    prepare([str(folder)], folder / "set", ByteTokenizer(), validation_fraction=0.2, num_workers=1)
    return folder / "set"


@pytest.fixture
def case(tmp_path: Path, prepared: Path) -> Case:
    path = tmp_path / "a.yaml"
    model = {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 4, "memory": None}
    train = {"num_steps": 7, "sequence_length": 64, "global_batch_size": 2, "micro_batch_size": 2}
    path.write_text(json.dumps({"model": model, "train": train, "data": {"datasets": [{"path": str(prepared)}]}}))
    return Case(prepared, path, RunFolder(tmp_path / "run"))


def files_in(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def of_other_data(case: Case) -> dict[str, Any]:
    part = {"first_step": 0, "datasets": [{"path": str(case.dataset), "sha256": "d" * 64}]}
    return {"tokenizer": ByteTokenizer.fingerprint, "trained_on": [part]}


@pytest.mark.parametrize("what", ["tokenizer", "data"])
def test_a_run_of_another_tokenizer_or_other_data_is_left_as_it_is(
    case: Case, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A resume, --from, a command that looks alone and a submission refuse; the message names a way that is one."""
    state = of_other_data(case)
    case.save(state if what == "data" else {**state, "tokenizer": "7" * 64})
    save_tokenizer(ByteTokenizer(), case.run.tokenizer)
    before, run = files_in(case.run.path), str(case.run.path)
    other = case.run.path.with_name("other")
    for words in (
        ["train", str(case.config), "--run-dir", run],
        ["config", "check", str(case.config), "--run-dir", run],
        ["train", str(case.config), "--from", run, "--run-dir", str(other)],
    ):
        assert cli.main(words) == 3
        said = " ".join(capsys.readouterr().err.split())
        assert ("another tokenizer" in said) == (what == "tokenizer")
        assert ("data.allow_change=true" in said) == (what == "data")
    config = load_config(case.config)
    with pytest.raises(DataError, match="another tokenizer" if what == "tokenizer" else "data.allow_change=true"):
        check_submission([config], 1, case.run)
    assert files_in(case.run.path) == before
    assert not other.exists()
    code = cli.main(["config", "check", str(case.config), "--run-dir", run, "data.allow_change=true"])
    assert code == (0 if what == "data" else 3)


def test_a_folder_that_was_moved_goes_on_where_it_stood(case: Case, tmp_path: Path) -> None:
    """The position of a run that goes on from it counts samples of the same data, too."""
    saved = RunState(step=3, consumed_samples=6).reading(
        ByteTokenizer.fingerprint, data_read([open_dataset(case.dataset)])
    )
    case.save({**asdict(saved), "step": 3})
    moved = tmp_path / "moved"
    shutil.copytree(case.dataset, moved)
    named = f"data.datasets.0.path={moved}"
    assert cli.main(["config", "check", str(case.config), "--run-dir", str(case.run.path), named]) == 0
    start = starting_point(read_state(checkpoints.step_folder(case.run.checkpoints, 3)))
    (stage,) = read_run(case.config, [named]).stages(start)
    assert stage.stage is not None
    assert (stage.stage.first_sample, stage.data.datasets) == (6, (DatasetEntry(str(moved)),))


def test_a_checkpoint_without_hashes_is_gone_on_with_by_the_tokenizer_that_its_run_kept(case: Case) -> None:
    case.save({})
    config, datasets = load_config(case.config), [open_dataset(case.dataset)]
    saved = read_state(checkpoints.step_folder(case.run.checkpoints, 3))
    told = check_trained_data(config, saved, datasets)
    assert [sentence.partition(" ")[2].partition(":")[0] for sentence in told] == [
        "does not say with which tokenizer it was trained",
        "has no hashes of its data sets",
    ]
    save_tokenizer(ByteTokenizer(), case.run.tokenizer)
    assert check_trained_data(config, saved, datasets) == told[1:]
    save_tokenizer(CodeTokenizer(200, 56), case.run.tokenizer)
    with pytest.raises(DataError, match="another tokenizer"):
        check_trained_data(config, saved, datasets)


def test_weights_that_have_seen_no_data_of_ours_say_nothing_of_it() -> None:
    saved = replace(AFTER_A, run=RunState(tokenizer=TOKENIZER))
    assert check_trained_data(WHOLE, saved, [opened(B)]) == []


def test_a_run_whose_tokenizer_was_replaced_is_neither_evaluated_nor_continued_in_text(case: Case) -> None:
    case.save(of_other_data(case))
    saved = read_state(checkpoints.step_folder(case.run.checkpoints, 3))
    save_tokenizer(ByteTokenizer(), case.run.tokenizer)
    assert tokenizer_of(case.run, saved).fingerprint == ByteTokenizer.fingerprint
    save_tokenizer(CodeTokenizer(200, 56), case.run.tokenizer)
    with pytest.raises(DataError, match=r"holds another tokenizer .* than .*step_00000003 was trained with"):
        tokenizer_of(case.run, saved)
    for command in (["eval"], ["generate", "--prompt", "a"]):
        assert cli.main([*command, str(case.run.path)]) == 3
