"""Placement of memories: the block that one reads at, and the block after which its output joins the residual stream.

Blocks count from 0. In UltraMemV2 and Memory+ a memory reads and adds in the same block; UltraMem reads the normalised
input of block a's feed-forward and adds after block b >= a, so that the blocks between do not wait for it (skip
insertion).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal

from pydantic import PositiveInt

from megamem.config.base import Config, EffectiveWhen

_KEY = "model.memory.placement.spans"


@dataclass(frozen=True)
class Span:
    """One memory layer: it reads at block `read`, and its output is added after block `add`.

    Attributes:
        queried: the earlier block whose normalised stream is its input; None: that of its own block.
    """

    read: int
    add: int
    queried: int | None = None

    @property
    def is_skip(self) -> bool:
        """True if the output waits for a later block."""
        return self.add > self.read


def parse_spans(text: str) -> tuple[Span, ...]:
    """The spans written `a:b/c:d/...`, in the release's notation.

    Raises:
        ValueError: the text is not of that form, a span ends before it begins, or two of them read at the same block or
            out of order.
    """
    spans = []
    for part in text.split("/"):
        match = re.fullmatch(r"(\d+):(\d+)", part.strip())
        if match is None:
            raise ValueError(f"{_KEY} is {text!r}: write read:add pairs of 0-based blocks joined by /, as in 2:5/6:9")
        spans.append(Span(int(match[1]), int(match[2])))
    for span in spans:
        if span.add < span.read:
            raise ValueError(
                f"{_KEY} is {text!r}, where {span.read}:{span.add} adds before it reads: the second block of a pair is "
                "the same or a later one"
            )
    for before, after in itertools.pairwise(spans):
        if after.read <= before.read:
            raise ValueError(
                f"{_KEY} is {text!r}, where {after.read}:{after.add} follows {before.read}:{before.add}: "
                "sort the pairs by their first block, and let each block read once"
            )
    return tuple(spans)


@dataclass(frozen=True)
class PlacementConfig(Config):
    """Blocks (counted from 0) with a memory, and the place where its output goes."""

    every: Annotated[
        PositiveInt,
        EffectiveWhen(lambda c: c.blocks is None and c.spans is None, "placement.blocks and placement.spans are null"),
    ] = 1
    """Every n-th block has a memory, the last of each n: blocks n - 1, 2n - 1, ... (1: every block)."""
    blocks: Annotated[tuple[int, ...] | None, EffectiveWhen(lambda c: c.spans is None, "placement.spans is null")] = (
        None
    )
    """The blocks with a memory, ascending; null: every n-th."""
    spans: str | None = None
    """UltraMem's skip insertion, read:add pairs joined by / as in 2:5/6:9: read the feed-forward's input in the first
    block, add after the second. Null: the memory adds where it reads."""
    query_group: Annotated[PositiveInt, EffectiveWhen(lambda c: c.spans is None, "placement.spans is null")] = 1
    """So many memory layers in a row read with the stream that the first of them is given, and add each in its own
    block (1: each reads with its own)."""
    position: Annotated[
        Literal["beside", "instead", "inserted"], EffectiveWhen(lambda c: c.spans is None, "placement.spans is null")
    ] = "beside"
    """beside: the memory adds to the feed-forward of its block; instead: it replaces it; inserted: it is all that its
    block adds to the residual stream, x + Mem(x + Attn(Norm(x))), from values of zeros on (MIDUS, Eq. 1)."""
    norm: Literal["rms", "layer"] = "rms"
    """Norm of the residual stream before the attention of an inserted block. rms: RMSNorm, as in the other blocks;
    layer: LayerNorm, as MIDUS writes it, with the gain of the following block and a bias of zeros at first."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.spans is not None:
            parse_spans(self.spans)
        if self.spans is None and self.position != "beside" and self.query_group > 1:
            raise ValueError(
                f"model.memory.placement.query_group is {self.query_group}, but position is {self.position}, where nothing "
                "but the memory reads its block's norm: use query_group: 1, or position: beside"
            )
        blocks = self.blocks
        if blocks is not None and (not blocks or list(blocks) != sorted(set(blocks)) or blocks[0] < 0):
            raise ValueError(
                f"model.memory.placement.blocks is {list(blocks)}: list 0-based blocks in ascending order, each once "
                "and at least one (leave model.memory out for a model without)"
            )

    @property
    def hands_on(self) -> bool:
        """True if blocks hand something of the memories to later ones."""
        return self.query_group > 1 or (
            self.spans is not None and any(span.is_skip for span in parse_spans(self.spans))
        )


def count_memory_layers(placement: PlacementConfig, num_layers: int) -> int:
    """Number of memory layers in a model of `num_layers` blocks.

    Raises:
        ValueError: a block lies outside of the model, or no block would have a memory.
    """
    listed = _listed(placement)
    if listed is None:
        if placement.every > num_layers:
            raise ValueError(
                f"model.memory.placement.every is {placement.every}, more than num_layers = {num_layers}: no block "
                "would have a memory"
            )
        return num_layers // placement.every
    last = max(span.add for span in listed)
    if last >= num_layers:
        setting = (
            f"blocks is {list(placement.blocks or ())}" if placement.spans is None else f"spans is {placement.spans}"
        )
        raise ValueError(
            f"model.memory.placement.{setting}, but block {last} is not one of num_layers = {num_layers}: they count "
            f"from 0 to {num_layers - 1}"
        )
    return len(listed)


def resolve_placement(placement: PlacementConfig, num_layers: int) -> tuple[Span, ...]:
    """The memory layers of a model of `num_layers` blocks, in the order of the blocks that they read at.

    Raises:
        ValueError: a block lies outside of the model, or no block would have a memory.
    """
    count_memory_layers(placement, num_layers)
    every = range(placement.every - 1, num_layers, placement.every)
    spans = _listed(placement) or tuple(Span(block, block) for block in every)
    group = placement.query_group
    firsts = [spans[index - index % group].read for index in range(len(spans))]
    return tuple(
        span if span.read == first else replace(span, queried=first) for span, first in zip(spans, firsts, strict=True)
    )


def _listed(placement: PlacementConfig) -> tuple[Span, ...] | None:
    """The memory layers that the placement lists one by one; None for every n-th block."""
    if placement.spans is not None:
        return parse_spans(placement.spans)
    if placement.blocks is not None:
        return tuple(Span(block, block) for block in placement.blocks)
    return None


def pending_before(spans: Sequence[Span], block: int) -> tuple[Span, ...]:
    """The spans that read before `block` and have not been added before it, in the order of their reads."""
    return tuple(span for span in spans if span.read < block <= span.add)
