"""Closed formulas against models that were built."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from megamem.config import MemoryConfig, ModelConfig, SharingConfig
from megamem.formulas import count_parameters, forward_flops_per_token, table_bytes_per_token, training_flops_per_token
from parallel.layout import padded_size
from pretrain.config.schema import RunConfig

VOCAB = 300
DENSE = ModelConfig(num_layers=4, hidden_size=32, num_attention_heads=4, num_query_groups=2, ffn_hidden_size=48)
MEMORY = MemoryConfig(num_keys=12, key_dim=8, value_dim=12, pre_value_dim=4, top_k=6)
MODELS = {
    "dense": DENSE,
    "untied, no qk norm, wide heads": replace(DENSE, tied_embeddings=False, qk_norm=False, head_dim=16),
    "memory": replace(DENSE, memory=MEMORY),
    "memory, block of 2": replace(DENSE, memory=replace(MEMORY, sharing=SharingConfig("block", 2))),
    "memory, ring of 3": replace(DENSE, memory=replace(MEMORY, sharing=SharingConfig("ring", 3))),
    "memory, single query, 2 heads, 1 core, no pre-values": replace(
        DENSE, memory=replace(MEMORY, query="single", num_heads=2, num_cores=1, pre_value_dim=0)
    ),
}


def _built_counts() -> dict[str, dict[str, int]]:
    """Parameters of each model by part, counted on real modules by their names."""
    import torch

    from parallel.cpu import cuda_on_cpu
    from parallel.groups import ParallelSizes, initialise_groups
    from pretrain.build import build_chunks

    with cuda_on_cpu():
        groups = initialise_groups(ParallelSizes(), device=torch.device("cpu"), timeout_minutes=1, seed=1)
        return {
            name: _by_part(build_chunks(RunConfig(model=model), groups, vocab_size=VOCAB)[0])
            for name, model in MODELS.items()
        }


def _by_part(chunk: object) -> dict[str, int]:
    parts = dict.fromkeys(("embedding", "attention", "ffn", "norms", "retrieval", "memory_projections", "tables"), 0)
    for name, parameter in chunk.named_parameters():  # type: ignore[attr-defined]
        parts[_part_of(name)] += parameter.numel()
    return parts


def _part_of(name: str) -> str:
    if "banks" in name:
        return "tables"
    if "value_proj" in name:
        return "memory_projections"
    if ".memory." in name:
        return "retrieval"
    if "layernorm" in name:
        return "norms"
    if "embedding" in name or "output_layer" in name:
        return "embedding"
    return "attention" if "self_attention" in name else "ffn"


@pytest.fixture(scope="module")
def built() -> dict[str, dict[str, int]]:
    from datetime import timedelta

    import torch.distributed as dist

    from parallel.launch import launch_ranks
    from parallel.ranks import current_ranks

    def main() -> dict[str, dict[str, int]]:
        ranks = current_ranks()
        assert ranks is not None
        dist.init_process_group(
            "gloo", init_method=ranks.init_method, rank=0, world_size=1, timeout=timedelta(minutes=2)
        )
        return _built_counts()

    return launch_ranks(main, 1, timeout_s=120)[0]


@pytest.mark.parametrize("name", MODELS)
def test_every_part_is_what_the_built_model_has(name: str, built: dict[str, dict[str, int]]) -> None:
    counts = count_parameters(MODELS[name], padded_size(VOCAB, MODELS[name].vocab_size_multiple))
    assert {part: getattr(counts, part) for part in built[name]} == built[name]
    assert counts.total == sum(built[name].values())


def test_active_parameters_count_the_values_that_a_token_reads() -> None:
    counts = count_parameters(MODELS["memory"], 384)
    assert counts.read_values == DENSE.num_layers * MEMORY.top_k * (MEMORY.value_dim + MEMORY.pre_value_dim)
    assert counts.active == counts.total - counts.tables + counts.read_values
    assert count_parameters(DENSE, 384).active == count_parameters(DENSE, 384).total


def test_flops_of_a_dense_model_are_two_per_weight_and_causal_attention() -> None:
    counts = count_parameters(DENSE, 384)
    weights = counts.attention + counts.ffn + 384 * DENSE.hidden_size
    attention = DENSE.num_layers * 4 * DENSE.hidden_size * (100 + 1) / 2
    assert forward_flops_per_token(DENSE, 384, 100) == 2 * weights + attention
    assert training_flops_per_token(DENSE, 384, 100) == 3 * forward_flops_per_token(DENSE, 384, 100)


def test_sharing_costs_key_products_and_not_reads() -> None:
    alone, shared = MODELS["memory"], MODELS["memory, ring of 3"]
    assert forward_flops_per_token(shared, 384, 64) > forward_flops_per_token(alone, 384, 64)
    read: Callable[[ModelConfig], int] = lambda model: table_bytes_per_token(model, 2)  # noqa: E731
    assert read(shared) == read(alone) == 2 * count_parameters(alone, 384).read_values
