"""Bytes that a block adds, at its largest moments, to what backward needs of its forward pass."""

from __future__ import annotations

from dataclasses import dataclass, field

from parallel.layout import coefficients_per_rank
from pretrain.config.schema import RunConfig
from pretrain.planning.bytes.block_kept import id_bytes
from pretrain.planning.bytes.memory_parts import MemoryPart, merged, total
from pretrain.planning.bytes.row_bytes import has_read_rows
from pretrain.planning.counts.attention import attention_backward
from pretrain.planning.counts.experts import experts_backward
from pretrain.planning.counts.pipeline_stages import FamilyInStage, Stage
from pretrain.planning.counts.residual_streams import sites_passing

SORT_SCRATCH = 8 + 4 + 8
"""Bytes per entry that a GPU sorts by row: positions to begin with, and the second halves of CUB's double buffers."""


@dataclass(frozen=True)
class Passing:
    """Bytes that one block adds at its largest moments to what backward needs of its forward pass, by part.

    Attributes:
        residual: bytes in all moments.
        of_backbone: bytes of the largest moment of feed-forward and attention.
        of_memory: bytes of the memory's largest moment.
        on_memory_stream: bytes of the largest moment of the memory's own stream.
        on_gradient_stream: bytes of the largest moment of the stream that adds gradients of tables up.
    """

    residual: dict[MemoryPart, float] = field(default_factory=dict)
    of_backbone: dict[MemoryPart, float] = field(default_factory=dict)
    of_memory: dict[MemoryPart, float] = field(default_factory=dict)
    on_memory_stream: float = 0.0
    on_gradient_stream: float = 0.0


def block_passing(
    config: RunConfig,
    stage: Stage,
    tokens: int,
    kept: dict[MemoryPart, float],
    under_way: dict[MemoryPart, float],
) -> Passing:
    """Bytes that one block adds at its largest moments to `kept`, the bytes that backward needs of its forward pass.

    Those of the backbone: backward of the feed-forward, see `_ffn_backward`; backward of attention across ranks, when
    what the feed-forward kept is gone, see `attention_backward`. Those of the memory, in all of which the lookup before
    may still have its gradients `under_way`, but for the sort. Selection of entries: the family's figure. Read: the scores
    of all keys, and coefficients as they are cut for ranks and as they leave, or before them rows and bins in one
    number. Backward of the read: the ids' sort, their rows and 8 bytes of positions, with the sort's scratch. Backward
    of the retrieval: the gradients of the key scores, when what the lookup and the entries kept is gone.
    """
    model, element = config.model, config.train.element_bytes
    backbone: list[dict[MemoryPart, float]] = [{}]
    if stage.backward.ffns:
        trained = stage.trained_blocks.ffns > 0
        backbone.append({MemoryPart.BACKWARD: _ffn_backward(config, tokens, trained=trained)})
    if config.parallel.context > 1:
        of_ffn = kept.get(MemoryPart.FEED_FORWARD, 0.0)
        backbone.append({MemoryPart.BACKWARD: attention_backward(config, tokens), MemoryPart.FEED_FORWARD: -of_ffn})
    moments: list[dict[MemoryPart, float]] = [{}]
    on_memory_stream = sorting = 0.0
    reading = stage.families if stage.backward.memories else ()
    together = [family.memory for family in reading if family.memory.reads_once]
    apart = [family for family in reading if not family.memory.reads_once]
    if apart:
        for family in apart:
            moments += _moments(config, family, tokens, kept)
            sorting = max(sorting, _sort_bytes(config, family, tokens))
        operands = under_way.get(MemoryPart.EXCHANGE, 0.0)
        on_memory_stream = max(0.0, *(total(moment) + operands for moment in moments))
        moments = [merged(moment, under_way) for moment in moments]
        moments.append({MemoryPart.MEMORY: sorting})
    for memory in together:
        # Gradient of a shared read: the sum so far, what one more block adds, and both; the block itself is gone.
        shared = tokens * memory.lookup.bins * memory.width("values") * element
        gone = (MemoryPart.RESIDUAL, MemoryPart.ATTENTION, MemoryPart.FEED_FORWARD)
        whole = config.train.recompute == "full"
        moments.append({MemoryPart.BACKWARD: 3.0 * shared, **{part: -kept[part] for part in gone if not whole}})
    of_sites = sites_passing(model, element)
    return Passing(
        # The gradient that goes down the residual stream, and what a part adds to it.
        {MemoryPart.BACKWARD: tokens * (2.0 * model.hidden_size * element + of_sites)},
        max(backbone, key=total),
        max(moments, key=total),
        on_memory_stream,
        # Rows as gradients are sorted and added up on the common stream, at the step's end.
        0.0 if has_read_rows(config) else sorting,
    )


def _moments(
    config: RunConfig, family: FamilyInStage, tokens: int, kept: dict[MemoryPart, float]
) -> list[dict[MemoryPart, float]]:
    """Largest moments of a memory layer of a family: selection, read, and backward of the retrieval; see
    `block_passing`."""
    element, group, lookup = config.train.element_bytes, config.parallel.memory, family.memory.lookup
    ids, per_id = group * tokens * lookup.rows, id_bytes(config, family.memory, max(family.lookups))
    cut = 2 * coefficients_per_rank(lookup.scores, config.parallel.memory_columns) * element
    both = per_id * (lookup.bins > 1)
    passing = max(cut, both) * ids if group > 1 else 0
    of_scores = 4 * tokens * family.costs.backward_wide / len(family.lookups)
    entries = tokens * family.costs.kept_by_entries / len(family.lookups)
    return [
        {MemoryPart.MEMORY: 4.0 * tokens * family.costs.select_wide / len(family.lookups)},
        {MemoryPart.MEMORY: of_scores / 2, MemoryPart.EXCHANGE: float(passing)},
        {
            MemoryPart.BACKWARD: of_scores,
            MemoryPart.MEMORY: -entries,
            MemoryPart.EXCHANGE: -kept[MemoryPart.EXCHANGE],
        },
    ]


def _sort_bytes(config: RunConfig, family: FamilyInStage, tokens: int) -> float:
    """Bytes of the sort of a lookup's ids, their rows and 8 bytes of positions."""
    per_id = id_bytes(config, family.memory, max(family.lookups))
    return float((per_id + 8 + SORT_SCRATCH) * config.parallel.memory * tokens * family.memory.lookup.rows)


def _ffn_backward(config: RunConfig, tokens: int, *, trained: bool) -> float:
    """Bytes of one feed-forward's gradients: of gate and up, their product, and, where it is trained, the weight."""
    model, element = config.model, config.train.element_bytes
    if model.moe is not None:
        return experts_backward(model, model.moe, tokens, element)
    width = model.ffn_hidden_size
    return element * (3.0 * tokens * width + trained * 2 * width * model.hidden_size / config.parallel.tensor)
