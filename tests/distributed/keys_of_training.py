"""Effects of the keys under `optimizer` and `train`, measured on a few steps of models on one rank."""

from __future__ import annotations

import contextlib
import importlib.util
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hidden_matrices import MuonFormula, matrices_in
from keys_table import BASE, MOE, Subject, Table, changed_names, last_parts, set_key, with_optimizer
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kernels.implementations import Implementation
from kernels.select import implementation_of
from pretrain.config.optimizer import TrainedRowsConfig

TRAINING = Table()
TABLES = {"values", "pre_values"}


def group_of(name: str, weight: Tensor) -> str:
    """The optimizer group of a parameter, by the words of its name."""
    (part,) = last_parts({name})
    if part in TABLES:
        return part
    if weight.dim() == 1:
        return "backbone_no_decay"
    return "experts" if "experts" in name else "retrieval" if ".memory." in name else "backbone"


@dataclass(frozen=True)
class AdamW:
    """Settings of the base's optimizer: three rates and a decay per group."""

    rates: tuple[float, float, float] = (2e-3, 2e-3, 2e-3)
    value_rates: tuple[float, float, float] | None = None
    pre_value_rates: tuple[float, float, float] | None = None
    decay: float = 0.1
    value_decay: float | None = None
    retrieval_rates: tuple[float, float, float] | None = None
    retrieval_decay: float | None = None
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    tables_by_row: bool = False
    row_beta2: float | None = None
    matrices: MuonFormula | None = None

    def of(self, group: str) -> tuple[tuple[float, float, float], float]:
        """Rates and decay."""
        decay = 0.0 if group == "backbone_no_decay" else self.decay
        if group == "retrieval":
            return self.retrieval_rates or self.rates, decay if self.retrieval_decay is None else self.retrieval_decay
        if group not in TABLES:
            return self.rates, decay
        rates = self.value_rates or self.rates
        if group == "pre_values":
            rates = self.pre_value_rates or rates
        return rates, decay if self.value_decay is None else self.value_decay

    def explains(self, subject: Subject) -> None:
        """Every weight after every step follows from the one before and the gradients so far, in float64."""
        for name, before in subject.weights.items():
            rates, decay = self.of(group_of(name, before))
            average = square = torch.zeros_like(before, dtype=torch.float64)
            for number, (step, rate) in enumerate(zip(subject.steps, rates, strict=True), start=1):
                gradient = step.gradients[name].double()
                if self.matrices is not None and matrices_in(name, gradient, subject.config.model):
                    expected, average = self.matrices.updated(
                        name, subject.config.model, before.double(), average, gradient, rate, decay
                    )
                    torch.testing.assert_close(
                        step.weights[name].double(),
                        expected,
                        rtol=2e-7,
                        atol=1e-3 * rate,
                        msg=f"{name} at step {number}",
                    )
                    before = step.weights[name]
                    continue
                average = self.beta1 * average + (1 - self.beta1) * gradient
                mean, squared, beta2 = average / (1 - self.beta1**number), gradient**2, self.beta2
                if self.tables_by_row and last_parts({name}) <= TABLES:
                    mean, squared = gradient, squared.mean(1, keepdim=True)
                    beta2 = self.row_beta2 or beta2
                square = beta2 * square + (1 - beta2) * squared
                size = (square / (1 - beta2**number)).sqrt() + self.epsilon
                expected = before.double() * (1 - rate * decay) - rate * mean / size
                after = step.weights[name]
                torch.testing.assert_close(
                    after.double(), expected, rtol=2e-7, atol=1e-4 * rate + 1e-9, msg=f"{name} at step {number}"
                )
                before = after


def moved_otherwise(base: Subject, second: Subject) -> set[str]:
    """Groups whose first step is another, of the same gradients; the loss before it is the same."""
    one, other = base.steps[0], second.steps[0]
    assert one.loss == other.loss
    return {group_of(name, base.weights[name]) for name in changed_names(one.weights, other.weights)}


EVERY_GROUP = {"backbone", "backbone_no_decay", "retrieval", "values", "pre_values"}


