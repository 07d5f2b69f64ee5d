"""Evaluation in passes: how many microbatches each has, what is summed, and in which mode the model is. The passes are
stand-ins.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import pretrain.engine.step as step_module
import pretrain.evaluation.evaluate as evaluate_module
from pretrain.data.held_out import Domain
from pretrain.engine.step import LossSum, evaluation_loss
from pretrain.evaluation.evaluate import Evaluation, evaluate
from pretrain.train.trackers import evaluation_row, scalars

LENGTH = 4


class Windows:
    """Windows of four targets, whose losses are their numbers; the last has three."""

    def __init__(self, count: int) -> None:
        self.count, self.sequence_length = count, LENGTH
        self.num_target_tokens, self.num_bytes = count * LENGTH - 1, 77
        self.domains = [Domain("all", self.num_target_tokens, self.num_bytes)]

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        mask = torch.ones(LENGTH)
        if index == self.count - 1:
            mask[-1] = 0
        return {
            "number": torch.full((LENGTH,), float(index)),
            "loss_mask": mask,
            "position_ids": torch.arange(LENGTH),
        }

    def nats(self) -> float:
        return LENGTH * sum(range(self.count)) - (self.count - 1)


@pytest.mark.parametrize(
    ("count", "micro_batch_size", "pipeline", "passes"),
    [
        (1, 4, 1, [1]),
        (32, 2, 1, [16]),
        (33, 2, 1, [16, 1]),
        (37, 2, 1, [16, 3]),
        # Multiples of the number of stages: more than there is to read.
        (37, 2, 4, [16, 4]),
        (37, 2, 3, [18, 3]),
        (3, 1, 32, [32]),
        (70, 1, 1, [16, 16, 16, 16, 6]),
    ],
)
def test_every_window_counts_once_in_passes_that_fill_the_pipeline(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    count: int,
    micro_batch_size: int,
    pipeline: int,
    passes: list[int],
) -> None:
    windows: Any = Windows(count)
    groups: Any = SimpleNamespace(data_rank=0, data_size=1, device=torch.device("cpu"), is_main=True)
    chunks: Any = ["first", "second"]
    seen: list[int] = []

    def one_pass(chunks_: Any, streams: Any, groups_: Any, **sizes: Any) -> LossSum:
        assert (chunks_, groups_, len(streams)) == (chunks, groups, 2)
        assert (sizes["micro_batch_size"], sizes["sequence_length"]) == (micro_batch_size, LENGTH)
        seen.append(sizes["num_microbatches"])
        nats = num_tokens = 0.0
        for _ in range(sizes["num_microbatches"]):
            batch, same = (next(stream) for stream in streams)
            assert torch.equal(batch["number"], same["number"])
            assert batch["number"].shape == (micro_batch_size, LENGTH)
            nats += float((batch["number"] * batch["loss_mask"]).sum())
            num_tokens += float(batch["loss_mask"].sum())
        return LossSum(nats, num_tokens)

    monkeypatch.setattr(evaluate_module, "evaluation_loss", one_pass)
    result = evaluate(chunks, windows, groups, micro_batch_size=micro_batch_size, pipeline=pipeline)
    nats, num_tokens = windows.nats(), count * LENGTH - 1
    assert seen == passes
    assert result == Evaluation(
        pytest.approx(nats / num_tokens), pytest.approx(nats / (math.log(2) * 77)), num_tokens, 77
    )
    assert capsys.readouterr().err == "", "a bar is drawn for who asks for one"


def test_a_rank_of_several_reads_its_own_windows_and_as_many_microbatches_as_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Thirteen windows, three at a time, on two ranks: three microbatches each, of which the last of this one, the
    second, is padding.
    """
    windows: Any = Windows(13)
    groups: Any = SimpleNamespace(data_rank=1, data_size=2, device=torch.device("cpu"), is_main=True)
    read: list[tuple[list[float], float]] = []

    def one_pass(chunks: Any, streams: Any, groups: Any, **sizes: Any) -> LossSum:
        for _ in range(sizes["num_microbatches"]):
            batch = next(streams[0])
            read.append((batch["number"][:, 0].tolist(), float(batch["loss_mask"].sum())))
        # The sum over both ranks.
        return LossSum(1.0, 13 * LENGTH - 1)

    monkeypatch.setattr(evaluate_module, "evaluation_loss", one_pass)
    evaluate([nn.Identity()], windows, groups, micro_batch_size=3, pipeline=1)
    assert read == [([3, 4, 5], 12), ([9, 10, 11], 12), ([12, 12, 12], 0)]


