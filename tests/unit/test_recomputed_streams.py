"""Streams that backward mixes again: the bits of those that are kept, at the price and for the bytes that are promised.

Five blocks, of which the third has a memory before attention, and the second one whose output joins behind the fourth.
Legend: t tokens, b sequences, n streams, D hidden size.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.pipeline_parallel.schedules import custom_backward, deallocate_output_tensor
from megatron.core.transformer.spec_utils import ModuleSpec
from test_residual_streams import KERNELS, KINDS, megatron
from torch import Tensor, nn

from megamem.backbone.parts import BlockParts
from megamem.blocks.block import Block
from megamem.blocks.memory_sites import FfnWithMemory
from megamem.blocks.stack import BlockStack
from megamem.chunk.inputs import Inputs
from megamem.config.model import ModelConfig
from megamem.families.engram.config import EngramConfig
from megamem.placement.block_plan import PLAIN
from megamem.placement.spans import PlacementConfig
from megamem.residual_streams.config import ResidualStreamsConfig
from megamem.residual_streams.make import make_site
from pretrain.config.optimizer import OptimizerConfig
from pretrain.config.schema import ParallelConfig, RunConfig, TrainConfig
from pretrain.planning.bytes.kept_streams import KeptStreams, kept_streams
from pretrain.planning.counts.pipeline_stages import stages_of

TOKENS, SEQUENCES, WIDTH = 6, 2, 16
NUM_BLOCKS, WITH_ENTRY, READS_LATER, JOINED = 5, 2, 1, 3
GROUPS: Any = SimpleNamespace(tp=None)
SETTINGS = {kind: ResidualStreamsConfig(kind=kind, count=3, iterations=3, rank=4) for kind in KINDS} | {
    "static": ResidualStreamsConfig(kind="plain", count=3, dynamic=False)
}
EVERY_KIND = pytest.mark.parametrize("kind", SETTINGS)


class Branch(nn.Module):
    """Attention, or a feed-forward: an output and no bias."""

    def __init__(self, **_: Any) -> None:
        super().__init__()
        self.proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        return torch.tanh(self.proj(hidden)), None


class Memory(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor, inputs: Inputs) -> Tensor:
        return torch.sin(self.proj(hidden))


class Entry(nn.Module):
    """Memory before attention, which keeps the streams that it is given."""

    def __init__(self, **_: Any) -> None:
        super().__init__()
        self.memory = Memory()

    def forward(self, streams: Tensor, inputs: Inputs) -> Tensor:
        return streams + self.memory(streams[:, :, 0], inputs).unsqueeze(2)


class ReadLater(FfnWithMemory):
    """Feed-forward whose memory joins behind a later block."""

    def __init__(self, config: Any) -> None:
        nn.Module.__init__(self)
        self.ffn, self.memory, self.joins_later = Branch(), Memory(), True


@dataclass
class Mixes:
    """Calls of `mix_streams`, and the streams that they have made, as long as there are any."""

    made: list[weakref.ref[Any]] = field(default_factory=list)
    most: int = 0

    def __call__(self, streams: Tensor, out: Tensor, post: Tensor, mix: Tensor | None) -> Tensor:
        result = KERNELS.mix_streams(streams, out, post, mix)
        self.made.append(weakref.ref(result.untyped_storage()))
        self.most = max(self.most, self.num_alive)
        return result

    @property
    def num_alive(self) -> int:
        return sum(made() is not None for made in self.made)

    @property
    def num_calls(self) -> int:
        return len(self.made)


def stack_of(
    kind: str,
    num_blocks: int | None,
    mixes: Mixes | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    is_first: bool = True,
    is_last: bool = True,
) -> BlockStack:
    """A chunk with the same weights for every way to keep streams."""
    config, settings = megatron(WIDTH, dtype), SETTINGS[kind]
    kernels = replace(KERNELS, mix_streams=mixes or KERNELS.mix_streams)

    def block(number: int) -> Block:
        return Block(
            config,
            BlockParts(
                input_layernorm=lambda **_: nn.Identity(),
                self_attention=ModuleSpec(module=Branch),
                pre_mlp_layernorm=lambda **_: nn.Identity(),
                mlp=ReadLater if number == READS_LATER else Branch,
                entry=Entry if number == WITH_ENTRY else None,
            ),
            layer_number=number + 1,
            plan=PLAIN,
            joins=(number == JOINED,) if READS_LATER < number <= JOINED else (),
            groups=GROUPS,
            streams=(
                make_site(config, settings, kernels, site_number=2 * number),
                make_site(config, settings, kernels, site_number=2 * number + 1),
            ),
        )

    stack = BlockStack(
        config,
        [block(number) for number in range(NUM_BLOCKS)],
        final_layernorm=lambda **_: nn.Identity(),
        groups=GROUPS,
        streams=settings,
        recompute_streams=num_blocks,
        kernels=kernels,
        is_first=is_first,
        is_last=is_last,
    ).to(dtype)
    generator = torch.Generator().manual_seed(7)
    for parameter in stack.parameters():
        nn.init.normal_(parameter, std=0.3, generator=generator)
    return stack


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def hidden_states(dtype: torch.dtype = torch.float32) -> Tensor:
    return drawn(TOKENS, SEQUENCES, WIDTH, dtype=dtype).requires_grad_()


def passed(stack: BlockStack, hidden: Tensor) -> dict[str, Tensor]:
    """Output of a chunk, and gradients of its input and of its weights."""
    out = stack(hidden, Inputs(None))
    out.backward(drawn(*out.shape, dtype=out.dtype))
    found = {"out": out.detach(), "hidden": hidden.grad}
    found |= {name: parameter.grad for name, parameter in stack.named_parameters()}
    return {name: value for name, value in found.items() if value is not None}


def same_bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@EVERY_KIND
def test_gradients_have_the_bits_of_kept_streams(kind: str, dtype: torch.dtype) -> None:
    expected = passed(stack_of(kind, None, dtype=dtype), hidden_states(dtype))
    assert all(value.isfinite().all() and value.any() for value in expected.values())
    for num_blocks in (1, 2, 3, NUM_BLOCKS):
        assert same_bits(passed(stack_of(kind, num_blocks, dtype=dtype), hidden_states(dtype)), expected)


# Two writes in each block, and one that joins.
WRITES = 2 * NUM_BLOCKS + 1
# By the blocks of a chain. Chains of one block are 0 | 1 | 2 | 3 | 4, of two 0, 1 | 2, 3 | 4, of three 0, 1 | 2, 3, 4: the memory
# in block 2 keeps what it reads, and begins a chain. Kept are the streams between chains, and mixed again those before each
# feed-forward, and before each block that begins no chain, for which block 3 writes two in one chain of three, and keeps one.
KEPT = {1: 4, 2: 2, 3: 1}
AGAIN = {1: 5, 2: 7, 3: 9}
# The most that there are in backward, without and with an end that needs the last streams: those kept, and of the last chain
# one, one and five, or those of blocks 2 and 3, when the streams behind them are gone.
MOST = {1: (4 + 1, 4 + 2), 2: (1 + 3, 2 + 2), 3: (1 + 5, 1 + 6)}


@pytest.mark.parametrize("num_blocks", KEPT)
@EVERY_KIND
def test_streams_are_kept_once_per_chain_and_mixed_once_again(kind: str, num_blocks: int) -> None:
    # Plain streams end with a sum.
    ends_with_streams = SETTINGS[kind].kind != "plain"
    mixes = Mixes()
    stack = stack_of(kind, num_blocks, mixes)
    out = stack(hidden_states(), Inputs(None))
    assert (mixes.num_calls, mixes.num_alive) == (WRITES, KEPT[num_blocks])
    mixes.most = 0
    out.sum().backward()
    assert mixes.num_calls == WRITES + AGAIN[num_blocks] + ends_with_streams
    assert mixes.most == MOST[num_blocks][ends_with_streams]
    assert mixes.num_alive == 0


@EVERY_KIND
def test_streams_of_every_site_are_kept_otherwise(kind: str) -> None:
    mixes = Mixes()
    out = stack_of(kind, None, mixes)(hidden_states(), Inputs(None))
    # All but those that an output joins without a mix.
    assert mixes.num_alive == WRITES - 1 - (SETTINGS[kind].kind == "plain")
    out.sum().backward()
    assert mixes.num_calls == WRITES


@contextmanager
def without_collector() -> Iterator[None]:
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@EVERY_KIND
def test_a_graph_that_is_dropped_leaves_nothing(kind: str) -> None:
    mixes = Mixes()
    stack = stack_of(kind, 2, mixes)
    with without_collector():
        out = stack(hidden_states(), Inputs(None))
        assert mixes.num_alive
        del out
        assert mixes.num_alive == 0


@pytest.mark.parametrize("num_blocks", KEPT)
@EVERY_KIND
def test_a_chunk_in_the_middle_keeps_no_message(kind: str, num_blocks: int) -> None:
    """Two microbatches are under way at once; Megatron frees what a stage has sent."""
    width = SETTINGS[kind].message_bytes(WIDTH, 4) // 4
    messages = [drawn(TOKENS, SEQUENCES, width) * factor for factor in (1, 0.5)]

    def run(stack: BlockStack, between: Callable[[], None]) -> list[Tensor]:
        given = [message.clone().requires_grad_() for message in messages]
        sent = [stack(each, Inputs(None)) for each in given]
        grads = [drawn(*each.shape) for each in sent]
        for each in sent:
            deallocate_output_tensor(each, True)
        between()
        for each, grad in zip(sent, grads, strict=True):
            custom_backward(each, grad)
        found = [each.grad for each in given] + [parameter.grad for parameter in stack.parameters()]
        return [each for each in found if each is not None]

    mixes, kept = Mixes(), []
    again = run(stack_of(kind, num_blocks, mixes, is_first=False, is_last=False), lambda: kept.append(mixes.num_alive))
    assert kept == [2 * KEPT[num_blocks]]
    assert mixes.num_calls == 2 * (WRITES + AGAIN[num_blocks])
    expected = run(stack_of(kind, None, is_first=False, is_last=False), lambda: None)
    assert all(map(torch.equal, again, expected))


@EVERY_KIND
def test_nothing_is_kept_without_gradients(kind: str) -> None:
    mixes = Mixes()
    stack = stack_of(kind, 2, mixes)
    with torch.no_grad():
        out = stack(hidden_states(), Inputs(None))
    assert torch.equal(out, stack_of(kind, None)(hidden_states(), Inputs(None)))
    assert (mixes.num_calls, mixes.num_alive) == (WRITES, 0)


@pytest.mark.parametrize("first_trained", range(1, NUM_BLOCKS))
@EVERY_KIND
def test_blocks_below_those_that_are_trained_keep_nothing(kind: str, first_trained: int) -> None:
    def frozen(num_blocks: int | None, mixes: Mixes | None = None) -> BlockStack:
        stack = stack_of(kind, num_blocks, mixes)
        for block in stack.layers[:first_trained]:
            block.requires_grad_(False)
        return stack

    hidden = hidden_states().detach()
    expected = passed(frozen(None), hidden)
    for num_blocks in (1, 3):
        assert same_bits(passed(frozen(num_blocks), hidden), expected)
    mixes = Mixes()
    out = frozen(NUM_BLOCKS, mixes)(hidden, Inputs(None))
    # Those before the first trained block, and before a memory in one.
    assert mixes.num_alive == 1 + (first_trained < WITH_ENTRY)
    del out


PLANNED = RunConfig(
    model=ModelConfig(
        num_layers=NUM_BLOCKS,
        memory=EngramConfig(placement=PlacementConfig(blocks=(WITH_ENTRY,))),
        residual_streams=ResidualStreamsConfig(),
    )
)


# Kept are the streams that all begin as, those behind the memory, and those between other chains. Nothing joins later here.
@pytest.mark.parametrize(
    ("num_blocks", "kept", "again", "at_once"),
    [(None, 10, 0, 0), (1, 5, 5 + 1, 1), (2, 3, 7 + 1, 1), (3, 2, 8 + 1, 5), (9, 2, 8 + 1, 5)],
)
def test_plans_count_what_is_kept_and_what_is_mixed_again(
    num_blocks: int | None, kept: int, again: int, at_once: int
) -> None:
    config = replace(PLANNED, train=TrainConfig(recompute_streams=num_blocks))
    assert kept_streams(config, stages_of(config)[0]) == KeptStreams(kept / NUM_BLOCKS, again, at_once)
    one_stream = replace(config, model=replace(config.model, residual_streams=None))
    assert kept_streams(one_stream, stages_of(one_stream)[0]) == KeptStreams(0.0)


def test_plans_begin_chains_with_stages_and_what_is_trained() -> None:
    config = replace(PLANNED, train=TrainConfig(recompute_streams=3))
    config = replace(config, parallel=ParallelConfig(pipeline=2, pipeline_layout="Ettt|ttL"))
    assert [kept_streams(config, stage) for stage in stages_of(config)] == [
        KeptStreams(2 / 3, 3 + 1, 1),
        KeptStreams(1 / 2, 3 + 1, 3),
    ]
    of_upper = replace(config, optimizer=OptimizerConfig(trained_layers=(5,)))
    assert [kept_streams(of_upper, stage) for stage in stages_of(of_upper)] == [
        KeptStreams(2.0),
        KeptStreams(1.0, 1 + 1, 1),
    ]
