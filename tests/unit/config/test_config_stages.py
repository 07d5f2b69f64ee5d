"""Runs of stages: what each one's configuration is, where it stands, and what is refused with file and line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pretrain.config.position import batch_size_at, check_position, position_in_data, samples_until, steps_for_tokens
from pretrain.config.schema import BatchRampConfig, RunConfig, TrainConfig
from pretrain.config.source import dump_yaml
from pretrain.config.stages import (
    StartingPoint,
    load_config,
    load_stage,
    load_stages,
    read_run,
    stage_of_step,
    to_entries,
)
from pretrain.config.validate import validate
from pretrain.errors import CheckpointError, ConfigError
from pretrain.state import RunState
from tools.common.stage_table import stage_chart, stage_table

THREE = """\
name: three
train: {global_batch_size: 8, micro_batch_size: 4, sequence_length: 32}
optimizer: {schedule: cosine, min_lr: 1e-5, lr: 1e-3}
model: {rotary_scaling: {kind: yarn, factor: 4.0}}
data: {datasets: [{path: /a}]}
stages:
  - name: first
    num_steps: 10
    optimizer: {schedule: constant}
  - name: second
    num_tokens: 1000
    data: {datasets: [{path: /b, weight: 2}, {path: /a}]}
  - name: third
    num_steps: 5
    optimizer_state: reset
    model: {rotary_base: 500000, rotary_scaling: null}
    train: {micro_batch_size: 2}
  - name: last
    num_steps: 2
    train: {sequence_length: 64}
"""


@pytest.fixture
def three(tmp_path: Path) -> Path:
    path = tmp_path / "three.yaml"
    path.write_text(THREE)
    return path


def test_every_stage_is_a_whole_configuration(three: Path) -> None:
    first, second, third, last = load_stages(three)
    assert (first.optimizer.schedule, second.optimizer.schedule) == ("constant", "cosine")
    # The first stage's schedule has no end that anything reads.
    assert (first.optimizer.min_lr, second.optimizer.min_lr) == (1e-4, 1e-5)
    assert [config.model.rotary_base for config in (first, second, third, last)] == [10000, 10000, 500000, 10000]
    assert (first.model.rotary_scaling is None, third.model.rotary_scaling is None) == (False, True)
    assert [entry.path for entry in second.data.datasets] == ["/b", "/a"]
    assert [config.name for config in (first, second, third, last)] == ["three"] * 4
    assert load_config(three) == first


def test_stages_stand_one_behind_the_other(three: Path) -> None:
    """The figures by hand: steps of 8 x 32 tokens; 1,000 of them take 4. The third reads on where the first stopped."""
    stages = load_stages(three)
    places = [config.stage for config in stages if config.stage is not None]
    assert [place.name for place in places] == ["first", "second", "third", "last"]
    assert [config.train.num_steps for config in stages] == [10, 14, 19, 21]
    assert [place.steps_before for place in places] == [0, 10, 14, 19]
    assert [place.samples_before for place in places] == [0, 80, 112, 152]
    assert [place.tokens_before for place in places] == [0, 2560, 3584, 4864]
    assert [place.first_sample for place in places] == [0, 0, 80, 0]
    assert [place.optimizer_state for place in places] == ["keep", "keep", "reset", "keep"]
    assert {(place.run_steps, place.run_tokens) for place in places} == {(21, 4864 + 2 * 8 * 64)}
    assert [stage_of_step(stages, step) for step in (0, 9, 10, 13, 14, 20, 21)] == [0, 0, 1, 1, 2, 3, 3]


def test_a_run_that_goes_on_from_a_checkpoint_counts_on(three: Path) -> None:
    """Its place in the data counts on too, if the data is the checkpoint's."""
    saved = replace(load_stages(three)[0], stage=None)
    start = StartingPoint(Path("x"), RunState(step=7, consumed_samples=50, consumed_tokens=900), saved)
    first, second, third, _ = read_run(three).stages(start)
    assert first.stage is not None
    assert third.stage is not None
    assert (first.stage.steps_before, first.stage.samples_before, first.stage.tokens_before) == (7, 50, 900)
    assert (first.train.num_steps, second.train.num_steps) == (17, 21)
    assert (first.stage.first_sample, third.stage.first_sample) == (50, 130)
    other = replace(start, config=replace(saved, data=replace(saved.data, seed=9)))
    (of_others, *_) = read_run(three).stages(other)
    assert of_others.stage is not None
    assert of_others.stage.first_sample == 0


