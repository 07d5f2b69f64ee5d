"""Head importance against what the loss does when a head's output is made a little larger, and on every layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_inserted_blocks import CONFIG, laid_out, with_values
from tiny_runs import VOCAB_SIZE, joined
from torch import Tensor

from lab.analysis.heads import HeadImportance, head_importance
from megamem.families.midus.block import CoreWithMemory
from pretrain.engine.build import build_chunks

EPSILON = 1e-4
LENGTH = CONFIG.train.sequence_length
# Nothing is predicted in the last window: it is no example.
NUM_TARGETS = (LENGTH, 11, 6, 1, LENGTH, 0)
LAYOUTS: dict[str, dict[str, Any]] = {
    "data 2": {},
    "tensor 2": {"tensor": 2},
    "tensor 2 x memory 2": {"tensor": 2, "memory": 2},
    "memory 2": {"memory": 2},
    "context 2": {"context": 2},
}


def windows() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    found = []
    for num_targets in NUM_TARGETS:
        tokens = torch.randint(0, VOCAB_SIZE, (LENGTH + 1,), generator=generator)
        places = torch.arange(LENGTH)
        mask = (places >= LENGTH - num_targets).float()
        found.append({"tokens": tokens[:-1], "labels": tokens[1:], "loss_mask": mask, "position_ids": places})
    return found


def measured(sizes: dict[str, Any]) -> HeadImportance:
    config: Any = laid_out(sizes)
    dataset: Any = windows()
    with pytest.MonkeyPatch.context() as patch, joined(config) as groups:
        with_values(patch)
        (model,) = build_chunks(config, groups, vocab_size=VOCAB_SIZE, dtype=torch.float64)
        found = head_importance(model, dataset, groups, micro_batch_size=4)
        assert all(parameter.requires_grad for parameter in model.parameters())
        return found


def by_hand() -> tuple[Tensor, Tensor]:
    """Central differences of each example's loss, its sum and its mean, with one head's output scaled: [blocks, heads]."""
    config = laid_out({})
    with pytest.MonkeyPatch.context() as patch, joined(config) as groups, torch.no_grad():
        with_values(patch)
        (model,) = build_chunks(config, groups, vocab_size=VOCAB_SIZE, dtype=torch.float64)
        model.eval()
        examples = [window for window in windows() if window["loss_mask"].any()]
        tokens, labels, mask, positions = (
            torch.stack([window[key] for window in examples])
            for key in ("tokens", "labels", "loss_mask", "position_ids")
        )
        means = []
        for block in model.decoder.layers:
            core = block.self_attention.core_attention
            attention = core.core if isinstance(core, CoreWithMemory) else core
            for head in range(config.model.num_attention_heads):
                losses = []
                for factor in (1 + EPSILON, 1 - EPSILON):
                    scale = torch.ones(config.model.num_attention_heads, 1, dtype=torch.float64)
                    scale[head] = factor

                    def scaled(module: Any, arguments: Any, out: Tensor, scale: Tensor = scale) -> Tensor:
                        return (out.unflatten(2, (len(scale), -1)) * scale).flatten(2)

                    handle = attention.register_forward_hook(scaled)
                    # In training the vocabulary's padding is part of the softmax.
                    logits = model(tokens, positions, None)
                    handle.remove()
                    nats = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
                    losses.append((nats.view_as(mask) * mask).sum(1))
                slopes = ((losses[0] - losses[1]) / (2 * EPSILON)).abs()
                means.append(torch.stack((slopes.mean(), (slopes / mask.sum(1)).mean())))
        of_sum, of_mean = torch.stack(means, 1).view(2, len(model.decoder.layers), -1)
        return of_sum, of_mean


@pytest.fixture(scope="module")
def alone(run_ranks: Any) -> tuple[HeadImportance, tuple[Tensor, Tensor]]:
    ((found, expected),) = run_ranks(lambda: (measured({}), by_hand()), 1)
    return found, expected


def test_it_is_the_slope_of_the_loss_when_a_head_is_scaled(
    alone: tuple[HeadImportance, tuple[Tensor, Tensor]],
) -> None:
    """Both readings of the loss have the slope, and the queries of inserted memories are among the heads."""
    found, expected = alone
    assert found.num_examples == len(NUM_TARGETS) - 1
    assert found.scores.shape == (2, CONFIG.model.num_layers, CONFIG.model.num_attention_heads)
    for scores, wanted in zip(found.scores, expected, strict=True):
        assert float(wanted.min()) > 0
        # Megatron's cross entropy is in fp32.
        torch.testing.assert_close(scores, wanted, rtol=1e-5, atol=1e-6 * float(wanted.max()))
    # The readings are no multiples of one another.
    ratios = found.scores[0] / found.scores[1]
    assert float(ratios.max() / ratios.min()) > 1.01


def test_it_is_the_same_on_every_layout(run_ranks: Any, alone: tuple[HeadImportance, tuple[Tensor, Tensor]]) -> None:
    """Heads, examples and tokens that are split over ranks; and where ranks have windows of nothing."""
    for of_rank in run_ranks(lambda: {name: measured(sizes) for name, sizes in LAYOUTS.items()}, 2):
        for name, found in of_rank.items():
            assert found.num_examples == alone[0].num_examples, name
            torch.testing.assert_close(found.scores, alone[0].scores, rtol=1e-5, atol=1e-7, msg=name)