@TRAINING.key("optimizer.lr", 3e-3)
def _(base: Subject, second: Subject) -> None:
    AdamW().explains(base)
    AdamW(rates=(3e-3,) * 3).explains(second)
    assert moved_otherwise(base, second) == EVERY_GROUP


@TRAINING.key("optimizer.beta1", 0.5)
def _(base: Subject, second: Subject) -> None:
    AdamW(beta1=0.5).explains(second)
    assert base.steps[0].loss == second.steps[0].loss
    # The first average is the gradient itself, whatever beta.
    for name, weight in base.steps[0].weights.items():
        torch.testing.assert_close(second.steps[0].weights[name], weight, rtol=2e-7, atol=1e-8)
    assert changed_names(base.steps[1].weights, second.steps[1].weights) == base.weights.keys()


@TRAINING.key("optimizer.beta2", 0.7)
def _(base: Subject, second: Subject) -> None:
    AdamW(beta2=0.7).explains(second)
    for name, weight in base.steps[0].weights.items():
        torch.testing.assert_close(second.steps[0].weights[name], weight, rtol=2e-7, atol=1e-8)
    assert changed_names(base.steps[1].weights, second.steps[1].weights) == base.weights.keys()


@TRAINING.key("optimizer.epsilon", 1e-2)
def _(base: Subject, second: Subject) -> None:
    AdamW(epsilon=1e-2).explains(second)
    assert moved_otherwise(base, second) == EVERY_GROUP


@TRAINING.key("optimizer.weight_decay", 0.4)
def _(base: Subject, second: Subject) -> None:
    AdamW(decay=0.4).explains(second)
    assert moved_otherwise(base, second) == EVERY_GROUP - {"backbone_no_decay"}


@TRAINING.key("optimizer.weight_decay", 0.3, MOE)
def _(base: Subject, second: Subject) -> None:
    AdamW(decay=0.3).explains(second)
    assert moved_otherwise(base, second) == {"backbone", "experts"}


@TRAINING.key("optimizer.value_weight_decay", 0.7)
def _(base: Subject, second: Subject) -> None:
    AdamW(value_decay=0.7).explains(second)
    assert moved_otherwise(base, second) == TABLES


@TRAINING.key("optimizer.value_lr", 5e-3)
def _(base: Subject, second: Subject) -> None:
    AdamW(value_rates=(5e-3,) * 3).explains(second)
    assert moved_otherwise(base, second) == TABLES


@TRAINING.key("optimizer.value_lr_multiplier", 2.0, with_optimizer(weight_decay=0.0))
def _(base: Subject, second: Subject) -> None:
    """Twice the update to the bit, but for the rounding of the weights."""
    AdamW(value_rates=(4e-3,) * 3, decay=0.0).explains(second)
    assert moved_otherwise(base, second) == TABLES
    for name in ("banks.0.values", "banks.1.pre_values"):
        once, twice = (
            subject.steps[0].weights[name].double() - base.weights[name].double() for subject in (base, second)
        )
        torch.testing.assert_close(twice, 2 * once, rtol=0, atol=1e-7)


ENDING = with_optimizer(value_lr_multiplier=3.0)
"""Three steps of 4 x 8 tokens."""


@TRAINING.key("optimizer.value_lr_end_multiplier", 1.5, ENDING)
def _(base: Subject, second: Subject) -> None:
    """Linear over the run's 96 tokens: a third of the way per step."""
    AdamW(value_rates=(6e-3,) * 3).explains(base)
    AdamW(value_rates=(6e-3, 5e-3, 4e-3)).explains(second)
    assert moved_otherwise(base, second) == set()


@TRAINING.key("optimizer.value_lr_decay_tokens", 64, set_key(ENDING, "optimizer.value_lr_end_multiplier", 1.5))
def _(base: Subject, second: Subject) -> None:
    """Half of the way per step, and then no further."""
    AdamW(value_rates=(6e-3, 4.5e-3, 3e-3)).explains(second)
    assert moved_otherwise(base, second) == set()


@TRAINING.key("optimizer.pre_value_lr_multiplier", 0.5)
def _(base: Subject, second: Subject) -> None:
    AdamW(pre_value_rates=(1e-3,) * 3).explains(second)
    assert moved_otherwise(base, second) == {"pre_values"}


