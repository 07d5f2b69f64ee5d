"""Effects of the keys of memories that tokens address, measured on initial weights and single passes of models on one rank."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from keys_table import (
    MEMORY,
    Subject,
    Table,
    as_kind,
    changed_names,
    same,
    with_kind,
    with_memory,
)
from tiny_runs import VOCAB_SIZE
from torch import Tensor

from megamem.addresses.ngrams import NgramAddressConfig
from megamem.attention.rotary import rotary_turns
from megamem.chunk.halo import UNCUT, WholeSequences
from megamem.chunk.inputs import Inputs
from megamem.config.model import LatentAttentionConfig
from megamem.families.engram.hashing import numpy_multipliers, splitmix_multipliers
from megamem.placement.spans import PlacementConfig

TOKEN_MEMORIES = Table()

# Memories that the token id addresses.

MOVE = with_kind("move", vocab_size=70, value_dim=32, num_gate_heads=4)
TIDE = with_kind("tide", vocab_size=70, value_dim=32, num_tables=2)


@TOKEN_MEMORIES.key("model.memory.vocab_size", 80, MOVE)
def _(base: Subject, second: Subject) -> None:
    """Two slots for every token id."""
    assert base.shapes["banks.0.values"] == (2 * 70, 32)
    assert second.shapes["banks.0.values"] == (2 * 80, 32)


@TOKEN_MEMORIES.key("model.memory.num_slots", 3, MOVE)
def _(base: Subject, second: Subject) -> None:
    for subject, slots in ((base, 2), (second, 3)):
        assert subject.shapes["banks.0.values"] == (slots * 70, 32)
        assert subject.memory_weights["gate_proj"].shape == (4 * (slots + 1), 32)


@TOKEN_MEMORIES.key("model.memory.num_gate_heads", 2, MOVE)
def _(base: Subject, second: Subject) -> None:
    for subject, heads in ((base, 4), (second, 2)):
        assert subject.memory_weights["gate_proj"].shape == (heads * 3, 32)
        assert subject.shapes["banks.0.values"] == (140, 32)


@TOKEN_MEMORIES.key("model.memory.gated_standard_path", False, MOVE)
def _(base: Subject, second: Subject) -> None:
    """The standard path multiplies the layer's values by a gate of 2 sigmoid(1), or leaves them as they are."""
    values, hidden = torch.ones(1, 2, 4, 8), torch.ones(1, 2, 32)
    ids = torch.tensor([[3, 60]])
    for subject, gates, factor in ((base, 3, 2 / (1 + math.exp(-1))), (second, 2, 1.0)):
        weight = torch.zeros(4, gates, 32)
        # A logit of 1 for the standard path, which comes first, and gates of 1 for the slots.
        if gates == 3:
            weight[:, 0, 0] = 1.0
        with torch.no_grad():
            before = subject.layer.gate_proj.clone()
            subject.layer.gate_proj.copy_(weight.flatten(0, 1))
            mixed = subject.layer(values, Inputs(torch.stack((ids, ids))), hidden)
            subject.layer.gate_proj.copy_(before)
        rows = subject.weights["banks.0.values"].view(70, 2, 32).sum(1)[ids]
        assert same(mixed.flatten(2), factor * values.flatten(2) + rows)


MOVE_LATENTS = replace(
    MOVE,
    model=replace(
        MOVE.model,
        latent_attention=LatentAttentionConfig(latent_dim=12, rotary_dim=4),
        memory=as_kind(MEMORY, "move", vocab_size=70, value_dim=12, num_gate_heads=4),
    ),
)


