"""Checks that need more than one section, or more than a type. All of them run before any process group or GPU is touched."""

from __future__ import annotations

import importlib.util
import math
import re
from collections.abc import Iterator
from typing import Any

from kernels.implementations import unavailable
from parallel.devices import num_visible_gpus
from pretrain.config.layout_rules import layout_problems
from pretrain.config.parse import join_problems
from pretrain.config.schema import RunConfig
from pretrain.errors import ConfigError

_AT_LEAST_ONE = (
    "model.num_query_groups",
    "model.head_dim",
    "model.vocab_size",
    "model.rotary_base",
    "parallel.tensor",
    "parallel.pipeline",
    "parallel.virtual_pipeline",
    "parallel.context",
    "parallel.memory",
    "train.num_steps",
    "train.global_batch_size",
    "train.micro_batch_size",
    "train.sequence_length",
    "train.max_skipped_steps",
    "evaluation.max_sequences",
    "logging.every_steps",
)
_ABOVE_ZERO = ("model.norm_epsilon", "model.init_std", "parallel.timeout_minutes", "optimizer.lr", "optimizer.epsilon")
_NOT_NEGATIVE = (
    "seed",
    "optimizer.min_lr",
    "optimizer.warmup_steps",
    "optimizer.warmup_start",
    "optimizer.decay_steps",
    "optimizer.weight_decay",
    "optimizer.value_weight_decay",
    "optimizer.beta1",
    "optimizer.beta2",
    "optimizer.clip_grad",
    "optimizer.value_clip_grad",
    "optimizer.value_lr",
    "optimizer.value_lr_multiplier",
    "optimizer.value_lr_end_multiplier",
    "optimizer.value_lr_decay_tokens",
    "optimizer.pre_value_lr_multiplier",
    "data.seed",
    "data.num_workers",
    "evaluation.every_steps",
    "logging.memory_every_steps",
    "checkpoint.every_steps",
    "checkpoint.keep_last",
    "checkpoint.keep_every_steps",
)


def validate(config: RunConfig, world_size: int | None) -> None:
    """Refuses a configuration that cannot run.

    Args:
        config: what was loaded.
        world_size: ranks of the run; None leaves out the checks that need it (to look at a configuration for another machine).

    Raises:
        ConfigError: naming every problem found, each with key, value and fix.
    """
    problems = list(_sizes(config))
    # The next checks divide by these sizes: with one of them wrong they would only add noise.
    if not problems:
        problems += layout_problems(config, world_size)
        problems += _batch(config, world_size)
        problems += _schedule(config)
    problems += _ranges(config)
    problems += _data(config)
    problems += _packages(config)
    if world_size is not None:
        problems += _kernels(config)
    if problems:
        raise ConfigError(join_problems(problems))


def value_at(config: Any, key: str) -> Any:
    """The value of a dotted key."""
    for segment in key.split("."):
        config = getattr(config, segment)
    return config


def _sizes(config: RunConfig) -> Iterator[str]:
    for key in _AT_LEAST_ONE:
        if (value := value_at(config, key)) is not None and value < 1:
            yield f"{key} is {value}: it must be at least 1"


def _ranges(config: RunConfig) -> Iterator[str]:
    for key in _ABOVE_ZERO:
        if (value := value_at(config, key)) is not None and value <= 0:
            yield f"{key} is {value}: it must be above 0"
    for key in _NOT_NEGATIVE:
        if (value := value_at(config, key)) is not None and value < 0:
            yield f"{key} is {value}: it must not be negative"
    for key in ("optimizer.beta1", "optimizer.beta2"):
        if (value := value_at(config, key)) >= 1:
            yield f"{key} is {value}: it must be below 1"
    for key in ("seed", "data.seed"):
        if (value := value_at(config, key)) is not None and value >= 2**31:
            yield f"{key} is {value}: it must be below 2^31, because seeds of ranks and layers are derived by adding to it"
    if not re.fullmatch(r"[\w.+=-]+", config.name) or not config.name.strip("."):
        yield f"name is {config.name!r}: it names a folder, so use letters, digits and . _ - + ="


