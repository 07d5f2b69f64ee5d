"""Auxiliary losses: closed formulas, the released code's figures, and what their weight does not depend on."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from safetensors.torch import load_file
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from kernels.select import select_kernels
from megamem.banks.bank import Bank
from megamem.config.model import ModelConfig
from megamem.families.ultramem_v2.config import UltraMemV2Config
from megamem.families.ultramem_v2.layer import UltraMemV2Layer
from megamem.layers.layer import begin_step
from megamem.layers.losses import LOSS_NAMES, begin_losses, key_balance, tucker_penalty
from megamem.placement.sharing import BankSpec, LayerView
from megamem.releases.names import from_released
from tests.microbatch import some_inputs

MEMORY = UltraMemV2Config(num_keys=8, key_dim=8, value_dim=16, pre_value_dim=16, top_k=4, shuffle="none")
HIDDEN = 32


def build(memory: UltraMemV2Config, dtype: torch.dtype = torch.float64) -> tuple[UltraMemV2Layer, Bank]:
    spec = BankSpec(0, memory.num_keys**2, (0,))
    bank = Bank(spec, memory, select_kernels("naive"), dtype=dtype, device="cpu", replica_rank=0)
    config = TransformerConfig(
        num_layers=1, hidden_size=HIDDEN, num_attention_heads=4, use_cpu_initialization=True, params_dtype=dtype
    )
    layer = UltraMemV2Layer(
        config,
        memory,
        LayerView(0, 0, memory.num_keys**2, spec.num_rows),
        SimpleNamespace(read=bank.read),
        kernels=bank.kernels,
        name="decoder.layers.0.mlp.memory",
        seed=1,
    )
    g = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in (*layer.parameters(), *bank.parameters()):
            parameter.copy_(torch.rand(parameter.shape, generator=g, dtype=torch.float64) - 0.3)
    begin_step([layer])
    return layer, bank


def tokens(count: int, seed: int = 1) -> Tensor:
    return torch.randn(count, 1, HIDDEN, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def gradients(layer: UltraMemV2Layer, microbatches: tuple[Tensor, ...], recompute: bool = False) -> dict[str, Tensor]:
    """Gradients of a training loss of 0, so that only the injected part is left; the input's is among them."""
    layer.zero_grad()
    begin_step([layer])
    inputs = [x.clone().requires_grad_() for x in microbatches]
    for x in inputs:
        out = checkpoint(layer, x, some_inputs(x), use_reentrant=True) if recompute else layer(x, some_inputs(x))
        (0.0 * out).sum().backward()
    found = {name: p.grad.clone() for name, p in layer.named_parameters() if p.grad is not None}
    return {**found, "input": torch.cat([x.grad for x in inputs if x.grad is not None])}


def test_tucker_penalty_is_eq_17() -> None:
    """Diagonal cores have their entries as singular values, in any order and with any sign."""
    cores = torch.diag_embed(torch.tensor([[-0.9, 3.0, 0.1], [0.2, -0.1, 0.05]], dtype=torch.float64))
    expected = ((0.9 - 0.15) ** 2 / 2 + 0.0) / 2
    assert float(tucker_penalty(cores, 0.15)) == pytest.approx(expected, rel=1e-12)
    assert float(tucker_penalty(cores, 0.0)) == pytest.approx(((0.81 + 0.01) / 2 + (0.01 + 0.0025) / 2) / 2, rel=1e-12)