@TOKEN_MEMORIES.key("model.memory.mixed_into", "latents", MOVE_LATENTS)
def _(base: Subject, second: Subject) -> None:
    """The same weights and bits; of attention's keys and values, the keys alone are others."""
    assert not changed_names(base.weights, second.weights)
    assert base.shapes["banks.0.values"] == (140, 12)
    x, ids = torch.randn(5, 1, 32, generator=torch.Generator().manual_seed(1)), torch.arange(5).unsqueeze(1)
    inputs, turns = Inputs(torch.stack((ids, ids))), rotary_turns(torch.zeros(5, 1, 1, 4))
    with torch.no_grad():
        (queries, keys, values), (same_queries, other_keys, same_values) = (
            subject.model.decoder.layers[0].self_attention.get_query_key_value_tensors(x, (turns, inputs, None))
            for subject in (base, second)
        )
    assert same(queries, same_queries)
    assert same(values, same_values)
    assert not same(keys, other_keys)


@TOKEN_MEMORIES.key("model.memory.num_tables", 3, TIDE)
def _(base: Subject, second: Subject) -> None:
    for subject, tables in ((base, 2), (second, 3)):
        assert subject.shapes["banks.0.values"] == (tables * 70, 32)
        assert subject.memory_weights["router"].shape == (tables + 1, 32)
        assert subject.shapes["shared_read.gain"] == (tables, 32)


@TOKEN_MEMORIES.key("model.memory.row_gain", False, TIDE)
def _(base: Subject, second: Subject) -> None:
    """A learned gain of 1 at first: the same numbers before the first update, and others after it."""
    assert base.weights.keys() - second.weights.keys() == {"shared_read.gain"}
    assert bool((base.weights["shared_read.gain"] == 1).all())
    assert same(base.logits(), second.logits())
    assert bool((base.steps[0].weights["shared_read.gain"] != 1).any())


# Addresses of the same families by n-grams.

MOVE_NGRAMS = with_kind(
    "move", value_dim=32, num_gate_heads=4, address=NgramAddressConfig(max_order=3, heads_per_order=2, num_rows=100)
)
MOVE_BIGRAMS = with_kind("move", value_dim=32, num_gate_heads=4, address=NgramAddressConfig(num_rows=100))


def addresses_of(subject: Subject, ids: list[int]) -> list[list[int]]:
    """[tokens][A] of one sequence."""
    tokens, places = torch.tensor(ids).unsqueeze(1), torch.arange(len(ids)).unsqueeze(1)
    found: list[list[int]] = type(subject.layer).addresses([subject.layer], tokens, places, UNCUT)[:, :, 0].T.tolist()
    return found


def sum_address(order: int, head: int, *ids: int, prime: int = 97) -> int:
    """A token's address by its last ids, the token's own first."""
    salt = 1 + 97 * (order - 2) + 7919 * head
    multipliers = (1000003 + salt * 2654435761, 998244353 + salt * 40503, 911382323 + salt * 40503)
    return sum(id * factor for id, factor in zip(ids, multipliers, strict=False)) % prime


@TOKEN_MEMORIES.key("model.memory.address", NgramAddressConfig(num_rows=100), MOVE)
def _(base: Subject, second: Subject) -> None:
    """Two slots for every token id, or for every hash: 97 is the largest prime up to 100."""
    assert base.shapes["banks.0.values"] == (2 * 70, 32)
    assert second.shapes["banks.0.values"] == (2 * 97, 32)
    assert base.memory_weights["gate_proj"].shape == second.memory_weights["gate_proj"].shape
    assert addresses_of(second, [5, 60]) == [[sum_address(2, 0, 5, 0)], [sum_address(2, 0, 60, 5)]]


@TOKEN_MEMORIES.key("model.memory.address.rules", "xor", MOVE_BIGRAMS)
def _(base: Subject, second: Subject) -> None:
    """The last row of xor is that of a sequence's first token."""
    assert addresses_of(base, [5, 60])[1] == [sum_address(2, 0, 60, 5)]
    assert addresses_of(second, [5, 60]) == [[99], [(36313 * 60 ^ 27191 * 5) % 99]]
    assert second.shapes["banks.0.values"] == (2 * 100, 32)


