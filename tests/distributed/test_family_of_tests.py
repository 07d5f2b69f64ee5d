"""A family that only the tests have: its folder and its registration here are all that it takes to train, split,
pipeline, recompute, save, resume, price and measure it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_usage_rows import rows_of
from tiny_runs import SHARED, joined, on, tiny_run

from megamem.families.registry import FAMILIES
from megamem.inputs import Inputs
from pretrain.config.schema import LoggingConfig
from pretrain.config.stages import load_config
from pretrain.engine.build import build_chunks
from pretrain.planning.costs.formulas import count_parameters
from tests.families.hashed.config import HashedConfig
from tests.families.hashed.family import HASHED
from tools.config import extra_sections

STEPS = 3
MEMORY = HashedConfig(num_rows=40, value_dim=12, num_hashes=3)
CONFIG = replace(SHARED, model=replace(SHARED.model, memory=MEMORY))

LAYOUTS: dict[str, dict[str, Any]] = {
    "tensor 2 x memory 2": {"tensor": 2, "memory": 2},
    "data 4 x memory 4": {"memory": 4, "micro_batch_size": 2},
    "context 2 x memory 2": {"context": 2, "memory": 2},
    "pipeline 2 x virtual pipeline 2, recomputed": {
        "pipeline": 2,
        "virtual_pipeline": 2,
        "micro_batch_size": 2,
        "recompute": "full",
    },
    "tensor 2 x pipeline 2 x virtual pipeline 2 x memory 2, recomputed": {
        "tensor": 2,
        "pipeline": 2,
        "virtual_pipeline": 2,
        "memory": 2,
        "micro_batch_size": 2,
        "recompute": "full",
    },
}


@pytest.fixture(autouse=True, scope="module")
def _registered() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(FAMILIES, HASHED.kind, HASHED)
        yield


@pytest.fixture(scope="module")
def trained(run_ranks: Any) -> dict[str, list[tuple[float, float]]]:
    """Loss and gradient norm per step, by layout."""

    def main(layouts: dict[str, dict[str, Any]]) -> dict[str, list[tuple[float, float]]]:
        found = {}
        for name, sizes in layouts.items():
            with tiny_run(on(CONFIG, **sizes)) as run:
                found[name] = run.train(STEPS)
        return found

    alone: dict[str, list[tuple[float, float]]] = run_ranks(lambda: main({"one rank": {}}), 1)[0]
    return alone | run_ranks(lambda: main(LAYOUTS), 4, timeout_s=300)[0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_steps_are_the_same_on_every_layout(trained: dict[str, Any], layout: str) -> None:
    for (loss, norm), (expected_loss, expected_norm) in zip(trained[layout], trained["one rank"], strict=True):
        assert loss == pytest.approx(expected_loss, rel=1e-5)
        assert norm == pytest.approx(expected_norm, rel=1e-4)


def test_a_layer_adds_the_rows_of_its_tokens(run_ranks: Any) -> None:
    def main() -> float:
        with tiny_run(CONFIG) as run, torch.no_grad():
            (model,) = run.bare
            layer, ids = model.memory_layers[1], torch.tensor([[3, 5], [3, 60]])
            hidden = torch.randn(2, 2, CONFIG.model.hidden_size)
            out = layer(hidden, Inputs(torch.stack((ids, ids))))
            table, weights = model.banks["1"].values, layer.out_proj
            return max(
                float((out[s, b] - weights @ sum(table[row] for row in layer.rows(ids[s, b].view(1))[0])).abs().max())
                for s in range(2)
                for b in range(2)
            )

    assert run_ranks(main, 1)[0] < 1e-6


def test_what_one_layout_saves_another_one_resumes(run_ranks: Any, tmp_path: Path, trained: dict[str, Any]) -> None:
    saved, resumed = (
        LAYOUTS["tensor 2 x pipeline 2 x virtual pipeline 2 x memory 2, recomputed"],
        LAYOUTS["data 4 x memory 4"],
    )

    def main() -> list[tuple[float, float]]:
        with tiny_run(on(CONFIG, **saved)) as run:
            run.train(2)
            run.save(tmp_path)
        with tiny_run(on(CONFIG, **resumed)) as run:
            run.resume(tmp_path / "step_00000002")
            return run.train(1)

    for (loss, norm), (expected_loss, expected_norm) in zip(
        run_ranks(main, 4)[0], trained["one rank"][2:], strict=True
    ):
        assert loss == pytest.approx(expected_loss, rel=1e-5)
        assert norm == pytest.approx(expected_norm, rel=1e-4)


def test_its_use_is_measured_without_scores(run_ranks: Any, tmp_path: Path) -> None:
    config = replace(CONFIG, logging=LoggingConfig(memory_every_steps=2))
    (rows,) = run_ranks(lambda: rows_of(config, tmp_path, 2), 1)
    (observed,) = [row["memory"] for row in rows if "memory" in row]
    assert set(observed) == {"0", "1", "2", "3"}
    for figures in observed.values():
        assert set(figures) == {"coverage", "kl_to_uniform", "output_std"}
        assert 0.5 < figures["coverage"] <= 1
        assert figures["output_std"] > 0


def test_its_costs_are_those_of_the_model(run_ranks: Any) -> None:
    def main() -> int:
        with joined(CONFIG) as groups:
            (chunk,) = build_chunks(CONFIG, groups, vocab_size=61)
            return sum(p.numel() for p in chunk.parameters())

    assert count_parameters(replace(CONFIG.model, vocab_size=61)).total == run_ranks(main, 1)[0]


def test_the_command_line_knows_it(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("model: {num_layers: 2, vocab_size: 500, memory: {kind: hashed, num_rows: 100, num_hashes: 4}}")
    config = load_config(path)
    assert config.model.memory == HashedConfig(num_rows=100, num_hashes=4)
    sections = {section.title: "\n".join(section.lines) for section in extra_sections(config, 1)}
    assert "tables: 3,200" in sections["parameters"]
    assert "memory_projections: 4,096" in sections["parameters"]
    assert "bytes of table read per token: 512" in sections["parameters"]
    assert "memory of block 1: sigma_V 0.125, output std measured" in sections["initialisation (constants)"]


def test_registered_families_are_there_by_name_alone() -> None:
    """Nothing of the product was changed for it, so nothing of the product names it."""
    repository = Path(__file__).parents[2]
    for package in ("kernels", "megamem", "parallel", "pretrain", "tools"):
        for file in (repository / package).rglob("*.py"):
            assert not re.search(r"families\.hashed|HashedConfig|HashedLayer", file.read_text(encoding="utf-8")), file
