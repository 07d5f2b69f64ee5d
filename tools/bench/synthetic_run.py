"""A model that trains on random tokens: what the benchmarks time."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_layer import MoELayer

from parallel.groups import ParallelGroups
from pretrain.config.schedule import apply_schedule
from pretrain.config.schema import RunConfig
from pretrain.data.loader import Sample, on_device
from pretrain.engine.build import build_chunks, wrap_chunks
from pretrain.engine.optimizer import build_optimizer
from pretrain.engine.step import train_step


class SyntheticRun:
    """One configuration's model and optimizer, with random tokens for data."""

    def __init__(self, config: RunConfig, groups: ParallelGroups) -> None:
        """Build both, for a model whose `vocab_size` is set. Collective."""
        self.config, self.groups = config, groups
        vocab_size = config.model.vocab_size
        assert vocab_size is not None, "nothing says how many token ids there are"
        self.chunks = wrap_chunks(build_chunks(config, groups, vocab_size=vocab_size), config, groups)
        self.optimizer = build_optimizer(config, self.chunks, groups)
        self.batches = [on_device(_random_batches(config, vocab_size), groups.device) for _ in self.chunks]

    def steps(self, count: int) -> float:
        """Seconds that `count` optimizer steps take."""
        dist.barrier()
        started = time.perf_counter()
        for step in range(count):
            apply_schedule(self.optimizer.param_groups, step, self.config.optimizer, self.config.train)
            self.step()
        # A step ends with a host sync (the loss), so the clock has seen all of its work.
        return time.perf_counter() - started

    def step(self) -> None:
        """One optimizer step."""
        train = self.config.train
        train_step(
            self.chunks,
            self.optimizer,
            self.batches,
            self.groups,
            num_microbatches=train.global_batch_size // (train.micro_batch_size * self.groups.data_size),
            micro_batch_size=train.micro_batch_size,
            sequence_length=train.sequence_length,
        )

    def cut_graphs(self) -> None:
        """Let go of the last microbatch's graph, so that the garbage collector can free the model.

        Megatron's token dispatchers keep tensors of it, and the graph refers to the model through gradient hooks, which
        the collector cannot see.
        """
        for chunk in self.chunks:
            for layer in (module for module in chunk.modules() if isinstance(module, MoELayer)):
                for name, value in list(vars(layer.token_dispatcher).items()):
                    if isinstance(value, torch.Tensor) and value.grad_fn is not None:
                        setattr(layer.token_dispatcher, name, value.detach())


def _random_batches(config: RunConfig, vocab_size: int) -> Iterator[Sample]:
    generator = torch.Generator().manual_seed(config.seed)
    b, s = config.train.micro_batch_size, config.train.sequence_length
    while True:
        tokens = torch.randint(vocab_size, (b, s + 1), generator=generator)
        yield {
            "tokens": tokens[:, :-1].contiguous(),
            "labels": tokens[:, 1:].contiguous(),
            "loss_mask": torch.ones(b, s),
            "position_ids": torch.arange(s).expand(b, s),
        }
