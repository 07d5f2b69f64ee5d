"""The models of four billion parameters fit a laptop: what they hold does not grow beyond weights and rows' state."""

from __future__ import annotations

from pathlib import Path

import pytest

from pretrain.config.schema import RunConfig
from pretrain.config.stages import load_config
from pretrain.config.validate import validate
from pretrain.planning.bytes.memory import stage_bytes
from pretrain.planning.bytes.memory_parts import MemoryPart
from pretrain.planning.counts.formulas import count_parameters

FOLDER = Path(__file__).parents[2] / "configs" / "laptop"
NAMES = ("4b", "4b_ultramemv2")


def load(name: str, *overrides: str) -> RunConfig:
    return load_config(FOLDER / f"{name}.yaml", ["model.vocab_size=4096", *overrides])


@pytest.mark.parametrize("name", NAMES)
def test_four_billion_parameters_take_ten_gigabytes(name: str) -> None:
    config = load(name)
    validate(config, 1)
    memory, counts = config.model.memory, count_parameters(config.model)
    assert memory is not None
    assert counts.total > 4e9
    (held,) = stage_bytes(config, 1, on_gpu=False)
    assert held.total < 10e9
    tables = held.by_part[MemoryPart.TABLES] + held.by_part[MemoryPart.TABLE_OPTIMIZER]
    assert tables == pytest.approx((2 + 8 / memory.value_dim) * counts.tables, rel=1e-6)


@pytest.mark.parametrize(("name", "fewer"), [("4b", "rows_per_head=39200"), ("4b_ultramemv2", "num_keys=396")])
def test_gradients_take_what_is_read_whatever_the_rows(name: str, fewer: str) -> None:
    gradients = []
    for config in (load(name), load(name, f"model.memory.{fewer}")):
        (held,) = stage_bytes(config, 1, on_gpu=False)
        gradients.append(held.by_part[MemoryPart.TABLE_GRADIENTS])
    # Rows are added up in what activations had, of which scores of more keys leave more.
    assert 0 < gradients[0] <= gradients[1] < 0.1e9
