"""The weights after each step are those of AdamW, or of `optimizer.tables` and `optimizer.matrices`, computed again in
float64 from the gradients: with the rates of a warm-up and a decay, a skipped step, and a resume.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hidden_matrices import MuonFormula, is_matrix
from megatron.core import tensor_parallel
from tiny_runs import SHARED, TinyRun, tiny_run
from torch import Tensor

from pretrain.checkpoint.folder import step_folder
from pretrain.config.optimizer import OptimizerConfig
from pretrain.train.loop import take_step

NUM_STEPS, SKIPPED, SAVED = 7, 2, 4
BETA1, BETA2, EPSILON = 0.8, 0.9, 1e-6
CONFIG = replace(
    SHARED,
    train=replace(SHARED.train, num_steps=NUM_STEPS),
    optimizer=OptimizerConfig(
        lr=4e-3,
        min_lr=1e-3,
        schedule="cosine",
        warmup_steps=3,
        weight_decay=2.0,
        value_weight_decay=0.5,
        beta1=BETA1,
        beta2=BETA2,
        epsilon=EPSILON,
        clip_grad=0.5,
        value_lr_multiplier=5.0,
        value_lr_end_multiplier=1.5,
        pre_value_lr_multiplier=0.5,
    ),
)


def settings_of(name: str, dim: int, step: int) -> tuple[float, float]:
    """Learning rate and weight decay of a parameter at a step, counted from 0."""
    if step < 3:
        lr = 4e-3 * (step + 1) / 3
    else:
        # From the peak at step 3 to the minimum at the last one.
        lr = 1e-3 + 3e-3 * (1 + math.cos(math.pi * (step - 3) / (NUM_STEPS - 1 - 3))) / 2
    if name.endswith(".pre_values"):
        return 0.5 * lr, 0.5
    if name.endswith(".values"):
        return (5.0 - 3.5 * step / NUM_STEPS) * lr, 0.5
    return lr, 2.0 if dim > 1 else 0.0


@dataclass
class AdamW:
    """One parameter's trajectory in float64."""

    weight: Tensor
    first: Tensor
    second: Tensor
    num_updates: int = 0

    def update(self, gradient: Tensor, lr: float, decay: float) -> None:
        self.num_updates += 1
        self.first = BETA1 * self.first + (1 - BETA1) * gradient
        self.second = BETA2 * self.second + (1 - BETA2) * gradient**2
        mean = self.first / (1 - BETA1**self.num_updates)
        square = self.second / (1 - BETA2**self.num_updates)
        self.weight = self.weight - lr * decay * self.weight - lr * mean / (square.sqrt() + EPSILON)


@dataclass
class ByRow(AdamW):
    """A table's trajectory in float64 with a second moment [rows, 1], which begins in that shape, and without a first."""

    def update(self, gradient: Tensor, lr: float, decay: float) -> None:
        self.num_updates += 1
        self.second = BETA2 * self.second + (1 - BETA2) * (gradient**2).mean(1, keepdim=True)
        square = self.second / (1 - BETA2**self.num_updates)
        self.weight = (1 - lr * decay) * self.weight - lr * gradient / (square.sqrt() + EPSILON)


@dataclass
class ByMuon(AdamW):
    """The trajectory in float64 of hidden matrices, `first` being their momentum."""

    name: str = ""

    def update(self, gradient: Tensor, lr: float, decay: float) -> None:
        self.weight, self.first = MuonFormula().updated(
            self.name, CONFIG.model, self.weight, self.first, gradient, lr, decay
        )


@contextmanager
def without_finite_gradients(run: TinyRun) -> Iterator[None]:
    (bare,) = run.bare
    hook = bare.decoder.final_layernorm.register_forward_hook(lambda module, args, out: out * math.inf)
    yield
    hook.remove()


def weights_of(run: TinyRun) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in run.bare[0].named_parameters()}


