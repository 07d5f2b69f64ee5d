"""Ways of teaching a trained model: what of it moves, by which rule, at which rates."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from pretrain.config.optimizer import OptimizerConfig, TrainedRowsConfig


@dataclass(frozen=True)
class RowBudget:
    """Rows of each table that a step trains, where a way chooses.

    Attributes:
        number: rows of each table.
        background: file of the reads of the text that the model knows.
    """

    number: int
    background: Path


@dataclass(frozen=True)
class TeachingWay:
    """A way of teaching.

    Attributes:
        what: words for it, in tables.
        rates: rates that are tried; shares of the rates that the model was trained at, but for LoRA's and plain gradients', which
            are rates.
        optimizer: optimizer at a rate, given the run's and the choice of rows; None: adapters, which peft trains.
    """

    what: str
    rates: tuple[float, ...]
    optimizer: Callable[[OptimizerConfig, float, RowBudget], OptimizerConfig] | None = None

    @property
    def moves_rows_alone(self) -> bool:
        """True if what it makes is a patch."""
        return self.optimizer not in (None, _everything)


def _constant(run: OptimizerConfig, rate: float) -> OptimizerConfig:
    """AdamW of the run at a constant share of its rates, without a decay."""
    return OptimizerConfig(
        lr=run.lr * rate,
        schedule="constant",
        weight_decay=0.0,
        beta1=run.beta1,
        beta2=run.beta2,
        epsilon=run.epsilon,
    )


def _everything(run: OptimizerConfig, rate: float, budget: RowBudget) -> OptimizerConfig:
    return replace(_constant(run, rate), value_lr_multiplier=run.value_lr_multiplier)


def _rows(run: OptimizerConfig, rate: float, rows: TrainedRowsConfig) -> OptimizerConfig:
    value_lr = (run.lr * run.value_lr_multiplier if run.value_lr is None else run.value_lr) * rate
    return replace(
        _constant(run, rate), tables="row_wise", table_gradients="rows", value_lr=value_lr, trained_rows=rows
    )


def _all_rows(run: OptimizerConfig, rate: float, budget: RowBudget) -> OptimizerConfig:
    return _rows(run, rate, TrainedRowsConfig())


def _some_rows(run: OptimizerConfig, rate: float, budget: RowBudget) -> OptimizerConfig:
    return _rows(run, rate, TrainedRowsConfig(number=budget.number, background=str(budget.background)))


def _plainly(run: OptimizerConfig, rate: float, budget: RowBudget) -> OptimizerConfig:
    return replace(_some_rows(run, 1.0, budget), row_rule="sgd", value_lr=rate)


WAYS: Mapping[str, TeachingWay] = {
    "full": TeachingWay("everything, AdamW", (0.03, 0.1, 0.3), _everything),
    "lora": TeachingWay("adapters of rank 16 of all linears, AdamW", (1e-3, 3e-3, 1e-2)),
    "all_rows": TeachingWay("all rows that a step reads", (0.3, 1.0, 3.0), _all_rows),
    "rows": TeachingWay("rows read more than elsewhere", (0.3, 1.0, 3.0), _some_rows),
    "rows_sgd": TeachingWay("rows read more than elsewhere, plain gradients", (100.0, 300.0, 1000.0), _plainly),
}
LORA_RANK = 16
