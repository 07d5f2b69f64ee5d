"""Effects of the keys of sharing and placement under `model.memory`: tables that layers see, blocks that have a memory."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import torch
from keys_table import (
    MEMORY,
    Subject,
    Table,
    set_key,
    with_kind,
    with_model,
)
from torch import Tensor

from megamem.attention.rotary import rotary_turns
from megamem.blocks.block import BlockState
from megamem.chunk.inputs import Inputs
from megamem.placement.sharing import SharingConfig
from megamem.placement.spans import PlacementConfig

SHARING = Table()


def with_sharing(pattern: Any, group: int = 1, **fields: Any) -> Any:
    return with_model(num_layers=4, memory=replace(MEMORY, sharing=SharingConfig(pattern, group, **fields)))


def rows_of_banks(subject: Subject) -> list[int]:
    return [shape[0] for name, shape in subject.shapes.items() if name.endswith(".values")]


def tables_seen(subject: Subject) -> list[set[int]]:
    """Per memory layer: the tables of 144 rows of its bank that its entries read."""
    found = []
    for layer in subject.model.memory_layers:
        rows, _ = layer.locate(torch.arange(layer.view.num_keys**2))
        found.append({int(row) // 144 for row in rows})
    return found


@SHARING.key("model.memory.sharing.pattern", "all", with_sharing("block", 4))
def _(base: Subject, second: Subject) -> None:
    assert (rows_of_banks(base), rows_of_banks(second)) == ([4 * 144], [144])
    assert tables_seen(base) == [{0, 1, 2, 3}] * 4
    assert tables_seen(second) == [{0}] * 4


@SHARING.key("model.memory.sharing.pattern", "no_ring", with_sharing("ring", 3))
def _(base: Subject, second: Subject) -> None:
    """A window of three: floor(12 sqrt(3))^2 = 400 rows from the table before the layer's own. At the ends it goes
    around, or stops.
    """
    assert rows_of_banks(base) == rows_of_banks(second) == [4 * 144]
    assert tables_seen(base) == [{3, 0, 1}, {0, 1, 2}, {1, 2, 3}, {2, 3, 0}]
    assert tables_seen(second) == [{0, 1, 2}, {0, 1, 2}, {1, 2, 3}, {1, 2, 3}]


@SHARING.key("model.memory.sharing.pattern", "all", with_sharing("none"))
def _(base: Subject, second: Subject) -> None:
    assert (rows_of_banks(base), rows_of_banks(second)) == ([144] * 4, [144])
    assert len({layer.view.bank for layer in base.model.memory_layers}) == 4


@SHARING.key("model.memory.sharing.group", 4, with_sharing("block", 2))
def _(base: Subject, second: Subject) -> None:
    assert rows_of_banks(base) == [2 * 144] * 2
    assert rows_of_banks(second) == [4 * 144]


@SHARING.key("model.memory.sharing.window", "released", with_sharing("ring", 3))
def _(base: Subject, second: Subject) -> None:
    assert tables_seen(base) == [{3, 0, 1}, {0, 1, 2}, {1, 2, 3}, {2, 3, 0}]
    assert tables_seen(second) == [{0, 1, 2}, {1, 2, 3}, {2, 3, 0}, {3, 0, 1}]


def blocks_with_memory(subject: Subject) -> list[int]:
    return [int(layer.name.split(".")[2]) for layer in subject.model.memory_layers]


FOUR_BLOCKS = with_model(num_layers=4)


@SHARING.key("model.memory.placement.every", 2, FOUR_BLOCKS)
def _(base: Subject, second: Subject) -> None:
    assert (blocks_with_memory(base), blocks_with_memory(second)) == ([0, 1, 2, 3], [1, 3])


@SHARING.key("model.memory.placement.blocks", (0, 3), FOUR_BLOCKS)
def _(base: Subject, second: Subject) -> None:
    assert (blocks_with_memory(base), blocks_with_memory(second)) == ([0, 1, 2, 3], [0, 3])


@SHARING.key(
    "model.memory.placement.position",
    "instead",
    set_key(FOUR_BLOCKS, "model.memory.placement", PlacementConfig(blocks=(1,))),
)
def _(base: Subject, second: Subject) -> None:
    assert blocks_with_memory(base) == blocks_with_memory(second) == [1]
    assert {name for name in base.weights if name not in second.weights} == {
        "decoder.layers.1.mlp.ffn.linear_fc1.weight",
        "decoder.layers.1.mlp.ffn.linear_fc2.weight",
    }


@SHARING.key(
    "model.memory.placement.position",
    "inserted",
    with_model(num_layers=4, memory=replace(MEMORY, pre_value_dim=0, placement=PlacementConfig(blocks=(1,)))),
)
def _(base: Subject, second: Subject) -> None:
    """Neither a feed-forward nor a second norm, and nothing is added at first: block 1 hands on what it is given."""
    assert blocks_with_memory(base) == blocks_with_memory(second) == [1]
    assert {name for name in base.weights if name not in second.weights} == {
        "decoder.layers.1.mlp.ffn.linear_fc1.weight",
        "decoder.layers.1.mlp.ffn.linear_fc2.weight",
        "decoder.layers.1.pre_mlp_layernorm.weight",
    }
    assert not second.weights["banks.0.values"].any()
    x = torch.randn(8, 1, 32, generator=torch.Generator().manual_seed(3))
    for subject in (base, second):
        with torch.no_grad():
            turns = rotary_turns(subject.model.rotary_pos_emb(8))
            out = subject.model.decoder.layers[1](BlockState(x), Inputs(None, turns=turns))
        assert torch.equal(out.hidden, x) == (subject is second)


@SHARING.key(
    "model.memory.placement.norm",
    "layer",
    set_key(with_kind("midus", num_heads=4), "model.memory.placement", PlacementConfig(blocks=(1,))),
)
def _(base: Subject, second: Subject) -> None:
    """A bias of zeros; and the mean is taken off before attention."""
    norm = "decoder.layers.1.input_layernorm"
    assert second.weights.keys() - base.weights.keys() == {f"{norm}.bias"}
    assert not second.weights[f"{norm}.bias"].any()
    x = 3.0 + torch.randn(8, 1, 32, generator=torch.Generator().manual_seed(3))
    for subject, centred in ((base, x), (second, x - x.mean(-1, keepdim=True))):
        with torch.no_grad():
            normal = subject.model.decoder.layers[1].input_layernorm(x)
        assert torch.allclose(normal, centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt(), atol=1e-6)


def outputs_that_the_memory_changes(subject: Subject) -> list[int]:
    """Blocks whose output is another with the memory switched off."""
    outputs: list[list[Tensor]] = []
    for enabled in (True, False):
        seen: list[Tensor] = []
        hooks = [
            layer.register_forward_hook(lambda _, inputs, out, seen=seen: seen.append(out.hidden))
            for layer in subject.model.decoder.layers
        ]
        subject.model.set_memory_enabled(enabled)
        subject.logits()
        for hook in hooks:
            hook.remove()
        outputs.append(seen)
    subject.model.set_memory_enabled(True)
    return [block for block, (on, off) in enumerate(zip(*outputs, strict=True)) if not torch.equal(on, off)]


def memory_inputs(subject: Subject) -> list[Tensor]:
    """Inputs of the memories, in the order of their blocks."""
    inputs: list[Tensor] = []
    hooks = [
        layer.register_forward_pre_hook(lambda _, given: inputs.append(given[0]))
        for layer in subject.model.memory_layers
    ]
    subject.logits()
    for hook in hooks:
        hook.remove()
    return inputs


@SHARING.key("model.memory.placement.query_group", 2, FOUR_BLOCKS)
def _(base: Subject, second: Subject) -> None:
    """The second and the fourth are given what the one before is."""
    own, (first, as_first, third, as_third) = memory_inputs(base), memory_inputs(second)
    assert not any(torch.equal(one, other) for one, other in itertools.combinations(own, 2))
    assert torch.equal(first, as_first)
    assert torch.equal(third, as_third)
    assert not torch.equal(first, third)


@SHARING.key("model.memory.placement.spans", "1:2", set_key(FOUR_BLOCKS, "model.memory.placement", PlacementConfig()))
def _(base: Subject, second: Subject) -> None:
    """It reads in block 1, and joins after block 2."""
    assert blocks_with_memory(second) == [1]
    assert outputs_that_the_memory_changes(base) == [0, 1, 2, 3]
    assert outputs_that_the_memory_changes(second) == [2, 3]