def test_what_was_passed_over_moves_the_position_and_no_stage(three: Path) -> None:
    """The first stage read samples 0 to 48 in six steps, and passed over 48 to 64 when it went back."""
    first, _, third, _ = load_stages(three)
    gone_back = RunState(step=6, consumed_samples=64, consumed_tokens=6 * 256, passed_over=((48, 64),))
    check_position(first, gone_back, "x")
    assert position_in_data(first, gone_back) == 64
    with pytest.raises(CheckpointError, match="has seen 64 sequences"):
        check_position(first, replace(gone_back, passed_over=()), "x")
    later = replace(gone_back, step=14, consumed_samples=112 + 16, consumed_tokens=3584)
    check_position(third, later, "x")
    # It goes on where the first stopped, which was 16 samples further on.
    assert position_in_data(third, later) == 80 + 16
    # Another run that goes on from there.
    (again, *_) = read_run(three).stages(StartingPoint(Path("x"), later, third))
    check_position(again, later, "x")
    assert position_in_data(again, later) == 80 + 16
    saved = RunConfig(seed=1, train=replace(first.train, num_steps=7), data=first.data)
    (again, *_) = read_run(three).stages(StartingPoint(Path("x"), gone_back, saved))
    check_position(again, gone_back, "x")
    assert position_in_data(again, gone_back) == 64


def test_one_of_several_stages_is_named(three: Path, tmp_path: Path) -> None:
    stages = load_stages(three)
    assert load_stage(three, (), "third") == stages[2]
    with pytest.raises(ConfigError, match="has several stages: name one with --stage: first, second, third"):
        load_stage(three)
    with pytest.raises(ConfigError, match="--stage is fourth: name one with --stage: first, second"):
        load_stage(three, (), "fourth")
    whole = tmp_path / "whole.yaml"
    whole.write_text("train: {num_steps: 7}")
    assert load_stage(whole).train.num_steps == 7
    with pytest.raises(ConfigError, match="--stage is first: it has none"):
        load_stage(whole, (), "first")


