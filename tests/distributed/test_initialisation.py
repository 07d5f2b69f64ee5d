"""Initial weights of real models have the variances that the paper's appendix derives (UltraMemV2, Eq. 22, 25, 26)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import pytest
import torch
from torch import Tensor

from megamem.config.model import ModelConfig
from megamem.families.ultramem.config import UltraMemConfig
from megamem.families.ultramem_v2.config import UltraMemV2Config
from megamem.initialisation.initialise import initialise
from megamem.layers.tucker import calibrate_scores
from megamem.model import MemoryGPTModel
from megamem.placement.sharing import SharingConfig
from megamem.retrieval.config import TuckerConfig
from megamem.retrieval.initial import swiglu_ffn_variance
from parallel.groups import ParallelSizes, initialise_groups
from parallel.machine.cpu import cuda_on_cpu
from pretrain.config.schema import RunConfig, TrainConfig
from pretrain.engine.build import build_chunks, build_unset_chunks
from tests.microbatch import some_inputs

SEEDS = (1, 2, 3)
# Means are over so many layers or, of models with fewer than a third of them, over those of all seeds.
NUM_MEASURED = 12
TOKENS = 512
MEMORY = UltraMemV2Config(num_keys=32, key_dim=32, value_dim=32, pre_value_dim=48, top_k=8)
PLAIN = ModelConfig(num_layers=4, hidden_size=128, ffn_hidden_size=320, memory=MEMORY)
MODELS = {
    "plain": PLAIN,
    "shared": replace(
        PLAIN,
        memory=UltraMemV2Config(
            num_keys=24, key_dim=16, value_dim=64, pre_value_dim=32, top_k=12, sharing=SharingConfig("block", 2)
        ),
    ),
    "two heads, single query, one core": replace(
        PLAIN,
        memory=UltraMemV2Config(
            num_keys=48, value_dim=32, pre_value_dim=32, top_k=8, num_heads=2, query="single", num_cores=1
        ),
    ),
    "no pre-values": replace(PLAIN, memory=UltraMemV2Config(num_keys=40, value_dim=48, pre_value_dim=0, top_k=16)),
    "ultramem": replace(PLAIN, memory=UltraMemConfig(num_keys=24, value_dim=32, top_k=12)),
    "shallow": replace(PLAIN, num_layers=2),
    "deep": replace(PLAIN, num_layers=16),
}
MATCHED = {
    f"{name}, matched": replace(model, memory=replace(model.memory, initialisation="matched"))
    for name, model in (MODELS | {"gelu": replace(PLAIN, memory=replace(MEMORY, pre_value_activation="gelu"))}).items()
    if model.memory is not None
}


@dataclass(frozen=True)
class Measured:
    """Means over the layers and seeds of one model."""

    mean_score: float
    memory_variance: float
    ffn_variance: float
    eq_22: float
    eq_25: float
    table_std_over_eq_26: float


def unit_rms_tokens(hidden_size: int, seed: int) -> Tensor:
    x = torch.randn(TOKENS, 1, hidden_size, generator=torch.Generator().manual_seed(seed))
    return x / x.square().mean(-1, keepdim=True).sqrt()


def eq_22(model: ModelConfig, memory: TuckerConfig, sigma_s: float, table_std: float) -> float:
    """Variance of the memory's output; without pre-values the factor 0.4 sigma_V^2 P of their product falls out."""
    pre_dim = memory.width("pre_values")
    product = 0.4 * table_std**2 * pre_dim if pre_dim else 1.0
    read = memory.top_k * memory.num_heads * memory.value_dim
    return 0.4 * product * (1 + sigma_s**2) * table_std**2 * read / model.hidden_size


def eq_26(model: ModelConfig, memory: TuckerConfig, sigma_s: float) -> float:
    """sigma_V as the paper writes it; without pre-values P falls out, and 0.08 under a square root stands for 0.2 under
    a fourth one.
    """
    k_inner = model.ffn_hidden_size / model.hidden_size
    read = memory.top_k * memory.num_heads * memory.value_dim * (1 + sigma_s**2)
    share = k_inner * model.hidden_size / (read * model.num_layers)
    if pre_dim := memory.width("pre_values"):
        return float((0.2 * share / pre_dim) ** 0.25)
    return float((0.08 * share) ** 0.5)


