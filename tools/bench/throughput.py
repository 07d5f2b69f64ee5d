"""Training speed of several configurations, measured side by side on the same ranks."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_layer import MoELayer

from parallel.groups import ParallelGroups
from pretrain.build import build_chunks, wrap_chunks
from pretrain.config.schema import RunConfig
from pretrain.data.loader import Sample, on_device
from pretrain.optimizer import build_optimizer
from pretrain.schedule import apply_schedule
from pretrain.step import train_step


@dataclass(frozen=True)
class Throughput:
    """Tokens per second over all ranks, one figure per round."""

    tokens_per_s: tuple[float, ...]

    @property
    def median(self) -> float:
        return median(self.tokens_per_s)


class Contestant:
    """One configuration's model and optimizer, with random tokens for data."""

    def __init__(self, config: RunConfig, groups: ParallelGroups, vocab_size: int) -> None:
        """Build both. Collective.

        Args:
            config: the run.
            groups: this rank's place.
            vocab_size: token ids.
        """
        self.config, self.groups = config, groups
        self.chunks = wrap_chunks(build_chunks(config, groups, vocab_size=vocab_size), groups)
        self.optimizer = build_optimizer(config, self.chunks, groups)
        self.batches = [on_device(_random_batches(config, vocab_size), groups.device) for _ in self.chunks]

    def steps(self, count: int) -> float:
        """Seconds that `count` optimizer steps take."""
        dist.barrier()
        started = time.perf_counter()
        for step in range(count):
            self.apply_schedule(step)
            self.step()
        # A step ends with a host sync (the loss), so the clock has seen all of its work.
        return time.perf_counter() - started

    def apply_schedule(self, step: int) -> None:
        """The learning rates of a step."""
        apply_schedule(self.optimizer.param_groups, step, self.config.optimizer, self.config.train)

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
        """Let go of the last microbatch's graph, so that the garbage collector finds the model once nobody needs it.

        Megatron's token dispatchers keep tensors of it. Through them hang the gradient hooks, which know the model, out of Python's sight.
        """
        for chunk in self.chunks:
            for layer in (module for module in chunk.modules() if isinstance(module, MoELayer)):
                for name, value in list(vars(layer.token_dispatcher).items()):
                    if isinstance(value, torch.Tensor) and value.grad_fn is not None:
                        setattr(layer.token_dispatcher, name, value.detach())


def measure(
    configs: Sequence[RunConfig], groups: ParallelGroups, *, vocab_size: int, rounds: int, steps_per_round: int
) -> list[Throughput]:
    """Take turns: every round times each configuration once, so that a change of the machine's load meets all of them. Collective.

    Args:
        configs: of one layout.
        groups: this rank's place.
        vocab_size: token ids.
        rounds: figures per configuration.
        steps_per_round: optimizer steps behind each.
    """
    contestants = [Contestant(config, groups, vocab_size) for config in configs]
    for contestant in contestants:
        contestant.steps(1)
    figures: list[list[float]] = [[] for _ in contestants]
    for _ in range(rounds):
        for contestant, into in zip(contestants, figures, strict=True):
            train = contestant.config.train
            tokens = steps_per_round * train.global_batch_size * train.sequence_length
            into.append(tokens / contestant.steps(steps_per_round))
    return [Throughput(tuple(values)) for values in figures]


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