@TRAINING.key("optimizer.retrieval_lr", 5e-3, with_optimizer(schedule="cosine", min_lr=4e-4))
def _(base: Subject, second: Subject) -> None:
    """The rate holds at every step, whatever the schedule."""
    AdamW(rates=(2e-3, 1.2e-3, 4e-4)).explains(base)
    AdamW(rates=(2e-3, 1.2e-3, 4e-4), retrieval_rates=(5e-3,) * 3).explains(second)
    assert moved_otherwise(base, second) == {"retrieval"}


@TRAINING.key("optimizer.retrieval_weight_decay", 0.7)
def _(base: Subject, second: Subject) -> None:
    AdamW(retrieval_decay=0.7).explains(second)
    assert moved_otherwise(base, second) == {"retrieval"}


@TRAINING.key("optimizer.trained_layers", (2,))
def _(base: Subject, second: Subject) -> None:
    """The second block and its bank move as they did, but for the clipping; everything else stands still."""
    moved = changed_names(second.weights, second.steps[-1].weights)
    assert moved == {name for name in second.weights if name.startswith(("decoder.layers.1.", "banks.1."))}
    assert second.steps[0].loss == base.steps[0].loss
    assert second.steps[0].norm < base.steps[0].norm


def prepare_read_counts() -> None:
    """Two files of reads of the base's tables: rows of one parity are read by all sequences, the others by none."""
    for name, parity in (("even", 0), ("odd", 1)):
        counts = {"num_sequences": np.array([10])}
        for bank in BASE.model.memory_plan.banks:
            sequences = (np.arange(bank.num_rows) % 2 == parity) * 10
            counts |= {f"sequences.banks.{bank.index}": sequences, f"reads.banks.{bank.index}": sequences * 2}
        np.savez(f"{name}.npz", **counts)


def choosing(**rows: Any) -> Any:
    """The base with rows that are trained alone, by plain gradients."""
    return with_optimizer(
        tables="row_wise",
        table_gradients="rows",
        row_rule="sgd",
        value_weight_decay=0.0,
        trained_rows=TrainedRowsConfig(**rows),
    )


def rows_moved(subject: Subject) -> dict[str, set[int]]:
    """Rows of each table that the first step moves; nothing else may move in any step."""
    moved = changed_names(subject.weights, subject.steps[-1].weights)
    assert moved == {name for name in subject.weights if name.startswith("banks.")}
    return {
        name: set((subject.weights[name] != subject.steps[0].weights[name]).any(1).nonzero().flatten().tolist())
        for name in moved
    }


@TRAINING.key(
    "optimizer.trained_rows",
    TrainedRowsConfig(),
    with_optimizer(tables="row_wise", table_gradients="rows", value_weight_decay=0.0),
)
def _(base: Subject, second: Subject) -> None:
    """Tables move as they did in the first step, and everything else stands still."""
    assert base.steps[0].loss == second.steps[0].loss
    assert second.steps[0].norm < base.steps[0].norm
    for name in rows_moved(second):
        torch.testing.assert_close(base.steps[0].weights[name], second.steps[0].weights[name], rtol=1e-6, atol=1e-7)


@TRAINING.key("optimizer.trained_rows.number", 3, choosing(score="reads", number=9))
def _(base: Subject, second: Subject) -> None:
    few, more = rows_moved(second), rows_moved(base)
    for name, rows in few.items():
        assert len(rows) == 3
        assert len(more[name]) == 9
        assert rows < more[name]


@TRAINING.key("optimizer.trained_rows.share", 0.2, choosing(score="reads", share=0.4))
def _(base: Subject, second: Subject) -> None:
    few, more = rows_moved(second), rows_moved(base)
    for name, rows in few.items():
        assert rows < more[name]
        assert len(more[name]) - 1 <= 2 * len(rows) <= len(more[name]) + 1


KNOWN = choosing(number=9, background="even.npz")


