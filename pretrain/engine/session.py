"""Join the ranks of a run, whether started here or elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from kernels.processor import multiplies_bf16
from megamem.attention.backends import NoFusedAttentionError, fused_attention
from parallel.groups import ParallelGroups, close_groups, initialise_groups, meeting, parallel_context
from parallel.machine.cpu_products import products_in_fp32
from parallel.machine.determinism import deterministic_algorithms
from parallel.machine.devices import why_gpus_are_unusable
from parallel.machine.environment import settle_environment
from parallel.processes.ranks import current_ranks
from pretrain.config.overlap import queues_of
from pretrain.config.schema import RunConfig
from pretrain.engine.megatron import parallel_sizes
from pretrain.errors import ConfigError


@contextmanager
def session(config: RunConfig, *later: RunConfig) -> Iterator[ParallelGroups]:
    """This rank's groups, for as long as the context lasts.

    Args:
        config: configuration whose layout the groups have.
        later: configurations that may take its place (`relaid`).

    Raises:
        RuntimeError: nobody has started ranks (see `parallel.processes.launch`).
        ConfigError: the machine has GPUs, and they cannot be used.
    """
    layout, deterministic = config.parallel, config.train.deterministic
    ranks = current_ranks()
    if ranks is None:
        raise RuntimeError(
            "this process is not a rank: start it with torchrun, srun or parallel.processes.launch.launch_ranks"
        )
    # Before anybody asks for the GPU, which is next.
    settle_environment(**queues_of((config, *later)), deterministic=deterministic)
    with ExitStack() as stack:
        store = stack.enter_context(meeting(ranks, timeout_minutes=layout.timeout_minutes))
        if reason := why_gpus_are_unusable():
            raise ConfigError(
                f"this machine has GPUs that cannot be used: {reason}. To leave them idle, add --device cpu, or set "
                "CUDA_VISIBLE_DEVICES to nothing"
            )
        if deterministic:
            stack.enter_context(deterministic_algorithms())
        groups = stack.enter_context(
            parallel_context(
                parallel_sizes(config), ranks, store, timeout_minutes=layout.timeout_minutes, seed=config.seed
            )
        )
        if groups.on_gpu and any(each.train.cuda_graph != "none" for each in (config, *later)):
            # Gradients are added up on the stream that DDP was built on, and the default one cannot be captured.
            stack.enter_context(torch.cuda.stream(torch.cuda.Stream(groups.device)))
        if groups.on_gpu and (in_bf16 := [each for each in (config, *later) if each.train.precision == "bf16"]):
            stack.enter_context(attention_without_scores(in_bf16[0]))
        if groups.device.type == "cpu" and takes_products_in_fp32(config, *later):
            stack.enter_context(products_in_fp32())
        yield groups


@contextmanager
def attention_without_scores(config: RunConfig) -> Iterator[None]:
    """Within the block attention is fused, or refused."""
    try:
        with fused_attention():
            yield
    except NoFusedAttentionError as error:
        model = config.model
        raise ConfigError(
            f"{error} on this GPU: {model.num_attention_heads} of {model.attention_head_dim} dimensions, with "
            f"{model.num_query_groups or model.num_attention_heads} heads of keys, in bf16. Set model.head_dim to a multiple "
            "of 8 up to 128, or train.precision: fp32"
        ) from error


def takes_products_in_fp32(*configs: RunConfig) -> bool:
    """True if one is in bf16, and this machine's cores cannot multiply that. Whether there are GPUs is not asked."""
    return any(config.train.precision == "bf16" for config in configs) and not multiplies_bf16()


def relaid(config: RunConfig, groups: ParallelGroups) -> ParallelGroups:
    """The groups of another configuration's layout, in the session of `groups`. Collective.

    The former groups, and objects built on them, must not be used again.
    """
    close_groups()
    return initialise_groups(
        parallel_sizes(config),
        device=groups.device,
        timeout_minutes=config.parallel.timeout_minutes,
        seed=config.seed,
    )
