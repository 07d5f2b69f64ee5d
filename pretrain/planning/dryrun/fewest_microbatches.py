"""Fewest microbatches that a step's peak needs: a dry run takes time for each."""

from __future__ import annotations

from dataclasses import replace

from pretrain.config.schema import RunConfig
from pretrain.planning.bytes.row_bytes import has_files, has_read_rows
from pretrain.planning.counts.pipeline_stages import Division


def with_fewest_microbatches(config: RunConfig, num_ranks: int) -> RunConfig:
    """The configuration with as few microbatches per step as hold at once what all of them do.

    A pipeline of P stages is full after P microbatches, an interleaved one within 2P, whose number P divides. The four that
    follow show what microbatches hold of each other: the allocator takes back what another stream has used when that
    stream's work is done. Each that is left out keeps its loss and its number of tokens, 16 bytes, to the step's end.

    Steps stay whole whose rows are those that were read, as each microbatch adds to them, and those of stages that go
    forward alone, which no backward pass holds up.
    """
    if has_read_rows(config) or has_files(config) or config.optimizer.trained_layers is not None:
        return config
    stages = config.parallel.pipeline
    fewest = stages + 4 if config.parallel.virtual_pipeline == 1 else 2 * stages
    division = Division.of(config, num_ranks)
    if division.num_microbatches <= fewest:
        return config
    sequences = fewest * config.train.micro_batch_size * division.replicas
    return replace(config, train=replace(config.train, global_batch_size=sequences))