@TRAINING.key("optimizer.trained_rows.score", "kl", choosing(number=50, background="even.npz"))
def _(base: Subject, second: Subject) -> None:
    """Odd rows, which the background does not read, come first in both. The others score nothing by tf_idf, so the first of them
    are taken, and by kl the more the less they are read."""
    for name, rows in rows_moved(base).items():
        others = rows_moved(second)[name]
        odd, even = ({row for row in rows if row % 2 == parity} for parity in (1, 0))
        assert odd == {row for row in others if row % 2}
        assert even
        assert max(even) < max(others - odd)


@TRAINING.key("optimizer.trained_rows.score", "reads", KNOWN)
def _(base: Subject, second: Subject) -> None:
    assert all(any(row % 2 == 0 for row in rows) for rows in rows_moved(second).values())


@TRAINING.key("optimizer.trained_rows.background", "odd.npz", KNOWN)
def _(base: Subject, second: Subject) -> None:
    assert all(row % 2 == 0 for rows in rows_moved(second).values() for row in rows)


@TRAINING.key("optimizer.trained_rows.text", "even.npz", choosing(number=9, score="reads"))
def _(base: Subject, second: Subject) -> None:
    """Nine even rows, the first ones, as all are read alike."""
    for name, rows in rows_moved(second).items():
        assert rows <= set(range(0, 18, 2))
        assert rows != rows_moved(base)[name]


DECAYING = with_optimizer(schedule="cosine", min_lr=4e-4)
"""A cosine over three steps is at both of its ends and in their middle."""


@TRAINING.key("optimizer.schedule", "cosine", with_optimizer(min_lr=1e-4))
def _(base: Subject, second: Subject) -> None:
    AdamW().explains(base)
    AdamW(rates=(2e-3, 1.05e-3, 1e-4)).explains(second)
    assert moved_otherwise(base, second) == set()


@TRAINING.key("optimizer.min_lr", 8e-4, DECAYING)
def _(base: Subject, second: Subject) -> None:
    AdamW(rates=(2e-3, 1.2e-3, 4e-4)).explains(base)
    AdamW(rates=(2e-3, 1.4e-3, 8e-4)).explains(second)


@TRAINING.key("optimizer.schedule", "wsd", set_key(DECAYING, "optimizer.decay_steps", 1))
def _(base: Subject, second: Subject) -> None:
    AdamW(rates=(2e-3, 1.2e-3, 4e-4)).explains(base)
    AdamW(rates=(2e-3, 2e-3, 4e-4)).explains(second)


@TRAINING.key("optimizer.decay_steps", 1, with_optimizer(schedule="wsd", min_lr=4e-4, decay_steps=3))
def _(base: Subject, second: Subject) -> None:
    low = 2e-3 - 1.6e-3 / 3
    AdamW(rates=(low, low - 1.6e-3 / 3, 4e-4)).explains(base)
    AdamW(rates=(2e-3, 2e-3, 4e-4)).explains(second)


@TRAINING.key("optimizer.warmup_steps", 2)
def _(base: Subject, second: Subject) -> None:
    AdamW(rates=(1e-3, 2e-3, 2e-3)).explains(second)


@TRAINING.key("optimizer.warmup_start", 0.1, with_optimizer(warmup_steps=2))
def _(base: Subject, second: Subject) -> None:
    """The warmup starts at a tenth, and goes half of the way per step."""
    AdamW(rates=(1e-3, 2e-3, 2e-3)).explains(base)
    AdamW(rates=(2e-4, 1.1e-3, 2e-3)).explains(second)


def norm_of(gradients: dict[str, Tensor], tables: bool) -> float:
    squares = [g.double().square().sum() for name, g in gradients.items() if (last_parts({name}) <= TABLES) == tables]
    return math.sqrt(sum(map(float, squares)))


def scales(base: Subject, second: Subject) -> tuple[float, float]:
    """Shares of the first step's gradients left after clipping: of all but the tables, and of the tables."""
    shares: dict[bool, list[float]] = {False: [], True: []}
    for name, gradient in base.steps[0].gradients.items():
        if norm := float(gradient.double().norm()):
            left = second.steps[0].gradients[name].double()
            shares[last_parts({name}) <= TABLES].append(float(left.norm()) / norm)
            torch.testing.assert_close(left, gradient.double() * (float(left.norm()) / norm), rtol=1e-5, atol=1e-9)
    dense, tables = shares[False], shares[True]
    assert max(dense) == pytest.approx(min(dense), rel=1e-4)
    assert max(tables) == pytest.approx(min(tables), rel=1e-4)
    return dense[0], tables[0]


