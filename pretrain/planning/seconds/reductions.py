"""Seconds by which reductions of gradients and gathers of weights make a step longer.

A part of the gradients is reduced as soon as the last microbatch's backward pass has it, a part of the weights gathered
until the next forward pass reads it. A bank that several blocks read has its gradient after the lowest of them, and is
needed by the same: what lies below hides the one, and what lies before it hides the other. The rest is taken to lie in
equal parts with the blocks. All parts share the links, one after the other.

Legend: P stages, V chunks of a stage.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from megamem.config.memory import Scoring
from parallel.layout import padded_size
from pretrain.config.schema import RunConfig
from pretrain.config.updates import GRADIENT_BYTES, table_gradient_bytes
from pretrain.planning.bytes.row_bytes import has_read_rows
from pretrain.planning.bytes.weights import trained_dense
from pretrain.planning.counts.pipeline_stages import Division, Stage
from pretrain.planning.seconds.hardware import Hardware


class Weights(Enum):
    """Weights by how they are reduced: over the replicas of tables and experts, or of all else."""

    TABLES = "tables"
    DENSE = "dense"


@dataclass(frozen=True)
class Piece:
    """Weights that are reduced and gathered at a time.

    Attributes:
        kind: kind of the weights, which decides their replicas.
        chunk: number of the stage's chunk, whose own parts come one after the other.
        blocks_below: blocks of the stage that backward still passes when their gradient is complete, and forward has
            passed when they are needed, in one chunk's microbatch after another's.
        reduce_s, gather_s: seconds, alone.
    """

    kind: Weights
    chunk: int
    blocks_below: float
    reduce_s: float
    gather_s: float


@dataclass(frozen=True)
class Exposed:
    """Seconds by which pieces make a step longer, by kind."""

    reduce_s: dict[Weights, float]
    gather_s: dict[Weights, float]


def exposed(
    config: RunConfig, stage: Stage, division: Division, hardware: Hardware, forward_s: float, backward_s: float
) -> Exposed:
    """Exposed seconds of a stage.

    Args:
        forward_s, backward_s: seconds of a microbatch's passes through all blocks of the stage.
    """
    pieces = list(pieces_of(config, stage, division, hardware))
    blocks = max(1, stage.blocks.num)
    layout = config.parallel
    # A step begins with a decomposition of all cores, and so with a wait for the parts that they are in: nearly all.
    dense_first = any(memory.scoring == Scoring.TUCKER for memory in config.model.memories)
    return Exposed(
        reduce_exposed(pieces, backward_s / blocks if layout.overlap_grad_reduce else 0.0),
        gather_exposed(pieces, forward_s / blocks if layout.overlap_param_gather else 0.0, dense_first=dense_first),
    )


def pieces_of(config: RunConfig, stage: Stage, division: Division, hardware: Hardware) -> Iterator[Piece]:
    """Pieces of a stage, in the order in which forward needs them."""
    layout, element = config.parallel, config.train.element_bytes

    def piece(kind: Weights, weights: float, chunk: int, below: float, gradient: int = GRADIENT_BYTES) -> Piece:
        replicas, stride = (division.table_replicas, layout.memory)
        if kind == Weights.DENSE:
            replicas, stride = division.replicas * layout.context, layout.tensor
        times = (ring_s(weights * width, replicas, stride, hardware) for width in (gradient, element))
        return Piece(kind, chunk, below, *times)

    model = config.model
    blocks_of_chunks = [len(chunk.layers) for chunk in stage.chunks]
    num_blocks = max(1, sum(blocks_of_chunks))
    experts = stage.trained.experts / layout.memory / num_blocks
    vocabulary = padded_size(model.vocab_size or 0, model.vocab_size_multiple) * model.hidden_size / layout.tensor
    embedding = vocabulary * (stage.has_embedding and stage.trains_all)
    output = vocabulary * (stage.has_loss and stage.trains_all and not (model.tied_embeddings and stage.has_embedding))
    dense = (trained_dense(config, stage) - embedding - output) / num_blocks
    yield piece(Weights.DENSE, embedding, 0, 0)
    passed = 0
    for chunk, num in enumerate(blocks_of_chunks):
        # Between the same block's microbatches of two chunks lie those of all stages.
        before = passed * (layout.pipeline if layout.virtual_pipeline > 1 else 1)
        for block in range(num):
            for bank in () if has_read_rows(config) else stage.trained_banks:
                if (bank.chunk, bank.blocks_below) == (chunk, block):
                    of_bank = bank.elements / layout.memory
                    yield piece(Weights.TABLES, of_bank, chunk, before + block, table_gradient_bytes(config.optimizer))
            if experts:
                yield piece(Weights.TABLES, experts, chunk, before + block)
            yield piece(Weights.DENSE, dense, chunk, before + block)
        passed += num
    yield piece(Weights.DENSE, output if passed else output + dense, len(blocks_of_chunks) - 1, passed)


def reduce_exposed(pieces: Sequence[Piece], block_s: float) -> dict[Weights, float]:
    """Seconds of reductions after the end of backward, which takes `block_s` per block; 0: none starts before."""
    seconds = dict.fromkeys(Weights, 0.0)
    # Backward ends at 0.
    free = -float("inf")
    for piece in sorted(pieces, key=lambda each: -each.blocks_below):
        start = max(free, -piece.blocks_below * block_s)
        free = start + piece.reduce_s
        seconds[piece.kind] += max(0.0, free - max(0.0, start))
    return seconds


def gather_exposed(pieces: Sequence[Piece], block_s: float, *, dense_first: bool) -> dict[Weights, float]:
    """Seconds that forward, which takes `block_s` per block, waits for gathers; 0: it starts after all of them.

    A part's gather starts when the one before it of its kind and chunk is needed.

    Args:
        dense_first: True if forward begins when all of the dense weights are there.
    """
    seconds = dict.fromkeys(Weights, 0.0)
    # When the link is free, forward's delay so far, and when the last part of each row was needed.
    free, delay = 0.0, 0.0
    asked: dict[tuple[Weights, int], float] = {}
    if dense_first:
        free = delay = seconds[Weights.DENSE] = sum(p.gather_s for p in pieces if p.kind == Weights.DENSE)
    for piece in pieces:
        if dense_first and piece.kind == Weights.DENSE:
            continue
        row = piece.kind, piece.chunk
        free = max(free, asked.get(row, 0.0)) + piece.gather_s
        needed = piece.blocks_below * block_s + delay
        waits = max(0.0, free - needed)
        seconds[piece.kind] += waits
        delay += waits
        asked[row] = needed + waits
    return seconds


def ring_s(num_bytes: float, size: int, stride: int, hardware: Hardware) -> float:
    """Seconds of a reduce-scatter or gather of `num_bytes` over `size` ranks that are `stride` apart.

    A ring crosses between nodes once per node, and its members in a node share their adapters.
    """
    if size == 1:
        return 0.0
    sent = num_bytes * (size - 1) / size
    in_node = max(1, min(size, hardware.gpus_per_node // stride))
    inside = sent / hardware.nvlink_bytes_per_s if in_node > 1 else 0.0
    across = sent / in_node / hardware.network_bytes_per_s if size > in_node else 0.0
    return max(inside, across)
