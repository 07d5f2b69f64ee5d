"""Changes that the slots around the feed-forward and before a block make of its parts (`megamem.placement.slots`)."""

from __future__ import annotations

from functools import partial

from megamem.backbone.parts import BlockParts, Parts, Site
from megamem.blocks.memory_sites import EntryMemory, FfnWithMemory


def edit_ffn(block: BlockParts, site: Site, parts: Parts) -> None:
    """Put the memory beside the feed-forward, or in its place."""
    block.mlp = partial(FfnWithMemory, make_ffn=parts.make_ffn, site=site, side_stream=parts.side_stream)


def edit_entry(block: BlockParts, site: Site, parts: Parts) -> None:
    """Put the memory before attention."""
    block.entry = partial(EntryMemory, site=site)