@TOKEN_MEMORIES.key("model.memory.address.max_order", 4, MOVE_NGRAMS)
def _(base: Subject, second: Subject) -> None:
    """Gates for two slots of each hash, and one of the standard path."""
    for subject, num_hashes in ((base, 4), (second, 6)):
        assert subject.memory_weights["gate_proj"].shape == (4 * (2 * num_hashes + 1), 32)
        assert subject.shapes["banks.0.values"] == (2 * 97, 32)
    assert addresses_of(second, [5, 6, 7, 9])[3][:4] == addresses_of(base, [5, 6, 7, 9])[3]


@TOKEN_MEMORIES.key("model.memory.address.heads_per_order", 3, MOVE_NGRAMS)
def _(base: Subject, second: Subject) -> None:
    ids = [5, 6, 7]
    for subject, heads in ((base, 2), (second, 3)):
        wanted = [
            sum_address(order, head, 7, 6, *((5,) if order == 3 else ())) for order in (2, 3) for head in range(heads)
        ]
        assert addresses_of(subject, ids)[2] == wanted


@TOKEN_MEMORIES.key("model.memory.address.num_rows", 200, MOVE_BIGRAMS)
def _(base: Subject, second: Subject) -> None:
    for subject, prime in ((base, 97), (second, 199)):
        assert subject.shapes["banks.0.values"] == (2 * prime, 32)
        assert addresses_of(subject, [5, 60])[1] == [sum_address(2, 0, 60, 5, prime=prime)]


VALUE_NGRAMS = with_kind(
    "value_ngrams", value_dim=2, address=NgramAddressConfig(max_order=3, heads_per_order=2, num_rows=100)
)


@TOKEN_MEMORIES.key("model.memory.into", "one_head", VALUE_NGRAMS)
def _(base: Subject, second: Subject) -> None:
    """Zeros at first: the first step moves rows alone, and then the other model's projection."""
    assert base.memory_weights["up_proj"].shape == (32, 8)
    assert base.memory_weights.keys() - second.memory_weights.keys() == {"up_proj"}
    values, hidden = torch.zeros(1, 1, 4, 8), torch.ones(1, 1, 32)
    for subject, heads in ((base, 4), (second, 1)):
        layer: Any = subject.layer
        inputs = layer.alone(Inputs(torch.tensor([[[3]], [[0]]])))
        table = subject.model.banks["0"].get_parameter("values")
        with torch.no_grad():
            table.fill_(1.0)
            added = layer(values, inputs, hidden)[0, 0]
            table.zero_()
        assert int(added.bool().any(1).sum()) == heads


@TOKEN_MEMORIES.key("model.memory.gate_channels", 5, VALUE_NGRAMS)
def _(base: Subject, second: Subject) -> None:
    for subject, channels in ((base, 12), (second, 5)):
        gate = subject.memory_weights["gate"]
        assert gate.shape == (1, channels)
        layer: Any = subject.layer
        hidden = torch.arange(32.0).view(1, 1, 32)
        wanted = torch.sigmoid((gate[0] * hidden[0, 0, :channels]).sum() / channels)
        assert torch.allclose(layer.gates(hidden), wanted)


@TOKEN_MEMORIES.key("model.memory.gate_bias", True, VALUE_NGRAMS)
def _(base: Subject, second: Subject) -> None:
    """At first -3, a gate of 1/21 without the rest."""
    assert second.memory_weights.keys() - base.memory_weights.keys() == {"gate_bias"}
    for subject, wanted in ((base, 0.5), (second, 1 / (1 + math.exp(3)))):
        layer: Any = subject.layer
        assert float(layer.gates(torch.zeros(1, 1, 32))) == pytest.approx(wanted)