def largest_errors(run: TinyRun, folder: Path) -> list[float]:
    """Train, and save on the way: after each step, the largest difference from the trajectory in float64, over the
    learning rate of the parameter.
    """
    trajectories: dict[str, AdamW] = {}
    for name, weight in weights_of(run).items():
        zeros = torch.zeros_like(weight, dtype=torch.float64)
        if name.endswith("values") and run.config.optimizer.tables == "row_wise":
            trajectories[name] = ByRow(weight.double(), zeros, zeros[:, :1])
        elif is_matrix(name) and run.config.optimizer.matrices == "muon":
            trajectories[name] = ByMuon(weight.double(), zeros, zeros, name=name)
        else:
            trajectories[name] = AdamW(weight.double(), zeros, zeros)
    errors = []
    for step in range(NUM_STEPS):
        if step == SKIPPED:
            with without_finite_gradients(run):
                result, _ = take_step(run.run, run.batches)
        else:
            result, _ = take_step(run.run, run.batches)
        assert result.norms.are_finite == (step != SKIPPED)
        worst = 0.0
        for name, parameter in run.bare[0].named_parameters():
            lr, decay = settings_of(name, parameter.dim(), step)
            trajectory = trajectories[name]
            if result.norms.are_finite:
                trajectory.update(parameter.main_grad.double(), lr, decay)
            worst = max(worst, float((parameter.detach().double() - trajectory.weight).abs().max()) / lr)
        errors.append(worst)
        if step + 1 == SAVED:
            run.save(folder)
    return errors


@pytest.mark.parametrize(("tables", "matrices"), [("adamw", "adamw"), ("row_wise", "muon")])
def test_the_weights_move_as_the_optimizer_says(run_ranks: Any, tmp_path: Path, tables: Any, matrices: Any) -> None:
    """Every parameter follows its update with the settings above written out; a resumed run goes the same way to the
    bit."""
    config = replace(CONFIG, optimizer=replace(CONFIG.optimizer, tables=tables, matrices=matrices))

    def main() -> tuple[list[float], list[str]]:
        with tiny_run(config) as run:
            errors = largest_errors(run, tmp_path)
            expected = weights_of(run)
        with tiny_run(config) as run:
            run.resume(step_folder(tmp_path, SAVED))
            run.train(NUM_STEPS - SAVED)
            return errors, [name for name, w in weights_of(run).items() if not torch.equal(w, expected[name])]

    ((errors, different),) = run_ranks(main, 1)
    assert len(errors) == NUM_STEPS
    assert max(errors) < 1e-3, errors
    assert not different


def draws_of(run: TinyRun, num_steps: int) -> list[tuple[float, float]]:
    """A random number of each of Megatron's two generators in the middle of every step."""
    draws: list[tuple[float, float]] = []

    def draw(*_: object) -> None:
        with tensor_parallel.get_cuda_rng_tracker().fork():
            of_tensor_rank = float(torch.rand(()))
        draws.append((float(torch.rand(())), of_tensor_rank))

    hook = run.bare[0].decoder.final_layernorm.register_forward_hook(draw)
    run.train(num_steps)
    hook.remove()
    return draws


def test_random_numbers_are_those_of_the_seed_and_the_step(run_ranks: Any, tmp_path: Path) -> None:
    """Though nothing in a step draws any yet."""
    config = replace(CONFIG, train=replace(CONFIG.train, micro_batch_size=8))

    def main() -> tuple[list[tuple[float, float]], ...]:
        with tiny_run(config) as run:
            before = draws_of(run, 1)
            run.save(tmp_path)
            after = draws_of(run, 2)
        with tiny_run(config) as run:
            run.resume(step_folder(tmp_path, 1))
            resumed = draws_of(run, 2)
        with tiny_run(replace(config, seed=2)) as run:
            return before + after, resumed, draws_of(run, 3)

    ((straight, resumed, other_seed),) = run_ranks(main, 1)
    assert resumed == straight[1:]
    every = [number for draws in (straight, other_seed) for draw in draws for number in draw]
    assert len(every) == len(set(every)) == 12
