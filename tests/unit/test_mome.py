"""MoME's layer against a naive twin, a loop over tokens and heads, where no recorded case is: routers of values, a single slot, and
logits that are equal."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from megamem.addresses.ngrams import NgramAddressConfig
from megamem.chunk.inputs import Inputs, pack
from megamem.families.mome.config import MomeConfig
from tests.golden import build_memory, megatron

WIDTH, HEADS, HEAD_DIM, SLOTS, VOCAB, LENGTH, BATCH = 12, 2, 5, 4, 11, 6, 2


def naive(layer: Any, table: Tensor, values: Tensor, addresses: Tensor, hidden: Tensor) -> Tensor:
    """V_S [s, b, g, d] by the paper's formulas; `addresses` [A, s, b]."""
    memory, mixed = layer.memory, []
    num_slots = memory.rows_per_token
    for place in range(values.shape[0]):
        for sequence in range(values.shape[1]):
            x = hidden[place, sequence]
            rows = [int(address) * SLOTS + slot for address in addresses[:, place, sequence] for slot in range(SLOTS)]
            for head in range(HEADS):
                value = values[place, sequence, head]
                own = slice(head * num_slots, (head + 1) * num_slots)
                if memory.router_input == "value":
                    logits = layer.router_of_values @ value + layer.router_bias
                else:
                    logits = layer.router[own] @ x + layer.router_bias[own]
                best = sorted(range(num_slots), key=lambda slot: (-float(logits[slot].detach()), slot))[
                    : memory.active_slots
                ]
                if memory.active_slots == 1:
                    alpha = [logits.exp()[best[0]] / logits.exp().sum()]
                else:
                    found = [1 / (1 + (-logits[slot]).exp()) for slot in best]
                    alpha = [weight / (sum(found) + 1e-10) for weight in found]
                gate = 2 / (1 + (-(layer.gate[head] @ x[: memory.gate_channels])).exp())
                added = sum(weight * table[rows[slot]] for weight, slot in zip(alpha, best, strict=True))
                mixed.append(value + gate * added)
    return torch.stack(mixed).view(values.shape)


@pytest.mark.parametrize("at_first", [False, True], ids=["drawn", "at first"])
@pytest.mark.parametrize("router_input", ["hidden", "value"])
@pytest.mark.parametrize("active_slots", [1, 2, 4])
@pytest.mark.parametrize("by_ngrams", [False, True], ids=["ids", "n-grams"])
def test_a_layer_is_its_naive_twin(
    active_slots: int, router_input: Literal["hidden", "value"], *, by_ngrams: bool, at_first: bool
) -> None:
    """Outputs and gradients in fp64. At first, routers are zeros: all logits are equal, and the first slots are chosen."""
    memory = MomeConfig(
        num_heads=HEADS,
        num_slots=SLOTS,
        active_slots=active_slots,
        value_dim=HEAD_DIM,
        router_input=router_input,
        gate_channels=7,
        vocab_size=None if by_ngrams else VOCAB,
        address=NgramAddressConfig(max_order=3, num_rows=13) if by_ngrams else None,
    )
    config = megatron({"d": WIDTH, "H": HEADS}, torch.float64)
    config.num_query_groups, config.kv_channels = HEADS, HEAD_DIM
    (layer,), (bank,) = build_memory(memory, config, 1, "auto")
    generator = torch.Generator().manual_seed(3)
    draw: Any = {"generator": generator, "dtype": torch.float64}
    table = bank.get_parameter("values")
    with torch.no_grad():
        table.copy_(torch.randn(table.shape, **draw))
        for weight in layer.parameters():
            weight.copy_(torch.randn(weight.shape, **draw) * (not at_first))
    ids = torch.randint(VOCAB, (BATCH, LENGTH), generator=generator)
    inputs = layer.alone(Inputs(pack(ids, torch.arange(LENGTH).expand_as(ids))))
    addresses = inputs.addresses_of(0, 2) if by_ngrams else ids.t().unsqueeze(0)
    values = torch.randn(LENGTH, BATCH, HEADS, HEAD_DIM, **draw).requires_grad_()
    hidden = torch.randn(LENGTH, BATCH, WIDTH, **draw).requires_grad_()
    leaves = [values, hidden, table, *layer.parameters()]
    weights = torch.randn(values.shape, **draw)
    found = [out := layer(values, inputs, hidden), *torch.autograd.grad((out * weights).sum(), leaves)]
    wanted = [
        out := naive(layer, table, values, addresses, hidden),
        *torch.autograd.grad((out * weights).sum(), leaves),
    ]
    for actual, expected in zip(found, wanted, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-12)
    if at_first:
        slots, _ = layer.choice(values, hidden)
        assert torch.equal(slots, torch.arange(active_slots).expand_as(slots))


def test_its_slots_are_named_and_weighed() -> None:
    memory = MomeConfig(num_heads=HEADS, num_slots=SLOTS, value_dim=HEAD_DIM, gate_channels=7, vocab_size=VOCAB)
    config = megatron({"d": WIDTH, "H": HEADS}, torch.float64)
    config.num_query_groups, config.kv_channels = HEADS, HEAD_DIM
    (layer,), _ = build_memory(memory, config, 1, "auto")
    with torch.no_grad():
        for weight in layer.parameters():
            weight.zero_()
    ids = torch.zeros(1, 3, dtype=torch.int64)
    weights = layer.slot_weights(
        torch.zeros(3, 1, HEADS, HEAD_DIM), Inputs(pack(ids, ids)), torch.zeros(3, 1, WIDTH).double()
    )
    assert memory.slot_names == ("1", "2", "3", "4")
    torch.testing.assert_close(weights, torch.tensor([[0.5, 0.5, 0.0, 0.0]]).expand(3, 4))