@TOKEN_MEMORIES.key("model.memory.address.signs", "ids", VALUE_NGRAMS)
def _(base: Subject, second: Subject) -> None:
    """Patterns behind the addresses: of a text's start the first, then (60 xor 5) modulo 8192, for all heads of bigrams."""
    assert [len(numbers) for numbers in addresses_of(base, [5, 60])] == [4, 4]
    found = addresses_of(second, [5, 60])
    assert [numbers[:4] for numbers in found] == addresses_of(base, [5, 60])
    assert [numbers[4:] for numbers in found] == [[0] * 4, [60 ^ 5, 60 ^ 5, 0, 0]]
    layer: Any = second.layer
    rows = torch.tensor([[0, 1, 2, 3]] * 2)
    inputs = layer.alone(Inputs(torch.tensor([[[5], [60]], [[0], [1]]])))
    table = second.model.banks["0"].get_parameter("values")
    with torch.no_grad():
        table.fill_(3.0)
        read = layer.read_signed(rows, inputs, torch.float32)
        table.zero_()
    assert read.shape == (2, 4, 2)
    assert torch.equal(read[1, 0], 3.0 * layer.patterns[60 ^ 5])
    assert torch.equal(read[1, 2], 3.0 * layer.patterns[0])


@TOKEN_MEMORIES.key("model.memory.address.signs", "hashed", VALUE_NGRAMS)
def _(base: Subject, second: Subject) -> None:
    found = addresses_of(second, [5, 6, 60])[2][4:]
    assert found == [(48271 * 60 ^ 30011 * 6) % 8192] * 2 + [(58699 * 60 ^ 39779 * 6 ^ 26801 * 5) % 8192] * 2


SIGNED = with_kind("value_ngrams", value_dim=2, address=NgramAddressConfig(num_rows=100, signs="ids"))


@TOKEN_MEMORIES.key("model.memory.address.num_sign_patterns", 7, SIGNED)
def _(base: Subject, second: Subject) -> None:
    for subject, num_patterns in ((base, 8192), (second, 7)):
        layer: Any = subject.layer
        assert layer.patterns.shape == (num_patterns, 2)
        assert addresses_of(subject, [5, 60])[1][1] == (60 ^ 5) % num_patterns


EMBEDDED = with_kind(
    "ngram_embedding", value_dim=4, address=NgramAddressConfig(rules="polynomial", num_rows=100, heads_per_order=2)
)


@TOKEN_MEMORIES.key("model.memory.address.base", 50, EMBEDDED)
def _(base: Subject, second: Subject) -> None:
    """As many as token ids, or so many; the second hash's rows begin behind the first one's 101."""
    for subject, number in ((base, VOCAB_SIZE), (second, 50)):
        found = (60 + 5 * number) % 101, 101 + (60 + 5 * number) % 103
        assert addresses_of(subject, [5, 60])[1] == list(found)
    assert base.shapes["banks.0.values"] == (101 + 103, 4)


@TOKEN_MEMORIES.key("model.memory.address.boundary_id", 5, EMBEDDED)
def _(base: Subject, second: Subject) -> None:
    """A token that ends a document is hidden from those behind it, and sees its own past."""
    for subject, is_seen in ((base, True), (second, False)):
        with_it, without = (addresses_of(subject, ids)[-1] for ids in ([7, 5, 60], [7, 0, 60]))
        assert (with_it != without) == is_seen
        assert addresses_of(subject, [7, 5])[1] != addresses_of(subject, [0, 5])[1]


@TOKEN_MEMORIES.key("model.memory.amplification", "sqrt_width", EMBEDDED)
def _(base: Subject, second: Subject) -> None:
    layer: Any = base.layer
    amplified: Any = second.layer
    hidden = torch.randn(2, 1, 32, generator=torch.Generator().manual_seed(4))
    inputs = layer.alone(Inputs(torch.tensor([[[3], [9]], [[0], [1]]])))
    with torch.no_grad():
        assert torch.allclose(amplified(hidden, inputs), layer(hidden, inputs) * math.sqrt(32))


@TOKEN_MEMORIES.key("model.memory.amplification", "layer_norm", EMBEDDED)
def _(base: Subject, second: Subject) -> None:
    amplified: Any = second.layer
    hidden = torch.randn(2, 1, 32, generator=torch.Generator().manual_seed(4))
    inputs = amplified.alone(Inputs(torch.tensor([[[3], [9]], [[0], [1]]])))
    with torch.no_grad():
        out = amplified(hidden, inputs)
    assert float(out.mean().abs()) < 1e-6
    assert torch.allclose(out.square().mean(-1), torch.ones(2, 1), atol=1e-3)


