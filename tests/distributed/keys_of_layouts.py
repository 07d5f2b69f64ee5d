"""What the keys under `parallel` do, measured on two ranks or on stand-ins for what a CPU does not have."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

import pytest
import torch
from keys_table import BASE, Subject, Table, set_key, with_model
from tiny_runs import VOCAB_SIZE, tiny_run

from pretrain.build import build_unset_chunks
from pretrain.config.schema import RunConfig
from pretrain.session import relaid, session

LAYOUTS, STAND_INS = Table(), Table()

FOUR_BLOCKS = replace(with_model(num_layers=4), train=replace(BASE.train, global_batch_size=8))
STAGES = set_key(FOUR_BLOCKS, "parallel.pipeline", 2)


@dataclass(frozen=True)
class OnRank:
    """What one rank holds and sees in a step.

    Attributes:
        blocks: global numbers of the blocks of each of its chunks.
        shapes: of the parameters of its first chunk, by name.
        hidden: [s, b, D] of what its first block gets, per microbatch.
        loss: of the step, nats per target.
    """

    blocks: list[list[int]]
    shapes: dict[str, tuple[int, ...]]
    hidden: list[tuple[int, ...]]
    loss: float


def on_rank(config: RunConfig) -> OnRank:
    """One step on the ranks that are there."""
    with tiny_run(config) as run:
        hidden: list[tuple[int, ...]] = []
        run.bare[0].decoder.layers[0].register_forward_pre_hook(
            lambda _, arguments, named: hidden.append(tuple((*arguments, named.get("hidden_states"))[0].shape)),
            with_kwargs=True,
        )
        ((loss, _),) = run.train(1)
        return OnRank(
            [[layer.layer_number - 1 for layer in chunk.decoder.layers] for chunk in run.bare],
            {name: tuple(p.shape) for name, p in run.bare[0].named_parameters()},
            hidden,
            loss,
        )


def same_losses(base: list[OnRank], second: list[OnRank]) -> None:
    """No layout changes what is computed."""
    assert [rank.loss for rank in second] == pytest.approx([rank.loss for rank in base], rel=1e-6)


FC1 = "decoder.layers.0.mlp.ffn.linear_fc1.weight"


@LAYOUTS.key("parallel.tensor", 2, FOUR_BLOCKS)
def _(base: list[OnRank], second: list[OnRank]) -> None:
    """Half of the rows of a column-parallel weight, and half of a sequence: with data parallelism, half of the
    microbatches.
    """
    same_losses(base, second)
    for rank in base:
        assert rank.shapes[FC1] == (96, 32)
        assert rank.hidden == [(8, 2, 32)] * 2
    for rank in second:
        assert rank.shapes[FC1] == (48, 32)
        assert rank.hidden == [(4, 2, 32)] * 4
        assert rank.shapes["banks.0.values"] == (144, 16)


@LAYOUTS.key("parallel.pipeline", 2, FOUR_BLOCKS)
def _(base: list[OnRank], second: list[OnRank]) -> None:
    same_losses(base, second)
    assert [rank.blocks for rank in base] == [[[0, 1, 2, 3]]] * 2
    assert [rank.blocks for rank in second] == [[[0, 1]], [[2, 3]]]


@LAYOUTS.key("parallel.virtual_pipeline", 2, STAGES)
def _(base: list[OnRank], second: list[OnRank]) -> None:
    same_losses(base, second)
    assert [rank.blocks for rank in second] == [[[0], [2]], [[1], [3]]]


@LAYOUTS.key("parallel.pipeline_layout", "Ettt|tL", STAGES)
def _(base: list[OnRank], second: list[OnRank]) -> None:
    same_losses(base, second)
    assert [rank.blocks for rank in base] == [[[0, 1]], [[2, 3]]]
    assert [rank.blocks for rank in second] == [[[0, 1, 2]], [[3]]]


@LAYOUTS.key("parallel.context", 2, FOUR_BLOCKS)
def _(base: list[OnRank], second: list[OnRank]) -> None:
    """Half of every sequence, and whole weights."""
    same_losses(base, second)
    for rank in second:
        assert rank.hidden == [(4, 2, 32)] * 4
        assert rank.shapes == base[0].shapes


@LAYOUTS.key("parallel.memory", 2, FOUR_BLOCKS)
def _(base: list[OnRank], second: list[OnRank]) -> None:
    """Half of the columns of the tables, and nothing else."""
    same_losses(base, second)
    for before, rank in zip(base, second, strict=True):
        tables = {name: shape for name, shape in rank.shapes.items() if name.startswith("banks.")}
        assert set(tables.values()) == {(144, 8), (144, 5)}
        assert {**before.shapes, **tables} == rank.shapes
        assert rank.hidden == before.hidden


@STAND_INS.key("parallel.overlap_memory", False, set_key(BASE, "parallel.memory", 2))
def _(base: Subject, second: Subject) -> None:
    """On a GPU, the memory of a block starts before its feed-forward runs, or after it."""
    for subject, overlaps in ((base, True), (second, False)):
        groups = replace(subject.groups, device=torch.device("cuda", 0))
        (model,) = build_unset_chunks(subject.config, groups, vocab_size=VOCAB_SIZE)
        branch = MagicMock()
        join = model.decoder.layers[0].mlp.side_stream.start(branch, MagicMock(), MagicMock())
        assert branch.call_count == overlaps
        join()
        assert branch.call_count == 1


@STAND_INS.key("parallel.timeout_minutes", 7.0)
def _(base: Subject, second: Subject) -> None:
    """Of the world, and of every group of Megatron's in it, also of those that take the place of others."""
    ranks = SimpleNamespace(rank=0, world_size=1, local_rank=0, init_method="file:///nowhere")
    for subject, minutes in ((base, 10), (second, 7)):
        with (
            patch("parallel.groups.dist") as dist,
            patch("parallel.groups.parallel_state") as state,
            patch("parallel.groups.tensor_parallel"),
            patch("parallel.groups.ProcessGroupCollection"),
            patch("pretrain.session.current_ranks", return_value=ranks),
        ):
            dist.distributed_c10d._world.pg_map = {}
            with session(subject.config) as groups:
                relaid(subject.config, groups)
        assert dist.init_process_group.call_args.kwargs["timeout"] == timedelta(minutes=minutes)
        made: list[Any] = [
            call.kwargs["distributed_timeout_minutes"] for call in state.initialize_model_parallel.mock_calls
        ]
        assert made == [minutes, minutes]