def test_tucker_penalty_gradient_goes_through_the_singular_values() -> None:
    cores = torch.rand(2, 3, 3, generator=torch.Generator().manual_seed(3), dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(lambda c: tucker_penalty(c, 0.05), cores)


def test_key_balance_is_two_for_even_use_and_grows_with_uneven_use() -> None:
    even = torch.zeros(2, 8, 1, 8, dtype=torch.float64)
    each = torch.arange(8).view(1, 8, 1, 1).expand(2, -1, -1, -1)
    assert float(key_balance(even, each, 1, 1)) == pytest.approx(2)
    always_the_first = torch.zeros_like(each)
    assert float(key_balance(even, always_the_first, 1, 1)) == pytest.approx(2)
    sharp = even.clone()
    sharp[..., 0] = 50
    assert float(key_balance(sharp, always_the_first, 1, 1)) == pytest.approx(16)


def test_key_balance_is_eq_19_by_hand() -> None:
    g = torch.Generator().manual_seed(4)
    scores = torch.randn(2, 5, 2, 6, generator=g, dtype=torch.float64)
    selected = scores.topk(3, dim=-1).indices
    expected = 0.0
    for side in range(2):
        for key in range(6):
            frequency = int((selected[side] == key).sum()) / (5 * 2 * 3)
            probability = sum(
                float(scores[side, t, h].exp()[key] / scores[side, t, h].exp().sum())
                for t in range(5)
                for h in range(2)
            )
            expected += 6 * frequency * probability / 10
    assert float(key_balance(scores, selected, 1, 1)) == pytest.approx(expected, rel=1e-12)


def test_groups_of_sequences_are_balanced_each_by_itself() -> None:
    """Four sequences of five tokens, two of them taken together."""
    g = torch.Generator().manual_seed(4)
    scores = torch.randn(2, 20, 2, 6, generator=g, dtype=torch.float64)
    selected = scores.topk(3, dim=-1).indices
    sequence = torch.arange(20) % 4
    alone = [
        float(key_balance(scores[:, sequence // 2 == group], selected[:, sequence // 2 == group], 1, 1))
        for group in (0, 1)
    ]
    assert float(key_balance(scores, selected, 2, 2)) == pytest.approx(sum(alone) / 2, rel=1e-12)
    assert float(key_balance(scores, selected, 1, 4)) != pytest.approx(sum(alone) / 2, rel=1e-3)


@pytest.mark.parametrize("sequences", [1, 2])
def test_no_microbatch_size_changes_the_balance_of_keys(sequences: int) -> None:
    """Four sequences at once, in twos, and one by one: the same loss and the same gradients of the same samples."""
    layer, _ = build(replace(MEMORY, key_balance_weight=0.5, key_balance_sequences=sequences))
    assert layer.losses is not None
    samples = torch.cat([tokens(6, seed) for seed in range(4)], 1)
    whole, balance = gradients(layer, (samples,)), layer.losses.sums.clone()
    for size in (size for size in (1, 2) if size >= sequences):
        cut = gradients(layer, samples.split(size, 1))
        cut["input"] = cut["input"].unflatten(0, (4 // size, 6)).transpose(0, 1).reshape(6, 4, HIDDEN)
        for name, gradient in whole.items():
            torch.testing.assert_close(cut[name], gradient, rtol=1e-10, atol=1e-14)
        torch.testing.assert_close(layer.losses.sums, balance, rtol=1e-12, atol=0)
    with_all = replace(MEMORY, key_balance_weight=0.5, key_balance_sequences=4)
    other = gradients(build(with_all)[0], (samples,))
    assert float((other["keys"] - whole["keys"]).abs().max()) > 0.1 * float(whole["keys"].abs().max())


def test_what_is_not_trained_has_no_losses() -> None:
    """Gradients of an evaluation are those of the loss that is measured."""
    layer, _ = build(replace(MEMORY, key_balance_weight=0.5, tucker_penalty_weight=0.25))
    assert layer.losses is not None
    layer.eval()
    assert all(float(gradient.abs().max()) == 0 for gradient in gradients(layer, (tokens(6),)).values())
    assert float(layer.losses.sums.abs().max()) == 0


def test_balance_gradient_is_that_of_eq_19_with_constant_frequencies() -> None:
    memory = replace(MEMORY, key_balance_weight=0.5, num_heads=2)
    layer, _ = build(memory)
    x = tokens(6)
    injected = gradients(layer, (x,))
    layer.zero_grad()
    direct_x = x.clone().requires_grad_()
    found = layer.retrieve(direct_x.flatten(0, 1))
    loss = key_balance(found.stage_scores(), found.stage_ids, 1, 1)
    (0.5 * 6 * loss).backward()
    assert direct_x.grad is not None
    torch.testing.assert_close(injected["input"], direct_x.grad, rtol=1e-12, atol=1e-14)
    for name in ("query_proj", "keys", "query_norm", "keys_norm"):
        torch.testing.assert_close(injected[name], layer.get_parameter(name).grad, rtol=1e-12, atol=1e-14)
    assert float(injected["cores"].abs().max()) == 0


def test_penalty_gradient_is_weight_times_tokens_times_that_of_eq_17() -> None:
    layer, _ = build(replace(MEMORY, tucker_penalty_weight=0.25, tucker_penalty_margin=0.02))
    injected = gradients(layer, (tokens(6),))
    core_sum = layer.cores.detach().sum(0).requires_grad_()
    (expected,) = torch.autograd.grad(0.25 * 6 * tucker_penalty(core_sum, 0.02), core_sum)
    assert float(expected.abs().max()) > 0
    for core in injected["cores"]:
        torch.testing.assert_close(core, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("losses", [{"key_balance_weight": 0.5}, {"tucker_penalty_weight": 0.25}], ids=str)
def test_the_weight_does_not_depend_on_the_number_of_microbatches(losses: dict[str, float]) -> None:
    """The same microbatch three times gives three times the gradient over three times the tokens."""
    layer, _ = build(replace(MEMORY, **losses))  # type: ignore[arg-type]
    once, thrice = gradients(layer, (tokens(6),)), gradients(layer, (tokens(6),) * 3)
    for name in once.keys() - {"input"}:
        torch.testing.assert_close(3 * once[name], thrice[name], rtol=1e-12, atol=1e-14)


def test_recomputation_changes_neither_gradients_nor_sums() -> None:
    layer, _ = build(replace(MEMORY, key_balance_weight=0.5, tucker_penalty_weight=0.25))
    assert layer.losses is not None
    plain, sums = gradients(layer, (tokens(6), tokens(6, 2))), layer.losses.sums.clone()
    recomputed = gradients(layer, (tokens(6), tokens(6, 2)), recompute=True)
    for name, gradient in plain.items():
        assert torch.equal(gradient, recomputed[name]), name
    assert torch.equal(sums, layer.losses.sums)


def test_sums_give_the_means_over_tokens_and_leave_evaluation_out() -> None:
    layer, _ = build(replace(MEMORY, key_balance_weight=0.5, tucker_penalty_weight=0.25))
    assert layer.losses is not None
    gradients(layer, (tokens(6), tokens(3, 2)))
    with torch.no_grad():
        layer(tokens(5, 3), some_inputs(tokens(5, 3)))
    num_tokens, *totals = layer.losses.sums.tolist()
    assert num_tokens == 9
    balances = []
    for x in (tokens(6), tokens(3, 2)):
        found = layer.retrieve(x.flatten(0, 1))
        scores = found.stage_scores()
        balances.append(float(key_balance(scores, found.stage_ids, 1, 1)))
    means = dict(zip(LOSS_NAMES, (total / 9 for total in totals), strict=True))
    assert means["key_balance"] == pytest.approx((6 * balances[0] + 3 * balances[1]) / 9)
    assert means["tucker_penalty"] == pytest.approx(float(tucker_penalty(layer.cores.detach().sum(0), 0.15)))


def test_the_output_is_the_same_with_and_without_losses() -> None:
    plain, _ = build(MEMORY)
    with_losses, _ = build(replace(MEMORY, key_balance_weight=0.5, tucker_penalty_weight=0.25))
    assert plain.losses is None
    x = tokens(6)
    assert torch.equal(plain(x, some_inputs(x)), with_losses(x, some_inputs(x)))


@pytest.mark.parametrize("name", ["tucker_penalty_weight", "tucker_penalty_margin", "key_balance_weight"])
def test_negative_weights_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=rf"UltraMemV2Config\.{name} is -1"):
        UltraMemV2Config(**{name: -1.0})  # type: ignore[arg-type]


def test_balance_is_what_the_release_computes(golden_dir: Path) -> None:
    """The recorded loss leaves the balance loss out, the recorded gradients contain coefficient x loss."""
    case = golden_dir / "v2_perrank_h1_balance"
    ctor: dict[str, Any] = json.loads(case.with_suffix(".json").read_text())["ctor"]
    tensors = load_file(case.with_suffix(".safetensors"))
    num_tokens = tensors["x0"].shape[0] * tensors["x0"].shape[1]
    memory = replace(
        MEMORY,
        num_keys=ctor["knum"],
        shuffle="table",
        # Ours is per token, and this test divides by no number of targets.
        key_balance_weight=ctor["mem_key_balance_reg_coef"] / num_tokens,
        # The release takes all of a microbatch together.
        key_balance_sequences=tensors["x0"].shape[0],
    )
    layer, bank = build(memory)
    model = ModelConfig(num_layers=1, hidden_size=HIDDEN, memory=memory)
    released = {
        "layer0.": "transformer.mem_blocks.0.",
        "table.values": "transformer.full_memory_layer.values_for_look_up",
        "table.pre_values": "transformer.full_memory_layer.pre_values_for_look_up",
    }

    def ours(prefix: str) -> dict[str, Tensor]:
        renamed = {
            name.removeprefix(prefix).replace(old, new): tensor
            for name, tensor in tensors.items()
            for old, new in released.items()
            if name.startswith(prefix + old)
        }
        return from_released(renamed, model)

    parameters = {f"{layer.name}.{name}": p for name, p in layer.named_parameters()}
    parameters |= {f"banks.0.{name}": p for name, p in bank.named_parameters()}
    buffers = {f"{layer.name}.{name}": b for name, b in layer.named_buffers()}
    weights = ours("")
    assert set(weights) == {*parameters, *buffers}
    with torch.no_grad():
        for name, target in {**parameters, **buffers}.items():
            target.copy_(weights[name])
    assert layer.losses is not None
    begin_losses([(layer.losses, layer.cores)])
    x = tensors["x0"].transpose(0, 1).contiguous().requires_grad_()
    out = layer(x, some_inputs(x))
    loss = (out * tensors["r0"].transpose(0, 1)).sum()
    loss.backward()
    errors = {
        "loss": relative_error(loss, tensors["loss"]),
        "output": relative_error(out.transpose(0, 1), tensors["y0"]),
        "balance": relative_error(layer.losses.sums[2] / num_tokens, tensors["aux0"]),
    }
    assert x.grad is not None
    errors["input"] = relative_error(x.grad.transpose(0, 1), tensors["grad.x0"])
    for name, expected in ours("grad.").items():
        gradient = parameters[name].grad
        assert gradient is not None
        errors[name] = relative_error(gradient, expected)
    assert len(errors) == 4 + len(parameters)
    assert max(errors.values()) <= 1e-9, errors


def relative_error(actual: Tensor, reference: Tensor) -> float:
    assert actual.shape == reference.shape
    return float((actual.detach() - reference).abs().max() / reference.abs().max())
