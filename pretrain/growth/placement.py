"""Places of new blocks between those of a model (MIDUS, Eq. 11 and appendix G.4). Blocks count from 0."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

from pretrain.errors import ConfigError

Placement = Literal["distributed", "top-heavy", "bottom-heavy"]
PLACEMENTS: tuple[Placement, ...] = get_args(Placement)


def anchors(placement: Placement, *, num_layers: int, num_inserted: int) -> tuple[int, ...]:
    """The blocks of the model beside which new ones go, one each, ascending.

    distributed: the last of each of `num_inserted` groups of consecutive blocks; the depth need not be a multiple, then
    groups differ by one block. top-heavy: the last blocks. bottom-heavy: the first.

    Raises:
        ConfigError: the blocks are fewer than the new ones.
    """
    if not 1 <= num_inserted <= num_layers:
        raise ConfigError(
            f"--blocks is {num_inserted}, and the model has {num_layers} blocks, each of which takes one new block at "
            f"most: use 1 to {num_layers}"
        )
    match placement:
        case "distributed":
            return tuple((j + 1) * num_layers // num_inserted - 1 for j in range(num_inserted))
        case "top-heavy":
            return tuple(range(num_layers - num_inserted, num_layers))
        case "bottom-heavy":
            return tuple(range(num_inserted))


def positions(found: Sequence[int], *, after: bool) -> tuple[int, ...]:
    """Numbers of the new blocks in the grown model: each before its anchor, or after it."""
    return tuple(anchor + number + after for number, anchor in enumerate(found))