def test_losses_are_summed_by_domain_beside_their_total(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loss per token, of which some do not count, in three domains: sums by hand."""
    losses = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    batch = {
        "loss_mask": torch.tensor([[1.0, 1.0, 0.0], [1.0, 1.0, 1.0]]),
        "domains": torch.tensor([[0, 0, 1], [1, 2, 2]]),
    }

    class Model(nn.Module):
        reads_tokens, separate_documents, cp_group = True, False, None

        def forward(self, *_: Any, labels: Any) -> torch.Tensor:
            return losses

    def schedule(chunks: Any, iterators: Any, *_: int, forward_only: bool, forward_step: Any) -> list[torch.Tensor]:
        results = []
        for _ in range(2):
            output, measure = forward_step(iterators[0], chunks[0])
            results.append(measure(output)[2]["loss"])
        return results

    monkeypatch.setattr(step_module, "_schedule", schedule)
    monkeypatch.setattr(step_module, "own_tokens", lambda batch, _: batch)
    monkeypatch.setattr(step_module, "unwrap", lambda chunk: chunk)
    monkeypatch.setattr(step_module, "world_sums", lambda sums, _: sums)
    arguments: Any = ([Model()], [iter([batch, batch])], SimpleNamespace(device="cpu"))
    sizes = {"num_microbatches": 2, "micro_batch_size": 2, "sequence_length": 3}
    found = evaluation_loss(*arguments, **sizes, num_domains=3)
    by_domain = (LossSum(6.0, 4.0), LossSum(8.0, 2.0), LossSum(22.0, 4.0))
    assert found == LossSum(36.0, 10.0, by_domain)
    arguments = ([Model()], [iter([batch, batch])], SimpleNamespace(device="cpu"))
    assert evaluation_loss(*arguments, **sizes) == LossSum(36.0, 10.0)


def test_every_domain_has_its_own_nats_and_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    windows: Any = Windows(4)
    windows.domains = [Domain("text", 10, 20), Domain("code", 5, 57)]
    groups: Any = SimpleNamespace(data_rank=0, data_size=1, device=torch.device("cpu"), is_main=True)
    passes: list[int] = []

    def one_pass(*_: Any, num_domains: int, num_microbatches: int, **__: Any) -> LossSum:
        assert num_domains == 2
        passes.append(num_microbatches)
        first = len(passes) == 1
        by_domain = (LossSum(10.0, 8.0), LossSum(6.0, 3.0)) if first else (LossSum(2.0, 2.0), LossSum(4.0, 2.0))
        return LossSum(sum(part.nats for part in by_domain), sum(part.num_tokens for part in by_domain), by_domain)

    monkeypatch.setattr(evaluate_module, "evaluation_loss", one_pass)
    monkeypatch.setattr(evaluate_module, "_PASS_MICROBATCHES", 2)
    found = evaluate([nn.Identity()], windows, groups, micro_batch_size=1, pipeline=1)
    assert passes == [2, 2]
    assert (found.loss, found.num_tokens, found.num_bytes) == (22 / 15, 15, 77)
    assert found.by_domain == {
        "text": Evaluation(1.2, pytest.approx(12 / math.log(2) / 20), 10, 20),
        "code": Evaluation(2.0, pytest.approx(10 / math.log(2) / 57), 5, 57),
    }
    row = evaluation_row(found)
    assert list(row["domains"]) == ["text", "code"]
    assert row["domains"]["code"]["validation_loss"] == 2.0
    assert dict(scalars(row))["domains/text/validation_tokens"] == 10


def test_tokens_that_no_rank_saw_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    windows: Any = Windows(2)
    groups: Any = SimpleNamespace(data_rank=0, data_size=1, device=torch.device("cpu"), is_main=True)
    monkeypatch.setattr(evaluate_module, "evaluation_loss", lambda *_, **__: LossSum(1.0, 6.0))
    with pytest.raises(AssertionError, match="did not see every held-out token once"):
        evaluate([nn.Identity()], windows, groups, micro_batch_size=2, pipeline=1)


def test_the_model_is_evaluated_without_gradients_and_trains_on_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    chunks = [nn.Linear(1, 1), nn.Linear(1, 1)]
    streams, groups = [iter([{}]), iter([{}])], SimpleNamespace(device="cpu")

    def schedule(
        chunks_: Any, iterators: Any, *sizes: int, forward_only: bool, forward_step: Any
    ) -> list[torch.Tensor]:
        assert (chunks_, iterators, sizes, forward_only) == (chunks, streams, (5, 6, 7), True)
        assert not any(chunk.training for chunk in chunks)
        assert not torch.is_grad_enabled()
        return [torch.tensor([1.0, 1.5]), torch.tensor([2.0, 0.5])]

    def over_ranks(sums: torch.Tensor, groups_: Any) -> torch.Tensor:
        assert groups_ is groups
        return sums

    monkeypatch.setattr(step_module, "_schedule", schedule)
    monkeypatch.setattr(step_module, "world_sums", over_ranks)
    arguments: Any = (chunks, streams, groups)
    found = evaluation_loss(*arguments, num_microbatches=5, micro_batch_size=6, sequence_length=7)
    assert found == LossSum(3.0, 2.0)
    assert all(chunk.training for chunk in chunks)


def test_the_mean_of_a_sum_is_per_token() -> None:
    assert LossSum(6.0, 4.0).mean == 1.5
    assert math.isnan(LossSum(0.0, 0.0).mean)
