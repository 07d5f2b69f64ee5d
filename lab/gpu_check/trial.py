"""One trial on one rank: a short training on tokens that follow a rule, and what there is to see of it."""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass
from statistics import median

import torch

from parallel.groups import ParallelGroups
from parallel.machine.devices import hide_gpus
from pretrain.config.schedule import apply_schedule
from pretrain.config.schema import RunConfig
from pretrain.data.loader import Sample, microbatches, on_device
from pretrain.engine.build import build_chunks, wrap_chunks
from pretrain.engine.build_optimizer import build_optimizer
from pretrain.engine.microbatch_graph import microbatch_graph
from pretrain.engine.session import session
from pretrain.engine.step import train_step
from pretrain.train.loop import seed_step


@dataclass(frozen=True)
class Observed:
    """Observations of a rank.

    Attributes:
        losses, norms: figures of every step; the same on every rank.
        tokens_per_s: the median of the second half of the steps.
        held_bytes: allocated on the GPU after a step; 0 on a CPU.
        peak_bytes: the most that was.
    """

    losses: tuple[float, ...]
    norms: tuple[float, ...]
    tokens_per_s: float
    held_bytes: int
    peak_bytes: int


class RuleOfTokens:
    """Samples to learn something from in a few steps: each id follows from the one before it, but for a coin's toss."""

    NUM_IDS = 512

    def __init__(self, config: RunConfig) -> None:
        self._seed, self._length = config.data_seed, config.train.sequence_length
        self._num_samples = config.train.num_steps * config.train.global_batch_size

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int, /) -> Sample:
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + index)
        ids = torch.randint(self.NUM_IDS, (1,), generator=generator).tolist()
        for toss in torch.randint(2, (self._length,), generator=generator).tolist():
            ids.append((5 * ids[-1] + 17 + toss) % self.NUM_IDS)
        tokens = torch.tensor(ids)
        return {
            "tokens": tokens[:-1],
            "labels": tokens[1:],
            "loss_mask": torch.ones(self._length),
            "position_ids": torch.arange(self._length),
        }


def run_on_cpu(config: RunConfig) -> Observed:
    """`run_trial` where no GPU has been touched yet, and none will be."""
    hide_gpus()
    return run_trial(config)


def run_trial(config: RunConfig) -> Observed:
    """Train from fresh weights. Collective."""
    with session(config) as groups:
        return train(config, groups)


def train(config: RunConfig, groups: ParallelGroups) -> Observed:
    """Train from fresh weights in a session that is open. Collective."""
    settings, vocab_size = config.train, config.model.vocab_size
    assert vocab_size is not None
    chunks = wrap_chunks(build_chunks(config, groups, vocab_size=vocab_size), config, groups)
    optimizer = build_optimizer(config, chunks, groups)
    batches = [
        on_device(
            microbatches(
                RuleOfTokens(config),
                start_sample=0,
                micro_batch_size=settings.micro_batch_size,
                data_rank=groups.data_rank,
                data_size=groups.data_size,
                num_workers=0,
            ),
            groups.device,
        )
        for _ in chunks
    ]
    graph = microbatch_graph(config, chunks, groups)
    losses, norms, seconds = [], [], []
    for step in range(settings.num_steps):
        started = time.perf_counter()
        seed_step(config.seed, step)
        apply_schedule(optimizer.param_groups, step, config.optimizer, settings)
        result = train_step(
            chunks,
            optimizer,
            batches,
            groups,
            num_microbatches=settings.global_batch_size // (settings.micro_batch_size * groups.data_size),
            micro_batch_size=settings.micro_batch_size,
            sequence_length=settings.sequence_length,
            graph=graph,
        )
        # A step ends with a host sync (the loss), so the clock has seen all of its work.
        seconds.append(time.perf_counter() - started)
        losses.append(result.loss.mean)
        norms.append(result.norms.main)
    held, peak = 0, 0
    if groups.device.type == "cuda":
        # The last graph is garbage.
        gc.collect()
        held, peak = torch.cuda.memory_allocated(groups.device), torch.cuda.max_memory_allocated(groups.device)
    speed = settings.tokens_per_step / median(seconds[len(seconds) // 2 :])
    return Observed(tuple(losses), tuple(norms), speed, held, peak)
