"""Blocks of a grown model, and the blocks that each is made of.

Legend: L blocks of the model, D new ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from pretrain.errors import ConfigError
from pretrain.growth.placement import Placement, anchors, positions

Method = Literal["memory", "llama-pro", "averaged", "solar"]
METHODS: tuple[Method, ...] = get_args(Method)


@dataclass(frozen=True)
class GrownBlock:
    """One block of the grown model.

    Attributes:
        sources: blocks of the model whose mean it begins with; as a rule one, which it then equals.
        inserted: kind of a new block. None: it is one of the model's own. memory: it has the source's attention without
            output projection, and a memory in place of the feed-forward. muted: all of the source, with output
            projections of zeros. copy: all of it.
    """

    sources: tuple[int, ...]
    inserted: Literal["memory", "muted", "copy"] | None = None


def grown_blocks(
    method: Method, *, num_layers: int, num_inserted: int, placement: Placement | None = None
) -> tuple[GrownBlock, ...]:
    """The blocks of the grown model, first to last.

    memory: a block of memory before each anchor, with the attention of that one (MIDUS, Eq. 2 and 11). llama-pro: a
    copy after each anchor, that adds nothing at first (Llama Pro, where anchors are `distributed`). averaged: before
    each anchor the mean of it and of the one before (Avg-DeUS averages adjacent blocks; that the new block stands
    between the two is our reading). solar: the first and the last (L + D) / 2 blocks, one after the other (SOLAR); the
    second ones of those that are there twice count as the new ones.

    Raises:
        ConfigError: the model's depth does not allow it.
    """
    own = [GrownBlock((layer,)) for layer in range(num_layers)]
    if method == "solar":
        return _solar(num_layers, num_inserted, placement)
    found = anchors(placement or "distributed", num_layers=num_layers, num_inserted=num_inserted)
    if method == "averaged" and found[0] == 0:
        raise ConfigError(
            "--insert averaged puts the mean of two blocks between them, and before the first there is none: use "
            "another --placement, or fewer --blocks"
        )
    for anchor, position in zip(found, positions(found, after=method == "llama-pro"), strict=True):
        match method:
            case "memory":
                new = GrownBlock((anchor,), "memory")
            case "llama-pro":
                new = GrownBlock((anchor,), "muted")
            case "averaged":
                new = GrownBlock((anchor - 1, anchor), "copy")
        own.insert(position, new)
    return tuple(own)


def _solar(num_layers: int, num_inserted: int, placement: Placement | None) -> tuple[GrownBlock, ...]:
    if placement is not None:
        raise ConfigError("--placement has no effect on --insert solar, which repeats the blocks in the middle")
    half, odd = divmod(num_layers + num_inserted, 2)
    if odd or not 1 <= num_inserted <= num_layers:
        raise ConfigError(
            f"--blocks is {num_inserted}: solar joins the first and the last half of {num_layers} + {num_inserted} "
            f"blocks, so use a number from 1 to {num_layers} that is {'odd' if num_layers % 2 else 'even'}"
        )
    first = [GrownBlock((layer,)) for layer in range(half)]
    last = range(num_layers - half, num_layers)
    return (*first, *(GrownBlock((layer,), "copy" if layer < half else None) for layer in last))
