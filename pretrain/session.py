"""Joining the ranks of a run, whoever started them."""

from __future__ import annotations

from contextlib import AbstractContextManager

from parallel.devices import why_gpus_are_unusable
from parallel.groups import ParallelGroups, close_groups, initialise_groups, parallel_context
from parallel.ranks import current_ranks
from pretrain.config.schema import RunConfig
from pretrain.errors import ConfigError
from pretrain.megatron import parallel_sizes


def session(config: RunConfig) -> AbstractContextManager[ParallelGroups]:
    """This rank's groups, for as long as the context lasts.

    Raises:
        RuntimeError: nobody has started ranks (see `parallel.launch`).
        ConfigError: there are GPUs, and they cannot be used.
    """
    ranks = current_ranks()
    if ranks is None:
        raise RuntimeError("this process is not a rank: start it with torchrun, srun or parallel.launch.launch_ranks")
    if reason := why_gpus_are_unusable():
        raise ConfigError(
            f"this machine has GPUs that cannot be used: {reason}. To leave them idle, add --device cpu, or set "
            "CUDA_VISIBLE_DEVICES to nothing"
        )
    return parallel_context(
        parallel_sizes(config), ranks, timeout_minutes=config.parallel.timeout_minutes, seed=config.seed
    )


def relaid(config: RunConfig, groups: ParallelGroups) -> ParallelGroups:
    """The groups of another configuration's layout, in the session of `groups`. Collective.

    The former groups, and what was built on them, must not be used again.
    """
    close_groups()
    return initialise_groups(
        parallel_sizes(config),
        device=groups.device,
        timeout_minutes=config.parallel.timeout_minutes,
        seed=config.seed,
    )