@TRAINING.key("optimizer.clip_grad", 0.25)
def _(base: Subject, second: Subject) -> None:
    """One norm of everything, and one factor; 0 does not clip."""
    dense, tables = (norm_of(base.steps[0].gradients, tables) for tables in (False, True))
    norm = math.hypot(dense, tables)
    assert base.steps[0].norm == pytest.approx(norm, rel=1e-5)
    assert second.steps[0].norm == pytest.approx(norm, rel=1e-5)
    assert norm > 0.25
    assert scales(base, second) == pytest.approx((0.25 / norm,) * 2, rel=1e-4)
    AdamW().explains(second)


@TRAINING.key("optimizer.value_clip_grad", 1e-3)
def _(base: Subject, second: Subject) -> None:
    """A norm of the tables' own; the other one then is without them."""
    dense, tables = (norm_of(base.steps[0].gradients, tables) for tables in (False, True))
    assert base.steps[0].norm == pytest.approx(math.hypot(dense, tables), rel=1e-5)
    assert second.steps[0].norm == pytest.approx(dense, rel=1e-5)
    assert tables > 1e-3
    assert scales(base, second) == pytest.approx((1.0, 1e-3 / tables), rel=1e-4)


WITH_MATRICES = {"backbone", "retrieval"}
MUON = with_optimizer(matrices="muon")


@TRAINING.key("optimizer.matrices", "muon")
def _(base: Subject, second: Subject) -> None:
    AdamW(matrices=MuonFormula()).explains(second)
    assert moved_otherwise(base, second) == WITH_MATRICES


@TRAINING.key("optimizer.matrices", "muon", MOE)
def _(base: Subject, second: Subject) -> None:
    AdamW(matrices=MuonFormula()).explains(second)
    assert moved_otherwise(base, second) == {"backbone", "experts"}


@TRAINING.key("optimizer.muon_lr_multiplier", 3.0, MUON)
def _(base: Subject, second: Subject) -> None:
    AdamW(matrices=MuonFormula(rate=3.0)).explains(second)
    assert moved_otherwise(base, second) == WITH_MATRICES


@TRAINING.key("optimizer.muon_weight_decay", 0.7, MUON)
def _(base: Subject, second: Subject) -> None:
    AdamW(matrices=MuonFormula(decay=0.7)).explains(second)
    assert moved_otherwise(base, second) == WITH_MATRICES


@TRAINING.key("optimizer.muon_scale", "original", MUON)
def _(base: Subject, second: Subject) -> None:
    AdamW(matrices=MuonFormula(scale="original")).explains(second)
    assert moved_otherwise(base, second) == WITH_MATRICES


@TRAINING.key("optimizer.muon_momentum", 0.5, MUON)
def _(base: Subject, second: Subject) -> None:
    """The first update has one direction whatever the momentum."""
    AdamW(matrices=MuonFormula(momentum=0.5)).explains(second)
    for name, weight in base.steps[0].weights.items():
        torch.testing.assert_close(second.steps[0].weights[name], weight, rtol=2e-7, atol=1e-6)
    matrices = {name for name, weight in base.weights.items() if matrices_in(name, weight, base.config.model)}
    assert matrices <= changed_names(base.steps[1].weights, second.steps[1].weights)


@TRAINING.key("optimizer.muon_nesterov", False, MUON)
def _(base: Subject, second: Subject) -> None:
    AdamW(matrices=MuonFormula(nesterov=False)).explains(second)
    for name, weight in base.steps[0].weights.items():
        torch.testing.assert_close(second.steps[0].weights[name], weight, rtol=2e-7, atol=1e-6)
    matrices = {name for name, weight in base.weights.items() if matrices_in(name, weight, base.config.model)}
    assert matrices <= changed_names(base.steps[1].weights, second.steps[1].weights)