def _batch(config: RunConfig, world_size: int | None) -> Iterator[str]:
    """Whole microbatches on every data-parallel rank, and as many of them as the schedule needs."""
    train, parallel = config.train, config.parallel
    model_ranks = parallel.tensor * parallel.pipeline * parallel.context
    data_size = world_size // model_ranks if world_size is not None and world_size % model_ranks == 0 else None
    unit = train.micro_batch_size * (data_size or 1)
    over = f" x data-parallel size {data_size}" if data_size is not None else ""
    # Interleaved chunks take microbatches in rounds of one per stage.
    interleaved = parallel.virtual_pipeline > 1 and data_size is not None
    rounds = parallel.pipeline if interleaved else 1
    if train.global_batch_size % unit:
        yield (
            f"train.global_batch_size is {train.global_batch_size}, which is not a multiple of "
            f"train.micro_batch_size {train.micro_batch_size}{over} = {unit}: {_use_multiple(train.global_batch_size, unit * rounds)}"
        )
    elif train.global_batch_size % (unit * rounds):
        yield (
            f"train.global_batch_size is {train.global_batch_size}, which gives {train.global_batch_size // unit} microbatches per rank: "
            f"with parallel.virtual_pipeline {parallel.virtual_pipeline} their number must be a multiple of "
            f"parallel.pipeline {parallel.pipeline}: {_use_multiple(train.global_batch_size, unit * rounds)}"
        )


def _use_multiple(value: int, unit: int) -> str:
    below, above = value // unit * unit, math.ceil(value / unit) * unit
    return f"use {above}" if below == 0 else f"use {below} or {above}"


def _schedule(config: RunConfig) -> Iterator[str]:
    optimizer, num_steps = config.optimizer, config.train.num_steps
    if optimizer.schedule != "constant" and optimizer.min_lr > optimizer.lr:
        yield f"optimizer.min_lr is {optimizer.min_lr}, above optimizer.lr {optimizer.lr}: the schedule ends there, so lower it"
    if optimizer.schedule == "wsd" and optimizer.decay_steps == 0:
        yield (
            "optimizer.decay_steps is 0, and optimizer.schedule wsd ends with a decay of that many steps: "
            "set it, or use schedule: constant"
        )
    if optimizer.warmup_start is not None and optimizer.warmup_start > 1:
        yield f"optimizer.warmup_start is {optimizer.warmup_start}: it is a share of optimizer.lr, so use at most 1"
    decay_steps = optimizer.decay_steps if optimizer.schedule == "wsd" else 0
    if optimizer.warmup_steps + decay_steps > num_steps:
        decay = f" and optimizer.decay_steps {decay_steps}" if decay_steps else ""
        yield (
            f"optimizer.warmup_steps {optimizer.warmup_steps}{decay} need {optimizer.warmup_steps + decay_steps} steps, "
            f"but train.num_steps is {num_steps}: shorten them or train longer"
        )


def _data(config: RunConfig) -> Iterator[str]:
    for index, entry in enumerate(config.data.datasets):
        if not entry.path:
            yield f"data.datasets.{index}.path is empty: give the folder that `megamem data prepare` wrote"
        if entry.weight <= 0:
            yield f"data.datasets.{index}.weight is {entry.weight}: it must be above 0; remove the entry to leave it out"


def _packages(config: RunConfig) -> Iterator[str]:
    """Optional packages that the configuration asks for."""
    wanted = (
        (config.model.implementation == "transformer_engine", "model.implementation", "transformer_engine", "te"),
        (config.logging.tensorboard, "logging.tensorboard", "tensorboard", "tracking"),
        (config.logging.wandb_mode != "disabled", "logging.wandb_mode", "wandb", "tracking"),
    )
    for is_wanted, key, module, extra in wanted:
        if is_wanted and importlib.util.find_spec(module) is None:
            value = str(value_at(config, key)).lower() if key == "logging.tensorboard" else value_at(config, key)
            yield f'{key} is {value}, but {module} is not installed: pip install "megamem[{extra}]", or change the option'


def _kernels(config: RunConfig) -> Iterator[str]:
    """Implementations of the memory kernels that this machine cannot run."""
    if config.model.memory is None:
        return
    device_type = "cuda" if num_visible_gpus() else "cpu"
    implementation = config.train.kernels
    # Where there are GPUs, torch may still be built without them: the ranks will know.
    if implementation == "cpu" and device_type == "cuda":
        return
    if reason := unavailable(implementation, device_type):
        yield f"train.kernels is {implementation}, which {reason}"
