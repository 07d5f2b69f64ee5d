"""Auxiliary losses and usage metrics are the same on every layout, with accumulation and with recomputation."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
from tiny_runs import MEMORY, SHARED, TinyRun, on, tiny_run

from megamem.layers.usage import LayerMetrics, UsageCollector
from megamem.placement.spans import PlacementConfig
from pretrain.config.schema import RunConfig
from pretrain.engine.step import evaluation_loss
from pretrain.train.loop import take_step
from tests.rotation import named_in_rotation

STEPS = 2
WITH_LOSSES = replace(
    SHARED,
    model=replace(
        SHARED.model,
        memory=replace(
            MEMORY, sharing=SHARED.model.memory.sharing, tucker_penalty_weight=3.0, key_balance_weight=2.0, num_heads=2
        ),
    ),
    # Not clipped, so that the gradient norm shows the losses' size.
    optimizer=replace(SHARED.optimizer, clip_grad=0.0),
)


def cut(micro_batch_size: int) -> RunConfig:
    """The samples in microbatches of so many."""
    return replace(WITH_LOSSES, train=replace(WITH_LOSSES.train, micro_batch_size=micro_batch_size))


OTHERS: dict[str, tuple[int, Callable[[], RunConfig]]] = {
    "one rank, recomputed": (1, lambda: on(WITH_LOSSES, recompute="full")),
    "one rank, a sequence at a time": (1, lambda: cut(1)),
    "data 2, two sequences at a time": (2, lambda: cut(2)),
    "tensor 2 x memory 2, recomputed": (2, lambda: on(WITH_LOSSES, tensor=2, memory=2, recompute="full")),
    "context 2": (2, lambda: on(WITH_LOSSES, context=2)),
    "tensor 2 x context 2 x memory 4, recomputed": (
        4,
        lambda: on(WITH_LOSSES, tensor=2, context=2, memory=4, recompute="full"),
    ),
    "tensor 2, pipeline 2, recomputed": (4, lambda: on(WITH_LOSSES, tensor=2, pipeline=2, recompute="full")),
}
TRIED = named_in_rotation(OTHERS, parts=2)
LAYOUTS = {"one rank": (1, lambda: WITH_LOSSES), **TRIED}


@dataclass(frozen=True)
class Outcome:
    """Results of one layout: per step, and of the last step's memory."""

    losses: list[float]
    grad_norms: list[float]
    auxiliary: list[dict[str, dict[int, float]]]
    usage: dict[int, LayerMetrics]


def run_steps(run: TinyRun) -> Outcome:
    train, memory = run.config.train, run.config.model.memory
    assert memory is not None
    collector = UsageCollector(
        [layer for chunk in run.bare for layer in chunk.memory_layers],
        num_blocks=run.config.model.num_layers,
        observed=memory.observed,
        stage_group=run.groups.megatron.tp_dp_cp,
        device=run.groups.device,
    )
    sizes: dict[str, Any] = {
        "num_microbatches": run.run.num_microbatches,
        "micro_batch_size": train.micro_batch_size,
        "sequence_length": train.sequence_length,
    }
    results = []
    for step in range(STEPS):
        if step == STEPS - 1:
            collector.start()
        results.append(take_step(run.run, run.batches)[0])
    # Not counted: an evaluation between a step and the end of its observation.
    evaluation_loss(run.chunks, run.batches, run.groups, **sizes)
    return Outcome(
        [result.loss.mean for result in results],
        [result.norms.main for result in results],
        [result.auxiliary for result in results],
        collector.finish(),
    )


@pytest.fixture(scope="module")
def outcomes(run_ranks: Any) -> dict[str, Outcome]:
    by_size: dict[int, list[str]] = {}
    for name, (num_ranks, _) in LAYOUTS.items():
        by_size.setdefault(num_ranks, []).append(name)
    found: dict[str, Outcome] = {}
    for num_ranks, names in by_size.items():

        def main(names: list[str] = names) -> list[Outcome]:
            results = []
            for name in names:
                with tiny_run(LAYOUTS[name][1]()) as run:
                    results.append(run_steps(run))
            return results

        found |= dict(zip(names, run_ranks(main, num_ranks)[0], strict=True))
    return found


