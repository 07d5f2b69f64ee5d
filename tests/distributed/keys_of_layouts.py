"""Effects of the keys under `parallel`, measured on two ranks or on stand-ins for what a CPU does not have."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any
from unittest.mock import MagicMock, patch

import pytest
import torch
from keys_table import BASE, Subject, Table, set_key, with_model
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from test_traffic import sent_bytes
from tiny_runs import VOCAB_SIZE, TinyRun, tiny_run

from parallel.processes.ranks import RankEnvironment
from pretrain.config.schema import RunConfig
from pretrain.config.settled import settled
from pretrain.engine.build import build_unset_chunks
from pretrain.engine.microbatch_graph import MicrobatchGraph, microbatch_graph
from pretrain.engine.parts import parts_of
from pretrain.engine.session import relaid, session
from pretrain.engine.tables.gradient_timing import make_gradient_stream
from pretrain.errors import ConfigError
from pretrain.train.loop import take_step

LAYOUTS, STAND_INS = Table(), Table()

NOWHERE = RankEnvironment(rank=0, world_size=1, local_rank=0, init_method="file:///nowhere", are_watched=True)

FOUR_BLOCKS = replace(with_model(num_layers=4), train=replace(BASE.train, global_batch_size=8))
STAGES = set_key(FOUR_BLOCKS, "parallel.pipeline", 2)


@dataclass(frozen=True)
class OnRank:
    """Blocks, tensors and traffic of one rank in a step.

    Attributes:
        blocks: global numbers of the blocks of each of its chunks.
        shapes: shapes of the parameters of its first chunk, by name.
        hidden: [s, b, D] of what its first block gets, per microbatch.
        loss: loss of the step, nats per target.
        sent_for_attention: bytes that each collective over its context-parallel group sends in the step.
        reduced_early: parts of the gradients whose reduction had started when the backward pass of the next step ended,
            and all parts.
        gathered_late: parts of the weights that were not gathered yet when that step ended, and all parts.
    """

    blocks: list[list[int]]
    shapes: dict[str, tuple[int, ...]]
    hidden: list[tuple[int, ...]]
    loss: float
    sent_for_attention: list[int]
    reduced_early: tuple[int, int]
    gathered_late: tuple[int, int]


def on_rank(config: RunConfig) -> OnRank:
    """One step on the ranks that are there."""
    with tiny_run(config) as run:
        hidden: list[tuple[int, ...]] = []
        run.bare[0].decoder.layers[0].register_forward_pre_hook(
            lambda _, arguments: hidden.append(tuple(arguments[0].hidden.shape))
        )
        with sent_bytes(run.groups.megatron.cp) as sent:
            ((loss, _),) = run.train(1)
        hidden_of_step = list(hidden)
        return OnRank(
            [[layer.layer_number - 1 for layer in chunk.decoder.layers] for chunk in run.bare],
            {name: tuple(p.shape) for name, p in run.bare[0].named_parameters()},
            hidden_of_step,
            loss,
            list(sent),
            *communicated_beside(run),
        )


def communicated_beside(run: TinyRun) -> tuple[tuple[int, int], tuple[int, int]]:
    """Take a step; see `OnRank`. The first step of a run finds out which gradients come, and reduces all at its end."""
    parts = [part for chunk in run.chunks for part in parts_of(chunk)]
    when_finished: list[int] = []

    def finalise(*arguments: Any, **keywords: Any) -> None:
        when_finished.append(sum(part.grad_reduce_handle is not None for part in parts))
        finalize_model_grads(*arguments, **keywords)

    run.bare[0].config.finalize_model_grads_func = finalise
    take_step(run.run, run.batches)
    late = sum(part.param_gather_handle is not None or not part.param_gather_dispatched for part in parts)
    (early,) = when_finished
    return (early, len(parts)), (late, len(parts))


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


CUT = set_key(set_key(FOUR_BLOCKS, "parallel.context", 2), "parallel.context_attention", "ring")
PASSES = 4 * 4
"""Blocks x microbatches of a rank."""
VECTORS = 8 * 4 * 8 * 4
"""Bytes of the queries, or keys, or values, of a rank's tokens: 8 of 4 heads of 8 numbers."""


