"""Every kind of memory trains to the same numbers on every layout."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tiny_runs import SHARED, on, tiny_run

from megamem.config import MemoryConfig, SharingConfig
from pretrain.config.schema import RunConfig

STEPS = 3
HIDDEN = SHARED.model.hidden_size
PRODUCT = MemoryConfig(kind="memory_plus", num_keys=12, key_dim=8, value_dim=16, top_k=4, num_heads=2)
KINDS = {
    "ultramem": MemoryConfig(kind="ultramem", num_keys=12, key_dim=8, value_dim=16, top_k=4),
    "memory_plus": replace(PRODUCT, biases=True, output_gate=True, sharing=SharingConfig("all")),
    "pkm": replace(PRODUCT, kind="pkm", value_dim=HIDDEN),
    "peer": replace(PRODUCT, kind="peer", value_dim=HIDDEN, biases=True, query_norm=False),
}


def config_of(kind: str) -> RunConfig:
    return replace(SHARED, model=replace(SHARED.model, memory=KINDS[kind]))


@pytest.fixture(scope="module")
def trained(run_ranks: Any) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """Loss and gradient norm per step, by layout and kind."""

    def main(tensor: int) -> dict[str, list[tuple[float, float]]]:
        found = {}
        for kind in KINDS:
            with tiny_run(on(config_of(kind), tensor=tensor)) as run:
                found[kind] = run.train(STEPS)
        return found

    layouts = {"one rank": (1, 1), "data 2": (1, 2), "tensor 2": (2, 2)}
    return {name: run_ranks(lambda tensor=tensor: main(tensor), ranks)[0] for name, (tensor, ranks) in layouts.items()}


@pytest.mark.parametrize("layout", ["data 2", "tensor 2"])
@pytest.mark.parametrize("kind", KINDS)
def test_steps_are_the_same_on_every_layout(trained: dict[str, Any], kind: str, layout: str) -> None:
    for (loss, norm), (expected_loss, expected_norm) in zip(
        trained[layout][kind], trained["one rank"][kind], strict=True
    ):
        assert loss == pytest.approx(expected_loss, rel=1e-5)
        assert norm == pytest.approx(expected_norm, rel=1e-4)