def test_a_file_without_stages_is_one(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("train: {num_steps: 7}")
    assert load_stages(path) == (load_config(path),)
    assert load_config(path).stage is None
    start = StartingPoint(Path("x"), RunState(step=3), RunConfig())
    (config,) = read_run(path, ["optimizer.schedule_from=run"]).stages(start)
    assert config.stage is not None
    assert (config.stage.name, config.stage.steps_before, config.train.num_steps) == ("continued", 3, 10)
    with pytest.raises(ConfigError, match=r"optimizer\.schedule_from has no effect unless the run has stages"):
        load_stages(path, ["optimizer.schedule_from=run"])


def test_overrides_are_the_runs_or_a_stages(three: Path) -> None:
    stages = load_stages(three, ["train.micro_batch_size=8", "stages.second.optimizer.lr=0.5", "stages.3.num_steps=9"])
    assert [config.train.micro_batch_size for config in stages] == [8, 8, 2, 8]
    assert [config.optimizer.lr for config in stages] == [1e-3, 0.5, 1e-3, 1e-3]
    assert stages[3].train.num_steps == 19 + 9


def test_an_override_of_a_named_stage_outdoes_its_entry(three: Path) -> None:
    overrides = ("train.micro_batch_size=1", "train.global_batch_size=16")
    assert [each.train.micro_batch_size for each in load_stages(three, overrides)] == [1, 1, 2, 1]
    third = load_stage(three, overrides, "third")
    assert (third.train.micro_batch_size, third.train.global_batch_size) == (1, 16)
    assert third.model.rotary_base == 500000


def test_a_problem_of_all_stages_is_told_once(three: Path) -> None:
    with pytest.raises(ConfigError, match=r"^override train\.num_stepz=3: unknown key train\.num_stepz"):
        load_stages(three, ["train.num_stepz=3"])


def test_what_is_shown_loads_again(three: Path, tmp_path: Path) -> None:
    stages = load_stages(three)
    (tmp_path / "shown.yaml").write_text(dump_yaml(to_entries(stages)))
    assert load_stages(tmp_path / "shown.yaml") == stages


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("num_steps: 5", "num_steps: 5\n    num_tokens: 7", "three.yaml:13: stage third needs either num_steps or num_tokens"),
        ("    num_steps: 5\n", "", "stage third needs either num_steps or num_tokens"),
        ("name: third", "name: first", "a stage is called 'first'"),
        # It stands in a comment and a directive of a batch script.
        ("name: third", 'name: "base\\ntouch FILE; echo"', r"a stage is called 'base\ntouch FILE; echo'"),
        ("name: third", "name: two words", "of letters, digits and _ - + ="),
        ("name: third", "name: -third", "not first a -"),
        ("num_steps: 5", "num_step: 5", "three.yaml:14: unknown key stages.2.num_step: did you mean num_steps"),
        ("{micro_batch_size: 2}", "{num_steps: 2}", "three.yaml:17: stages.2.train.num_steps: write the length of a stage"),
        ("{micro_batch_size: 2}", "{micro_batch: 2}", "three.yaml:17: unknown key train.micro_batch"),
        ("{micro_batch_size: 2}", "{deterministic: true}", "stage third changes train.deterministic"),
        ("rotary_base: 500000", "hidden_size: 64", "three.yaml:16: stage third has another model than stage first"),
        ("sequence_length: 32}", "num_steps: 9}", "three.yaml:2: train.num_steps has no effect in a run of stages"),
        ("lr: 1e-3}", "decay_steps: 3}", "three.yaml:3: optimizer.decay_steps has no effect in any stage unless"),
        ("{schedule: constant}", "{decay_steps: 3}", "three.yaml:9: optimizer.decay_steps has no effect unless"),
        ("stages:", "stage: {name: x}\nstages:", "three.yaml:6: stage says where one stage stands"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_told_with_its_place(three: Path, old: str, new: str, told: str) -> None:
    assert old in THREE
    three.write_text(THREE.replace(old, new, 1))
    with pytest.raises(ConfigError) as refused:
        load_stages(three)
    assert told in str(refused.value)


@pytest.mark.parametrize("listed", ["[]", "{}", "3", "[3]"])
def test_stages_are_a_list_of_mappings(tmp_path: Path, listed: str) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(f"stages: {listed}")
    with pytest.raises(ConfigError, match=r"a\.yaml:1: stages(\.0)? is .*, expected a (list|mapping)"):
        load_stages(path)


def test_the_problems_of_all_stages_are_told_at_once(three: Path) -> None:
    three.write_text(THREE.replace("num_steps: 10", "num_steps: 0").replace("num_steps: 2", "num_steps: x"))
    with pytest.raises(ConfigError, match=r"(?s)2 problems.*three\.yaml:8.*three\.yaml:19"):
        load_stages(three)


def test_schedules_fit_into_what_they_count_from(three: Path) -> None:
    stages = load_stages(three, ["stages.second.optimizer.warmup_steps=5"])
    with pytest.raises(ConfigError, match=r"warmup_steps 5 need 5 steps, but the stage has 4"):
        validate(stages[1], None)
    stages = load_stages(three, ["stages.second.optimizer={warmup_steps: 5, schedule_from: run}"])
    validate(stages[1], None)


# Batch ramps


@pytest.mark.parametrize("ramp", [(2, 1, 100), (1, 3, 777), (4, 2, 64), (1, 9, 10), (4, 3, 10**6), (9, 1, 3)])
def test_a_ramp_is_its_law_step_by_step(ramp: tuple[int, int, int]) -> None:
    """The law after t tokens: start_size + increment x floor(t / over_tokens x increments)."""
    start, increment, over_tokens = ramp
    train = TrainConfig(
        global_batch_size=10, sequence_length=7, batch_ramp=BatchRampConfig(start, increment, over_tokens)
    )
    samples = 0
    for step in range(300):
        size = 10
        if 7 * samples < over_tokens:
            size = start + increment * (7 * samples * ((10 - start) // increment) // over_tokens)
        assert (batch_size_at(train, step), samples_until(train, step)) == (size, samples)
        assert steps_for_tokens(train, 7 * samples + 1) == step + 1
        samples += size
        assert steps_for_tokens(train, 7 * samples) == step + 1


def test_a_ramp_fits_the_layout_at_every_size() -> None:
    def config(start: int, increment: int) -> RunConfig:
        ramp = BatchRampConfig(start, increment, 1000)
        return RunConfig(train=TrainConfig(global_batch_size=64, micro_batch_size=2, batch_ramp=ramp))

    validate(config(16, 8), 4)
    for start, increment, told in (
        (16, 12, r"train\.batch_ramp\.increment is 12, which is not a multiple of .* = 8"),
        (12, 4, r"train\.batch_ramp\.start_size is 12, which is not a multiple"),
        (64, 8, r"start_size is 64, not below train\.global_batch_size 64"),
        (16, 32, r"increment is 32, which does not lead from start_size 16 to .* 64: use a divisor of 48"),
    ):
        with pytest.raises(ConfigError, match=told):
            validate(config(start, increment), 4)


# Drawings


def test_the_table_and_the_chart_say_what_the_stages_are(three: Path) -> None:
    stages = load_stages(three, ["stages.first.train.batch_ramp={start_size: 4, increment: 4, over_tokens: 300}"])
    head, first, *_, last = stage_table(stages)
    assert head.split()[:5] == ["stage", "steps", "tokens", "sequence", "batch"]
    # Three steps of 128 tokens, then seven of 256.
    assert " ".join(first.split()) == "first 0..10 2,176 32 4 > 8 0.001 - a from 0 data"
    assert " ".join(last.split()) == "last 19..21 1,024 64 8 0.001 > 1e-05 - a from 0 data"
    lines = list(stage_chart(stages))
    assert [line.split("  ")[0] for line in lines[:3]] == ["lr", "batch (tokens)", "sequence"]
    bars = lines[1].removeprefix("batch (tokens)  ")
    # The first 384 of 5,504 tokens are five of 72 columns; the last steps have twice the tokens of those before.
    assert bars[:6] == "\u2582" * 5 + "\u2584"
    assert bars.split()[0][-1] == "\u2588"
    assert [part.strip() for part in lines[-1].split("|")[1:]] == ["first", "second", "third", "last"]
