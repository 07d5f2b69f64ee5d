"""Costs of a run's checkpoints: bytes, and seconds to write one, to stand still for it and to start from it."""

from __future__ import annotations

from dataclasses import dataclass

from pretrain.config.schema import RunConfig
from pretrain.planning.bytes.memory import checkpoint_bytes
from pretrain.planning.seconds.hardware import Hardware


@dataclass(frozen=True)
class CheckpointCosts:
    """Bytes and seconds of one checkpoint of a run.

    Attributes:
        num_bytes: bytes of all its files.
        save_s: seconds until it is written, by all nodes at a time.
        stall_s: seconds in which no step is taken for it: all of `save_s`, or with `checkpoint.asynchronous` the copy
            to the host.
        restart_s: seconds from a job's start to its first step: the start, every file read once to hold it against its
            hash (`checkpoint.check_hashes`), and once to be loaded.
    """

    num_bytes: float
    save_s: float
    stall_s: float
    restart_s: float


def checkpoint_costs(config: RunConfig, num_ranks: int, hardware: Hardware) -> CheckpointCosts:
    """Costs of a checkpoint of a run on `num_ranks` ranks. Items are shared out evenly over all ranks."""
    num_bytes = checkpoint_bytes(config)
    nodes = max(1, num_ranks // hardware.gpus_per_node)
    save_s = num_bytes / (nodes * hardware.storage_gb_per_s * 1e9)
    copied_s = num_bytes / num_ranks / (hardware.host_link_gb_per_s * 1e9)
    reads = 2 if config.checkpoint.check_hashes else 1
    return CheckpointCosts(
        num_bytes, save_s, copied_s if config.checkpoint.asynchronous else save_s, hardware.start_s + reads * save_s
    )
