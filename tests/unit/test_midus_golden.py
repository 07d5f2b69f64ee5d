"""Head-wise memory against recorded tensors: what is selected, outputs and every gradient; and what the paper proves of
its factored values.

Norm and attention of the recorded blocks are written out by PyTorch's operations; the layer and its bank are the
product's. Whole stacks of blocks are held by `tests/distributed/test_inserted_blocks.py`.

Legend: b sequences, s tokens, n heads, d width of a head, D hidden size, N keys per side, K retrieved, V columns of the
table.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from kernels.select import select_kernels
from megamem.backbone.norm import LayerNorm
from megamem.banks.bank import Bank
from megamem.chunk.inputs import Inputs
from megamem.families.midus.config import MidusConfig
from megamem.families.registry import family_of
from tests.golden import (
    TOLERANCE,
    attend,
    build_memory,
    check,
    megatron,
    read_case,
    recorded_weights,
    relative_error,
    rms_normalise,
    rotate,
    split_heads,
)

BLOCKS = (
    "midus_h2_r_eq_dh",
    "midus_h4_layernorm",
    "midus_h4_r_eq_dh",
    "midus_h4_r_small",
    "midus_k1",
    "midus_llama_gqa_rope",
    "midus_variant_query_residual",
)
# Stacks are held by `test_inserted_blocks`, the backward pass of tables by `test_values_get_what_algorithm_1_gives`.
ELSEWHERE = (
    "midus_stack_distributed",
    "midus_stack_top_heavy",
    "midus_value_backward",
)


@dataclass
class Block:
    """A recorded block: the product's layer with the recorded weights, and the leaves that gradients are taken of."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    memory: MidusConfig
    layer: Any
    leaves: dict[str, Tensor]

    def out(self) -> Tensor:
        """x + Mem(heads), [b, s, D]."""
        own, config = self.leaves, self.config
        x = own["x"]
        if config["norm"] == "layernorm":
            norm = LayerNorm(megatron(config, x.dtype), x.shape[-1], config["eps"])
            # Leaves of the test stand for the product's parameters.
            weights = {"weight": own["attn_norm"], "bias": own["attn_norm_bias"]}
            normal = torch.func.functional_call(norm, weights, (x,))
        else:
            normal = rms_normalise(x, own["attn_norm"])
        query, key, value = (
            split_heads(normal @ own[name], config[heads])
            for name, heads in (("WQ", "H"), ("WK", "Hkv"), ("WV", "Hkv"))
        )
        if config["rope_theta"]:
            query, key = (rotate(part, config["rope_theta"]) for part in (query, key))
        # Ours is [s, b, n, d].
        heads = split_heads(attend(query, key, value), config["H"]).permute(2, 0, 1, 3)
        if config["query_residual"]:
            stream = x.transpose(0, 1)
            return x + self.layer(stream + heads.flatten(2), Inputs(None)).transpose(0, 1)
        return x + self.layer(heads, Inputs(None)).transpose(0, 1).flatten(2)


def build(golden_dir: Path, name: str, dtype: torch.dtype, kernels: Literal["auto", "naive"]) -> Block:
    config, tensors = read_case(golden_dir / "head", name)
    memory = MidusConfig(
        num_heads=config["H"],
        num_keys=config["n"],
        top_k=config["k"],
        value_dim=config["r"],
        query_from="stream_and_heads" if config["query_residual"] else "heads",
    )
    (layer,), (bank,) = build_memory(memory, megatron(config, dtype), kernels=kernels)
    leaves = recorded_weights(tensors, dtype)
    with torch.no_grad():
        layer.keys.copy_(torch.stack((leaves["keys_row"], leaves["keys_col"]), 1))
        leaves["Vbar"] = put(bank.get_parameter("values"), leaves["Vbar"])
        leaves["Wh"] = put(layer.expansion, leaves["Wh"])
    return Block(config, tensors, memory, layer, leaves)


@pytest.mark.parametrize("query_from", ["heads", "stream_and_heads"])
def test_normalised_queries_are_layer_norm_of_every_head(
    query_from: Literal["heads", "stream_and_heads"],
) -> None:
    """Table 11, w/ LayerNorm: the memory that the recorded tensors hold, of queries that are normalised by the
    definition; outputs and gradients."""
    torch.manual_seed(1)
    num_heads, width = 2, 6
    config = {"d": num_heads * width, "H": num_heads}
    memory = MidusConfig(num_heads=num_heads, num_keys=5, top_k=3, value_dim=4, query_from=query_from)
    ops, plan = select_kernels("naive", device_type="cpu"), memory.plan(1)
    bank = Bank(plan.banks[0], memory, ops, dtype=torch.float64, device="cpu", replica_rank=0)
    normal, plain = (
        family_of(memory).layer()(
            megatron(config, torch.float64), kind, plan.views[0], bank, kernels=ops, name="layers.0", seed=1
        )
        for kind in (replace(memory, query_norm="layer"), memory)
    )
    gain, bias = (torch.randn(num_heads, width, dtype=torch.float64).requires_grad_() for _ in range(2))
    with torch.no_grad():
        bank.get_parameter("values").normal_()
        normal.query_gain.copy_(gain)
        normal.query_bias.copy_(bias)
        for name in ("keys", "expansion"):
            put(getattr(plain, name), put(getattr(normal, name), torch.randn_like(getattr(normal, name))))
    heads = torch.randn(7, 3, num_heads, width, dtype=torch.float64).requires_grad_()
    deviation = heads - heads.sum(-1, keepdim=True) / width
    scale = ((deviation**2).sum(-1, keepdim=True) / width + 1e-5) ** -0.5
    expected = plain(deviation * scale * gain + bias, Inputs(None))
    found = normal(heads if query_from == "heads" else heads.flatten(2), Inputs(None)).view(expected.shape)
    assert relative_error(found, expected) < 1e-12
    upstream = torch.randn_like(expected)
    leaves = (normal.query_gain, normal.query_bias, normal.keys, normal.expansion)
    ours = torch.autograd.grad(found, (heads, *leaves), upstream)
    theirs = torch.autograd.grad(expected, (heads, gain, bias, plain.keys, plain.expansion), upstream)
    for one, other in zip(ours, theirs, strict=True):
        assert other.abs().max() > 1e-3
        assert relative_error(one, other) < 1e-12


