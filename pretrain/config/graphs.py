"""Parts of a run that a CUDA graph of a microbatch cannot hold (`train.cuda_graph`). Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from pretrain.config.overlap import memory_runs_beside
from pretrain.config.schema import RunConfig


def graph_problems(config: RunConfig) -> Iterator[str]:
    """Parts that a graph cannot hold, in sentences with key, value and fix."""
    if config.train.cuda_graph == "none":
        return
    for part, why, fix in _obstacles(config):
        yield f"train.cuda_graph is microbatch, and {part}, {why}: {fix}, or use train.cuda_graph: none"


def without_overlap(config: RunConfig) -> RunConfig:
    """The configuration that a run with a graph has: reductions and gathers stand behind the last replay and before the
    next, since what would start them earlier are calls of Python's."""
    if config.train.cuda_graph == "none":
        return config
    return replace(config, parallel=replace(config.parallel, overlap_grad_reduce=False, overlap_param_gather=False))


def _obstacles(config: RunConfig) -> Iterator[tuple[str, str, str]]:
    """Parts of a run, each with why a graph cannot hold it, and what to set instead."""
    layout, model, optimizer, train = config.parallel, config.model, config.optimizer, config.train
    for axis in ("tensor", "pipeline", "context"):
        if (size := getattr(layout, axis)) > 1:
            yield (
                f"parallel.{axis} is {size}",
                "so that a microbatch has messages between ranks",
                f"use parallel.{axis}: 1",
            )
    if memory_runs_beside(config):
        yield (
            f"parallel.memory is {layout.memory}",
            "whose lookups run on a stream of their own",
            "use parallel.overlap_memory: false",
        )
    if model.moe is not None:
        yield "model.moe is set", "whose experts' numbers of tokens are read on the host", "use a dense feed-forward"
    if model.implementation == "transformer_engine":
        yield (
            "model.implementation is transformer_engine",
            "which keeps state of its own between microbatches",
            "use model.implementation: local",
        )
    if config.data.documents == "separate":
        yield "data.documents is separate", "whose bounds are read on the host", "use data.documents: joined"
    if train.recompute != "none":
        yield (
            f"train.recompute is {train.recompute}",
            "which restores states of random numbers on the host",
            "use train.recompute: none",
        )
    if model.memory is None:
        return
    if train.kernels in ("naive", "torch"):
        yield (
            f"train.kernels is {train.kernels}",
            "whose sums by index may wait for the host",
            "use train.kernels: auto",
        )
    if optimizer.tables == "row_wise" and optimizer.table_gradients == "rows":
        yield (
            "optimizer.table_gradients is rows",
            "whose number is another one for every microbatch",
            "use optimizer.table_gradients: dense",
        )
    if optimizer.table_gradient_dtype == "bf16":
        yield (
            "optimizer.table_gradient_dtype is bf16",
            "whose roundings are numbered on the host",
            "use optimizer.table_gradient_dtype: fp32",
        )
    if optimizer.table_folder is not None:
        yield "optimizer.table_folder is set", "whose rows are fetched for each step", "leave it out"