MOME = with_kind("mome", vocab_size=70, value_dim=8, num_heads=4, num_slots=3, gate_channels=12)


def draw_routers(subject: Subject) -> tuple[Tensor, Tensor, Inputs]:
    """Values [s, b, g, d] and inputs of attention for a layer whose router and gate begin as zeros, and here do not."""
    generator = torch.Generator().manual_seed(1)
    layer: Any = subject.layer
    with torch.no_grad():
        for name in ("router", "router_of_values", "router_bias"):
            if name in subject.memory_weights:
                weight = getattr(layer, name)
                weight.copy_(torch.randn(weight.shape, generator=generator))
    values, hidden = torch.randn(5, 1, 4, 8, generator=generator), torch.randn(5, 1, 32, generator=generator)
    ids = torch.arange(5).unsqueeze(1)
    return values, hidden, Inputs(torch.stack((ids, ids)))


@TOKEN_MEMORIES.key("model.memory.num_slots", 4, MOME)
def _(base: Subject, second: Subject) -> None:
    for subject, slots in ((base, 3), (second, 4)):
        assert subject.shapes["banks.0.values"] == (slots * 70, 8)
        assert subject.memory_weights["router"].shape == (4 * slots, 32)
        assert subject.memory_weights["router_bias"].shape == (4 * slots,)


@TOKEN_MEMORIES.key("model.memory.active_slots", 1, MOME)
def _(base: Subject, second: Subject) -> None:
    """Two sigmoids add up to 1; of one slot there is its softmax, at first of three equal logits."""
    for subject, active, alpha in ((base, 2, 1 / 2), (second, 1, 1 / 3)):
        layer: Any = subject.layer
        slots, weights = layer.choice(torch.zeros(1, 1, 4, 8), torch.zeros(1, 1, 32))
        assert slots.tolist() == [[list(range(active))] * 4]
        assert same(weights, torch.full((1, 4, active), alpha))
    assert base.shapes == second.shapes


@TOKEN_MEMORIES.key("model.memory.router_input", "value", MOME)
def _(base: Subject, second: Subject) -> None:
    """Choices follow the values, and not attention's input; or the other way round."""
    assert second.memory_weights["router_of_values"].shape == (3, 8)
    assert second.memory_weights["router_bias"].shape == (3,)
    for subject, follows_values in ((base, False), (second, True)):
        layer: Any = subject.layer
        values, hidden, _ = draw_routers(subject)
        logits = layer.logits(values, hidden)
        assert same(logits, layer.logits(-values, hidden)) != follows_values
        assert same(logits, layer.logits(values, -hidden)) == follows_values


@TOKEN_MEMORIES.key("model.memory.gate_channels", 5, MOME)
def _(base: Subject, second: Subject) -> None:
    for subject, channels in ((base, 12), (second, 5)):
        assert subject.memory_weights["gate"].shape == (4, channels)


@TOKEN_MEMORIES.key("model.memory.one_table", True, MOME)
def _(base: Subject, second: Subject) -> None:
    assert {name for name in base.shapes if name.startswith("banks.")} == {"banks.0.values", "banks.1.values"}
    assert {name for name in second.shapes if name.startswith("banks.")} == {"banks.0.values"}


# Memories that n-grams address.

ENGRAM = with_kind("engram", value_dim=6, heads_per_order=2, rows_per_head=29, rows_multiple=1, vocab_size=70)


LEARNED = with_memory(placement=PlacementConfig(blocks=(1,)))