@TRAINING.key("optimizer.muon_ns_steps", 3, MUON)
def _(base: Subject, second: Subject) -> None:
    AdamW(matrices=MuonFormula(num_steps=3)).explains(second)
    assert moved_otherwise(base, second) == WITH_MATRICES


@TRAINING.key("optimizer.tables", "row_wise")
def _(base: Subject, second: Subject) -> None:
    AdamW(tables_by_row=True).explains(second)
    assert moved_otherwise(base, second) == TABLES


BY_ROW = with_optimizer(tables="row_wise", value_weight_decay=0.0)


@TRAINING.key("optimizer.row_rule", "sgd", BY_ROW)
def _(base: Subject, second: Subject) -> None:
    assert base.steps[0].loss == second.steps[0].loss
    before = second.weights
    for step in second.steps:
        for name in before:
            if last_parts({name}) <= TABLES:
                expected = before[name].double() - 2e-3 * step.gradients[name].double()
                torch.testing.assert_close(step.weights[name].double(), expected, rtol=1e-7, atol=1e-12)
        before = step.weights


@TRAINING.key("optimizer.row_beta2", 0.7, with_optimizer(tables="row_wise"))
def _(base: Subject, second: Subject) -> None:
    AdamW(tables_by_row=True, row_beta2=0.7).explains(second)
    for name, weight in base.steps[0].weights.items():
        torch.testing.assert_close(second.steps[0].weights[name], weight, rtol=2e-7, atol=1e-8)
    assert {
        group_of(name, base.weights[name]) for name in changed_names(base.steps[1].weights, second.steps[1].weights)
    } >= TABLES


@TRAINING.key("optimizer.row_clock", "reads", with_optimizer(tables="row_wise", table_gradients="rows"))
def _(base: Subject, second: Subject) -> None:
    """The first update of a row is 1 / sqrt(1 - beta2) times as large; rows that were not read stay, and others decay by 0.1."""
    assert base.steps[0].loss == second.steps[0].loss
    for name in (name for name in base.weights if last_parts([name]) <= TABLES):
        before, after = base.weights[name], second.steps[0].weights[name]
        # What is stored is the row over the table's scale, which has the decay.
        moved = (base.steps[0].weights[name] - before) * (1 - 2e-3 * 0.1)
        read = moved.any(1)
        assert 0 < int(read.sum()) < len(read)
        assert torch.equal(after[~read], before[~read])
        expected = 0.9 * before + moved / math.sqrt(0.05)
        # Beside the smallest gradients epsilon counts.
        firm = moved.square().mean(1).sqrt() > 0.9999 * 2e-3
        assert firm.any()
        torch.testing.assert_close(after[firm], expected[firm], rtol=1e-4, atol=5e-6)


@TRAINING.key("optimizer.table_gradients", "rows", BY_ROW)
def _(base: Subject, second: Subject) -> None:
    """The same losses, norms and weights, without gradients of tables."""
    for one, other in zip(base.steps, second.steps, strict=True):
        assert (one.loss, one.norm) == (other.loss, other.norm)
        assert not changed_names(one.weights, other.weights)
        assert last_parts(one.gradients.keys() - other.gradients.keys()) == TABLES


@TRAINING.key(
    "optimizer.tables_every", 3, with_optimizer(tables="row_wise", table_gradients="rows", value_weight_decay=0.0)
)
def _(base: Subject, second: Subject) -> None:
    """The first two of three steps leave tables as they are, and out of the norm."""
    assert base.steps[0].loss == second.steps[0].loss
    assert second.steps[0].norm < base.steps[0].norm
    before = second.weights
    for number, step in enumerate(second.steps, start=1):
        moved = {name for name in changed_names(before, step.weights) if last_parts({name}) <= TABLES}
        assert moved == ({name for name in before if last_parts({name}) <= TABLES} if number == 3 else set())
        assert changed_names(before, step.weights) - moved
        before = step.weights


