"""Split tables and cut sequences train in fp64 to the same parameters to ten digits: what is left of a difference in
fp32 is rounding and nothing else.

Megatron's distributed optimizer knows no fp64, so these runs take plain gradient steps on what its schedules, its DDP
and our collectives put into the gradient buffers. Its cross entropy is in fp32, whose sum over a vocabulary that
tensor-parallel ranks share differs in the seventh digit: layouts with tensor parallelism are compared in
`test_layouts.py`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from megatron.core.distributed import DistributedDataParallel
from test_layouts import LAYOUTS, Shard, assembled, shards
from test_token_layouts import config_of
from tiny_runs import VOCAB_SIZE, joined, on, random_batches

from pretrain.config.schema import RunConfig
from pretrain.engine.build import build_chunks
from pretrain.engine.megatron import ddp_config
from pretrain.engine.step import _schedule
from tests.rotation import in_rotation

# The second reads weights that the first one moved.
STEPS = 2
LEARNING_RATE = 0.05
SPLIT = in_rotation(
    [
        name
        for name, layout in LAYOUTS.items()
        if "tensor" not in layout.axes
        and layout.num_ranks > 1
        and (layout.axes.keys() & {"memory", "context"} or name in ("data 2", "pipeline 2"))
    ]
)
NAMES = [*dict.fromkeys(LAYOUTS[name].reference for name in SPLIT), *SPLIT]
OF_NGRAMS = ("engram, ple", "engram, documents apart", "latents, engram", "engram beside learned keys")
"""Kinds whose gate has a root, which makes more of roundings in fp32 than others do."""


def train(config: RunConfig) -> list[Shard]:
    """This rank's parameters after a few steps."""
    sizes = config.train
    with joined(config) as groups:
        bare = build_chunks(config, groups, vocab_size=VOCAB_SIZE, dtype=torch.float64)
        in_fp64 = replace(
            ddp_config(config),
            grad_reduce_in_fp32=False,
            use_distributed_optimizer=False,
            overlap_grad_reduce=False,
            overlap_param_gather=False,
        )
        wrap = partial(DistributedDataParallel, pg_collection=groups.megatron)
        chunks = [wrap(c.config, in_fp64, c, disable_bucketing=i > 0) for i, c in enumerate(bare)]
        batches = [random_batches(config, groups) for _ in chunks]
        for _ in range(STEPS):
            for chunk, model in zip(chunks, bare, strict=True):
                chunk.zero_grad_buffer()
                model.begin_step()
            _schedule(
                chunks,
                batches,
                sizes.global_batch_size // sizes.micro_batch_size // groups.data_size,
                sizes.micro_batch_size,
                sizes.sequence_length,
                forward_only=False,
            )
            with torch.no_grad():
                for parameter in (p for model in bare for p in model.parameters()):
                    assert parameter.main_grad.dtype == torch.float64
                    parameter -= LEARNING_RATE * parameter.main_grad
        return shards(bare)


@pytest.fixture(scope="module")
def trained(run_ranks: Any) -> dict[str, list[Shard]]:
    found: dict[str, list[Shard]] = {}
    for num_ranks in sorted({LAYOUTS[name].num_ranks for name in NAMES}):
        names = [name for name in NAMES if LAYOUTS[name].num_ranks == num_ranks]
        by_rank = run_ranks(
            lambda names=names: [train(LAYOUTS[name].config) for name in names], num_ranks, timeout_s=300
        )
        for index, name in enumerate(names):
            found[name] = [shard for of_rank in by_rank for shard in of_rank[index]]
    return found


@pytest.mark.parametrize("name", SPLIT)
def test_parameters_are_those_of_one_rank_to_ten_digits(trained: dict[str, list[Shard]], name: str) -> None:
    check(trained[name], trained[LAYOUTS[name].reference])


def test_memories_of_ngrams_are_those_of_one_rank_to_ten_digits(run_ranks: Any) -> None:
    axes = {"context": 2, "memory": 2, "micro_batch_size": 2}
    kinds = in_rotation(OF_NGRAMS, 2)
    alone, *_ = run_ranks(lambda: [train(config_of(kind)) for kind in kinds], 1)
    by_rank = run_ranks(lambda: [train(on(config_of(kind), **axes)) for kind in kinds], 4, timeout_s=300)
    for expected, *of_kind in zip(alone, *by_rank, strict=True):
        check([shard for of_rank in of_kind for shard in of_rank], expected)


def check(found: list[Shard], of_one_rank: list[Shard]) -> None:
    actual, expected = assembled(found), assembled(of_one_rank)
    assert actual.keys() == expected.keys()
    # Multipliers of hashes are whole numbers.
    assert {shard.data.dtype for shard in found} - {torch.int64} == {torch.float64}
    errors = {key: float((actual[key] - expected[key]).abs().max() / expected[key].abs().max()) for key in expected}
    too_large = {key: error for key, error in errors.items() if not error <= 1e-10}
    assert not too_large
