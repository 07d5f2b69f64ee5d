"""Learning rates as a closed function of the step: nothing to save, nothing to lose on resume.

`step` counts optimizer steps from 0; the values are those used for the update that ends that step.
"""

from __future__ import annotations

import math
from typing import Any

from megamem.parameters import GroupName
from pretrain.config.schema import OptimizerConfig, TrainConfig


def backbone_lr(step: int, optimizer: OptimizerConfig, num_steps: int) -> float:
    """Linear warm-up, then constant, cosine or warm-up-stable-decay over a run of `num_steps`."""
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


def value_multiplier(step: int, optimizer: OptimizerConfig, train: TrainConfig) -> float:
    """Learning rate of the tables over the backbone's: linear over value_lr_decay_tokens (section 4.2.9)."""
    start, end = optimizer.value_lr_multiplier, optimizer.value_lr_end_multiplier
    if end is None:
        return start
    decay_tokens = optimizer.value_lr_decay_tokens or train.num_steps * train.tokens_per_step
    return start + (end - start) * min(1.0, step * train.tokens_per_step / decay_tokens)


def group_settings(step: int, optimizer: OptimizerConfig, train: TrainConfig) -> dict[GroupName, tuple[float, float]]:
    """(learning rate, weight decay) of every group at a step."""
    lr = backbone_lr(step, optimizer, train.num_steps)
    value_lr = lr * value_multiplier(step, optimizer, train) if optimizer.value_lr is None else optimizer.value_lr
    pre_multiplier = optimizer.pre_value_lr_multiplier
    table_decay = optimizer.weight_decay if optimizer.value_weight_decay is None else optimizer.value_weight_decay
    return {
        "backbone": (lr, optimizer.weight_decay),
        "backbone_no_decay": (lr, 0.0),
        "retrieval": (lr, optimizer.weight_decay),
        "experts": (lr, optimizer.weight_decay),
        "values": (value_lr, table_decay),
        "pre_values": (value_lr if pre_multiplier is None else lr * pre_multiplier, table_decay),
    }


def apply_schedule(
    param_groups: list[dict[str, Any]], step: int, optimizer: OptimizerConfig, train: TrainConfig
) -> None:
    """Set learning rate and weight decay of every group for one step, in place."""
    settings = group_settings(step, optimizer, train)
    for group in param_groups:
        group["lr"], group["weight_decay"] = settings[group["name"]]