@TRAINING.key("optimizer.table_gradient_dtype", "bf16", BY_ROW)
def _(base: Subject, second: Subject) -> None:
    """The first loss is the same; gradients of tables have 8 bits, which a small share of all is rounded to."""
    assert base.steps[0].loss == second.steps[0].loss
    for name, wide in base.steps[0].gradients.items():
        narrow = second.steps[0].gradients[name]
        if last_parts([name]) <= TABLES:
            assert torch.equal(narrow, narrow.bfloat16().to(narrow.dtype))
            assert 0 < float((narrow - wide).norm()) < 2**-6 * float(wide.norm())
        else:
            assert torch.equal(narrow, wide)


@TRAINING.key("optimizer.value_offload", "cpu")
def _(base: Subject, second: Subject) -> None:
    """The same weights; the tables' state is not in the optimizer that PyTorch steps on the device."""
    AdamW().explains(second)

    def elements(subject: Subject) -> int:
        parts = subject.run.optimizer.chained_optimizers
        return sum(p.numel() for part in parts for group in part.param_groups for p in group["params"])

    assert elements(base) - elements(second) == 2 * 144 * (16 + 10)
    assert not list(base.run.optimizer.describe())
    (text,) = second.run.optimizer.describe()
    assert "in host memory" in text


# train.*


@TRAINING.key("train.num_steps", 5, DECAYING)
def _(base: Subject, second: Subject) -> None:
    """A cosine over five steps: its third is in the middle."""
    AdamW(rates=(2e-3, 1.2e-3 + 0.8e-3 * math.sqrt(0.5), 1.2e-3)).explains(second)


@TRAINING.key("train.num_steps", 6, set_key(ENDING, "optimizer.value_lr_end_multiplier", 1.5))
def _(base: Subject, second: Subject) -> None:
    """The multiplier of the tables takes the whole run, too."""
    AdamW(value_rates=(6e-3, 5.5e-3, 5e-3)).explains(second)


def forwards(subject: Subject) -> list[tuple[int, ...]]:
    """Shapes [b, s] of the tokens of one step's microbatches."""
    run, seen = subject.build(), []
    run.bare[0].embedding.register_forward_pre_hook(
        lambda _, arguments, named: seen.append(tuple((*arguments, *named.values())[0].shape)), with_kwargs=True
    )
    run.train(1)
    return seen


@TRAINING.key("train.global_batch_size", 8)
def _(base: Subject, second: Subject) -> None:
    assert forwards(base) == [(2, 8)] * 2
    assert forwards(second) == [(2, 8)] * 4


@TRAINING.key("train.micro_batch_size", 1)
def _(base: Subject, second: Subject) -> None:
    """The same samples in other portions: the same loss and the same gradients, to rounding."""
    assert forwards(second) == [(1, 8)] * 4
    assert second.steps[0].loss == pytest.approx(base.steps[0].loss, rel=1e-6)
    assert second.steps[0].norm == pytest.approx(base.steps[0].norm, rel=1e-5)


@TRAINING.key("train.sequence_length", 12)
def _(base: Subject, second: Subject) -> None:
    assert forwards(second) == [(2, 12)] * 2
    assert not changed_names(base.weights, second.weights)


@TRAINING.key("train.precision", "bf16")
def _(base: Subject, second: Subject) -> None:
    """Weights and activations in bf16; main weights, gradients and moments in fp32."""
    for subject, dtype in ((base, torch.float32), (second, torch.bfloat16)):
        assert {p.dtype for p in subject.run.chunks[0].parameters()} == {dtype}
        assert {p.main_grad.dtype for p in subject.run.chunks[0].parameters()} == {torch.float32}
        parts = subject.run.optimizer.chained_optimizers
        assert {p.dtype for part in parts for group in part.param_groups for p in group["params"]} == {torch.float32}
        # The logits leave the model in fp32, from a final norm that does not.
        seen: list[torch.dtype] = []
        subject.model.decoder.final_layernorm.register_forward_hook(
            lambda _, inputs, out, seen=seen: seen.append(out.dtype)
        )
        subject.logits()
        assert seen == [dtype]
    assert second.steps[0].loss == pytest.approx(base.steps[0].loss, rel=1e-2)


