"""Places of new blocks: the published lists, recorded ones of other depths, and what cannot be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pretrain.errors import ConfigError
from pretrain.growth.placement import PLACEMENTS, Placement, anchors, positions
from pretrain.growth.plan import GrownBlock, Method, grown_blocks

# MIDUS, appendix G.4: (placement, after the anchor) of 16 + 8 and 32 + 16 blocks.
PUBLISHED: dict[tuple[Placement, bool], tuple[tuple[int, ...], tuple[int, ...]]] = {
    ("distributed", False): (tuple(range(1, 24, 3)), tuple(range(1, 48, 3))),
    ("distributed", True): (tuple(range(2, 24, 3)), tuple(range(2, 48, 3))),
    ("top-heavy", False): (tuple(range(8, 24, 2)), tuple(range(16, 48, 2))),
    ("bottom-heavy", False): (tuple(range(0, 16, 2)), tuple(range(0, 32, 2))),
}


@pytest.mark.parametrize(("placement", "after"), PUBLISHED)
def test_published_lists(placement: Placement, after: bool) -> None:
    for depth, expected in zip((16, 32), PUBLISHED[placement, after], strict=True):
        found = anchors(placement, num_layers=depth, num_inserted=depth // 2)
        assert positions(found, after=after) == expected


def test_recorded_lists_of_other_depths(golden_dir: Path) -> None:
    rows = json.loads((golden_dir / "head" / "midus_placement.json").read_text(encoding="utf-8"))["rows"]
    assert len(rows) == 56
    for row in rows:
        after = row["insert"] == "after"
        placement: Placement = "distributed" if after else row["policy"].replace("_", "-")
        found = anchors(placement, num_layers=row["L"], num_inserted=row["D"])
        assert list(found) == row["anchors"]
        assert list(positions(found, after=after)) == row["positions"]


@pytest.mark.parametrize("method", ["memory", "llama-pro"])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_the_model_is_there_in_its_order_and_new_blocks_where_they_are_said_to_be(
    placement: Placement, method: Method
) -> None:
    for depth in (1, 2, 7, 16):
        for number in range(1, depth + 1):
            blocks = grown_blocks(method, num_layers=depth, num_inserted=number, placement=placement)
            assert [block.sources for block in blocks if block.inserted is None] == [(i,) for i in range(depth)]
            found = anchors(placement, num_layers=depth, num_inserted=number)
            places = positions(found, after=method == "llama-pro")
            assert tuple(i for i, block in enumerate(blocks) if block.inserted) == places
            for place, anchor in zip(places, found, strict=True):
                assert blocks[place].sources == (anchor,)
                # Before the block whose attention it has, or after the one that it copies.
                assert blocks[place + (1 if method == "memory" else -1)] == GrownBlock((anchor,))


def test_solar_of_its_paper() -> None:
    """32 blocks to 48: the first 24 and the last 24."""
    blocks = grown_blocks("solar", num_layers=32, num_inserted=16)
    assert [block.sources[0] for block in blocks] == [*range(24), *range(8, 32)]
    assert [i for i, block in enumerate(blocks) if block.inserted] == list(range(24, 40))


def test_what_a_depth_does_not_allow_is_refused() -> None:
    for number in (0, 5):
        with pytest.raises(ConfigError, match=rf"--blocks is {number}, and the model has 4 blocks.*use 1 to 4"):
            grown_blocks("memory", num_layers=4, num_inserted=number)
    with pytest.raises(ConfigError, match=r"--blocks is 3: solar joins .* from 1 to 4 that is even"):
        grown_blocks("solar", num_layers=4, num_inserted=3)
    with pytest.raises(ConfigError, match=r"--placement has no effect on --insert solar"):
        grown_blocks("solar", num_layers=4, num_inserted=2, placement="top-heavy")
    with pytest.raises(ConfigError, match=r"before the first there is none"):
        grown_blocks("averaged", num_layers=4, num_inserted=2, placement="bottom-heavy")