@TOKEN_MEMORIES.key(
    "model.second_memory",
    as_kind(MEMORY, "engram", vocab_size=70, value_dim=6, placement=PlacementConfig(blocks=(0,))),
    LEARNED,
)
def _(base: Subject, second: Subject) -> None:
    """A layer more, in a block of its own, with a bank behind the others; the rest begins as it was."""
    assert [layer.name for layer in second.model.memory_layers] == [
        "decoder.layers.0.entry.memory",
        "decoder.layers.1.mlp.memory",
    ]
    assert second.shapes["banks.1.values"][1] == 6
    assert all(same(second.weights[name], weight) for name, weight in base.weights.items())
    assert not same(base.logits(), second.logits())


def rows_of(subject: Subject, ids: list[int]) -> list[list[int]]:
    """Rows of each token's heads, head by head, in one sequence."""
    tokens = torch.tensor(ids).unsqueeze(1)
    places = torch.arange(len(ids)).unsqueeze(1)
    layer: Any = subject.layer
    return (layer.addresses([layer], tokens, places, WholeSequences())[:, :, 0] - layer.offsets[:, None]).T.tolist()


def hashed(subject: Subject, *window: int) -> list[int]:
    """Rows of a token with this window, the token first."""
    layer: Any = subject.layer
    heads = subject.memory.heads_per_order  # type: ignore[attr-defined]
    mixed, found = window[0] * int(layer.multipliers[0]), []
    for order, token in enumerate(window[1:], start=1):
        mixed ^= token * int(layer.multipliers[order])
        found += [mixed % size for size in layer.sizes[(order - 1) * heads : order * heads].tolist()]
    return found


@TOKEN_MEMORIES.key("model.memory.rules", "ple", ENGRAM)
def _(base: Subject, second: Subject) -> None:
    """Behind a token of boundary_id the window ends; multipliers are other ones."""
    ids = [5, 0, 7, 9]
    assert rows_of(base, ids)[3] == hashed(base, 9, 7, 0)
    assert rows_of(base, ids)[2] == hashed(base, 7, 0, 5)
    assert rows_of(second, ids)[2] == hashed(second, 7, 0, 0)
    assert rows_of(second, ids)[1] == hashed(second, 0, 5, 0)
    assert base.layer.multipliers.tolist() == list(numpy_multipliers(3, 70, 0, 0))
    assert second.layer.multipliers.tolist() == list(splitmix_multipliers(3, 70, 0, 0))


@TOKEN_MEMORIES.key("model.memory.max_order", 4, ENGRAM)
def _(base: Subject, second: Subject) -> None:
    for subject, width in ((base, 24), (second, 36)):
        assert subject.memory_weights["key_proj"].shape == (32, width)
    assert rows_of(second, [5, 6, 7, 9])[3] == hashed(second, 9, 7, 6, 5)


@TOKEN_MEMORIES.key("model.memory.heads_per_order", 3, ENGRAM)
def _(base: Subject, second: Subject) -> None:
    """Every head has the next prime from 29 on."""
    assert base.layer.sizes.tolist() == [29, 31, 37, 41]
    assert second.layer.sizes.tolist() == [29, 31, 37, 41, 43, 47]


@TOKEN_MEMORIES.key("model.memory.rows_per_head", 40, ENGRAM)
def _(base: Subject, second: Subject) -> None:
    assert base.shapes["banks.0.values"] == (29 + 31 + 37 + 41, 6)
    assert second.shapes["banks.0.values"] == (41 + 43 + 47 + 53, 6)


@TOKEN_MEMORIES.key("model.memory.rows_multiple", 100, ENGRAM)
def _(base: Subject, second: Subject) -> None:
    assert base.shapes["banks.0.values"] == (138, 6)
    assert second.shapes["banks.0.values"] == (200, 6)


@TOKEN_MEMORIES.key("model.memory.conv_kernel", 0, ENGRAM)
def _(base: Subject, second: Subject) -> None:
    assert base.memory_weights["conv"].shape == (32, 4)
    assert base.memory_weights.keys() - second.memory_weights.keys() == {"conv", "conv_gain"}
    # Its taps are zeros at first.
    assert same(base.logits(), second.logits())


@TOKEN_MEMORIES.key("model.memory.projection_biases", False, ENGRAM)
def _(base: Subject, second: Subject) -> None:
    assert base.memory_weights.keys() - second.memory_weights.keys() == {"key_bias", "value_bias"}


