"""Runs and verdicts of the check of GPUs, without a GPU."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.cuda._sanitizer import ArgumentHandler

from lab.gpu_check.judge import Verdict, judge, judge_resumed
from lab.gpu_check.page import Output, page
from lab.gpu_check.plan import CheckPlan, ShortTraining, full_plan
from lab.gpu_check.sanitized import main, pass_over_sparse_tensors, sanitized_config
from lab.gpu_check.trial import Observed, RuleOfTokens
from pretrain.config.schema import RunConfig
from pretrain.config.validate import validate
from pretrain.planning.bytes.held import held_bytes
from tools.cli import build_parser


@pytest.fixture(scope="module")
def plan() -> CheckPlan:
    return full_plan()


SEEN = Observed((5.0, 4.0, 3.0), (1.0, 0.9, 0.8), 1000.0, 0, 0)


@pytest.fixture
def trial(plan: CheckPlan) -> ShortTraining:
    return replace(plan.trials[1], tolerance=0.1)


def test_every_trial_can_run_and_has_something_to_be_like(plan: CheckPlan) -> None:
    names: list[str] = []
    for trial in plan.trials:
        validate(trial.config, trial.num_ranks)
        assert trial.name not in names
        # Something independent: what runs on the CPU alone is like nothing.
        assert (trial.like is None) == trial.on_cpu
        assert trial.like is None or trial.like in names
        names.append(trial.name)
    assert plan.resumed is not None
    assert {trial.num_ranks for trial in plan.trials} == {1, 2, 4, 8}


def test_layouts_precisions_and_switches_are_in_the_plan(plan: CheckPlan) -> None:
    keys = ("kernels", "recompute", "deterministic", "precision")
    trained = [trial.config.train for trial in plan.trials]
    assert [len({getattr(train, key) for train in trained}) for key in keys] == [2, 2, 2, 2]
    assert {trial.config.parallel.memory for trial in plan.trials} >= {1, 2, 4, 8}
    for key in ("tensor", "pipeline", "virtual_pipeline", "context"):
        assert {getattr(trial.config.parallel, key) for trial in plan.trials} == {1, 2}
    for key in ("overlap_memory", "overlap_grad_reduce", "overlap_param_gather"):
        assert {getattr(trial.config.parallel, key) for trial in plan.trials} == {True, False}
    assert {trial.config.optimizer.value_offload for trial in plan.trials} == {"none", "cpu"}
    # A deterministic run and its repetition must have the same bits.
    assert any(not trial.tolerance and trial.like for trial in plan.trials)


def test_what_only_a_gpu_can_tell_comes_first(plan: CheckPlan) -> None:
    assert list(plan.first) == [
        "Order of streams, 1 GPU",
        "Order of streams, 2 GPUs",
        "This machine",
        "A step, predicted and measured, 1 GPU",
        "A step, predicted and measured, 2 GPUs",
        "Memory kernels, beside a copy",
    ]
    written = [
        command.words[command.words.index("--write") + 1]
        for command in plan.first.values()
        if "--write" in command.words
    ]
    read = {
        command.words[command.words.index("--gpu") + 1] for command in plan.first.values() if "--gpu" in command.words
    }
    # Steps are predicted by figures that were measured just before.
    assert {*written} == read == {"{folder}/machine.yaml"}
    parser = build_parser()
    for command in (*plan.first.values(), *plan.commands.values()):
        if command.words[0] == "lab":
            assert parser.parse_args([*command.words[1:]]).func


def test_the_sanitizer_begins_when_the_environment_is_settled(
    plan: CheckPlan, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sanitized = [command for title, command in plan.first.items() if title.startswith("Order of streams")]
    assert [(*command.words, command.num_gpus) for command in sanitized] == [
        ("lab.gpu_check.sanitized", "1", 1),
        ("lab.gpu_check.sanitized", "2", 2),
    ]
    done: list[str] = []
    devices: list[str] = []

    @contextmanager
    def session(_: RunConfig) -> Iterator[SimpleNamespace]:
        done.append("session")
        yield SimpleNamespace(device=torch.device(devices[-1]))

    monkeypatch.setattr("pretrain.engine.session.session", session)
    # Put back behind the test.
    monkeypatch.setattr(ArgumentHandler, "_handle_argument", ArgumentHandler._handle_argument)
    monkeypatch.setattr("torch.cuda._sanitizer.enable_cuda_sanitizer", lambda: done.append("sanitizer"))
    monkeypatch.setattr("lab.gpu_check.trial.train", lambda *_: done.append("train"))
    monkeypatch.setattr("parallel.processes.launch.launch_ranks", lambda work, number: [work() for _ in range(number)])
    for device, number, order, said in (
        ("cuda", 2, ["session", "sanitizer", "train"], "2 ranks, memories on a stream of their own: no two uses"),
        ("cpu", 1, ["session", "train"], "1 rank, memories on the common stream: no GPU, and so no streams"),
    ):
        devices.append(device)
        validate(sanitized_config(number), number)
        assert main(number) == 0
        assert done == order * number
        assert f"3 steps on {said}" in capsys.readouterr().out
        done.clear()


def test_the_sanitizer_is_not_asked_about_sparse_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.Tensor] = []
    monkeypatch.setattr(ArgumentHandler, "_handle_argument", lambda self, value, *_: seen.append(value))
    pass_over_sparse_tensors()
    sparse, dense = torch.eye(2).to_sparse(), torch.eye(2)
    for value in (sparse, dense):
        ArgumentHandler()._handle_argument(value, False, False)
    assert [value is dense for value in seen] == [True]


def test_a_loss_may_be_so_far_off_and_no_further(trial: ShortTraining) -> None:
    near = replace(SEEN, losses=(5.0, 4.09, 3.0))
    assert judge(trial, near, SEEN).state == "ok"
    verdict = judge(trial, replace(SEEN, losses=(5.0, 4.11, 3.0)), SEEN)
    assert verdict.state == "differs"
    assert verdict.text.startswith("other losses: loss 5.0000 to 3.0000, 1,000 tokens/s; losses within 1.1e-01 of ")


def test_where_the_same_bits_are_wanted_norms_count_too(trial: ShortTraining) -> None:
    exact = replace(trial, tolerance=0.0)
    assert judge(exact, SEEN, SEEN).state == "ok"
    assert judge(exact, replace(SEEN, losses=(5.0, 4.0, math.nextafter(3.0, 4))), SEEN).text.startswith("other losses")
    assert judge(exact, replace(SEEN, norms=(1.0, 0.9, 0.7)), SEEN).text.startswith("other gradient norms")


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_differs(trial: ShortTraining, value: float) -> None:
    for broken in (replace(SEEN, losses=(5.0, value, 3.0)), replace(SEEN, norms=(1.0, 0.9, value))):
        assert judge(trial, broken, SEEN).state == "differs"
        assert judge(trial, broken, None).text.startswith("a loss or a gradient is not finite")


def test_who_learns_nothing_differs(trial: ShortTraining) -> None:
    """Both sides may be wrong alike."""
    flat = replace(SEEN, losses=(5.0, 5.0, 5.0))
    assert judge(trial, flat, flat).text.startswith("it has learned nothing")


def test_memory_is_held_against_the_formula(trial: ShortTraining) -> None:
    expected = held_bytes(trial.config, 1).total
    assert trial.holds
    for held, state in (
        (expected, "ok"),
        (1.05 * expected, "ok"),
        (0.99 * expected, "differs"),
        (1.2 * expected + 300 * 2**20, "differs"),
    ):
        seen = replace(SEEN, held_bytes=int(held + 1), peak_bytes=int(2 * held))
        assert judge(trial, seen, SEEN).state == state
        assert judge(replace(trial, holds=False), seen, SEEN).state == "ok"


def test_a_resumed_run_is_the_same_in_every_step() -> None:
    straight = {1: 5.0, 2: 4.0, 3: 3.0}
    assert judge_resumed(straight, dict(straight), 3).state == "ok"
    apart = judge_resumed(straight, {**straight, 2: 4.5}, 3)
    assert (apart.state, apart.text) == ("differs", "other losses from step 2 on, by up to 5.0e-01")
    assert judge_resumed(straight, {1: 5.0, 2: 4.0}, 3).state == "differs"
    assert judge_resumed({}, {}, 3).state == "differs"


def test_samples_follow_their_rule_and_differ(plan: CheckPlan) -> None:
    samples = RuleOfTokens(plan.trials[0].config)
    first, second = samples[0], samples[1]
    assert not first["tokens"].equal(second["tokens"])
    assert samples[0]["tokens"].equal(first["tokens"])
    step = (first["labels"] - 5 * first["tokens"] - 17) % RuleOfTokens.NUM_IDS
    assert set(step.tolist()) == {0, 1}


def test_the_page_has_the_worst_first_and_everything_after(monkeypatch: pytest.MonkeyPatch) -> None:
    verdicts = [
        Verdict("one", "ok", "fine"),
        Verdict("two", "differs", "by 0.5"),
        Verdict("three", "skipped", "2 GPUs"),
    ]
    text = page(verdicts, [Output("Speed", "python -m bench", "1 s\n")], minutes=3.21)
    assert "1 ok, 1 differs, 1 skipped, in 3.2 minutes." in text
    assert (
        text.index("- **two**: by 0.5") < text.index("| one | ok | fine |") < text.index("$ python -m bench\n1 s\n```")
    )
    assert "| commit | " in text
    assert "torch 2." in text
    assert text.index("## What to send us") < text.index("## What differs")
    assert "## What differs" not in page(verdicts[:1], [], minutes=1)