def calls_per_step(subject: Subject) -> tuple[int, int]:
    """Forward passes of the first block's attention core and feed-forward in one step of two microbatches."""
    run, counts = subject.build(), {"core": 0, "ffn": 0}
    block = run.bare[0].decoder.layers[0]

    def count(name: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            counts[name] += 1

        return hook

    block.self_attention.core_attention.register_forward_pre_hook(count("core"))
    block.mlp.ffn.register_forward_pre_hook(count("ffn"))
    run.train(1)
    return counts["core"], counts["ffn"]


def _enter_recompute(how: str, calls: tuple[int, int]) -> None:
    @TRAINING.key("train.recompute", how)
    def _(base: Subject, second: Subject) -> None:
        assert calls_per_step(base) == (2, 2)
        assert calls_per_step(second) == calls
        assert second.steps[0].loss == base.steps[0].loss
        assert second.steps[0].norm == pytest.approx(base.steps[0].norm, rel=1e-6)


_enter_recompute("full", (4, 4))
_enter_recompute("selective", (4, 2))


class LargestLogits(TorchDispatchMode):
    """The most tokens whose logits, over 64 ids, are in one tensor that is made inside of the context."""

    num_tokens = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        # The transposed weight is none: [32, 64].
        if isinstance(out, Tensor) and out.dim() > 1 and out.shape[-1] == 64 and out.shape != (32, 64):
            self.num_tokens = max(self.num_tokens, out.numel() // 64)
        return out


@TRAINING.key("train.loss_chunk_tokens", 5)
def _(base: Subject, second: Subject) -> None:
    """Microbatches of 16 tokens, whole or in chunks of 5, 5, 5 and 1: the same loss and the same gradients."""
    for subject, largest in ((base, 16), (second, 5)):
        run = subject.build()
        with LargestLogits() as seen:
            run.train(1)
        assert seen.num_tokens == largest
    assert second.steps[0].loss == pytest.approx(base.steps[0].loss, rel=1e-6)
    assert second.steps[0].norm == pytest.approx(base.steps[0].norm, rel=1e-6)


@TRAINING.key("train.apex", ("norms",))
def _(base: Subject, second: Subject) -> None:
    """Another class in every slot of a norm; its kernels are refused where they are not installed."""
    assert type(base.model.decoder.final_layernorm).__name__ == "RMSNorm"
    if importlib.util.find_spec("apex") is None:
        with pytest.raises(ImportError, match="apex"):
            second.build()
    else:
        assert type(second.model.decoder.final_layernorm).__name__ == "ApexRMSNorm"


@contextlib.contextmanager
def watched_kernels() -> Iterator[set[str]]:
    """Record the kernels that models built inside of the context call."""
    called: set[str] = set()

    def watched(function: Callable[..., Any], name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            called.add(name)
            return function(*arguments, **named)

        return call

    def load(op: str, name: Implementation) -> Any:
        return watched(implementation_of(op, name), f"{name} {op}")

    with patch("kernels.select.implementation_of", load):
        yield called


def kernels_of(subject: Subject) -> set[str]:
    """Kernels that one step calls; its loss and norm are those of the base to rounding."""
    with watched_kernels() as called:
        ((loss, norm),) = subject.build().train(1)
    assert loss == pytest.approx(subject.steps[0].loss, rel=1e-6)
    assert norm == pytest.approx(subject.steps[0].norm, rel=1e-5)
    return called


_FORWARD = (
    "gather_dot",
    "gather_sum",
    "rms_norm",
    "rotated_heads",
    "shuffled_rows",
    "swiglu",
    "tucker_scores",
    "tucker_topk",
)


@TRAINING.key("train.kernels", "naive")
def _(base: Subject, second: Subject) -> None:
    assert kernels_of(base) == {f"torch {op}" for op in (*_FORWARD, "segment_accumulate")}
    # Naive gathers leave their gradients to autograd.
    assert kernels_of(second) == {f"naive {op}" for op in _FORWARD}
    assert second.steps[0].loss == pytest.approx(base.steps[0].loss, rel=1e-6)
    assert second.steps[0].norm == pytest.approx(base.steps[0].norm, rel=1e-5)
