"""Seconds of exchanges of lookups and of tokens with experts, and what hides them.

Legend: G ranks of the memory group.
"""

from __future__ import annotations

from dataclasses import dataclass

from pretrain.config.overlap import memory_runs_beside
from pretrain.config.schema import RunConfig
from pretrain.planning.counts.experts import dispatched_bytes
from pretrain.planning.counts.pipeline_stages import Division, Stage
from pretrain.planning.seconds.hardware import Hardware
from pretrain.planning.seconds.reductions import ring_s
from pretrain.planning.seconds.traffic import WayBytes, lookup_bytes_of_ways


def exposed_exchange_s(config: RunConfig, stage: Stage, division: Division, hardware: Hardware) -> tuple[float, float]:
    """Seconds of a microbatch's exchanges, forward and backward, beyond those of the feed-forwards' products that they
    run beside.

    A memory waits for its exchanges: its other kernels and the products share the GPU.
    """
    memories = stage.blocks.memories
    if config.parallel.memory == 1 or not memories:
        return 0.0, 0.0
    forward, backward = exchange_s_of_ways(config, stage, division, hardware)
    beside = stage.blocks.beside / memories if config.parallel.overlap_memory else 0.0
    model, tokens = config.model, division.rank_tokens
    ffn_s = 2 * 3 * model.hidden_size * model.active_ffn_width * tokens / hardware.flops_per_s
    forwards, backwards = memory_passes(config, stage)
    of_forward = forwards * beside * memories * ffn_s
    of_backward = 2 * backwards * beside * memories * ffn_s
    # As much of the exchanges as belongs to memories that have a product beside them.
    return forward - min(beside * forward, of_forward), backward - min(beside * backward, of_backward)


@dataclass(frozen=True)
class BesideBackward:
    """Seconds by which gradients of tables, and exchanges, make a backward pass longer.

    Attributes:
        gradients: seconds of the gradients, more than they take alone if their share of the GPU is too small for them.
        exchange: seconds of backward's exchanges that no gradients hide.
    """

    gradients: float
    exchange: float


def beside_backward(
    config: RunConfig, gradients_s: float, products_s: float, exchange_s: float, hardware: Hardware
) -> BesideBackward:
    """Gradients of tables beside the rest of a backward pass.

    The memory's next kernels, which have priority, wait for exchanges meanwhile. Products run beside them if they leave
    some of the multiprocessors: as many as a kernel of rows needs to reach its bandwidth do not slow it down, and
    products slow down by as many as it has.

    Args:
        gradients_s: seconds of the gradients with the whole GPU, sort included.
        products_s: seconds of backward's products of matrices.
        exchange_s: seconds of backward's exchanges that no product hides.
    """
    if not memory_runs_beside(config):
        return BesideBackward(gradients_s, exchange_s)
    share = config.parallel.gradient_sm_share
    slowed = gradients_s * max(1.0, hardware.row_sm_share / share)
    both = max(slowed, products_s + share * slowed)
    return BesideBackward(both - products_s, exchange_s - min(exchange_s, gradients_s))


def exchange_s_of_ways(config: RunConfig, stage: Stage, division: Division, hardware: Hardware) -> tuple[float, float]:
    """Seconds of a microbatch's exchanges, forward and backward."""
    forward, backward = (way_s(way, config, hardware) for way in lookup_bytes_of_ways(config, stage, division))
    return forward, backward


def way_s(way: WayBytes, config: RunConfig, hardware: Hardware) -> float:
    """Seconds of exchanges one after the other, some of which are gathers."""
    group = config.parallel.memory
    # What a ring of G sends, (G - 1) / G of it.
    gathers = ring_s(way.gathered * group / (group - 1), group, 1, hardware)
    meeting = link_s(way.meeting, config.parallel.memory_columns, hardware)
    return gathers + meeting + link_s(way.direct, group, hardware)


def link_s(num_bytes: float, group: int, hardware: Hardware) -> float:
    near, far = near_and_far(num_bytes, group, hardware)
    return max(near / hardware.nvlink_bytes_per_s, far / hardware.network_bytes_per_s)


def memory_passes(config: RunConfig, stage: Stage) -> tuple[float, float]:
    """Forward and backward passes of a stage's memories, on the average over them."""
    backward = stage.backward.memories / max(1, stage.blocks.memories)
    return 1 + (config.train.recompute == "full") * backward, backward


def dispatch_s(config: RunConfig, stage: Stage, division: Division, hardware: Hardware) -> float:
    """Seconds that a microbatch's tokens take to experts and back, which nothing hides."""
    return link_s(dispatched_bytes(config, stage, division), config.parallel.memory, hardware)


def near_and_far(num_bytes: float, group: int, hardware: Hardware) -> tuple[float, float]:
    """Split of bytes that a group of consecutive ranks sends to its members alike: in the node, and to others."""
    if group == 1:
        return 0.0, 0.0
    near = num_bytes * (min(group, hardware.gpus_per_node) - 1) / (group - 1)
    return near, num_bytes - near
