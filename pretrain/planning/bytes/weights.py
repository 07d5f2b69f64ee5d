"""Weights of a pipeline stage on one rank: all of them, those that are trained, and those whose gradients are reduced."""

from __future__ import annotations

from pretrain.config.schema import RunConfig
from pretrain.planning.bytes.row_bytes import has_read_rows
from pretrain.planning.counts.pipeline_stages import Stage


def local_dense(config: RunConfig, stage: Stage) -> float:
    """Weights of a stage on one rank, without tables and experts."""
    return stage.split_weights / config.parallel.tensor + stage.whole_weights


def local_tables(config: RunConfig, stage: Stage) -> float:
    """Elements of a stage's tables (and experts) on one rank."""
    return (stage.table_elements + stage.expert_weights) / config.parallel.memory


def trained_dense(config: RunConfig, stage: Stage) -> float:
    """Trained part of `local_dense`."""
    return stage.trained.split / config.parallel.tensor + stage.trained.whole


def trained_tables(config: RunConfig, stage: Stage) -> float:
    """Trained part of `local_tables`."""
    return (stage.trained.table_elements + stage.trained.experts) / config.parallel.memory


def reduced_tables(config: RunConfig, stage: Stage) -> float:
    """The part of `trained_tables` whose gradients replicas reduce, each owning a range: without those that are rows."""
    tables = 0.0 if has_read_rows(config) else stage.trained.table_elements
    return (tables + stage.trained.experts) / config.parallel.memory
