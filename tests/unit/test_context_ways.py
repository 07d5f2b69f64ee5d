"""Choice of the way of attention across cut sequences, and the ways that are refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from megamem.config.model import ModelConfig
from pretrain.config.context_ways import context_costs, context_way, heads_problem
from pretrain.config.keys import ineffective_fields
from pretrain.config.schema import ParallelConfig, RunConfig, TrainConfig
from pretrain.config.validate import validate
from pretrain.engine.megatron import transformer_config
from pretrain.errors import ConfigError
from tests.plain_config import parse_config

# A layer of 32 query heads and 8 key/value heads of width 128, whose 2,048 tokens of a rank are bf16.
TOKENS, WIDTH = 2048, 128
MODEL = ModelConfig(hidden_size=32 * WIDTH, num_attention_heads=32, num_query_groups=8, ffn_hidden_size=64)


def run(*, context: int, heads: int = 32, groups: int | None = 8, tensor: int = 1, **others: Any) -> RunConfig:
    model = replace(MODEL, num_attention_heads=heads, num_query_groups=groups, hidden_size=heads * WIDTH)
    if "implementation" in others:
        model = replace(model, implementation=others.pop("implementation"))
    return RunConfig(
        model=model,
        parallel=ParallelConfig(context=context, tensor=tensor, **others),
        train=TrainConfig(precision="bf16", sequence_length=TOKENS * context, micro_batch_size=1),
    )


def test_costs_are_those_counted_by_hand() -> None:
    """Four ranks; with sixteen, each of eight key/value heads goes to two ranks."""
    per_head = TOKENS * WIDTH * 2
    normalisers = TOKENS * 32 * 4

    def costs(way: Any, size: int) -> tuple[int, int, int]:
        found = context_costs(MODEL, way, context_size=size, tensor_size=1, num_tokens=TOKENS, element_bytes=2)
        return found.forward, found.backward, found.kept - normalisers

    assert costs("gather", 4) == (3 * 16 * per_head, 3 * 16 * per_head, (64 + 4 * 16) * per_head)
    # Three quarters of 32 + 8 + 8 heads and of 32 outputs leave.
    assert costs("heads", 4) == (60 * per_head, 60 * per_head, 80 * per_head)
    # Keys and values in bf16 and, in backward, as many sums in fp32.
    assert costs("ring", 4) == (3 * 16 * per_head, 3 * (16 + 32) * per_head, 80 * per_head)
    assert costs("heads", 16) == (90 * per_head, 90 * per_head, 96 * per_head)


@pytest.mark.parametrize(
    ("config", "way"),
    [
        # Bytes by the formulas, in heads and both passes: 80 against 64, 120 against 192, 140 against 448.
        (run(context=2), "ring"),
        (run(context=4), "heads"),
        (run(context=8), "heads"),
        # No part of 20 heads is an eighth of them; of 6 heads that are read by 12 none can be shared out over 4.
        (run(context=8, heads=20, groups=None), "ring"),
        (run(context=4, heads=12, groups=6), "ring"),
        # One head for all queries goes to every rank: 3/4 (64 + 8) x 2 = 108 against 3 x (2 + 2 + 4) = 24.
        (run(context=4, groups=1), "ring"),
        (run(context=4, tensor=4), "heads"),
        (run(context=4, implementation="transformer_engine"), "ring"),
        (run(context=4, context_attention="gather"), "gather"),
        (run(context=2, context_attention="heads"), "heads"),
    ],
)
def test_a_run_takes_the_way_that_sends_least_of_those_that_shrink(config: RunConfig, way: str) -> None:
    assert context_way(config) == way


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        (
            run(context=8, heads=20, groups=None, context_attention="heads"),
            "20 query heads of a tensor-parallel rank are no multiple of parallel.context 8",
        ),
        (
            run(context=4, heads=12, groups=6, context_attention="heads"),
            "of 6 key/value heads of a tensor-parallel rank and parallel.context 4, neither divides the other",
        ),
        (
            run(context=16, context_attention="heads", implementation="transformer_engine"),
            "Transformer Engine wants a multiple of parallel.context 16 for key/value heads too, not 8",
        ),
    ],
)
def test_heads_that_cannot_be_shared_out_are_refused(config: RunConfig, problem: str) -> None:
    assert heads_problem(config) == problem
    with pytest.raises(ConfigError) as refused:
        validate(config, None)
    assert f"parallel.context_attention is heads, but {problem}: use ring or auto, or another context size" in str(
        refused.value
    )


def test_a_way_without_cut_sequences_has_no_effect() -> None:
    keys = {item.key for item in ineffective_fields(run(context=1, context_attention="ring"))}
    assert "parallel.context_attention" in keys


def test_separate_documents_are_refused_with_transformer_engine() -> None:
    config = parse_config(
        {"data": {"documents": "separate"}, "model": {"implementation": "transformer_engine"}}, RunConfig
    )
    with pytest.raises(ConfigError, match=r"data\.documents is separate, but model\.implementation is transformer_eng"):
        validate(config, None)


@pytest.mark.parametrize(
    ("asked", "told"), [("auto", "p2p"), ("gather", "all_gather"), ("heads", "a2a"), ("ring", "p2p")]
)
def test_transformer_engine_is_told_the_way(asked: Any, told: str) -> None:
    config = run(context=2, context_attention=asked, implementation="transformer_engine")
    assert transformer_config(config, dtype=torch.bfloat16, on_gpu=True).cp_comm_type == told
