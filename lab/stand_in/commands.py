"""Traffic between host and GPU of commands that step a model, beside training; a watch on order sees their accesses, if it
runs.

Each runs its own code on a rank without data, from where tensors are there to where they are on disk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import Tensor

from lab.stand_in.budgets import CommandTraffic, Unit
from lab.stand_in.host_traffic import HostTraffic
from lab.stand_in.order import Race
from lab.stand_in.order_watch import OrderWatch
from parallel.groups import ParallelSizes
from pretrain.checkpoint import loading
from pretrain.checkpoint.run_entries import entries_to_save, restore_run
from pretrain.checkpoint.staging import StagingBuffer, placed
from pretrain.checkpoint.store.tensors import pieces
from pretrain.checkpoint.write_plan import ITEM_BYTES, data_of, held_shards, with_storage_of_its_own
from pretrain.config.schema import ParallelConfig, RunConfig
from pretrain.data.loader import on_device
from pretrain.engine.build import build_unset_chunks
from pretrain.engine.chunks import Chunk, unwrap
from pretrain.engine.step import evaluation_loss
from pretrain.evaluation.generate import generate
from pretrain.evaluation.sampling import Sampling
from pretrain.planning.dryrun.gpu import StandInGpu
from pretrain.planning.dryrun.gpu_work import GpuWork
from pretrain.planning.dryrun.rank import DryRank, batch_of
from pretrain.planning.dryrun.world import fake_rank, without_data
from pretrain.state import RunState

_PROMPT_TOKENS, _GENERATED_TOKENS = 8, 3


def evaluation(rank: DryRank, gpu: StandInGpu) -> CommandTraffic:
    """Traffic of a pass over as many microbatches as there are stages."""
    train, number = rank.config.train, rank.config.parallel.pipeline
    batches = [on_device(repeat(batch_of(rank.config)), rank.groups.device) for _ in rank.chunks]
    with HostTraffic(gpu).watching() as watch:
        evaluation_loss(
            rank.chunks,
            batches,
            rank.groups,
            num_microbatches=number,
            micro_batch_size=train.micro_batch_size,
            sequence_length=train.sequence_length,
        )
    return CommandTraffic("evaluation", watch.findings(), units_of_passes(rank.chunks, number))


def units_of_passes(chunks: Sequence[Chunk], num_microbatches: int) -> dict[Unit, int]:
    """Units of so many forward passes of all chunks."""
    return {
        "pass": 1,
        "chunk": len(chunks),
        "forward": num_microbatches * len(chunks),
        "microbatch": num_microbatches * sum(unwrap(chunk).reads_tokens for chunk in chunks),
        "mixture": num_microbatches * num_mixtures(chunks),
    }


def num_mixtures(chunks: Sequence[Chunk]) -> int:
    """Mixtures of experts in these chunks."""
    return sum(isinstance(module, MoELayer) for chunk in chunks for module in chunk.modules())


def saving(rank: DryRank, gpu: StandInGpu) -> CommandTraffic:
    """Traffic of an asynchronous save and of a synchronous one, without the agreement of ranks on who writes what."""
    with _storages_told_apart():
        held = held_shards(entries_to_save(rank.config, rank.chunks, rank.optimizer))
    items = [
        item
        for shard in held
        if shard.is_main
        for item in pieces(shard.region, max(1, ITEM_BYTES // shard.tensor.dtype.itemsize))
    ]
    data = data_of(items, held)
    buffer = StagingBuffer()
    with HostTraffic(gpu).watching() as watch, _without_numpy():
        for copied in buffer.copy(data).values():
            # Written by another thread, beside the next step.
            copied.clone()
        for tensor in data.values():
            with_storage_of_its_own(tensor)
    _, buffers = placed(tensor.nbytes for tensor in data.values())
    return CommandTraffic("saving", watch.findings(), {"pass": 1, "item": len(items), "buffer": len(buffers)})


def restoring(rank: DryRank, gpu: StandInGpu) -> CommandTraffic:
    """Traffic of restoring a run from items as large as their targets."""
    num_items = 0

    def load(folder: Path, targets_of: Callable[[Any], Sequence[loading.LoadTarget]]) -> None:
        nonlocal num_items
        # Of an index it is asked what is stored apart from what the model has.
        for target in targets_of(SimpleNamespace(tensors={})):
            stored: Any = _Stored(torch.empty((), dtype=target.data.dtype))
            loading._copy(stored, target.region, target)
            num_items += 1

    saved: Any = SimpleNamespace(path=Path(), weights_dtype=None, run=RunState())
    with (
        _storages_told_apart(),
        patch("pretrain.checkpoint.run_entries.load", load),
        HostTraffic(gpu).watching() as watch,
    ):
        restore_run(saved, rank.chunks, rank.optimizer)
    return CommandTraffic("restoring", watch.findings(), {"item": num_items, "window": rank.optimizer.num_windows})


class _Stored:
    """An item on disk."""

    def __init__(self, host: Tensor) -> None:
        self._host = host

    def read(self, start: Sequence[int], shape: Sequence[int]) -> Tensor:
        # A view, as nothing on the host is made of nothing here.
        return self._host.expand(shape)


def generation(config: RunConfig, *, in_order: bool) -> tuple[CommandTraffic, tuple[Race, ...]]:
    """Traffic of a short text from the first of as many ranks as split columns of tables in training, and accesses
    that have no order, if that is watched.

    A mixture's experts are never split in generation.
    """
    size, vocab_size = config.parallel.memory_columns if config.model.moe is None else 1, config.model.vocab_size
    assert vocab_size is not None
    alone = replace(config, parallel=ParallelConfig(memory=size))
    gpu = StandInGpu()
    with (
        fake_rank(0, size, ParallelSizes(memory=size), seed=config.seed, gpu=gpu) as groups,
        without_data(
            groups, experts_per_token=config.model.moe.top_k if config.model.moe is not None else 0, gpu=gpu
        ) as recorder,
    ):
        (chunk,) = build_unset_chunks(alone, groups, vocab_size=vocab_size)
        chunk.weights_are_set = True
        chunk.eval()
        order = OrderWatch(gpu)
        with (
            GpuWork(lambda *_: recorder.count_kernel()).working(),
            order.watching() if in_order else nullcontext(),
            HostTraffic(gpu).watching() as watch,
        ):
            for _ in generate(
                chunk,
                [1] * _PROMPT_TOKENS,
                max_tokens=_GENERATED_TOKENS,
                context_tokens=config.train.sequence_length,
                vocab_size=vocab_size,
                # Never generated: without data every id is 1.
                eod=0,
                sampling=Sampling(temperature=0.8, top_k=4, top_p=0.9, seed=1),
                group=groups.megatron.ep,
            ):
                pass
        mixtures = _GENERATED_TOKENS * num_mixtures([chunk])
    return CommandTraffic(
        "generation", watch.findings(), {"token": _GENERATED_TOKENS, "mixture": mixtures}
    ), order.races


@contextmanager
def _storages_told_apart() -> Iterator[None]:
    """Give storages without memory an address each, by which a checkpoint finds the model's."""
    with patch.object(torch.UntypedStorage, "data_ptr", lambda storage: storage._cdata):
        yield


@contextmanager
def _without_numpy() -> Iterator[None]:
    """Let tensors without data be taken for arrays of numpy."""
    with patch("torch.Tensor.numpy", lambda tensor: tensor), patch("torch.from_numpy", lambda array: array):
        yield
