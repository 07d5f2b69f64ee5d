"""Every kind of memory trains to the same numbers on every layout."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tiny_runs import MEMORY, SHARED, build, joined, on

from megamem.families.linear_memory.config import LinearConfig
from megamem.families.memory_plus.config import MemoryPlusConfig
from megamem.families.midus.config import MidusConfig
from megamem.families.peer.config import PeerConfig
from megamem.families.pkm.config import PkmConfig
from megamem.families.ultramem.config import UltraMemConfig
from megamem.placement.sharing import SharingConfig
from megamem.placement.spans import PlacementConfig
from pretrain.config.schema import RunConfig
from tests.rotation import in_rotation

# The second shows the weights after the first one's update.
STEPS = 2
HIDDEN = SHARED.model.hidden_size
GRID: Any = {"num_keys": 12, "key_dim": 8, "top_k": 4, "num_heads": 2}
PRODUCT = MemoryPlusConfig(value_dim=16, **GRID)
KINDS = {
    "ultramem": UltraMemConfig(num_keys=12, key_dim=8, value_dim=16, top_k=4),
    "ultramem, inserted": UltraMemConfig(
        value_dim=16,
        queries_per_head=True,
        placement=PlacementConfig(blocks=(0, 3), position="inserted"),
        **GRID,
    ),
    "ultramem_v2, activated": replace(MEMORY, pre_value_activation="gelu", sharing=SharingConfig("ring", 2)),
    "memory_plus": replace(PRODUCT, biases=True, output_gate=True, sharing=SharingConfig("all")),
    "pkm": PkmConfig(value_dim=HIDDEN, **GRID),
    "pkm, inserted": PkmConfig(
        value_dim=HIDDEN, placement=PlacementConfig(blocks=(0, 3), position="inserted"), query_norm=False, **GRID
    ),
    "linear": LinearConfig(num_heads=2, num_rows=50, key_dim=8, top_k=4, value_dim=HIDDEN),
    "linear, inserted": LinearConfig(
        num_heads=4,
        num_rows=50,
        key_dim=8,
        top_k=4,
        value_dim=HIDDEN,
        placement=PlacementConfig(blocks=(0, 3), position="inserted"),
    ),
    "midus": MidusConfig(num_heads=4, num_keys=12, value_dim=16, placement=PlacementConfig(blocks=(1, 3))),
    "midus, stream and heads": MidusConfig(
        num_heads=4, num_keys=12, value_dim=16, query_from="stream_and_heads", placement=PlacementConfig(blocks=(1, 3))
    ),
    "midus, projected": MidusConfig(
        num_heads=4, num_keys=12, value_dim=16, query_from="projected", placement=PlacementConfig(blocks=(1, 3))
    ),
    "midus, layer norm": MidusConfig(
        num_heads=4, num_keys=12, value_dim=16, placement=PlacementConfig(blocks=(1, 3), norm="layer")
    ),
    "midus, normalised queries": MidusConfig(
        num_heads=4, num_keys=12, value_dim=16, query_norm="layer", placement=PlacementConfig(blocks=(1, 3))
    ),
    "midus, projected, normalised queries": MidusConfig(
        num_heads=4,
        num_keys=12,
        value_dim=16,
        query_from="projected",
        query_norm="layer",
        placement=PlacementConfig(blocks=(1, 3)),
    ),
    "peer": PeerConfig(value_dim=HIDDEN, biases=True, query_norm=False, **GRID),
}


LAYOUTS = {
    "data 2": {},
    "tensor 2": {"tensor": 2},
    "memory 2": {"memory": 2},
    "tensor 2 x memory 2": {"tensor": 2, "memory": 2},
}
# Variants of a family meet every axis in two layouts.
VARIANTS = [kind for kind in KINDS if "," in kind]
PAIRS = in_rotation(
    [
        (kind, layout)
        for layout in LAYOUTS
        for kind in KINDS
        if layout in ("data 2", "tensor 2 x memory 2") or kind not in VARIANTS
    ]
)


def config_of(kind: str) -> RunConfig:
    return replace(SHARED, model=replace(SHARED.model, memory=KINDS[kind]))


@pytest.fixture(scope="module")
def trained(run_ranks: Any) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """Loss and gradient norm per step, by layout and kind."""

    def main(kinds: dict[str, list[str]]) -> dict[str, dict[str, list[tuple[float, float]]]]:
        found: dict[str, dict[str, list[tuple[float, float]]]] = {}
        for layout, of_layout in kinds.items():
            sizes = LAYOUTS.get(layout, {})
            with joined(on(config_of("peer"), **sizes)) as groups:
                found[layout] = {kind: build(on(config_of(kind), **sizes), groups).train(STEPS) for kind in of_layout}
        return found

    alone = {"one rank": list(dict.fromkeys(kind for kind, _ in PAIRS))}
    split = {layout: [kind for kind, its_layout in PAIRS if its_layout == layout] for layout in LAYOUTS}
    return run_ranks(lambda: main(alone), 1)[0] | run_ranks(lambda: main(split), 2)[0]


@pytest.mark.parametrize(("kind", "layout"), PAIRS)
def test_steps_are_the_same_on_every_layout(trained: dict[str, Any], kind: str, layout: str) -> None:
    for (loss, norm), (expected_loss, expected_norm) in zip(
        trained[layout][kind], trained["one rank"][kind], strict=True
    ):
        assert loss == pytest.approx(expected_loss, rel=1e-5)
        assert norm == pytest.approx(expected_norm, rel=1e-4)
