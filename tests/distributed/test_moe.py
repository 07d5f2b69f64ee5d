"""Megatron's mixture of experts as the feed-forward: what it computes, and the same run on every layout.

Legend: T tokens, E experts, D hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megamem.config.model import MoEConfig
from parallel.groups import ParallelSizes, initialise_groups
from parallel.machine.cpu import cuda_on_cpu
from pretrain.config.schema import ParallelConfig, RunConfig
from pretrain.engine.build import build_chunks
from pretrain.engine.build_optimizer import assign_groups
from pretrain.train.loop import take_step
from tests.distributed.tiny_runs import MEMORY, SHARED, VOCAB_SIZE, tiny_run
from tests.rotation import in_rotation, named_in_rotation

# Weights that the losses show at: with a wrong scale on some layout, the first gradient norm would tell.
EXPERTS = MoEConfig(num_experts=8, top_k=2, expert_ffn_hidden_size=24, balance_loss_weight=0.3, z_loss_weight=0.2)
MOE = replace(SHARED, model=replace(SHARED.model, memory=None, moe=EXPERTS))

TWO_RANKS: tuple[dict[str, int], ...] = (
    {},
    {"pipeline": 2, "virtual_pipeline": 2},
    {"pipeline": 2},
)
FOUR_RANKS = ({"tensor": 2, "pipeline": 2, "memory": 2}, {"tensor": 2, "context": 2, "memory": 4})


def on(config: RunConfig, layout: dict[str, int], recompute: str = "none") -> RunConfig:
    train = replace(config.train, recompute=recompute)  # type: ignore[arg-type]
    return replace(config, parallel=ParallelConfig(**layout), train=train)


def train(config: RunConfig, num_steps: int = 2) -> list[tuple[float, float]]:
    with tiny_run(config) as run:
        return run.train(num_steps)


def assert_same(run: Sequence[Any], expected: Sequence[Any]) -> None:
    for actual, reference in zip(run, expected, strict=True):
        assert actual == pytest.approx(reference, rel=1e-5)


def test_no_layout_and_no_recomputation_changes_a_run(run_ranks: Any) -> None:
    (alone, recomputed) = run_ranks(lambda: [train(MOE), train(on(MOE, {}, "full"))], 1)[0]
    assert_same(recomputed, alone)
    two = run_ranks(lambda: [train(on(MOE, layout)) for layout in in_rotation(TWO_RANKS)], 2)
    four = run_ranks(lambda: [train(on(MOE, layout, "full")) for layout in in_rotation(FOUR_RANKS, 2)], 4)
    for run in (*two[0], *four[0]):
        assert_same(run, alone)


def test_memories_stand_beside_experts_and_in_their_place(run_ranks: Any) -> None:
    memory = replace(MEMORY, placement=replace(MEMORY.placement, blocks=(1, 2), position="instead"))
    beside = replace(
        MOE, model=replace(MOE.model, memory=replace(MEMORY, placement=replace(MEMORY.placement, every=2)))
    )
    instead = replace(MOE, model=replace(MOE.model, memory=memory))
    pairs = in_rotation([(config, layout) for config in (beside, instead) for layout in FOUR_RANKS], 4)
    (alone,) = run_ranks(lambda: [train(config) for config, _ in pairs], 1)
    four = run_ranks(lambda: [train(on(config, layout, "full")) for config, layout in pairs], 4)
    for run, expected in zip(four[0], alone, strict=True):
        assert_same(run, expected)


def plain_mixture(x: Tensor, weights: dict[str, Tensor], moe: MoEConfig) -> tuple[Tensor, Tensor, Tensor]:
    """A mixture of experts in plain PyTorch.

    Returns:
        Output [T, D], balance loss E sum_e f_e P_e, and mean squared log-sum-exp of the logits.
    """
    logits = F.linear(x, weights["router.weight"])
    probability = logits.softmax(-1)
    best = probability.topk(moe.top_k)
    chosen = best.values / best.values.sum(-1, keepdim=True) if moe.renormalise else best.values
    out = torch.zeros_like(x)
    for expert in range(moe.num_experts):
        prefix = f"experts.local_experts.{expert}"
        gate, up = F.linear(x, weights[f"{prefix}.linear_fc1.weight"]).chunk(2, -1)
        of_expert = F.linear(F.silu(gate) * up, weights[f"{prefix}.linear_fc2.weight"])
        out = out + of_expert * (chosen * (best.indices == expert)).sum(-1, keepdim=True)
    share = F.one_hot(best.indices, moe.num_experts).to(x.dtype).mean((0, 1))
    balance = moe.num_experts * (share * probability.mean(0)).sum()
    return out, balance, logits.logsumexp(-1).square().mean()


def errors_against_plain(moe: MoEConfig) -> dict[str, float]:
    """Largest errors of a block's output and gradients, with both losses, over the largest element of the reference."""
    config = replace(MOE, model=replace(MOE.model, moe=moe))
    with cuda_on_cpu():
        groups = initialise_groups(ParallelSizes(), device=torch.device("cpu"), timeout_minutes=1, seed=1)
        (model,) = build_chunks(config, groups, vocab_size=VOCAB_SIZE, dtype=torch.float64)
        block = model.decoder.layers[2].mlp
        generator = torch.Generator().manual_seed(5)
        x = torch.randn(12, 2, 32, generator=generator, dtype=torch.float64)
        weights = dict(block.named_parameters())
        out, _ = block(x)
        out.square().sum().backward()
        actual = {"out": out.detach(), **{name: p.grad.clone() for name, p in weights.items() if p.grad is not None}}
        balance, z = (block.router.sums[1:] / block.router.sums[0]).tolist()
        block.zero_grad()
        plain, _, plain_z = plain_mixture(x.flatten(0, 1), weights, moe)
        groups_of_sequences = x.split(moe.balance_sequences, 1)
        balances = [plain_mixture(group.flatten(0, 1), weights, moe)[1] for group in groups_of_sequences]
        plain_balance = torch.stack(balances).mean()
        # One microbatch adds to the step's sum its loss times its tokens.
        auxiliary = 24 * (moe.balance_loss_weight * plain_balance + moe.z_loss_weight * plain_z)
        (plain.square().sum() + auxiliary).backward()
    reference = {"out": plain.detach().view_as(out), **{name: p.grad for name, p in weights.items()}}
    assert actual.keys() == reference.keys()
    errors = {name: float((actual[name] - r).abs().max() / r.abs().max()) for name, r in reference.items()}
    return {**errors, "balance": abs(balance / float(plain_balance) - 1), "z": abs(z / float(plain_z) - 1)}


