"""Pictures of searches of one number."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab.studies.compare.sweep import sweep_picture, swept_key
from lab.studies.compare.tuning import Trial, Tuning
from pretrain.config.stages import load_config

CONFIGS = Path(__file__).resolve().parents[3] / "configs"


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"optimizer.lr": (1e-3, 1)}, "optimizer.lr"),
        ({"optimizer.lr": (1e-3, 0)}, None),
        ({"optimizer.tables": ("adamw",)}, None),
        ({"model.tied": (True, False)}, None),
        ({"optimizer.lr": (1e-3,), "optimizer.beta2": (0.9,)}, None),
        ({"optimizer.lr, optimizer.min_lr": ((1e-3, 1e-4),)}, None),
    ],
)
def test_a_sweep_has_one_key_of_numbers(values: dict[str, tuple[object, ...]], key: str | None) -> None:
    assert swept_key(Tuning(3, 10, 1, values)) == key


def test_models_have_lines_in_the_order_of_their_values() -> None:
    def trial(rate: float, loss: float) -> Trial:
        config = load_config(CONFIGS / "quickstart.yaml", [f"optimizer.lr={rate}", f"optimizer.min_lr={rate / 10}"])
        return Trial({"optimizer.lr": rate}, config, loss)

    trials = {"narrow": [trial(4e-3, 3.0), trial(1e-3, 3.5), trial(8e-3, 2.9)], "wide": [trial(4e-3, 2.8)]}
    (axes,) = sweep_picture("optimizer.lr", trials).axes
    narrow, best, wide, _ = axes.lines
    assert narrow.get_xydata().tolist() == [[1e-3, 3.5], [4e-3, 3.0], [8e-3, 2.9]]
    assert best.get_xydata().tolist() == [[8e-3, 2.9]]
    assert [line.get_label() for line in (narrow, wide)] == ["narrow", "wide"]
