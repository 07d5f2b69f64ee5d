"""Single layers and feed-forwards measured without a model put out what they put out in one, and what is predicted of
them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megamem.config.model import ModelConfig
from megamem.families.memory_plus.config import MemoryPlusConfig
from megamem.families.ultramem.config import UltraMemConfig
from megamem.families.ultramem_v2.config import UltraMemV2Config
from megamem.initialisation.distributions import Normal
from megamem.initialisation.outputs import InitialOutput, measure_initial_outputs, sample_tokens, spread
from megamem.initialisation.random_fill import fill, normal_rows
from megamem.layers.layer import MemoryLayer
from megamem.placement.sharing import SharingConfig
from parallel.groups import ParallelSizes, initialise_groups
from parallel.machine.cpu import cuda_on_cpu
from pretrain.config.schema import RunConfig, TrainConfig
from pretrain.engine.build import build_chunks
from tests.microbatch import some_inputs

MEMORY = UltraMemV2Config(num_keys=24, key_dim=32, value_dim=32, pre_value_dim=48, top_k=8)
MODEL = ModelConfig(num_layers=3, hidden_size=128, ffn_hidden_size=320, memory=MEMORY)
MEMORIES = {
    "paper": MEMORY,
    "matched, shared": replace(MEMORY, initialisation="matched", sharing=SharingConfig("ring", 2)),
    "released": replace(MEMORY, initialisation="released"),
    "ultramem": UltraMemConfig(num_keys=24, value_dim=32, top_k=8),
    "memory_plus": MemoryPlusConfig(num_keys=24, value_dim=32, top_k=8),
}


def test_rows_are_those_of_the_filled_table() -> None:
    table = torch.empty(50, 12)
    fill(table, Normal(0.3), seed=3, name="banks.0.values", global_shape=(50, 12), offset=(0, 0))
    rows = torch.tensor([49, 0, 7, 7])
    assert torch.equal(normal_rows(rows, seed=3, name="banks.0.values", std=0.3, width=12), table[rows])


@pytest.mark.parametrize(("count", "most", "expected"), [(3, 4, [0, 1, 2]), (20, 4, [0, 6, 13, 19]), (9, 1, [4])])
def test_measured_layers_are_spread_over_the_model(count: int, most: int, expected: list[int]) -> None:
    assert list(spread(count, most)) == expected


@dataclass(frozen=True)
class InModel:
    """A layer measured on its own, and the same layer in a model.

    Attributes:
        alone: the measured one.
        table_std: standard deviation of the model's table.
        output_std: standard deviation of the model's layer's output, on the same tokens.
        ffn_std: standard deviation of the output of the feed-forward beside it, on the tokens that it is measured on.
    """

    alone: InitialOutput
    table_std: float
    output_std: float
    ffn_std: float


def root_mean_square(x: Tensor) -> float:
    return float(x.square().mean().sqrt())


def retrieved_std(layer: MemoryLayer, tokens: Tensor) -> float:
    return root_mean_square(layer(tokens, some_inputs(tokens)))


def ffn_name(block: int) -> str:
    return f"decoder.layers.{block}.mlp.ffn"


@pytest.fixture(scope="module")
def figures(run_ranks: Any) -> dict[str, list[InModel]]:
    def main() -> dict[str, list[InModel]]:
        found = {}
        with cuda_on_cpu():
            groups = initialise_groups(ParallelSizes(), device=torch.device("cpu"), timeout_minutes=1, seed=1)
            for name, memory in MEMORIES.items():
                model = replace(MODEL, memory=memory)
                (chunk,) = build_chunks(
                    RunConfig(seed=5, model=model, train=TrainConfig(sequence_length=8)), groups, vocab_size=8
                )
                tables = dict(chunk.banks.named_parameters())
                with torch.no_grad():
                    found[name] = [
                        InModel(
                            alone,
                            table_std=float(tables[f"{layer.view.bank}.values"].std()),
                            output_std=retrieved_std(layer, sample_tokens(alone.num_tokens, 128, 5, layer.name)),
                            ffn_std=root_mean_square(
                                block.mlp.ffn(sample_tokens(256, 128, 5, ffn_name(alone.block)))[0]
                            ),
                        )
                        for alone, layer, block in zip(
                            measure_initial_outputs(model, seed=5, most_layers=3),
                            chunk.memory_layers,
                            chunk.decoder.layers,
                            strict=True,
                        )
                    ]
        return found

    result: dict[str, list[InModel]] = run_ranks(main, 1)[0]
    return result


@pytest.mark.parametrize("name", MEMORIES)
def test_a_layer_alone_is_the_models(figures: dict[str, list[InModel]], name: str) -> None:
    for index, layer in enumerate(figures[name]):
        alone = layer.alone
        assert alone.block == index
        # Layers that share a table compromise on its deviation.
        assert alone.table_std == pytest.approx(layer.table_std, rel=0.05 if "shared" in name else 0.02)
        assert alone.measured_std == pytest.approx(layer.output_std, rel=0.1 if "shared" in name else 1e-5)
        assert alone.ffn_std == pytest.approx(layer.ffn_std, rel=1e-5)


@pytest.mark.parametrize("name", [name for name in MEMORIES if name != "memory_plus"])
def test_predictions_hold(figures: dict[str, list[InModel]], name: str) -> None:
    """The mean over layers is as predicted; one layer of so few rows departs from it, as its tokens share them."""
    layers = [layer.alone for layer in figures[name]]
    predicted = [layer.predicted_std for layer in layers if layer.predicted_std is not None]
    assert sum(layer.measured_std for layer in layers) == pytest.approx(sum(predicted), rel=0.1)


def test_product_keys_have_no_prediction(figures: dict[str, list[InModel]]) -> None:
    assert {layer.alone.predicted_std for layer in figures["memory_plus"]} == {None}