def measure(model: MemoryGPTModel, config: ModelConfig, seed: int) -> Measured:
    memory = config.memory
    assert isinstance(memory, TuckerConfig)
    scores, variances, ffn_variances, predicted, stds = [], [], [], [], []
    for index, layer in enumerate(model.memory_layers):
        hidden = unit_rms_tokens(config.hidden_size, 1000 * seed + index)
        with torch.no_grad():
            retrieved = layer.retrieve(hidden.flatten(0, 1)).scores
            scores.append(float(retrieved.mean()))
            sigma_s = float(retrieved.std() / retrieved.mean())
            variances.append(float(layer(hidden, some_inputs(hidden)).square().mean()))
            ffn_variances.append(float(model.decoder.layers[index].mlp.ffn(hidden)[0].square().mean()))
        assert layer.cores is not None
        calibration = calibrate_scores(memory, layer.num_keys, layer.cores, seed=seed, name=layer.name)
        values = dict(model.banks.named_parameters())[f"{layer.view.bank}.values"]
        std = float(values.detach().double().std())
        predicted.append(eq_22(config, memory, calibration.sigma_s, std))
        stds.append(std / eq_26(config, memory, sigma_s))
    k_inner = config.ffn_hidden_size / config.hidden_size
    return Measured(
        mean_score=fmean(scores),
        memory_variance=fmean(variances),
        ffn_variance=fmean(ffn_variances),
        eq_22=fmean(predicted),
        eq_25=0.064 * k_inner / (2 * config.num_layers),
        table_std_over_eq_26=fmean(stds),
    )


def average(parts: list[Measured]) -> Measured:
    return Measured(*(fmean(column) for column in zip(*(vars(part).values() for part in parts), strict=True)))


