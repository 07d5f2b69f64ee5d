"""A model that trains on random tokens: what the benchmarks time."""

from __future__ import annotations

import sys
import time
from contextlib import nullcontext

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer

from parallel.groups import ParallelGroups, barrier
from pretrain.config.schedule import apply_schedule
from pretrain.config.schema import RunConfig
from pretrain.data.loader import Sample, microbatches, on_device
from pretrain.engine.build import build_chunks, wrap_chunks
from pretrain.engine.build_optimizer import build_optimizer
from pretrain.engine.chunks import unwrap
from pretrain.engine.microbatch_graph import microbatch_graph
from pretrain.engine.step import train_step
from pretrain.engine.tables.step_reads import StepReads
from pretrain.engine.tables.stored_tables import stored_tables_of


class SyntheticRun:
    """One configuration's model and optimizer, with random tokens for data."""

    def __init__(self, config: RunConfig, groups: ParallelGroups) -> None:
        """Build both, for a model whose `vocab_size` is set. Collective."""
        self.config, self.groups = config, groups
        vocab_size = config.model.vocab_size
        assert vocab_size is not None, "nothing says how many token ids there are"
        self.chunks = wrap_chunks(build_chunks(config, groups, vocab_size=vocab_size), config, groups)
        self.optimizer = build_optimizer(config, self.chunks, groups)
        self.graph = microbatch_graph(config, self.chunks, groups)
        self.data = RandomSamples(config.seed, config.train.sequence_length, vocab_size)
        self.stored = stored_tables_of(unwrap(chunk) for chunk in self.chunks)
        self._reads = StepReads(self.data, [unwrap(chunk) for chunk in self.chunks], groups)
        self._steps_taken = 0
        self.batches = [
            on_device(
                microbatches(
                    self.data,
                    start_sample=0,
                    micro_batch_size=config.train.micro_batch_size,
                    data_rank=groups.data_rank,
                    data_size=groups.data_size,
                    num_workers=0,
                ),
                groups.device,
            )
            for _ in self.chunks
        ]

    def steps(self, count: int) -> float:
        """Seconds that `count` optimizer steps take."""
        barrier()
        started = time.perf_counter()
        for step in range(count):
            apply_schedule(self.optimizer.param_groups, step, self.config.optimizer, self.config.train)
            self.step()
        # A step ends with a host sync (the loss), so the clock has seen all of its work.
        return time.perf_counter() - started

    def step(self) -> None:
        """One optimizer step."""
        train, size = self.config.train, self.config.train.global_batch_size
        first = self._steps_taken * size
        own, *following = (range(start, start + size) for start in range(first, first + 3 * size, size))
        with nullcontext() if self.stored is None else self.stored.step(self._reads, own, following):
            train_step(
                self.chunks,
                self.optimizer,
                self.batches,
                self.groups,
                num_microbatches=size // (train.micro_batch_size * self.groups.data_size),
                micro_batch_size=train.micro_batch_size,
                sequence_length=train.sequence_length,
                graph=self.graph,
            )
        self._steps_taken += 1

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


class RandomSamples:
    """Samples without end, each drawn from its number."""

    def __init__(self, seed: int, sequence_length: int, vocab_size: int) -> None:
        self._seed, self._length, self._vocab_size = seed, sequence_length, vocab_size

    def __len__(self) -> int:
        return sys.maxsize

    def __getitem__(self, number: int) -> Sample:
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + number)
        tokens = torch.randint(self._vocab_size, (self._length + 1,), generator=generator)
        return {
            "tokens": tokens[:-1],
            "labels": tokens[1:],
            "loss_mask": torch.ones(self._length),
            "position_ids": torch.arange(self._length),
        }