@pytest.mark.parametrize(("renormalise", "sequences"), [(False, 1), (True, 2)])
def test_a_block_computes_what_plain_pytorch_does(run_ranks: Any, renormalise: bool, sequences: int) -> None:
    """The outputs agree to fp32: Megatron's routing softmax is in fp32 whatever the model's dtype."""
    moe = replace(EXPERTS, renormalise=renormalise, balance_sequences=sequences)
    (errors,) = run_ranks(lambda: errors_against_plain(moe), 1)
    assert max(errors.values()) < 1e-6, errors


def test_no_size_of_microbatches_changes_a_run(run_ranks: Any) -> None:
    """Means over tokens, and over sequences: the same samples give the same gradient however they are cut."""
    moe = replace(EXPERTS, balance_loss_weight=1.0, z_loss_weight=1.0)
    config = replace(MOE, model=replace(MOE.model, moe=moe))

    def runs() -> list[list[tuple[float, float]]]:
        sizes = (1, 2, 4, 8)
        return [train(replace(config, train=replace(config.train, micro_batch_size=size))) for size in sizes]

    (histories,) = run_ranks(runs, 1)
    for history in histories[1:]:
        assert_same(history, histories[0])


def reported(config: RunConfig) -> dict[str, dict[int, float]]:
    """The losses that a step reports."""
    with tiny_run(config) as run:
        return take_step(run.run, run.batches)[0].auxiliary


def test_the_losses_are_reported_once_per_token(run_ranks: Any) -> None:
    (alone,) = run_ranks(lambda: reported(MOE), 1)
    assert set(alone) == {"moe_balance", "moe_z"}
    assert all(list(of_block) == [0, 1, 2, 3] for of_block in alone.values())
    # At least 1, and above it at initialisation by the noise of 32 choices in a sequence; log(8)^2 = 4.3 with small
    # logits.
    assert all(0.9 < value < 1.8 for value in alone["moe_balance"].values())
    assert all(3.5 < value < 6 for value in alone["moe_z"].values())
    layouts = ({"tensor": 2}, {"pipeline": 2}, {"memory": 2})
    for result in run_ranks(lambda: [reported(on(MOE, layout, "full")) for layout in layouts], 2)[1]:
        for name, of_block in alone.items():
            assert result[name] == pytest.approx(of_block, rel=1e-6)


def test_experts_have_a_group_of_their_own(run_ranks: Any) -> None:
    def sizes() -> dict[str, int]:
        with tiny_run(on(MOE, {"memory": 2})) as run:
            return {name: sum(p.numel() for p in part) for name, part in assign_groups(run.bare).items()}

    for size in run_ranks(sizes, 2):
        # Four of eight experts on each rank, in four blocks.
        assert size["experts"] == 4 * 4 * 3 * 24 * 32
        assert size["retrieval"] == size["values"] == size["pre_values"] == 0


STEP = "step_00000002"


def save_half_way(folder: Path, layout: dict[str, int]) -> list[tuple[float, float]]:
    """Two steps, a checkpoint, and what the next two steps give."""
    config = on(MOE, layout)
    with tiny_run(config) as run:
        run.train(2)
        run.save(folder)
        return run.train(2)


def resume(path: Path, layout: dict[str, int]) -> list[tuple[float, float]]:
    config = on(MOE, layout)
    with tiny_run(config) as run:
        run.resume(path)
        return run.train(2)


# A layout that saves, and those of two ranks that go on from there.
SAVED: dict[str, tuple[dict[str, int], tuple[dict[str, int], ...]]] = {
    "experts": ({"memory": 2}, ({"tensor": 2, "memory": 2}, {"pipeline": 2})),
    "tensors": ({"tensor": 2}, ({"memory": 2},)),
}


def test_a_checkpoint_goes_on_on_another_layout(run_ranks: Any, tmp_path: Path) -> None:
    """Every layout reads what one has written, and every one writes what another reads."""
    saved = named_in_rotation(SAVED, 2)

    def main() -> list[list[tuple[float, float]]]:
        straight = [save_half_way(tmp_path / name, layout) for name, (layout, _) in saved.items()]
        return straight + [
            resume(tmp_path / name / STEP, layout) for name, (_, others) in saved.items() for layout in others
        ]

    expected, *found = run_ranks(main, 2)[0]
    found += run_ranks(lambda: [resume(tmp_path / name / STEP, {}) for name in saved], 1)[0]
    for run in found:
        assert_same(run, expected)
