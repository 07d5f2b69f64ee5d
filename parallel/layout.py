"""Where layers and ranks go: the arithmetic of a layout, without any process group."""

from __future__ import annotations


def chunk_layers(num_layers: int, *, pipeline: int, virtual_pipeline: int, pipeline_rank: int, chunk: int) -> range:
    """Global 0-based layers of one model chunk, as Megatron places them.

    Stage p of P holds chunks p, P + p, 2P + p, ... of the P x VP equal parts of the depth.

    Args:
        num_layers: layers of the model, divisible by pipeline x virtual_pipeline.
        pipeline: stages.
        virtual_pipeline: chunks per stage.
        pipeline_rank: the stage.
        chunk: which of its chunks.
    """
    per_chunk = num_layers // (pipeline * virtual_pipeline)
    first = (chunk * pipeline + pipeline_rank) * per_chunk
    return range(first, first + per_chunk)


def padded_size(size: int, multiple: int) -> int:
    """`size` rounded up to a multiple of `multiple`."""
    return -(-size // multiple) * multiple
