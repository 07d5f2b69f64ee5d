"""Collectives of ranks that were dry-run one by one: all ranks of a layout make the same calls in the same order, and
what is planted out of order or of another shape is told with its lines.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest

from megamem.config.model import ModelConfig
from megamem.families.ultramem_v2.config import UltraMemV2Config
from pretrain.config.schema import ParallelConfig, RunConfig, TrainConfig
from pretrain.planning.bytes.memory_parts import MemoryPart
from pretrain.planning.dryrun.collectives import Collective
from pretrain.planning.dryrun.lines import CallSite
from pretrain.planning.dryrun.meeting import deadlock
from pretrain.planning.dryrun.peers import find_mismatches
from tests.deadline import launch_within
from tests.rotation import in_rotation

RUN = RunConfig(
    model=ModelConfig(
        num_layers=2,
        hidden_size=64,
        num_attention_heads=4,
        ffn_hidden_size=128,
        vocab_size=256,
        memory=UltraMemV2Config(num_keys=32, value_dim=32, pre_value_dim=16, top_k=4),
    ),
    parallel=ParallelConfig(tensor=2, pipeline=2, memory=4),
    train=TrainConfig(sequence_length=64, micro_batch_size=1, global_batch_size=4, precision="bf16"),
)
LAYOUTS = {
    "tensor, pipeline, memory": RUN,
    "ring, interleaved": replace(
        RUN,
        model=replace(RUN.model, num_layers=4),
        parallel=ParallelConfig(pipeline=2, virtual_pipeline=2, context=2, context_attention="ring", memory=2),
        train=replace(RUN.train, global_batch_size=2),
    ),
}
WORLDS = {"tensor, pipeline, memory": 8, "ring, interleaved": 4}
TRIED = in_rotation(list(WORLDS), 2)

GROUPS = {"tensor": (0, 1), "data": (0, 2), "data of 1": (1, 2), "world": (0, 1, 2)}


def call(op: str, group: str, content: str = "float32 [4]", **options: Any) -> Collective:
    ranks = options.pop("ranks", None) or GROUPS[group]
    return Collective(
        op, group, ranks, 16, MemoryPart.OTHER, group=group, content=content, line=CallSite("a.py:1"), **options
    )


def send(to: int, content: str = "float32 [4]", **options: Any) -> Collective:
    return call("send", "world", content, ranks=(to,), **options)


def recv(source: int, content: str = "float32 [4]", **options: Any) -> Collective:
    return call("recv", "world", content, ranks=(source,), **options)


@pytest.fixture(scope="module")
def calls_of() -> dict[str, dict[int, tuple[Collective, ...]]]:
    """Calls of all ranks of each layout, and of two ranks that differ in their code."""

    def main() -> dict[str, dict[int, tuple[Collective, ...]]]:
        from parallel.exchange import Exchange
        from pretrain.planning.dryrun.rank import dry_run

        def calls(config: RunConfig, world: int, ranks: int) -> dict[int, tuple[Collective, ...]]:
            return {report.rank: report.collectives for report in dry_run(config, world, range(ranks))}

        found = {name: calls(LAYOUTS[name], WORLDS[name], WORLDS[name]) for name in TRIED}
        with patch.object(Exchange, "gather", with_a_sum(Exchange.gather)):
            return {**found, "in code": calls(RUN, 8, 2)}

    (found,) = launch_within(main, 1, timeout_s=280, num_threads=1)
    return found


def with_a_sum(gather: Any) -> Any:
    """Exchange.gather with a sum over the world: before it on rank 1, after it on others."""
    import torch.distributed as dist

    def gather_and_sum(exchange: Any, x: Any) -> Any:
        if first := dist.get_rank() == 1:
            dist.all_reduce(x.new_zeros(1))
        out = gather(exchange, x)
        if not first:
            dist.all_reduce(x.new_zeros(1))
        return out

    return gather_and_sum


@pytest.mark.parametrize("name", TRIED)
def test_all_ranks_of_a_layout_make_the_same_calls_and_defects_of_every_kind_are_told(
    calls_of: dict[str, dict[int, tuple[Collective, ...]]], name: str
) -> None:
    calls = calls_of[name]
    assert find_mismatches(calls) == []
    assert {(call.op, call.axis) for call in calls[0]} >= {("all_to_all", "memory"), ("all_reduce", "world")}
    for rank, planted, told in defects(calls):
        found = find_mismatches({**calls, rank: planted})
        assert any(told in sentence and ".py:" in sentence for sentence in found), (told, found)


def defects(calls: dict[int, tuple[Collective, ...]]) -> Iterator[tuple[int, tuple[Collective, ...], str]]:
    """A rank, its calls with one defect, and words of the sentence that tells it."""
    rank, of_rank = 3, calls[3]
    for index, one in enumerate(of_rank):
        before, after = of_rank[:index], of_rank[index + 1 :]
        if len(one.ranks) == 1 and not one.is_message:
            continue
        if one.op in ("all_gather", "all_reduce", "send") and one not in before:
            where = "message" if one.is_message else f"in group {one.axis}"
            for part in ("[", "bfloat16"):
                changed = replace(one, content=one.content.replace(part, "[7, " if part == "[" else "float16"))
                if changed != one:
                    yield rank, (*before, changed, *after), where
            if not one.is_message:
                yield rank, (*before, replace(one, op="broadcast"), *after), "broadcast of"
            yield rank, (*before, *after), where
        if one.op == "all_to_all" and one not in before:
            assert one.splits is not None
            rows = one.splits[0]
            assert len(rows) > 1
            yield (
                rank,
                (*before, replace(one, splits=((rows[0] + 1, *rows[1:]), one.splits[1])), *after),
                "which expects",
            )
        # Orders matter to ranks that are in both.
        if after and not one.is_message and after[0].group != one.group and {*one.ranks} & {*after[0].ranks} - {rank}:
            yield rank, (*before, after[0], one, *after[1:]), "wait for each other"


def test_two_communicators_in_other_orders_on_two_ranks() -> None:
    tensor, world = call("all_reduce", "tensor"), call("all_reduce", "world")
    assert list(deadlock({0: [tensor, world], 1: [tensor, world], 2: [world]})) == []
    (told,) = deadlock({0: [tensor, world], 1: [world, tensor], 2: [world]})
    assert "rank 0 is at all_reduce of float32 [4] in group tensor of 2 ranks at a.py:1" in told
    assert "rank 1 is at all_reduce of float32 [4] in group world of 3 ranks" in told


def test_a_circle_of_three_ranks_no_two_of_which_share_two_communicators() -> None:
    one, two, three = (call("all_reduce", group) for group in ("tensor", "data", "data of 1"))
    assert list(deadlock({0: [one, two], 1: [one, three], 2: [two, three]})) == []
    (told,) = deadlock({0: [one, two], 1: [three, one], 2: [two, three]})
    assert told.count("rank ") == 3


def test_messages_wait_for_their_other_end_and_for_collectives() -> None:
    world = call("all_reduce", "world")
    assert list(deadlock({0: [send(1), world], 1: [recv(0), world], 2: [world]})) == []
    (told,) = deadlock({0: [send(1), world], 1: [world, recv(0)], 2: [world]})
    assert "send" in told
    # Both send first: one after the other they wait, together they do not.
    crossed = {0: [send(1), recv(1)], 1: [send(0), recv(0)]}
    assert len(list(deadlock(crossed))) == 1
    together = {rank: [replace(one, batch=0) for one in of_rank] for rank, of_rank in crossed.items()}
    assert list(deadlock(together)) == []


def test_ranks_that_are_not_there_are_not_waited_for() -> None:
    assert (
        list(
            deadlock(
                {
                    0: [call("all_reduce", "tensor"), send(5), call("all_reduce", "world")],
                    2: [call("all_reduce", "world")],
                }
            )
        )
        == []
    )


@pytest.mark.parametrize(
    ("left", "right", "told"),
    [
        (call("all_reduce", "tensor", "sum of float32 [4]"), call("all_reduce", "tensor", "avg of float32 [4]"), "avg"),
        (call("broadcast", "tensor", "int32 [] from rank 0"), call("broadcast", "tensor", "int32 [] from rank 1"), "from"),
        (call("all_gather", "tensor"), call("reduce_scatter", "tensor"), "reduce_scatter"),
        (call("all_gather", "tensor"), None, "no call"),
        (send(1, "float32 [4]"), recv(0, "bfloat16 [4]"), "bfloat16 [4] (16 bytes) expected"),
        (send(1), None, "nothing expected"),
        (send(1), replace(recv(0), group="tensor"), "expected in group world"),
    ],
)  # fmt: skip
def test_calls_that_do_not_answer_each_other(left: Collective, right: Collective | None, told: str) -> None:
    found = find_mismatches({0: [left], 1: [] if right is None else [right]})
    assert len(found) == 1
    assert told in found[0]


def test_a_rank_that_exchanges_in_another_order_in_its_code_is_told(
    calls_of: dict[str, dict[int, tuple[Collective, ...]]],
) -> None:
    (told,) = find_mismatches(calls_of["in code"])
    assert "wait for each other" in told
    assert "all_gather of int32" in told
    assert "in group memory of 4 ranks at parallel/exchange.py:" in told
    assert "in group world of 8 ranks" in told
