"""Checks that need more than a field's type and limits. They run before any process group or GPU is touched."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from operator import attrgetter

from kernels.implementations import unavailable
from parallel.devices import num_visible_gpus
from pretrain.config.layout_rules import layout_problems
from pretrain.config.parse import join_problems
from pretrain.config.schema import RunConfig
from pretrain.config.suggest import nearest_multiples
from pretrain.errors import ConfigError


def validate(config: RunConfig, world_size: int | None) -> None:
    """Refuses a configuration that cannot run.

    Args:
        config: the run.
        world_size: ranks of the run; None leaves out the checks that need it (to look at a configuration for another
            machine).

    Raises:
        ConfigError: naming every problem found, each with key, value and fix.
    """
    problems = [*layout_problems(config, world_size), *_batch(config, world_size), *_schedule(config)]
    problems += [*_names(config), *_packages(config)]
    if world_size is not None:
        problems += _kernels(config)
    if problems:
        raise ConfigError(join_problems(problems))


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
            f"train.global_batch_size is {train.global_batch_size}, which is not a multiple of train.micro_batch_size "
            f"{train.micro_batch_size}{over} = {unit}: use {nearest_multiples(train.global_batch_size, unit * rounds)}"
        )
    elif train.global_batch_size % (unit * rounds):
        yield (
            f"train.global_batch_size is {train.global_batch_size}, which gives {train.global_batch_size // unit} "
            f"microbatches per rank: with parallel.virtual_pipeline {parallel.virtual_pipeline} their number must be a "
            f"multiple of parallel.pipeline {parallel.pipeline}: "
            f"use {nearest_multiples(train.global_batch_size, unit * rounds)}"
        )


def _schedule(config: RunConfig) -> Iterator[str]:
    optimizer, num_steps = config.optimizer, config.train.num_steps
    if optimizer.schedule != "constant" and optimizer.min_lr > optimizer.lr:
        yield (
            f"optimizer.min_lr is {optimizer.min_lr}, above optimizer.lr {optimizer.lr}: the schedule ends there, "
            "so lower it"
        )
    if optimizer.schedule == "wsd" and optimizer.decay_steps == 0:
        yield (
            "optimizer.decay_steps is 0, and optimizer.schedule wsd ends with a decay of that many steps: "
            "set it, or use schedule: constant"
        )
    decay_steps = optimizer.decay_steps if optimizer.schedule == "wsd" else 0
    if optimizer.warmup_steps + decay_steps > num_steps:
        decay = f" and optimizer.decay_steps {decay_steps}" if decay_steps else ""
        yield (
            f"optimizer.warmup_steps {optimizer.warmup_steps}{decay} need {optimizer.warmup_steps + decay_steps} "
            f"steps, but train.num_steps is {num_steps}: shorten them or train longer"
        )


def _names(config: RunConfig) -> Iterator[str]:
    """What names a folder."""
    if not re.fullmatch(r"[\w.+=-]+", config.name) or not config.name.strip("."):
        yield f"name is {config.name!r}: it names a folder, so use letters, digits and . _ - + ="
    for index, entry in enumerate(config.data.datasets):
        if not entry.path:
            yield f"data.datasets.{index}.path is empty: give the folder that `megamem data prepare` wrote"


def _packages(config: RunConfig) -> Iterator[str]:
    """Optional packages that the configuration asks for."""
    wanted = (
        (config.model.implementation == "transformer_engine", "model.implementation", "transformer_engine", "te"),
        (config.logging.tensorboard, "logging.tensorboard", "tensorboard", "tracking"),
        (config.logging.wandb_mode != "disabled", "logging.wandb_mode", "wandb", "tracking"),
    )
    for is_wanted, key, module, extra in wanted:
        if is_wanted and importlib.util.find_spec(module) is None:
            value = str(attrgetter(key)(config)).lower() if key == "logging.tensorboard" else attrgetter(key)(config)
            yield (
                f'{key} is {value}, but {module} is not installed: pip install "megamem[{extra}]", or change the option'
            )


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
