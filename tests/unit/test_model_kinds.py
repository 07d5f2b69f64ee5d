"""Memory layers of every kind: what they compute by their definition, which weights they have and train, and how they
start.
"""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from kernels.select import select_kernels
from megamem.banks.bank import Bank
from megamem.config.memory import MemoryConfig
from megamem.config.model import ModelConfig
from megamem.families.linear_memory.config import LinearConfig
from megamem.families.memory_plus.config import MemoryPlusConfig
from megamem.families.peer.config import PeerConfig
from megamem.families.pkm.config import PkmConfig
from megamem.families.registry import family_of
from megamem.families.ultramem.config import UltraMemConfig
from megamem.families.ultramem_v2.config import UltraMemV2Config
from megamem.initialisation.initialise import initialise
from megamem.layers.layer import MemoryLayer, begin_step
from megamem.layers.product_key import ProductKeyLayer
from megamem.layers.tucker import TuckerLayer
from megamem.placement.sharing import BankSpec, LayerView
from tests.microbatch import some_inputs

HIDDEN = 32
V2 = UltraMemV2Config(num_keys=8, key_dim=8, value_dim=16, pre_value_dim=12, top_k=6)
V1 = UltraMemConfig(num_keys=8, key_dim=8, value_dim=16, top_k=6)
GRID: Any = {"num_keys": 8, "key_dim": 8, "top_k": 4, "num_heads": 2}
PRODUCT = MemoryPlusConfig(value_dim=16, **GRID)
KINDS = {
    "v2": V2,
    "v2, summed blocks": replace(V2, key_expansion=2, num_heads=2),
    "v2, projected blocks, gelu": replace(V2, key_expansion=2, value_blocks="projected", pre_value_activation="gelu"),
    "v2, projected blocks, one core, no shuffle": replace(
        V2, key_expansion=3, value_blocks="projected", num_cores=1, shuffle="none"
    ),
    "ultramem": V1,
    "ultramem, queries per head": replace(V1, num_heads=2, queries_per_head=True),
    "memory_plus": PRODUCT,
    "memory_plus, every option": replace(PRODUCT, biases=True, output_gate=True, query_norm=False),
    "pkm": PkmConfig(value_dim=HIDDEN, **GRID),
    "pkm, projected and gated": PkmConfig(value_dim=16, value_projection=True, output_gate=True, biases=True, **GRID),
    "peer": PeerConfig(value_dim=HIDDEN, **GRID),
}
NAME = "decoder.layers.0.mlp.memory"


def build(
    memory: MemoryConfig, dtype: torch.dtype = torch.float64, view: LayerView | None = None
) -> tuple[MemoryLayer, Bank]:
    view = view or LayerView(0, 0, memory.num_keys**2, memory.num_keys**2)
    spec = BankSpec(0, view.num_bank_rows, (0,))
    bank = Bank(spec, memory, select_kernels("auto"), dtype=dtype, device="cpu", replica_rank=0)
    config = TransformerConfig(
        num_layers=1, hidden_size=HIDDEN, num_attention_heads=4, use_cpu_initialization=True, params_dtype=dtype
    )
    layer = family_of(memory).layer()(
        config,
        memory,
        view,
        SimpleNamespace(read=bank.read),
        kernels=bank.kernels,
        name=NAME,
        seed=1,
    )
    g = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in (*layer.parameters(), *bank.parameters()):
            parameter.copy_(torch.rand(parameter.shape, generator=g, dtype=torch.float64) - 0.3)
    begin_step([layer])
    return layer, bank