def gate_by_hand(subject: Subject, read: torch.Tensor, key_epsilon: float, query_epsilon: float) -> torch.Tensor:
    """The gate of `hidden` and what was read, with the norms' initial gains of 1 and biases of 0."""

    def normal(x: torch.Tensor, epsilon: float) -> torch.Tensor:
        return x / (x.square().mean(-1, keepdim=True) + epsilon).sqrt()

    key = normal(read @ subject.memory_weights["key_proj"].T, key_epsilon)
    score = (key * normal(subject.hidden.unsqueeze(1), query_epsilon)).sum(-1) / math.sqrt(32)
    return torch.sigmoid(score.sign() * score.abs().sqrt())


def check_gates(base: Subject, second: Subject, *epsilons: float) -> None:
    read = torch.randn(7, 1, 24, generator=torch.Generator().manual_seed(9))
    for subject, of_norms in ((base, (1e-5, 1e-5)), (second, epsilons)):
        layer: Any = subject.layer
        gate = layer.gate(subject.hidden.unsqueeze(1), read)
        assert torch.allclose(gate, gate_by_hand(subject, read, *of_norms), rtol=1e-5)


@TOKEN_MEMORIES.key("model.memory.key_epsilon", 0.3, ENGRAM)
def _(base: Subject, second: Subject) -> None:
    check_gates(base, second, 0.3, 1e-5)


@TOKEN_MEMORIES.key("model.memory.query_epsilon", 0.3, ENGRAM)
def _(base: Subject, second: Subject) -> None:
    check_gates(base, second, 1e-5, 0.3)


@TOKEN_MEMORIES.key("model.memory.conv_epsilon", 0.3, ENGRAM)
def _(base: Subject, second: Subject) -> None:
    """Taps have gradients of smaller inputs; at first they are zeros, and add nothing."""
    assert same(base.logits(), second.logits())
    name = "decoder.layers.0.entry.memory.conv"
    of_base, of_second = (float(subject.steps[0].gradients[name].norm()) for subject in (base, second))
    assert of_second < 0.5 * of_base


@TOKEN_MEMORIES.key("model.memory.boundary_id", 3, ENGRAM)
def _(base: Subject, second: Subject) -> None:
    assert rows_of(base, [5, 6])[0] == hashed(base, 5, 0, 0)
    assert rows_of(second, [5, 6])[0] == hashed(second, 5, 3, 3)


@TOKEN_MEMORIES.key("model.memory.hash_seed", 2, ENGRAM)
def _(base: Subject, second: Subject) -> None:
    for subject, seed in ((base, 0), (second, 2)):
        assert subject.layer.multipliers.tolist() == list(numpy_multipliers(3, 70, seed, 0))


MAPPED = with_kind(
    "engram", value_dim=6, heads_per_order=2, vocab_size=70, token_map="modulo_10.npy", compressed_vocab_size=10
)


def prepare_token_maps(folder: Path) -> None:
    """Two maps of 70 token ids to ten."""
    np.save(folder / "modulo_10.npy", np.arange(70, dtype=np.int32) % 10)
    np.save(folder / "sevens.npy", np.arange(70, dtype=np.int32) // 7)


@TOKEN_MEMORIES.key("model.memory.token_map", "sevens.npy", MAPPED)
def _(base: Subject, second: Subject) -> None:
    assert rows_of(base, [25, 6, 47])[2] == hashed(base, 7, 6, 5)
    assert rows_of(second, [25, 6, 47])[2] == hashed(second, 6, 0, 3)


@TOKEN_MEMORIES.key("model.memory.compressed_vocab_size", 14, MAPPED)
def _(base: Subject, second: Subject) -> None:
    """Multipliers overflow with no id that the map may give."""
    for subject, ids in ((base, 10), (second, 14)):
        assert subject.layer.multipliers.tolist() == list(numpy_multipliers(3, ids, 0, 0))
