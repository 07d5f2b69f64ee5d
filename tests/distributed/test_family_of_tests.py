"""Families that only the tests have: a folder and a registration here are all that it takes to train, split, pipeline,
recompute, save, resume, price and measure one. One stands around the feed-forward; the other brings a slot of its own,
in which no family of the product acts."""

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

from megamem.chunk.inputs import Inputs
from megamem.config.model import ModelConfig
from megamem.families.registry import FAMILIES
from pretrain.config.schema import LoggingConfig
from pretrain.config.stages import load_config
from pretrain.convert.huggingface.names import pairs
from pretrain.engine.build import build_chunks
from pretrain.errors import CheckpointError
from pretrain.planning.counts.formulas import count_parameters
from tests.families.behind_heads.config import BehindHeadsConfig
from tests.families.behind_heads.family import BEHIND_HEADS
from tests.families.hashed.config import HashedConfig
from tests.families.hashed.family import HASHED
from tests.rotation import in_rotation
from tools.config.sections import extra_sections

STEPS = 3
CONFIG = replace(SHARED, model=replace(SHARED.model, memory=HashedConfig(num_rows=40, value_dim=12, num_hashes=3)))
BEHIND_HEADS_CONFIG = replace(
    SHARED,
    model=replace(SHARED.model, memory=BehindHeadsConfig(num_rows=40, value_dim=SHARED.model.attention_head_dim)),
)
CONFIGS = {"hashed": CONFIG, "behind_heads": BEHIND_HEADS_CONFIG}
CASES = pytest.mark.parametrize("family", CONFIGS)

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
PAIRS = in_rotation([(family, layout) for layout in LAYOUTS for family in CONFIGS])


@pytest.fixture(autouse=True, scope="module")
def _registered() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for family in (HASHED, BEHIND_HEADS):
            patch.setitem(FAMILIES, family.kind, family)
        yield


@pytest.fixture(scope="module")
def trained(run_ranks: Any) -> dict[tuple[str, str], list[tuple[float, float]]]:
    """Loss and gradient norm per step, by family and layout."""

    def main(pairs: list[tuple[str, str]]) -> dict[tuple[str, str], list[tuple[float, float]]]:
        found = {}
        for family, layout in pairs:
            with tiny_run(on(CONFIGS[family], **LAYOUTS.get(layout, {}))) as run:
                found[family, layout] = run.train(STEPS)
        return found

    one_rank = [(family, "one rank") for family in CONFIGS]
    alone: dict[tuple[str, str], list[tuple[float, float]]] = run_ranks(lambda: main(one_rank), 1)[0]
    return alone | run_ranks(lambda: main(PAIRS), 4, timeout_s=300)[0]


@pytest.mark.parametrize(("family", "layout"), PAIRS)
def test_steps_are_the_same_on_every_layout(trained: dict[Any, Any], family: str, layout: str) -> None:
    alone = trained[family, "one rank"]
    for (loss, norm), (expected_loss, expected_norm) in zip(trained[family, layout], alone, strict=True):
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


def test_a_slot_of_its_own_adds_to_the_heads(run_ranks: Any) -> None:
    """With tables of zeros the model is the one without a memory; with others it is not."""

    def main() -> tuple[float, float, float]:
        def loss_of(model: ModelConfig, table: float | None) -> float:
            with tiny_run(replace(CONFIG, model=model)) as run:
                if table is not None:
                    for bank in run.bare[0].own_banks:
                        torch.nn.init.constant_(bank.values, table)
                return run.train(1)[0][0]

        with_memory = BEHIND_HEADS_CONFIG.model
        return loss_of(replace(with_memory, memory=None), None), loss_of(with_memory, 0.0), loss_of(with_memory, 1.0)

    dense, silent, doubled = run_ranks(main, 1)[0]
    assert silent == dense
    assert abs(doubled - dense) > 1e-4


@pytest.mark.parametrize("family", in_rotation(list(CONFIGS), 2))
def test_what_one_layout_saves_another_one_resumes(
    run_ranks: Any, tmp_path: Path, trained: dict[Any, Any], family: str
) -> None:
    saved, resumed = (
        LAYOUTS["tensor 2 x pipeline 2 x virtual pipeline 2 x memory 2, recomputed"],
        LAYOUTS["data 4 x memory 4"],
    )

    def main() -> list[tuple[float, float]]:
        with tiny_run(on(CONFIGS[family], **saved)) as run:
            run.train(2)
            run.save(tmp_path)
        with tiny_run(on(CONFIGS[family], **resumed)) as run:
            run.resume(tmp_path / "step_00000002")
            return run.train(1)

    for (loss, norm), (expected_loss, expected_norm) in zip(
        run_ranks(main, 4)[0], trained[family, "one rank"][2:], strict=True
    ):
        assert loss == pytest.approx(expected_loss, rel=1e-5)
        assert norm == pytest.approx(expected_norm, rel=1e-4)


@CASES
def test_its_use_is_measured_without_scores(run_ranks: Any, tmp_path: Path, family: str) -> None:
    config = replace(CONFIGS[family], logging=LoggingConfig(memory_every_steps=2))
    (rows,) = run_ranks(lambda: rows_of(config, tmp_path, 2), 1)
    (observed,) = [row["memory"] for row in rows if "memory" in row]
    assert set(observed) == {"0", "1", "2", "3"}
    for figures in observed.values():
        assert set(figures) == {"coverage", "kl_to_uniform", "output_std"}
        assert 0.5 < figures["coverage"] <= 1
        assert figures["output_std"] > 0


@CASES
def test_its_costs_are_those_of_the_model(run_ranks: Any, family: str) -> None:
    config = CONFIGS[family]

    def main() -> int:
        with joined(config) as groups:
            (chunk,) = build_chunks(config, groups, vocab_size=61)
            return sum(p.numel() for p in chunk.parameters())

    assert count_parameters(replace(config.model, vocab_size=61)).total == run_ranks(main, 1)[0]


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


def test_a_slot_that_exported_models_do_not_have_is_refused() -> None:
    model = replace(BEHIND_HEADS_CONFIG.model, vocab_size=64)
    with pytest.raises(CheckpointError, match=r"kind is behind_heads, whose memories act in the slot heads"):
        pairs(model, vocab_size=64, tensors={})


def test_registered_families_are_there_by_name_alone() -> None:
    """Nothing of the product was changed for it, so nothing of the product names it."""
    repository = Path(__file__).parents[2]
    for package in ("kernels", "megamem", "parallel", "pretrain", "tools"):
        for file in (repository / package).rglob("*.py"):
            assert not re.search(
                r"families\.(hashed|behind_heads)|Hashed(Config|Layer)|BehindHeads", file.read_text(encoding="utf-8")
            ), file
