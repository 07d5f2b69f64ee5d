"""Batches: the samples that each data-parallel rank reads, in their order."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Protocol

import torch
from torch.utils.data import DataLoader, default_collate

from megamem.attention.documents import DOCUMENT_BOUNDS, document_bounds
from parallel.processes.parent_death import signal_on_parent_death
from parallel.processes.stop_signals import STOP_SIGNALS
from pretrain.errors import DataError

Sample = dict[str, torch.Tensor]


class SampleSource(Protocol):
    """A data set as the loader sees it: samples by number, each a dictionary of tensors [sequence_length]."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Sample: ...


def microbatches(
    dataset: SampleSource,
    *,
    start_sample: int,
    micro_batch_size: int,
    data_rank: int,
    data_size: int,
    num_workers: int,
) -> Iterator[Sample]:
    """The microbatches of one data-parallel rank, tensors [micro_batch_size, sequence_length], from a sample number on.

    Microbatch m of rank d holds samples `start + (m * data_size + d) * micro_batch_size` and following. A global batch
    is a run of consecutive samples, so its samples depend neither on the number of ranks nor on the size of a
    microbatch; resuming is starting at the number of samples consumed.

    Args:
        dataset: samples in the order of the run.
        start_sample: samples that all ranks together have consumed before.
        micro_batch_size: samples per microbatch.
        num_workers: processes that read ahead; 0 reads in this one.

    Raises:
        DataError: the samples are used up, or one of them is damaged.
    """
    assert 0 <= data_rank < data_size
    assert micro_batch_size > 0
    assert start_sample >= 0
    starts = range(
        start_sample + data_rank * micro_batch_size, len(dataset) - micro_batch_size + 1, micro_batch_size * data_size
    )
    batches = (list(range(start, start + micro_batch_size)) for start in starts)
    if num_workers == 0:
        for numbers in batches:
            yield default_collate([dataset[number] for number in numbers])
    else:
        yield from _read_ahead(dataset, batches, num_workers)
    raise DataError(
        f"The training samples are used up: there are {len(dataset)}, and the run went on from number {start_sample} "
        "past the last one. Build the data set for as many samples as train.num_steps x train.global_batch_size."
    )


def held_out_microbatches(
    dataset: SampleSource, *, num_microbatches: int, micro_batch_size: int, data_rank: int, data_size: int
) -> Iterator[Sample]:
    """Every sample once over all ranks, in equally many microbatches, tensors [micro_batch_size, sequence_length].

    Where samples run out, the last one fills the place with its `loss_mask` set to zero: pipeline and data-parallel
    ranks must agree on the number of microbatches, and no sample may count twice.
    """
    for index in range(num_microbatches):
        first = (index * data_size + data_rank) * micro_batch_size
        samples = []
        for number in range(first, first + micro_batch_size):
            sample = dict(dataset[min(number, len(dataset) - 1)])
            if number >= len(dataset):
                sample["loss_mask"] = torch.zeros_like(sample["loss_mask"])
            samples.append(sample)
        yield default_collate(samples)


def on_device(batches: Iterator[Sample], device: torch.device) -> Iterator[Sample]:
    """Batches moved to where the model computes, with the bounds of their documents in host memory.

    To a GPU they go by way of page-locked memory: a copy from other memory may wait for all that its stream has to do.
    PyTorch's allocator keeps such memory, and hands a piece out again only once its copy has been made.
    """
    for batch in batches:
        staged = {name: tensor if device.type == "cpu" else tensor.pin_memory() for name, tensor in batch.items()}
        moved = {name: tensor.to(device, non_blocking=True) for name, tensor in staged.items()}
        yield {**moved, DOCUMENT_BOUNDS: document_bounds(batch["position_ids"])}


class _Microbatches(torch.utils.data.Dataset[Sample | DataError]):
    """Hands over a bad sample's error as a value: raised in a worker, it would come wrapped in a traceback."""

    def __init__(self, samples: SampleSource) -> None:
        self._samples = samples

    def __getitem__(self, numbers: list[int]) -> Sample | DataError:
        try:
            return default_collate([self._samples[number] for number in numbers])
        except DataError as error:
            return error


def _read_ahead(dataset: SampleSource, batches: Iterator[list[int]], num_workers: int) -> Iterator[Sample]:
    rank_pid = os.getpid()
    loader = DataLoader(
        _Microbatches(dataset),
        batch_size=None,
        sampler=batches,
        num_workers=num_workers,
        # A rank that is killed cannot stop its readers, and they would hold its memory and its files.
        worker_init_fn=lambda _: signal_on_parent_death(signal.SIGKILL, rank_pid),
        # Forked: a spawned worker would import torch and Megatron again, and unpickle a copy of memory-mapped indices.
        multiprocessing_context="fork",
    )
    # Readers are forked with stop signals blocked: one that goes to all processes of a run must not end them while the
    # rank has a step to finish.
    unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        read = iter(loader)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
    for batch in read:
        if isinstance(batch, DataError):
            raise batch
        yield batch