@pytest.fixture(scope="module")
def measured(run_ranks: Any) -> dict[str, Measured]:
    """Every model, measured on a rank: building one needs Megatron's groups."""

    def main() -> dict[str, Measured]:
        result = {}
        with cuda_on_cpu():
            groups = initialise_groups(ParallelSizes(), device=torch.device("cpu"), timeout_minutes=1, seed=1)
            for name, model in (MODELS | MATCHED).items():
                config = RunConfig(model=model, train=TrainConfig(sequence_length=8))
                (chunk,) = build_unset_chunks(config, groups, vocab_size=8)
                parts = []
                for seed in SEEDS[: max(1, NUM_MEASURED // model.num_layers)]:
                    initialise([chunk], model, seed=seed)
                    parts.append(measure(chunk, model, seed))
                result[name] = average(parts)
        return result

    result: dict[str, Measured] = run_ranks(main, 1)[0]
    return result


@pytest.mark.parametrize("name", MODELS)
def test_mean_retrieved_score_is_one(measured: dict[str, Measured], name: str) -> None:
    assert measured[name].mean_score == pytest.approx(1, rel=0.05)


@pytest.mark.parametrize("name", MODELS)
def test_memory_output_has_the_variance_of_eq_22(measured: dict[str, Measured], name: str) -> None:
    assert measured[name].memory_variance == pytest.approx(measured[name].eq_22, rel=0.1)


@pytest.mark.parametrize("name", MODELS)
def test_memory_output_has_the_ffn_variance_of_eq_25(measured: dict[str, Measured], name: str) -> None:
    assert measured[name].memory_variance == pytest.approx(measured[name].eq_25, rel=0.1)


@pytest.mark.parametrize("name", MODELS)
def test_tables_have_the_deviation_of_eq_26(measured: dict[str, Measured], name: str) -> None:
    assert measured[name].table_std_over_eq_26 == pytest.approx(1, rel=0.02)


@pytest.mark.parametrize("name", MATCHED)
def test_matched_memory_output_has_the_deviation_of_the_feed_forward(measured: dict[str, Measured], name: str) -> None:
    of_memory, of_ffn = measured[name].memory_variance ** 0.5, measured[name].ffn_variance ** 0.5
    assert of_memory == pytest.approx(of_ffn, rel=0.1)
    assert of_ffn == pytest.approx(swiglu_ffn_variance(MATCHED[name]) ** 0.5, rel=0.05)


@pytest.mark.parametrize("name", MATCHED)
def test_matched_scores_have_mean_1_too(measured: dict[str, Measured], name: str) -> None:
    assert measured[name].mean_score == pytest.approx(1, rel=0.05)


def test_matched_outputs_do_not_add_up_with_depth(measured: dict[str, Measured]) -> None:
    total = {
        name: measured[name].memory_variance * MATCHED[name].num_layers
        for name in MATCHED
        if "deep" in name or "shallow" in name
    }
    assert total["deep, matched"] == pytest.approx(total["shallow, matched"], rel=0.1)


def test_memory_outputs_do_not_add_up_with_depth(measured: dict[str, Measured]) -> None:
    """Summed over the blocks, a deep model's memory adds the same variance to the residual stream as a shallow one's."""
    total = {name: measured[name].memory_variance * MODELS[name].num_layers for name in ("shallow", "deep")}
    assert total["deep"] == pytest.approx(total["shallow"], rel=0.1)


def test_constants_of_every_parameter(run_ranks: Any) -> None:
    """Standard deviations by name, for both choices of initialisation."""

    def main() -> dict[str, dict[str, tuple[float, float]]]:
        result = {}
        with cuda_on_cpu():
            groups = initialise_groups(ParallelSizes(), device=torch.device("cpu"), timeout_minutes=1, seed=1)
            for choice in ("paper", "released"):
                assert PLAIN.memory is not None
                model = replace(
                    PLAIN, tied_embeddings=False, memory=replace(PLAIN.memory, initialisation=choice), init_std=None
                )
                (chunk,) = build_chunks(
                    RunConfig(model=model, train=TrainConfig(sequence_length=8)), groups, vocab_size=128
                )
                result[choice] = {
                    name: (float(p.double().mean()), float(p.double().std())) for name, p in chunk.named_parameters()
                }
        return result

    (stats,) = run_ranks(main, 1)
    linear = (2 / (5 * 128)) ** 0.5
    to_residual = linear / (2 * 4) ** 0.5
    expected = {
        "embedding.word_embeddings.weight": linear,
        "output_layer.weight": linear,
        "decoder.layers.3.self_attention.linear_qkv.weight": linear,
        "decoder.layers.3.self_attention.linear_proj.weight": to_residual,
        "decoder.layers.3.mlp.ffn.linear_fc1.weight": linear,
        "decoder.layers.3.mlp.ffn.linear_fc2.weight": to_residual,
        "decoder.layers.3.mlp.memory.keys": 32**-0.5,
    }
    of_choice = {
        "paper": {"query_proj": linear, "value_proj": linear, "pre_value_proj": linear},
        "released": {"query_proj": 32**-0.5, "value_proj": 32**-0.5, "pre_value_proj": 128**-0.5},
    }
    for choice, of_memory in of_choice.items():
        of_layer = {f"decoder.layers.3.mlp.memory.{name}": std for name, std in of_memory.items()}
        for name, std in {**expected, **of_layer}.items():
            mean, actual = stats[choice][name]
            assert actual == pytest.approx(std, rel=0.05), name
            assert abs(mean) < 0.05 * std, name
    for name in ("query_norm", "keys_norm"):
        mean, std = stats["released"][f"decoder.layers.0.mlp.memory.{name}"]
        assert (mean, std) == (pytest.approx(32**-0.4), pytest.approx(0, abs=1e-9))
    for table in ("values", "pre_values"):
        assert stats["released"][f"banks.0.{table}"][1] == pytest.approx(0.02, rel=0.02)
    mean, std = stats["paper"]["decoder.final_layernorm.weight"]
    assert (mean, std) == (1.0, 0.0)