def put(parameter: nn.Parameter, recorded: Tensor) -> nn.Parameter:
    parameter.copy_(recorded)
    return parameter


@pytest.mark.parametrize("kernels", ["auto", "naive"])
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_computes_what_is_recorded(
    golden_dir: Path, name: str, dtype: torch.dtype, kernels: Literal["auto", "naive"]
) -> None:
    block = build(golden_dir, name, dtype, kernels)
    out = block.out()
    (out * block.tensors["r"].to(dtype)).sum().backward()
    gradients = {name: leaf.grad for name, leaf in block.leaves.items()}
    gradients["keys_row"], gradients["keys_col"] = block.layer.keys.grad.unbind(1)
    for leaf, gradient in gradients.items():
        if not block.tensors[f"grad.{leaf}"].any():
            # One entry has the weight 1, whatever its score.
            assert block.memory.top_k == 1
            assert not gradient.any()
    check(out, gradients, block.tensors)


@pytest.mark.parametrize("kernels", ["auto", "naive"])
@pytest.mark.parametrize("name", BLOCKS)
def test_entries_and_weights_are_the_recorded_ones(
    golden_dir: Path, name: str, kernels: Literal["auto", "naive"]
) -> None:
    """The two stages find what a search of the whole grid finds."""
    block = build(golden_dir, name, torch.float64, kernels)
    found = block.layer.retrieve(block.tensors["mid.queries"].flatten(0, 1))
    for recorded in ("mid.pair_idx", "mid.pair_idx_full_grid"):
        assert torch.equal(found.entries, block.tensors[recorded].flatten(0, 1))
    assert relative_error(found.scores.squeeze(3), block.tensors["mid.weights"].flatten(0, 1)) <= 1e-12


@pytest.mark.parametrize("name", BLOCKS)
def test_expanded_tables_may_be_kept_for_inference(golden_dir: Path, name: str) -> None:
    """A table per head, Vbar W_h, read by the same entries (section 4.2)."""
    block = build(golden_dir, name, torch.float64, "auto")
    queries = block.tensors["mid.queries"].flatten(0, 1)
    with torch.no_grad():
        found = block.layer.retrieve(queries)
        expanded = block.leaves["Vbar"] @ block.layer.expansion
        assert relative_error(expanded, block.tensors["mid.V_cache"]) <= 1e-12
        by_head = [
            torch.einsum("tk,tkd->td", found.scores[:, head, :, 0], expanded[head][found.entries[:, head]])
            for head in range(block.config["H"])
        ]
        out = block.layer(queries.unsqueeze(1), Inputs(None)).squeeze(1)
        assert relative_error(out, torch.stack(by_head, 1)) <= 1e-12
        block.layer.expand_values()
        assert relative_error(block.layer.own_values.unflatten(0, expanded.shape[:2]), expanded) <= 1e-12
        # From now on these are read.
        block.layer.expansion.zero_()
        out = block.layer(queries.unsqueeze(1), Inputs(None)).squeeze(1)
    assert relative_error(out, torch.stack(by_head, 1)) <= 1e-12


def test_values_get_what_algorithm_1_gives(golden_dir: Path) -> None:
    """Rows that one query reads twice are added up."""
    tensors = load_file(golden_dir / "head" / "midus_value_backward.safetensors")
    for kernels in ("auto", "naive"):
        ops = select_kernels(kernels, device_type="cpu")
        table, weights = tensors["in.V"].clone().requires_grad_(), tensors["in.weights"].clone().requires_grad_()
        out = ops.gather_sum(table, tensors["in.indices"].long(), weights.unsqueeze(2))
        out.backward(tensors["in.G_Y"])
        for actual, name in ((out, "out"), (table.grad, "grad.V"), (weights.grad, "grad.weights")):
            assert actual is not None
            assert relative_error(actual, tensors[name]) <= 1e-12


def test_a_block_of_zero_values_is_the_identity_and_only_they_learn_at_first(golden_dir: Path) -> None:
    """The expansions must not be zero, therefore: values get their gradient through them."""
    block = build(golden_dir, "midus_llama_gqa_rope", torch.float32, "auto")
    with torch.no_grad():
        block.leaves["Vbar"].zero_()
    out = block.out()
    assert torch.equal(out, block.leaves["x"])
    (out * block.tensors["r"].float()).sum().backward()
    assert block.leaves["Vbar"].grad.any()
    for leaf in (block.layer.keys, block.layer.expansion, block.leaves["WQ"], block.leaves["attn_norm"]):
        assert not leaf.grad.any()


def test_every_recorded_case_is_tested(golden_dir: Path) -> None:
    recorded = {path.stem for path in (golden_dir / "head").glob("*.safetensors")}
    assert recorded == {*BLOCKS, *ELSEWHERE}
