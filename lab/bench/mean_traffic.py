"""Bytes that a rank sends per optimizer step, by closed formulas, as the mean over pipeline stages."""

from __future__ import annotations

from pretrain.config.schema import RunConfig
from pretrain.planning.counts.pipeline_stages import Division, Stage, stages_of
from pretrain.planning.seconds.traffic import context_bytes, lookup_bytes_of_ways


def lookup_bytes(config: RunConfig, stage: Stage, division: Division) -> int:
    """Bytes that a rank of a stage sends for all lookups of a microbatch, forward and backward."""
    return sum(way.total for way in lookup_bytes_of_ways(config, stage, division))


def exchanged_bytes(config: RunConfig, num_ranks: int) -> int:
    """Bytes that a rank sends per optimizer step for lookups in tables that are split, and for their gradients.

    Stages with more memory layers than others send more: this is their mean.
    """
    division = Division.of(config, num_ranks)
    per_microbatch = sum(lookup_bytes(config, stage, division) for stage in stages_of(config))
    return division.num_microbatches * per_microbatch // config.parallel.pipeline


def attention_bytes(config: RunConfig, num_ranks: int) -> int:
    """Bytes that a rank sends per optimizer step for attention across cut sequences.

    Stages with more layers than others send more: this is their mean.
    """
    per_microbatch = sum(context_bytes(config, stage) for stage in stages_of(config))
    return Division.of(config, num_ranks).num_microbatches * per_microbatch // config.parallel.pipeline