@pytest.mark.parametrize("name", TRIED)
def test_losses_and_gradients_are_the_same_on_every_layout(outcomes: dict[str, Outcome], name: str) -> None:
    reference, outcome = outcomes["one rank"], outcomes[name]
    assert outcome.losses == pytest.approx(reference.losses, rel=1e-5)
    assert outcome.grad_norms == pytest.approx(reference.grad_norms, rel=1e-4)


@pytest.mark.parametrize("name", TRIED)
def test_reported_losses_are_the_same_on_every_layout(outcomes: dict[str, Outcome], name: str) -> None:
    for reference, of_step in zip(outcomes["one rank"].auxiliary, outcomes[name].auxiliary, strict=True):
        assert set(reference) == {"tucker_penalty", "key_balance"}
        for loss, by_block in reference.items():
            assert set(by_block) == {0, 1, 2, 3}
            assert of_step[loss] == pytest.approx(by_block, rel=1e-5)


@pytest.mark.parametrize("name", TRIED)
def test_usage_is_the_same_on_every_layout(outcomes: dict[str, Outcome], name: str) -> None:
    reference, usage = outcomes["one rank"].usage, outcomes[name].usage
    assert set(reference) == set(usage) == {0, 1, 2, 3}
    for block, figures in reference.items():
        for metric, value in figures.items():
            if metric == "singular_values":
                for ours, theirs in zip(usage[block][metric], value, strict=True):  # type: ignore[arg-type]
                    assert ours == pytest.approx(theirs, rel=1e-4)
            else:
                # A rounding may swap the last of the retrieved entries: one of 128 x 8 reads.
                assert usage[block][metric] == pytest.approx(value, rel=3e-3, abs=1e-4), metric


def test_usage_counts_each_token_of_one_step_once(outcomes: dict[str, Outcome]) -> None:
    """128 tokens read 8 rows each of 288: all reads in one row would give log 288, an even spread over all about 0.1."""
    for figures in outcomes["one rank"].usage.values():
        assert isinstance(figures["coverage"], float)
        assert isinstance(figures["kl_to_uniform"], float)
        assert 0.3 < figures["coverage"] <= 1
        assert 0 < figures["kl_to_uniform"] < math.log(288)


def test_the_losses_weights_change_the_gradient_but_not_the_loss(run_ranks: Any) -> None:
    def main() -> dict[str, tuple[float, float]]:
        found = {}
        for name, config in {"with": WITH_LOSSES, "without": without_losses()}.items():
            with tiny_run(config) as run:
                found[name] = run.train(1)[0]
        return found

    (found,) = run_ranks(main, 1)
    assert found["with"][0] == found["without"][0]
    assert found["with"][1] > 1.05 * found["without"][1]


def without_losses() -> RunConfig:
    memory = WITH_LOSSES.model.memory
    assert memory is not None
    silent = replace(memory, tucker_penalty_weight=0.0, key_balance_weight=0.0)
    return replace(WITH_LOSSES, model=replace(WITH_LOSSES.model, memory=silent))


def test_a_stage_without_memory_reports_that_of_the_others(run_ranks: Any) -> None:
    memory = replace(MEMORY, placement=PlacementConfig(blocks=(3,)), key_balance_weight=2.0)
    config = replace(WITH_LOSSES, model=replace(WITH_LOSSES.model, memory=memory))

    def main() -> list[Outcome]:
        outcomes = []
        for memory in (1, 2):
            with tiny_run(on(config, pipeline=2, memory=memory)) as run:
                outcomes.append(run_steps(run))
        return outcomes

    ranks = run_ranks(main, 4)
    assert all(of_rank == ranks[0] for of_rank in ranks)
    whole, split = ranks[0]
    for outcome in (whole, split):
        assert set(outcome.usage) == {3}
        assert [set(by_block) for step in outcome.auxiliary for by_block in step.values()] == [{3}] * STEPS
    assert split.losses == pytest.approx(whole.losses, rel=1e-5)
    assert split.grad_norms == pytest.approx(whole.grad_norms, rel=1e-5)


def test_losses_that_are_off_are_not_reported(run_ranks: Any) -> None:
    def main() -> Outcome:
        with tiny_run(without_losses()) as run:
            return run_steps(run)

    assert run_ranks(main, 1)[0].auxiliary == [{}] * STEPS
