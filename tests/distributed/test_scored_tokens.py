"""Loss and gradients are means over the scored tokens of the global batch, wherever these are: on one rank, in one
microbatch, in one rank's part of a sequence. Against autograd on whole sequences.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from test_trained_layers import TIED, TOLERANCE, naive_steps, training
from tiny_runs import TinyRun, on, random_batches, tiny_run

from parallel.groups import ParallelGroups
from pretrain.config.schema import RunConfig
from pretrain.engine.step import Batch, evaluation_loss
from tests.rotation import in_rotation

SEPARATE = replace(training(TIED), data=replace(TIED.data, documents="separate"))
LAYOUTS: dict[str, dict[str, Any]] = {
    "data 2": {"micro_batch_size": 1},
    "context 2": {"context": 2},
    "tensor 2": {"tensor": 2, "micro_batch_size": 2},
    "pipeline 2": {"pipeline": 2, "micro_batch_size": 2},
    "pipeline 2 x virtual 2": {"pipeline": 2, "virtual_pipeline": 2, "micro_batch_size": 2},
}


def answers(config: RunConfig, groups: ParallelGroups) -> Iterator[Batch]:
    """Batches in which the first of eight sequences has an answer of three tokens at its end, and the fifth one of
    twelve; the others have prompts alone, as all those of the second data-parallel rank but one.
    """
    per_rank = config.train.global_batch_size // groups.data_size
    number = 0
    for batch in random_batches(config, groups):
        mask = batch["loss_mask"].zero_()
        for row in range(len(mask)):
            sample = groups.data_rank * per_rank + number % per_rank
            mask[row, {0: slice(13, None), 4: slice(2, 14)}.get(sample, slice(0, 0))] = 1
            number += 1
        yield batch


def losses(run: TinyRun, num_steps: int) -> list[tuple[float, float]]:
    for index in range(len(run.batches)):
        run.batches[index] = answers(run.config, run.groups)
    return run.train(num_steps)


@pytest.mark.parametrize(
    "config",
    in_rotation(
        [
            pytest.param(training(TIED), id="whole"),
            pytest.param(training(TIED, 3), id="part"),
            pytest.param(SEPARATE, id="separate"),
        ]
    ),
)
def test_every_scored_token_weighs_the_same(run_ranks: Any, config: RunConfig) -> None:
    def alone() -> list[tuple[float, float]]:
        if config is not SEPARATE:
            return naive_steps(config, 2, answers)[0]
        # The reference for separate documents is one microbatch of all sequences.
        with tiny_run(on(config, micro_batch_size=8)) as run:
            return losses(run, 2)

    def main() -> dict[str, list[tuple[float, float]]]:
        found = {}
        for name, axes in LAYOUTS.items():
            with tiny_run(on(config, **axes)) as run:
                found[name] = losses(run, 2)
        return found

    (expected,) = run_ranks(alone, 1)
    for of_rank in run_ranks(main, 2):
        for name, rows in of_rank.items():
            for row, reference in zip(rows, expected, strict=True):
                assert row == pytest.approx(reference, rel=TOLERANCE), name


def test_evaluation_sums_scored_tokens(run_ranks: Any) -> None:
    def main() -> list[tuple[float, float]]:
        found = []
        for axes in ({"micro_batch_size": 8 // 2}, *LAYOUTS.values()):
            with tiny_run(on(training(TIED), **axes)) as run:
                train = run.config.train
                loss = evaluation_loss(
                    run.chunks,
                    [answers(run.config, run.groups) for _ in run.chunks],
                    run.groups,
                    num_microbatches=train.global_batch_size // (train.micro_batch_size * run.groups.data_size),
                    micro_batch_size=train.micro_batch_size,
                    sequence_length=train.sequence_length,
                )
                found.append((loss.mean, loss.num_tokens))
        return found

    for of_rank in run_ranks(main, 2):
        assert [count for _, count in of_rank] == [15.0] * 6
        assert [mean for mean, _ in of_rank] == pytest.approx([of_rank[0][0]] * 6, rel=TOLERANCE)


def test_a_step_in_which_nothing_is_scored_has_no_gradient(run_ranks: Any) -> None:
    def main() -> tuple[float, float]:
        with tiny_run(on(training(TIED))) as run:
            batch = next(random_batches(run.config, run.groups))
            batch["loss_mask"].zero_()
            run.batches[0] = iter([batch] * 2)
            ((loss, norm),) = run.train(1)
            return loss, norm

    ((loss, norm),) = run_ranks(main, 1)
    # No loss, rather than one of zero.
    assert math.isnan(loss)
    assert norm == 0.0
