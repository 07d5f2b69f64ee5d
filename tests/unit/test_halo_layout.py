"""Tokens that the ranks of a cut sequence ask each other for, against Megatron's own cutting of a sequence of numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from megamem.addresses.ngrams import NgramAddressConfig
from megamem.config.model import ModelConfig
from megamem.families.engram.config import EngramConfig
from megamem.families.value_ngrams.config import ValueNgramsConfig
from megamem.placement.spans import PlacementConfig
from parallel.layout import halo_requests, halo_tokens_returned, halo_tokens_sent, stretches
from pretrain.config.schema import ParallelConfig, RunConfig, TrainConfig
from pretrain.planning.counts.pipeline_stages import stages_of
from pretrain.planning.seconds.traffic import halo_bytes


def held(tensor: int, context: int, num_tokens: int) -> list[list[int]]:
    """Places that each rank holds, tensor-parallel ranks fastest: slices r and 2 CP - 1 - r, cut in equal parts."""
    length = num_tokens * tensor * context
    found = []
    for rank in range(context):
        slices = torch.arange(length).chunk(2 * context)
        own = torch.cat((slices[rank], slices[2 * context - 1 - rank])) if context > 1 else torch.arange(length)
        found += [part.tolist() for part in own.chunk(tensor)]
    return found


@pytest.mark.parametrize("width", [1, 3, 9])
@pytest.mark.parametrize(("tensor", "context"), [(1, 1), (4, 1), (1, 3), (2, 2), (3, 2), (4, 4)])
def test_every_stretch_gets_the_tokens_before_it(tensor: int, context: int, width: int) -> None:
    sizes: dict[str, Any] = {"tensor": tensor, "context": context}
    places, num_tokens = held(tensor, context, 4), 4
    sent, returned = [0] * len(places), [0] * len(places)
    for rank, own in enumerate(places):
        parts = stretches(rank, num_tokens, **sizes)
        assert [place for part in parts for place in range(part.start, part.stop)] == own
        for part, asked in zip(parts, halo_requests(rank, num_tokens, width, **sizes), strict=True):
            got = {place: places[owner][at] for owner, at, place in asked}
            assert got == {
                place: part.start - width + place for place in range(width) if part.start - width + place >= 0
            }
            for owner, _, _ in asked:
                sent[owner] += owner != rank
                returned[rank] += owner != rank
    assert [halo_tokens_sent(rank, num_tokens, width, **sizes) for rank in range(len(places))] == sent
    assert [halo_tokens_returned(rank, num_tokens, width, **sizes) for rank in range(len(places))] == returned


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize(("tensor", "context"), [(1, 1), (4, 1), (1, 2), (1, 4), (2, 2), (2, 4), (4, 3)])
def test_plans_wait_for_the_rank_that_sends_the_most(tensor: int, context: int, recompute: Any) -> None:
    """All ranks are asked here; a convolution reaches over several of them."""
    memory = EngramConfig(
        value_dim=8, conv_kernel=4, max_order=3, vocab_size=64, placement=PlacementConfig(blocks=(0,))
    )
    model = ModelConfig(num_layers=1, hidden_size=16, num_attention_heads=4, vocab_size=64, memory=memory)
    for length in (4, 64):
        train = TrainConfig(micro_batch_size=2, sequence_length=length * tensor * context, recompute=recompute)
        config = RunConfig(model=model, train=train, parallel=ParallelConfig(tensor=tensor, context=context))
        (stage,) = stages_of(config)
        passes = 2 if recompute == "full" else 1
        sizes: dict[str, Any] = {"tensor": tensor, "context": context}
        hidden = [
            passes * halo_tokens_sent(rank, length, 9, **sizes) + halo_tokens_returned(rank, length, 9, **sizes)
            for rank in range(tensor * context)
        ]
        ids = [halo_tokens_sent(rank, length * tensor, 2, tensor=1, context=context) for rank in range(context)]
        found = halo_bytes(config, stage, busiest=True)
        assert (found.ids, found.hidden) == (2 * 8 * max(ids), 2 * 16 * 4 * max(hidden))
        first = halo_bytes(config, stage)
        assert (first.ids, first.hidden) == (2 * 8 * ids[0], 2 * 16 * 4 * hidden[0])


def test_two_families_that_look_back_ask_each_for_their_own() -> None:
    memory = EngramConfig(value_dim=8, max_order=3, vocab_size=64, placement=PlacementConfig(blocks=(0,)))
    second = ValueNgramsConfig(
        value_dim=4, address=NgramAddressConfig(num_rows=60), placement=PlacementConfig(blocks=(0,))
    )
    model = ModelConfig(num_layers=1, hidden_size=16, num_attention_heads=4, vocab_size=64, memory=memory)
    train = TrainConfig(micro_batch_size=2, sequence_length=64)

    def ids(model: ModelConfig) -> int:
        config = RunConfig(model=model, train=train, parallel=ParallelConfig(context=2))
        (stage,) = stages_of(config)
        return halo_bytes(config, stage).ids

    alone = [ids(model), ids(replace(model, memory=second))]
    assert [each // (2 * 8) for each in alone] == [
        halo_tokens_sent(0, 32, width, tensor=1, context=2) for width in (2, 1)
    ]
    assert ids(replace(model, second_memory=second)) == sum(alone)