def tokens(count: int = 5) -> Tensor:
    return torch.randn(count, 1, HIDDEN, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def weighted_values(layer: MemoryLayer, bank: Bank, x: Tensor) -> Tensor:
    """The sums [T, B, V] of the retrieved entries, one by one."""
    memory = layer.memory
    found, pre_input = layer.retrieve(x), layer.pre_input(x)
    sums = torch.zeros(x.shape[0], memory.lookup.bins, memory.value_dim, dtype=x.dtype)
    for t, h, k in torch.cartesian_prod(*(torch.arange(size) for size in found.entries.shape)).tolist():
        row, block = layer.locate(found.entries[t, h, k])
        product = torch.ones((), dtype=x.dtype)
        if hasattr(bank, "pre_values"):
            assert pre_input is not None
            product = bank.pre_values[row] @ pre_input[t]
            product = F.gelu(product) if memory.lookup.activation == "gelu" else product
        of_columns = found.scores[t, h, k].repeat_interleave(memory.value_dim // found.scores.shape[3])
        sums[t, 0 if block is None else block] += product * of_columns * bank.values[row]
    return sums


@pytest.mark.parametrize("name", KINDS)
def test_outputs_are_what_the_definition_says(name: str) -> None:
    layer, bank = build(KINDS[name])
    x = tokens()
    with torch.no_grad():
        expected = layer.project(weighted_values(layer, bank, x[:, 0]).flatten(1), x[:, 0])
        torch.testing.assert_close(layer(x, some_inputs(x))[:, 0], expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", KINDS)
def test_every_weight_is_trained_and_recomputation_changes_nothing(name: str) -> None:
    layer, bank = build(KINDS[name])
    gradients = []
    for recompute in (False, True):
        layer.zero_grad()
        bank.zero_grad()
        x = tokens().requires_grad_()
        out = checkpoint(layer, x, some_inputs(x), use_reentrant=True) if recompute else layer(x, some_inputs(x))
        out.square().sum().backward()
        named = {**dict(layer.named_parameters()), **dict(bank.named_parameters()), "input": x}
        assert all(p.grad is not None and bool(p.grad.abs().sum() > 0) for p in named.values())
        gradients.append({key: p.grad for key, p in named.items()})
    assert all(torch.equal(gradients[0][key], gradients[1][key]) for key in gradients[0])


@pytest.mark.parametrize("name", KINDS)
def test_in_bf16_scores_and_selection_are_fp32(name: str) -> None:
    layer, bank = build(KINDS[name], torch.float32)
    layer.bfloat16()
    bank.bfloat16()
    x = tokens().bfloat16()
    found = layer.retrieve(x.flatten(0, 1))
    assert found.scores.dtype == found.stage_scores()[0].dtype == torch.float32
    assert layer(x, some_inputs(x)).dtype == torch.bfloat16


@pytest.mark.parametrize("shuffle", ["keyed", "table", "none"])
@pytest.mark.parametrize("expansion", [1, 2, 3])
def test_every_virtual_block_addresses_every_row_of_the_window_once(shuffle: Any, expansion: int) -> None:
    memory = replace(
        V2, key_expansion=expansion, value_blocks="projected" if expansion > 1 else "summed", shuffle=shuffle
    )
    layer, _ = build(memory, view=LayerView(0, 90, 64, 100))
    rows, blocks = layer.locate(torch.arange((8 * expansion) ** 2))
    assert (blocks is None) == (expansion == 1)
    window = sorted([*range(54), *range(90, 100)])
    for block in range(expansion**2):
        of_block = rows if blocks is None else rows[blocks == block]
        assert sorted(of_block.tolist()) == window


def test_weights_of_product_keys_add_up_to_one_per_head() -> None:
    layer, _ = build(PRODUCT)
    scores = layer.retrieve(tokens().flatten(0, 1)).scores
    assert scores.shape == (5, 2, 4, 1)
    torch.testing.assert_close(scores.sum((2, 3)), torch.ones(5, 2, dtype=scores.dtype))


@pytest.mark.parametrize("top_k", [1, 3, 8, 20])
def test_product_keys_find_the_best_sums_of_the_whole_grid(top_k: int) -> None:
    layer, _ = build(replace(PRODUCT, top_k=top_k, row_top_k_limit=8, num_keys=8))
    assert isinstance(layer, ProductKeyLayer)
    x = tokens().flatten(0, 1)
    rows, columns = layer.key_scores(x)
    best = (rows.unsqueeze(3) + columns.unsqueeze(2)).flatten(2).topk(top_k, dim=-1)
    found = layer.retrieve(x)
    assert torch.equal(found.entries, best.indices)
    torch.testing.assert_close(found.scores.squeeze(3), best.values.softmax(-1))


COMMON = {"query_proj", "keys"}
PARTS = {
    "v2": COMMON | {"query_norm", "keys_norm", "cores", "value_proj", "pre_value_proj"},
    "ultramem": COMMON | {"query_norm", "keys_norm", "cores", "value_proj"},
    "memory_plus": COMMON | {"query_norm", "value_proj", "silu_gate"},
    "memory_plus, every option": COMMON
    | {"query_bias", "value_proj", "value_bias", "silu_gate", "silu_gate_bias", "output_gate", "output_gate_bias"},
    "pkm": COMMON | {"query_norm"},
    "pkm, projected and gated": COMMON
    | {"query_bias", "query_norm", "value_proj", "value_bias", "output_gate", "output_gate_bias"},
    "peer": COMMON | {"query_norm"},
}


@pytest.mark.parametrize("name", PARTS)
def test_weights_by_kind(name: str) -> None:
    layer, bank = build(KINDS[name])
    assert {part for part, _ in layer.named_parameters()} == PARTS[name]
    assert {part for part, _ in bank.named_parameters()} == (
        {"values", "pre_values"} if name in ("v2", "peer") else {"values"}
    )


class Chunk(nn.Module):
    """Parts of a model chunk that initialisation asks for: one layer and its bank."""

    def __init__(self, layer: MemoryLayer, bank: Bank) -> None:
        super().__init__()
        self.layer, self.bank = layer, bank

    def sharded_state_dict(self) -> dict[str, ShardedTensor]:
        named = {f"{NAME}.{part}": p for part, p in self.layer.named_parameters()}
        named |= {f"banks.0.{part}": p for part, p in self.bank.named_parameters()}
        return {name: ShardedTensor.from_rank_offsets(name, p, replica_id=(0, 0, 0)) for name, p in named.items()}


def initial(memory: MemoryConfig) -> dict[str, Tensor]:
    layer, bank = build(memory)
    chunk = Chunk(layer, bank)
    initialise([chunk], ModelConfig(num_layers=1, hidden_size=HIDDEN, memory=memory), seed=3)
    return {part: p.detach() for part, p in (*layer.named_parameters(), *bank.named_parameters())}


def test_product_keys_start_from_the_released_constants() -> None:
    memory = replace(KINDS["memory_plus, every option"], num_keys=32, query_norm=True)
    weights = initial(memory)
    # Bounds of uniform distributions, and deviations of normal ones.
    bounds = {
        "query_proj": math.sqrt(6 / (HIDDEN + 2 * 2 * 8)),
        "keys": 16**-0.5,
        "query_bias": HIDDEN**-0.5,
        "silu_gate_bias": HIDDEN**-0.5,
        "value_bias": 16**-0.5,
    }
    deviations = {"value_proj": HIDDEN**-0.5, "silu_gate": HIDDEN**-0.5, "values": 16**-0.5}
    for part, bound in bounds.items():
        assert 0.8 * bound < float(weights[part].abs().max()) <= bound, part
        assert float(weights[part].min()) < 0, part
    for part, deviation in deviations.items():
        assert float(weights[part].std()) == pytest.approx(deviation, rel=0.1), part
    assert torch.equal(weights["query_norm"], torch.ones_like(weights["query_norm"]))


def test_ultramem_starts_from_its_own_constants() -> None:
    weights = initial(replace(KINDS["ultramem"], initialisation="released", num_keys=32, key_dim=16))
    assert float(weights["query_norm"].mean()) == pytest.approx(16**-0.33)
    # Over the four virtual blocks side by side.
    assert float(weights["value_proj"].std()) == pytest.approx((4 * 16) ** -0.5, rel=0.1)
    assert float(weights["values"].std()) == pytest.approx(0.02, rel=0.1)


def test_the_calibration_sees_the_expanded_keys() -> None:
    """More keys to choose from have larger best scores, so the gain that brings their mean to 1 is smaller."""
    gains = [float(initial(replace(V2, num_keys=16, key_expansion=e))["query_norm"][0]) for e in (1, 4)]
    assert gains[1] < 0.95 * gains[0]


@pytest.mark.parametrize("family", [PkmConfig, PeerConfig])
def test_values_as_wide_as_the_model_without_a_projection(family: Any) -> None:
    with pytest.raises(ValueError, match=r"model\.memory\.value_dim is 16, but kind .* set it to hidden_size = 32"):
        ModelConfig(hidden_size=HIDDEN, memory=family(value_dim=16, **GRID))


def test_keys_are_counted_with_their_expansion() -> None:
    assert UltraMemV2Config(num_keys=8, top_k=16, key_expansion=2).row_top_k == 16
    with pytest.raises(ValueError, match=r"model\.memory\.num_keys is 8, but 16 rows"):
        UltraMemV2Config(num_keys=8, top_k=16)
    with pytest.raises(ValueError, match=r"UltraMemV2Config\.key_expansion is 0"):
        UltraMemV2Config(key_expansion=0)


def test_the_layer_of_ultramem_is_v2_with_what_its_kind_fixes() -> None:
    memory = KINDS["ultramem"]
    assert isinstance(memory, UltraMemConfig)
    assert (memory.expansion, memory.lookup.bins, memory.width("pre_values"), memory.query) == (
        2,
        4,
        0,
        "single",
    )
    same = replace(V2, key_expansion=2, value_blocks="projected", pre_value_dim=0, query="single")
    outs = [build(config)[0](tokens(), some_inputs(tokens())) for config in (memory, same)]
    assert torch.equal(outs[0], outs[1])


def test_heads_with_queries_of_their_own_are_layers_of_one_head_that_are_added() -> None:
    together, bank = build(replace(V1, num_heads=3, queries_per_head=True))
    expected = torch.zeros(5, 1, HIDDEN, dtype=torch.float64)
    for head in range(3):
        alone, other_bank = build(V1)
        with torch.no_grad():
            # [2 sides, 3 heads, d, D].
            queries = together.query_proj.view(2, 3, 8, HIDDEN)
            alone.query_proj.copy_(queries[:, head].flatten(0, 1))
            alone.keys.copy_(together.keys[head : head + 1])
            alone.cores.copy_(together.cores[:, head : head + 1])
            for name in ("query_norm", "keys_norm", "value_proj"):
                alone.get_parameter(name).copy_(together.get_parameter(name))
            other_bank.get_parameter("values").copy_(bank.get_parameter("values"))
            begin_step([alone])
            expected += alone(tokens(), some_inputs(tokens()))
    out = together(tokens(), some_inputs(tokens()))
    assert torch.allclose(out, expected, rtol=1e-12, atol=1e-12)


def test_a_linear_memory_with_all_pairs_of_product_keys_is_that_of_product_keys() -> None:
    """Outputs and gradients: a key of a row there is the first half of a line of keys here."""
    product, table = build(PkmConfig(value_dim=HIDDEN, query_norm=False, **GRID))
    memory = LinearConfig(num_heads=2, num_rows=64, key_dim=16, top_k=4, value_dim=HIDDEN)
    linear, other_table = build(memory, view=LayerView(0, 0, 64, 64))
    rows, columns = (product.keys.detach()[:, side] for side in (0, 1))
    with torch.no_grad():
        linear.query_proj.copy_(product.query_proj)
        pairs = (rows.unsqueeze(2).expand(-1, -1, 8, -1), columns.unsqueeze(1).expand(-1, 8, -1, -1))
        linear.keys.copy_(torch.cat(pairs, 3).flatten(1, 2))
        other_table.get_parameter("values").copy_(table.get_parameter("values"))
    outs, hiddens = [], []
    for layer in (product, linear):
        hiddens.append(tokens().requires_grad_())
        outs.append(layer(hiddens[-1], some_inputs(hiddens[-1])))
        (outs[-1] * outs[-1].detach().cos()).sum().backward()
    of_pairs = linear.keys.grad.unflatten(1, (8, 8))
    assert product.keys.grad.any()
    for ours, theirs in (
        (outs[1], outs[0]),
        (hiddens[1].grad, hiddens[0].grad),
        (linear.query_proj.grad, product.query_proj.grad),
        (of_pairs[..., :8].sum(2), product.keys.grad[:, 0]),
        (of_pairs[..., 8:].sum(1), product.keys.grad[:, 1]),
        (other_table.get_parameter("values").grad, table.get_parameter("values").grad),
    ):
        assert torch.allclose(ours, theirs, rtol=1e-11, atol=1e-12)


def test_a_linear_memory_takes_the_first_of_equal_scores() -> None:
    memory = LinearConfig(num_rows=9, key_dim=4, top_k=3, value_dim=HIDDEN)
    linear, _ = build(memory, view=LayerView(0, 0, 9, 9))
    with torch.no_grad():
        linear.keys.zero_()
        linear.keys[0, 5] = linear.query_proj @ tokens(1)[0, 0]
    found, weights = linear.retrieve(tokens(1)[0])
    assert found.tolist() == [[[5, 0, 1]]]
    assert float(weights.sum()) == pytest.approx(1.0)
    with pytest.raises(ValueError, match=r"num_rows is 9, but 10 rows are to be selected \(top_k\)"):
        replace(memory, top_k=10)
    with pytest.raises(ValueError, match=r"value_dim is 16, but kind linear_memory has no value projection"):
        ModelConfig(hidden_size=HIDDEN, memory=LinearConfig(value_dim=16))


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_without_tokens_reads_nothing_and_has_no_gradient_to_give(kind: str) -> None:
    layer, bank = build(KINDS[kind])
    hidden = tokens(0).requires_grad_()
    out = layer(hidden, some_inputs(hidden))
    assert out.shape == (0, 1, HIDDEN)
    out.sum().backward()
    assert hidden.grad is not None
    for parameter in (*layer.parameters(), *bank.parameters()):
        assert parameter.grad is None or not parameter.grad.any()


def test_layers_begin_a_step_together_as_they_would_alone() -> None:
    """One decomposition of all layers' cores gives the bits of one for each: singular vectors, penalties and their
    gradients.
    """
    memory = replace(V2, num_heads=2, tucker_rank=3, tucker_penalty_weight=0.5, tucker_penalty_margin=0.01)
    layers = [build(memory, torch.float32)[0] for _ in range(6)]
    for index in range(3):
        for layer in (layers[index], layers[index + 3]):
            with torch.no_grad():
                layer.cores.copy_(torch.randn(layer.cores.shape, generator=torch.Generator().manual_seed(index)))
    begin_step(layers[:3])
    for together, alone in zip(layers[:3], layers[3:], strict=True):
        begin_step([alone])
        assert isinstance(together, TuckerLayer)
        assert isinstance(alone, TuckerLayer)
        assert torch.equal(together.u, alone.u)
        assert torch.equal(together.v, alone.v)
        assert together.losses is not None
        assert alone.losses is not None
        assert together.losses.penalty > 0
        assert torch.equal(together.losses.penalty, alone.losses.penalty)
        assert torch.equal(together.losses.penalty_gradient, alone.losses.penalty_gradient)