@LAYOUTS.key("parallel.context_attention", "gather", CUT)
def _(base: list[OnRank], second: list[OnRank]) -> None:
    """Keys and values are sent twice around the ring and their gradients once; or each once, and never again."""
    same_losses(base, second)
    for before, rank in zip(base, second, strict=True):
        assert before.sent_for_attention == [2 * VECTORS] * 3 * PASSES
        assert rank.sent_for_attention == [2 * VECTORS] * 2 * PASSES


@LAYOUTS.key("parallel.context_attention", "heads", CUT)
def _(base: list[OnRank], second: list[OnRank]) -> None:
    """Half of the queries, keys and values and half of the outputs, and of their gradients."""
    same_losses(base, second)
    for rank in second:
        assert sorted(rank.sent_for_attention) == [VECTORS // 2] * 2 * PASSES + [3 * VECTORS // 2] * 2 * PASSES


@LAYOUTS.key("parallel.memory", 2, FOUR_BLOCKS)
def _(base: list[OnRank], second: list[OnRank]) -> None:
    """Half of the columns of the tables, and nothing else."""
    same_losses(base, second)
    for before, rank in zip(base, second, strict=True):
        tables = {name: shape for name, shape in rank.shapes.items() if name.startswith("banks.")}
        assert set(tables.values()) == {(144, 8), (144, 5)}
        assert {**before.shapes, **tables} == rank.shapes
        assert rank.hidden == before.hidden


@LAYOUTS.key("parallel.memory_rows", 2, set_key(FOUR_BLOCKS, "parallel.memory", 2))
def _(base: list[OnRank], second: list[OnRank]) -> None:
    """Half of the rows of the tables in place of half of their columns."""
    same_losses(base, second)
    for before, rank in zip(base, second, strict=True):
        tables = {name: shape for name, shape in rank.shapes.items() if name.startswith("banks.")}
        assert set(tables.values()) == {(72, 16), (72, 10)}
        assert {**before.shapes, **tables} == rank.shapes


@LAYOUTS.key("parallel.overlap_grad_reduce", False, FOUR_BLOCKS)
def _(base: list[OnRank], second: list[OnRank]) -> None:
    """No part is reduced before the backward pass has ended, instead of all; dense parameters and tables alike."""
    assert [rank.loss for rank in second] == [rank.loss for rank in base]
    for before, rank in zip(base, second, strict=True):
        assert before.reduced_early == (2, 2)
        assert rank.reduced_early == (0, 2)


@LAYOUTS.key("parallel.overlap_param_gather", False, FOUR_BLOCKS)
def _(base: list[OnRank], second: list[OnRank]) -> None:
    """All parts are gathered when the step ends, instead of none."""
    assert [rank.loss for rank in second] == [rank.loss for rank in base]
    for before, rank in zip(base, second, strict=True):
        assert before.gathered_late == (2, 2)
        assert rank.gathered_late == (0, 2)


@STAND_INS.key("parallel.overlap_memory", False, set_key(BASE, "parallel.memory", 2))
def _(base: Subject, second: Subject) -> None:
    """The memory of a block starts before its feed-forward runs on a GPU, or after it."""
    for subject, overlaps in ((base, True), (second, False)):
        groups = replace(subject.groups, device=torch.device("cuda", 0))
        with patch("torch.cuda.Stream") as stream:
            (model,) = build_unset_chunks(subject.config, groups, vocab_size=VOCAB_SIZE)
        assert [call.kwargs for call in stream.mock_calls] == [{"priority": -1}] * overlaps
        branch = MagicMock()
        join = model.decoder.layers[0].mlp.side_stream.start(branch, MagicMock(), MagicMock())
        assert branch.call_count == overlaps
        join()
        assert branch.call_count == 1


@STAND_INS.key("parallel.gradient_sm_share", 0.5, set_key(BASE, "parallel.memory", 2))
def _(base: Subject, second: Subject) -> None:
    """Gradients of tables have a stream, or one of a context of half of the multiprocessors, in whole groups of 8."""
    for subject, num_streams, contexts in ((base, 1, []), (second, 0, [{"num_sms": 64, "device_id": 0}])):
        groups = replace(subject.groups, device=torch.device("cuda", 0))
        with (
            patch("torch.cuda.Stream") as stream,
            patch("torch.cuda.green_contexts.GreenContext.create") as create,
            patch("torch.cuda.get_device_properties", return_value=MagicMock(multi_processor_count=132)),
        ):
            made = make_gradient_stream(subject.config, groups)
        assert made is not None
        assert stream.call_count == num_streams
        assert [call.kwargs for call in create.call_args_list] == contexts
        assert made._stream is (create.return_value.Stream.return_value if contexts else stream.return_value)


@STAND_INS.key("train.cuda_graph", "microbatch")
def _(base: Subject, second: Subject) -> None:
    """The passes of a microbatch are a graph on a GPU, beside which nothing is reduced or gathered; a CPU has none."""
    for subject, has_graph in ((base, False), (second, True)):
        groups = replace(subject.groups, device=torch.device("cuda", 0))
        assert isinstance(microbatch_graph(subject.config, [MagicMock()], groups), MicrobatchGraph) == has_graph
        layout = settled(subject.config).parallel
        assert (layout.overlap_grad_reduce, layout.overlap_param_gather) == (not has_graph, not has_graph)
    with pytest.raises(ConfigError, match=r"train\.cuda_graph is microbatch, which needs an NVIDIA GPU"):
        microbatch_graph(second.config, [MagicMock()], second.groups)


@STAND_INS.key("parallel.timeout_minutes", 7.0)
def _(base: Subject, second: Subject) -> None:
    """The world and all of Megatron's groups in it have the timeout, also those that take the place of others."""
    for subject, minutes in ((base, 10), (second, 7)):
        with (
            patch("parallel.groups.dist") as dist,
            patch("parallel.groups.parallel_state") as state,
            patch("parallel.groups.tensor_parallel"),
            patch("parallel.groups.ProcessGroupCollection"),
            patch("pretrain.engine.session.current_ranks", return_value=NOWHERE),
        ):
            dist.rendezvous.return_value = iter([(MagicMock(), 0, 1)])
            dist.distributed_c10d._world.pg_map = {}
            with session(subject.config) as groups:
                relaid(subject.config, groups)
        assert dist.rendezvous.call_args.kwargs["timeout"] == timedelta(minutes=minutes)
        assert dist.init_process_group.call_args.kwargs["timeout"] == timedelta(minutes=minutes)
        made: list[Any] = [
            call.kwargs["distributed_timeout_minutes"] for call in state.initialize_model_parallel.mock_calls
        ]
        assert made == [minutes, minutes]


@STAND_INS.key("train.deterministic", True)
def _(base: Subject, second: Subject) -> None:
    """PyTorch and Megatron take only algorithms that repeat their bits, as long as the session lasts."""
    for subject, expected in ((base, False), (second, True)):
        with (
            patch("pretrain.engine.session.meeting"),
            patch("pretrain.engine.session.parallel_context"),
            patch("pretrain.engine.session.settle_environment") as settle,
            patch("pretrain.engine.session.current_ranks", return_value=NOWHERE),
            session(subject.config),
        ):
            assert torch.are_deterministic_algorithms_enabled() == expected
            assert settle.call_args.kwargs["deterministic"] == expected
        assert not torch.are_deterministic_algorithms_enabled()
        (model,) = build_unset_chunks(subject.config, subject.groups, vocab_size=VOCAB_SIZE)
        assert model.embedding.word_embeddings.deterministic_mode == expected
