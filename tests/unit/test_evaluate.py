"""What evaluation makes of the losses that it is given: nats per token, bits per byte, every held-out token once."""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pretrain import evaluate as module
from pretrain.evaluate import evaluate
from pretrain.step import LossSum

LENGTH = 8


class Windows:
    """`count` windows of distinct ids, the last of them with three targets."""

    sequence_length = LENGTH
    num_bytes = 131

    def __init__(self, count: int) -> None:
        self.count = count
        self.num_target_tokens = (count - 1) * LENGTH + 3

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        mask = torch.ones(LENGTH)
        if index == self.count - 1:
            mask[3:] = 0
        return {"tokens": torch.arange(LENGTH) + index * LENGTH, "loss_mask": mask}


class Losses:
    """Stands for the forward passes: a target costs 3 bits, or 5 if its id is odd, and all streams must serve alike."""

    def __init__(self) -> None:
        self.lengths: list[int] = []
        self.seen: list[int] = []

    def __call__(self, chunks: Any, streams: list[Iterator[Any]], groups: Any, **sizes: int) -> LossSum:
        self.lengths.append(sizes["num_microbatches"])
        assert sizes["sequence_length"] == LENGTH
        bits = num_tokens = 0.0
        for _ in range(sizes["num_microbatches"]):
            first, *others = [next(stream) for stream in streams]
            assert all(torch.equal(first["loss_mask"], other["loss_mask"]) for other in others)
            assert first["tokens"].shape == (sizes["micro_batch_size"], LENGTH)
            ids = first["tokens"][first["loss_mask"].bool()]
            self.seen += ids.tolist()
            bits += float((3 + 2 * (ids % 2)).sum())
            num_tokens += len(ids)
        return LossSum(nats=bits * math.log(2), num_tokens=num_tokens)


@pytest.mark.parametrize(
    ("count", "micro_batch_size", "pipeline", "lengths"),
    [
        (1, 1, 1, [1]),
        (32, 2, 1, [16]),
        (33, 2, 1, [16, 1]),
        # Rounds of three: passes of 18, the last as long as it must be and a multiple.
        (38, 2, 3, [18, 3]),
        (5, 1, 4, [8]),
    ],
)
def test_every_target_counts_once_in_nats_per_token_and_bits_per_byte(
    monkeypatch: pytest.MonkeyPatch, count: int, micro_batch_size: int, pipeline: int, lengths: list[int]
) -> None:
    windows, losses = Windows(count), Losses()
    monkeypatch.setattr(module, "evaluation_loss", losses)
    groups = SimpleNamespace(data_rank=0, data_size=1, device=torch.device("cpu"), is_main=True)
    result = evaluate(
        [object(), object()],  # type: ignore[list-item]
        windows,  # type: ignore[arg-type]
        groups,  # type: ignore[arg-type]
        micro_batch_size=micro_batch_size,
        pipeline=pipeline,
    )
    num_tokens = (count - 1) * LENGTH + 3
    assert losses.seen == list(range(num_tokens))
    assert losses.lengths == lengths
    num_odd = num_tokens // 2
    bits = 3 * num_tokens + 2 * num_odd
    assert result.bits_per_byte == pytest.approx(bits / 131, rel=1e-12)
    assert result.loss == pytest.approx(bits * math.log(2) / num_tokens, rel=1e-12)
    assert (result.num_tokens, result.num_bytes) == (num_tokens, 131)


def test_a_lost_target_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    windows = Windows(4)
    windows.num_target_tokens += 1
    monkeypatch.setattr(module, "evaluation_loss", Losses())
    groups = SimpleNamespace(data_rank=0, data_size=1, device=torch.device("cpu"), is_main=True)
    with pytest.raises(AssertionError, match="every held-out token once"):
        evaluate([object()], windows, groups, micro_batch_size=2, pipeline=1)  # type: ignore[list-item, arg-type]
