"""The models of the shipped comparison are as equal as its rules say, by the closed formulas."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megamem.config import ModelConfig
from pretrain.config.loader import load_config
from pretrain.config.schema import RunConfig
from pretrain.config.validate import validate
from pretrain.costs.formulas import count_parameters, forward_flops_per_token
from tools.compare.rules import load_configs

FOLDER = Path(__file__).parents[2] / "configs" / "compare"
VOCAB = 4096
NAMES = ("dense", "memory_plus", "moe", "pkm", "ultramem", "ultramemv2", "ultramemv2_block", "ultramemv2_ring")
SPARSE = NAMES[1:]
MEMORIES = tuple(name for name in SPARSE if name != "moe")


def load(name: str) -> RunConfig:
    return load_config(FOLDER / f"{name}.yaml", [f"model.vocab_size={VOCAB}"])


def flops(model: ModelConfig) -> float:
    return forward_flops_per_token(model, 256)


def with_width(model: ModelConfig, change: int) -> ModelConfig:
    """The model with a wider or narrower feed-forward, or expert."""
    if model.moe is None:
        return replace(model, ffn_hidden_size=model.ffn_hidden_size + 8 * change)
    return replace(model, moe=replace(model.moe, expert_ffn_hidden_size=model.moe.expert_ffn_hidden_size + change))


def test_the_folder_is_one_comparison() -> None:
    configs = load_configs([str(path) for path in sorted(FOLDER.glob("*.yaml"))])
    assert tuple(config.name for config in configs.values()) == NAMES
    for config in configs.values():
        validate(config, 2)
        assert config.train.num_steps * config.train.global_batch_size * config.train.sequence_length == 1_048_576


@pytest.mark.parametrize("name", SPARSE)
def test_flops_and_active_parameters_are_those_of_the_dense_model(name: str) -> None:
    dense, model = load("dense").model, load(name).model
    assert flops(model) == pytest.approx(flops(dense), rel=0.005)
    assert count_parameters(model).active == pytest.approx(count_parameters(dense).active, rel=0.01)


@pytest.mark.parametrize("name", SPARSE)
def test_no_neighbouring_width_is_nearer(name: str) -> None:
    target, model = flops(load("dense").model), load(name).model
    distances = [abs(flops(with_width(model, change)) - target) for change in (-1, 0, 1)]
    assert min(distances) == distances[1]


@pytest.mark.parametrize("name", MEMORIES)
def test_tables_hold_what_idle_experts_hold(name: str) -> None:
    counts, mixture = count_parameters(load(name).model), count_parameters(load("moe").model)
    assert counts.tables == pytest.approx(mixture.idle_experts, rel=0.01)
    assert counts.total == pytest.approx(mixture.total, rel=0.01)
    assert counts.read_values == 4096


@pytest.mark.parametrize("name", NAMES)
def test_models_differ_in_the_feed_forward_and_memory_alone(name: str) -> None:
    config, dense = load(name), load("dense")
    alike = replace(config.model, ffn_hidden_size=dense.model.ffn_hidden_size, moe=None, memory=None)
    assert alike == dense.model
    # Without tables there is no learning rate of tables.
    optimizer = replace(config.optimizer, value_lr_multiplier=dense.optimizer.value_lr_multiplier)
    assert replace(config, name="dense", model=alike, optimizer=optimizer) == dense


def test_block_and_ring_differ_in_the_pattern_alone() -> None:
    block, ring = load("ultramemv2_block").model, load("ultramemv2_ring").model
    assert block.memory is not None
    assert replace(block, memory=replace(block.memory, sharing=replace(block.memory.sharing, pattern="ring"))) == ring
