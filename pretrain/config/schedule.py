"""Learning rates as a closed function of the step: nothing to save, nothing to lose on resume.

`step` counts optimizer steps from 0; the values are those used for the update that ends that step. In a run of stages
a schedule counts from the first step of the stage or of the run.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from pretrain.config.optimizer import OptimizerConfig
from pretrain.config.position import tokens_of_run
from pretrain.config.schema import StageConfig, TrainConfig
from pretrain.config.updates import MUON

if TYPE_CHECKING:
    # It imports torch, and code that checks or draws a schedule does not.
    from megamem.parameters.declaration import GroupName


def backbone_lr(step: int, optimizer: OptimizerConfig, num_steps: int) -> float:
    """Linear warm-up, then constant, cosine or warm-up-stable-decay over `num_steps`, from step 0."""
    peak, low, warmup = optimizer.lr, optimizer.min_lr, optimizer.warmup_steps
    if step < warmup:
        start = optimizer.warmup_start
        return peak * ((step + 1) / warmup if start is None else start + (1 - start) * step / warmup)
    match optimizer.schedule:
        case "constant":
            return peak
        case "cosine":
            progress = min(1.0, (step - warmup) / max(1, num_steps - 1 - warmup))
            return low + (peak - low) * 0.5 * (1 + math.cos(math.pi * progress))
        case "wsd":
            into_decay = step + 1 - (num_steps - optimizer.decay_steps)
            progress = min(1.0, max(0, into_decay) / max(1, optimizer.decay_steps))
            return peak + (low - peak) * progress


def schedule_span(
    step: int, optimizer: OptimizerConfig, train: TrainConfig, stage: StageConfig | None
) -> tuple[int, int]:
    """Number of a step within its schedule, and the schedule's number of steps (`optimizer.schedule_from`)."""
    if stage is None:
        return step, train.num_steps
    if optimizer.schedule_from == "run":
        return step, stage.run_steps
    return step - stage.steps_before, train.num_steps - stage.steps_before


def value_multiplier(
    step: int, optimizer: OptimizerConfig, train: TrainConfig, stage: StageConfig | None = None
) -> float:
    """Learning rate of the tables over the backbone's: linear over value_lr_decay_tokens (section 4.2.9)."""
    start, end = optimizer.value_lr_multiplier, optimizer.value_lr_end_multiplier
    if end is None:
        return start
    tokens, decay_tokens = tokens_of_run(train, stage, step), tokens_of_run(train, stage, train.num_steps)
    if stage is not None and optimizer.value_lr_from == "stage":
        tokens, decay_tokens = tokens - stage.tokens_before, decay_tokens - stage.tokens_before
    elif stage is not None:
        decay_tokens = stage.run_tokens
    return start + (end - start) * min(1.0, tokens / (optimizer.value_lr_decay_tokens or decay_tokens))


def largest_table_lr(optimizer: OptimizerConfig) -> float:
    """Largest learning rate that tables can have at a step."""
    multipliers = [optimizer.value_lr_multiplier, optimizer.value_lr_end_multiplier or 0.0]
    values = optimizer.lr * max(multipliers) if optimizer.value_lr is None else optimizer.value_lr
    return max(values, optimizer.lr * (optimizer.pre_value_lr_multiplier or 0.0))


def table_decay(optimizer: OptimizerConfig) -> float:
    """Weight decay of tables."""
    return optimizer.weight_decay if optimizer.value_weight_decay is None else optimizer.value_weight_decay


def group_settings(
    step: int, optimizer: OptimizerConfig, train: TrainConfig, stage: StageConfig | None = None
) -> dict[GroupName, tuple[float, float]]:
    """(learning rate, weight decay) of every group at a step of the run."""
    position, length = schedule_span(step, optimizer, train, stage)
    lr = backbone_lr(position, optimizer, length)
    value_lr = optimizer.value_lr
    if value_lr is None:
        value_lr = lr * value_multiplier(step, optimizer, train, stage)
    pre_multiplier = optimizer.pre_value_lr_multiplier
    retrieval_lr = lr if optimizer.retrieval_lr is None else optimizer.retrieval_lr
    retrieval_decay = (
        optimizer.weight_decay if optimizer.retrieval_weight_decay is None else optimizer.retrieval_weight_decay
    )
    return {
        "backbone": (lr, optimizer.weight_decay),
        "backbone_no_decay": (lr, 0.0),
        "retrieval": (retrieval_lr, retrieval_decay),
        "experts": (lr, optimizer.weight_decay),
        "values": (value_lr, table_decay(optimizer)),
        "pre_values": (value_lr if pre_multiplier is None else lr * pre_multiplier, table_decay(optimizer)),
    }


def apply_schedule(
    param_groups: list[dict[str, Any]],
    step: int,
    optimizer: OptimizerConfig,
    train: TrainConfig,
    stage: StageConfig | None = None,
) -> None:
    """Set learning rate and weight decay of every group for one step, in place.

    Several may have one name: hidden matrices that Muon updates (their `rule`), and the rest, which muP may give other
    rates (their `rate_factor`). A rate times a decay stays what it is without it.
    """
    settings = group_settings(step, optimizer, train, stage)
    for group in param_groups:
        lr, decay = settings[group["name"]]
        if group.get("rule") == MUON.name:
            lr, decay = matrix_settings(lr, decay, optimizer)
        factor = group.get("rate_factor", 1.0)
        group["lr"], group["weight_decay"] = lr * factor, decay / factor


def matrix_settings(lr: float, decay: float, optimizer: OptimizerConfig) -> tuple[float, float]:
    """(learning rate, weight decay) of the hidden matrices of a group with these, where Muon updates them."""
    own = optimizer.muon_weight_decay
    return lr * optimizer.muon_lr_multiplier, decay if own is None else own
