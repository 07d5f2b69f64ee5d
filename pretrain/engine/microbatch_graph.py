"""One CUDA graph of a microbatch's forward and backward pass, replayed for each (`train.cuda_graph`).

A host asks for thousands of kernels per microbatch, one after the other; of small ones a GPU waits for the host. A replay
asks for all of them at once. The graph reads the addresses that it was captured with: those of weights and gradients stay,
and each batch is copied to the first one's place. What a graph cannot hold is refused (`pretrain.config.graphs`), and
steps in which memories are observed are taken as without a graph, to the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor

from parallel.groups import ParallelGroups
from pretrain.config.schema import RunConfig
from pretrain.engine.chunks import unwrap
from pretrain.errors import ConfigError

Work: TypeAlias = Callable[[], tuple[Tensor, Tensor]]
"""A microbatch's passes: its targets, and its measured loss."""
Capture: TypeAlias = Callable[[Work], tuple[tuple[Tensor, Tensor], Callable[[], None]]]
"""Recorder of work: its results, whose memory stays, and what does the work again into them."""


def microbatch_graph(
    config: RunConfig, chunks: Sequence[DistributedDataParallel], groups: ParallelGroups
) -> MicrobatchGraph | None:
    """The graph that a run replays; None without `train.cuda_graph`.

    Raises:
        ConfigError: the run is not on a GPU.
    """
    if config.train.cuda_graph == "none":
        return None
    if not groups.on_gpu:
        raise ConfigError(
            "train.cuda_graph is microbatch, which needs an NVIDIA GPU, and this run is on CPUs: set train.cuda_graph: none"
        )
    (chunk,) = chunks
    return MicrobatchGraph(chunk)


class MicrobatchGraph:
    """The graph of a model that is one chunk. It is captured at the first microbatch that asks for it."""

    def __init__(self, chunk: DistributedDataParallel, capture: Capture | None = None) -> None:
        """
        Args:
            chunk: built on the stream that steps run on, which is not the default one.
            capture: captures passes in a graph; CUDA's, unless a test has another.
        """
        self._chunk, self._capture = chunk, capture or _cuda_capture
        self._batch: dict[str, Tensor] = {}
        self._results: tuple[Tensor, Tensor] | None = None
        self._replay: Callable[[], None] = lambda: None

    @property
    def holds_this_step(self) -> bool:
        """False while layers are observed: what they count is chosen anew at every such step."""
        return all(layer.usage is None for layer in unwrap(self._chunk).memory_layers)

    def run(
        self,
        batches: Iterator[dict[str, Tensor]],
        num_microbatches: int,
        forward_step: Callable[[Iterator[dict[str, Tensor]], Any], tuple[Tensor, Callable[[Tensor], Any]]],
        begin: Callable[[], None],
    ) -> list[Tensor]:
        """Gradients of the microbatches, complete over all ranks, as Megatron's schedule leaves them.

        Args:
            forward_step: the schedule's forward step, whose loss is backpropagated.
            begin: starts the step's sums anew, gradients among them; the passes before a capture leave some.

        Returns:
            The measured loss of each microbatch.
        """
        model = unwrap(self._chunk)
        # As Megatron's schedule counts them.
        num_targets = torch.zeros([], dtype=torch.int, device=torch.cuda.current_device())
        losses = []
        for _ in range(num_microbatches):
            batch = next(batches)
            if self._results is None:
                self._make(batch, forward_step)
                begin()
            assert {name: each.shape for name, each in batch.items()} == {
                name: each.shape for name, each in self._batch.items()
            }, "a microbatch has another shape than the one that was captured"
            for name, each in batch.items():
                self._batch[name].copy_(each, non_blocking=True)
            self._replay()
            assert self._results is not None
            targets, loss = self._results
            num_targets += targets
            # The next replay writes there again.
            losses.append(loss.clone())
        finalise = model.config.finalize_model_grads_func
        assert finalise is not None
        finalise([self._chunk], num_targets, pg_collection=model.pg_collection)
        return losses

    def _make(
        self,
        batch: dict[str, Tensor],
        forward_step: Callable[[Iterator[dict[str, Tensor]], Any], tuple[Tensor, Callable[[Tensor], Any]]],
    ) -> None:
        self._batch = {name: each.clone() for name, each in batch.items()}

        def work() -> tuple[Tensor, Tensor]:
            output, loss_of = forward_step(iter([dict(self._batch)]), self._chunk)
            loss, targets, measured = loss_of(output)
            loss.backward()
            return targets, measured["loss"]

        # Kernels are compiled, and libraries take their memory, at the first call.
        for _ in range(_WARM_UPS):
            work()
        self._results, self._replay = self._capture(work)


_WARM_UPS = 2


def _cuda_capture(work: Work) -> tuple[tuple[Tensor, Tensor], Callable[[], None]]:
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    try:
        # Other threads may talk to the GPU meanwhile: a loader's, a save's.
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
            results = work()
    except RuntimeError as error:
        raise ConfigError(
            f"train.cuda_graph is microbatch, and this model's passes cannot be captured ({error}): set train.cuda_graph: "
            "none"
        ) from error
    return results, graph.replay
