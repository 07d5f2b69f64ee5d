"""The formulas for the exchange's bytes, against what its collectives are given."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from tiny_runs import MEMORY, PRIVATE, SHARED, on, tiny_run
from torch import Tensor

from kernels.select import select_kernels
from megamem.config.memory import MemoryConfig
from megamem.families.midus.config import MidusConfig
from megamem.families.mome.config import MomeConfig
from megamem.families.move.config import MoveConfig
from megamem.families.peer.config import PeerConfig
from megamem.families.stem.config import StemConfig
from megamem.families.tide.config import TideConfig
from megamem.families.ultramem.config import UltraMemConfig
from megamem.placement.sharing import BankSpec
from parallel.sharded_bank import ShardedBank
from pretrain.config.context_ways import WAYS
from pretrain.config.schema import RunConfig
from pretrain.engine.tables.pipeline_copies import sum_over_stages
from pretrain.planning.counts.pipeline_stages import Division, stages_of
from pretrain.planning.seconds.traffic import (
    LookupTraffic,
    context_bytes,
    copies_bytes,
    lookup_bytes_of_ways,
    lookup_traffic,
)
from tests.rotation import in_rotation

GROUP = 3
TOKENS = 7
MEMORIES = {
    "v2": replace(MEMORY, value_dim=24, pre_value_dim=12, num_heads=2),
    "one core": replace(MEMORY, value_dim=12, pre_value_dim=6, num_cores=1),
    "blocks, no pre-values": UltraMemConfig(num_keys=12, key_dim=8, value_dim=18, top_k=3),
    "peer": PeerConfig(num_keys=12, value_dim=30, top_k=3, num_heads=5),
    "rows": replace(MEMORY, value_dim=10, pre_value_dim=8, num_heads=2),
}
MEETING = replace(MEMORY, value_dim=12, pre_value_dim=8, num_heads=2, num_cores=3)
"""Read by four ranks with two parts of rows, whose columns meet first."""
ROWS = {"v2": 144, "one core": 70_000, "blocks, no pre-values": 2_000, "peer": 17_000_000, "rows": 9}
ROW_PARTS = {"rows": 3}


@contextmanager
def sent_bytes(group: dist.ProcessGroup) -> Iterator[list[int]]:
    """Bytes that each collective of a group sends to other ranks, in the order of the calls."""
    sent: list[int] = []
    gather, exchange, transfer = dist.all_gather_into_tensor, dist.all_to_all_single, dist.batch_isend_irecv

    def counted_gather(out: Tensor, x: Tensor, **rest: Any) -> Any:
        if rest.get("group") is group:
            sent.append((group.size() - 1) * x.nbytes)
        return gather(out, x, **rest)

    def counted_exchange(out: Tensor, x: Tensor, *splits: list[int], **rest: Any) -> Any:
        if rest.get("group") is group:
            # Without sizes, equal parts.
            send = splits[1] if splits else [x.shape[0] // group.size()] * group.size()
            to_others = sum(count for rank, count in enumerate(send) if rank != group.rank())
            sent.append(to_others * x[:1].nbytes)
        return exchange(out, x, *splits, **rest)

    def counted_transfers(transfers: list[dist.P2POp]) -> Any:
        sent.extend(x.tensor.nbytes for x in transfers if x.op is dist.isend and x.group is group)
        return transfer(transfers)

    names = ("all_gather_into_tensor", "all_to_all_single", "batch_isend_irecv")
    with patch.multiple(dist, **dict(zip(names, (counted_gather, counted_exchange, counted_transfers), strict=True))):
        yield sent


def groups_apart() -> Any:
    """A context in which axes of the same ranks have groups of their own, so that the bytes of each can be told."""
    return patch("parallel.groups.one_group_per_ranks", nullcontext)


def lookup(
    memory: MemoryConfig, num_rows: int, row_parts: int, dtype: torch.dtype, num_tokens: int = TOKENS
) -> tuple[list[int], list[int]]:
    """Bytes sent by the collectives of a forward and of a backward pass."""
    group = dist.group.WORLD
    assert group is not None
    kernels = select_kernels("auto")
    options: dict[str, Any] = {"dtype": dtype, "device": "cpu", "replica_rank": 0, "group": group}
    bank = ShardedBank(BankSpec(0, 9 * row_parts, (0,)), memory, kernels, **options, row_parts=row_parts)
    # Ids are as wide as a bank of this size needs; only its first rows are read, so only they are allocated.
    bank.spec = BankSpec(0, num_rows, (0,))
    reads = memory.lookup.rows
    blocks = memory.lookup.bins
    scores = torch.rand(num_tokens, reads, memory.lookup.scores, dtype=dtype)
    pre_dim = memory.width("pre_values")
    pre_input = torch.rand(num_tokens, pre_dim, dtype=dtype, requires_grad=True) if pre_dim else None
    rows = torch.randint(8, (num_tokens, reads))
    block = torch.randint(blocks, (num_tokens, reads)) if blocks > 1 else None
    with torch.no_grad():
        for table in bank.parameters():
            table.zero_()
    with sent_bytes(group) as forward:
        out = bank.read(rows, scores.requires_grad_(), pre_input, block, blocks)
    with sent_bytes(group) as backward:
        out.sum().backward()
    return forward, backward


@pytest.fixture(scope="module")
def measured(run_ranks: Any) -> list[dict[tuple[str, torch.dtype], tuple[list[int], list[int]]]]:
    return run_ranks(
        lambda: {
            (name, dtype): lookup(memory, ROWS[name], ROW_PARTS.get(name, 1), dtype)
            for name, memory in MEMORIES.items()
            for dtype in (torch.float32, torch.bfloat16)
        },
        GROUP,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MEMORIES)
def test_a_lookup_sends_what_the_formula_says(measured: Any, name: str, dtype: torch.dtype) -> None:
    traffic = lookup_traffic(
        MEMORIES[name],
        ROWS[name],
        group_size=GROUP,
        row_parts=ROW_PARTS.get(name, 1),
        num_tokens=TOKENS,
        element_bytes=dtype.itemsize,
    )
    for of_rank in measured:
        check_messages(traffic, *of_rank[name, dtype])


def check_messages(traffic: LookupTraffic, forward: list[int], backward: list[int]) -> None:
    there = (traffic.rows, traffic.pre_input, traffic.meeting_products, traffic.products)
    there += (traffic.coefficients, traffic.values)
    back = (traffic.values, traffic.meeting_coefficients, traffic.coefficient_gradients)
    back += (traffic.products_back, traffic.pre_input)
    assert forward == [size for size in there if size]
    assert backward == [size for size in back if size]
    assert sum(forward) == traffic.forward
    assert sum(backward) == traffic.backward


def test_columns_that_meet_first_send_what_the_formula_says(run_ranks: Any) -> None:
    def main() -> tuple[list[int], list[int], LookupTraffic]:
        with patch("parallel.layout.MEETING_RANKS", 4):
            sizes = {"group_size": 4, "row_parts": 2, "num_tokens": 8, "element_bytes": 2}
            return *lookup(MEETING, 18, 2, torch.bfloat16, 8), lookup_traffic(MEETING, 18, **sizes)

    for forward, backward, traffic in run_ranks(main, 4):
        assert min(traffic.meeting_products, traffic.meeting_coefficients) > 0
        check_messages(traffic, forward, backward)
        # Of a product one sum goes out in place of two.
        assert traffic.products == traffic.products_back // 2


def with_memory(memory: MemoryConfig) -> RunConfig:
    return replace(SHARED, model=replace(SHARED.model, memory=memory))


def test_gradients_of_copies_are_added_up_as_the_formula_says(run_ranks: Any) -> None:
    """The two stages sum the table's share of a rank: half of it, of two replicas."""
    config = on(with_memory(MoveConfig(vocab_size=64, value_dim=16, num_gate_heads=2)), pipeline=2, micro_batch_size=2)

    def main() -> list[int]:
        summed: list[int] = []
        all_reduce = dist.all_reduce

        def count(tensor: torch.Tensor, *arguments: Any, **keywords: Any) -> Any:
            summed.append(tensor.nbytes)
            return all_reduce(tensor, *arguments, **keywords)

        with tiny_run(config) as run:
            run.train(1)
            with patch.object(dist, "all_reduce", count):
                sum_over_stages(run.chunks, run.groups.megatron.pp)
        return summed

    # Each of two ranks sends half of the sum to the other, twice.
    for summed in run_ranks(main, 4):
        assert summed == [64 * 2 * 16 * 4 // 2]
        assert [copies_bytes(config, stage, Division.of(config, 4)) for stage in stages_of(config)] == 2 * [sum(summed)]


def test_a_step_sends_what_the_formula_says(run_ranks: Any) -> None:
    every = [
        on(SHARED, memory=2, micro_batch_size=2),
        on(PRIVATE, tensor=2, memory=2),
        on(SHARED, tensor=2, memory=2, recompute="full"),
        on(with_memory(MoveConfig(vocab_size=61, value_dim=16, num_gate_heads=2)), memory=2, micro_batch_size=2),
        on(with_memory(MidusConfig(num_heads=4, value_dim=16, num_keys=12)), tensor=2, memory=2),
        on(with_memory(TideConfig(vocab_size=61, value_dim=32)), memory=2, micro_batch_size=2, recompute="full"),
        on(with_memory(StemConfig(vocab_size=61, value_dim=24)), tensor=2, memory=2),
        on(with_memory(MomeConfig(vocab_size=61, value_dim=8, num_heads=2, gate_channels=7)), tensor=2, memory=2),
    ]
    configs = in_rotation(every)

    def main() -> list[int]:
        totals = []
        for config in configs:
            with groups_apart(), tiny_run(config) as run:
                with sent_bytes(run.groups.megatron.ep) as sent:
                    run.train(1)
                totals.append(sum(sent))
        return totals

    for totals in run_ranks(main, 2):
        for config, total in zip(configs, totals, strict=True):
            (stage,), division = stages_of(config), Division.of(config, 2)
            ways = lookup_bytes_of_ways(config, stage, division)
            assert total == division.num_microbatches * sum(way.total for way in ways) > 0


def test_attention_across_ranks_sends_what_the_formula_says(run_ranks: Any) -> None:
    """Grouped queries travel as few heads as there are; recomputation sends again."""
    layouts = [
        on(SHARED, tensor=2, context=2),
        on(SHARED, context=2, micro_batch_size=2, memory=4),
        on(SHARED, context=4),
        on(PRIVATE, context=4, recompute="selective"),
        on(PRIVATE, tensor=2, context=2, recompute="full"),
    ]
    every = [
        replace(
            config,
            model=replace(config.model, num_layers=2),
            parallel=replace(config.parallel, context_attention=way),
            train=replace(config.train, precision=precision),
        )
        for number, config in enumerate(layouts)
        # The first with all, the others with two each.
        for way in (WAYS if number == 0 else [each for index, each in enumerate(WAYS) if index != number % len(WAYS)])
        for precision in ("fp32", "bf16")[: 1 + (number == 0)]
    ]
    configs = in_rotation(every)

    def main() -> list[int]:
        totals = []
        for config in configs:
            with groups_apart(), tiny_run(config) as run:
                with sent_bytes(run.groups.megatron.cp) as sent:
                    run.train(1)
                totals.append(sum(sent))
        return totals

    for totals in run_ranks(main, 4):
        for config, total in zip(configs, totals, strict=True):
            (stage,) = stages_of(config)
            assert total == Division.of(config, 4).num_microbatches * context_bytes(config, stage) > 0
