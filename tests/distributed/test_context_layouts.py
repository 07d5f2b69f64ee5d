"""Whole models whose sequences are cut, attended to in every way, with joined and separate documents: those of one rank;
and separate documents are those of a model that sees each of them alone.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny_runs import PRIVATE, SHARED, VOCAB_SIZE, joined, on, random_batches, tiny_run
from torch import Tensor

from megamem.attention.documents import DOCUMENT_BOUNDS
from megamem.attention.rotary_config import RotaryScalingConfig
from megamem.families.engram.config import EngramConfig
from megamem.model import MemoryGPTModel
from megamem.placement.spans import PlacementConfig
from pretrain.config.context_ways import WAYS
from pretrain.config.schema import DataConfig, RunConfig
from pretrain.engine.build import build_chunks

STEPS = 2
NGRAMS = replace(
    SHARED,
    model=replace(
        SHARED.model,
        memory=EngramConfig(value_dim=8, heads_per_order=2, rows_per_head=29, placement=PlacementConfig(blocks=(0, 2))),
    ),
)
"""N-grams and convolutions that look back across cuts, but not across documents."""
SCALING = RotaryScalingConfig("yarn", factor=16.0, original_length=16, beta_fast=2.0, beta_slow=0.1)
CUT: dict[str, tuple[RunConfig, dict[str, Any]]] = {
    "context 4": (SHARED, {"context": 4}),
    "tensor 2 x context 2, selective recomputation": (
        SHARED,
        {"tensor": 2, "context": 2, "memory": 4, "recompute": "selective"},
    ),
    "pipeline 2 x context 2, full recomputation": (
        PRIVATE,
        {"pipeline": 2, "context": 2, "recompute": "full"},
    ),
}
WHOLE: dict[str, tuple[RunConfig, dict[str, Any]]] = {
    "pipeline 4, full recomputation": (PRIVATE, {"pipeline": 4, "recompute": "full", "micro_batch_size": 2}),
    "pipeline 2 x virtual 2 x data 2": (PRIVATE, {"pipeline": 2, "virtual_pipeline": 2, "micro_batch_size": 2}),
}
LOOKING_BACK: dict[str, tuple[RunConfig, dict[str, Any]]] = {
    "n-grams, tensor 2 x context 2": (NGRAMS, {"tensor": 2, "context": 2})
}
DOCUMENTS = ("joined", "separate")


def with_documents(config: RunConfig, documents: Any) -> RunConfig:
    return replace(config, data=DataConfig(documents=documents))


def cases() -> dict[tuple[str, str, str], RunConfig]:
    """Configurations by layout, way and documents: every pair of two of them."""
    found = {}
    for (i, (name, (model, axes))), (j, way) in itertools.product(enumerate(CUT.items()), enumerate(WAYS)):
        documents = DOCUMENTS[(i + j) % 2]
        config = with_documents(on(model, **axes), documents)
        found[name, way, documents] = replace(config, parallel=replace(config.parallel, context_attention=way))
    # Halos of n-grams are none of attention's, in whatever way that is cut.
    for (name, (model, axes)), way in zip(LOOKING_BACK.items(), WAYS, strict=False):
        config = with_documents(on(model, **axes), "separate")
        found[name, way, "separate"] = replace(config, parallel=replace(config.parallel, context_attention=way))
    for name, (model, axes) in WHOLE.items():
        found[name, "-", "separate"] = with_documents(on(model, **axes), "separate")
    return found


CASES = cases()


def test_every_pair_is_there() -> None:
    cut = [case for case in CASES if case[0] in CUT]
    assert {case[:2] for case in cut} == set(itertools.product(CUT, WAYS))
    assert {case[1:] for case in cut} == set(itertools.product(WAYS, DOCUMENTS))
    assert {case[::2] for case in cut} == set(itertools.product(CUT, DOCUMENTS))


def losses(config: RunConfig) -> list[tuple[float, float]]:
    with tiny_run(config) as run:
        return run.train(STEPS)


@pytest.fixture(scope="module")
def of_one_rank(run_ranks: Any) -> dict[tuple[int, str], list[tuple[float, float]]]:
    (found,) = run_ranks(
        lambda: {
            (id(model), documents): losses(with_documents(model, documents))
            for model in (SHARED, PRIVATE, NGRAMS)
            for documents in DOCUMENTS
        },
        1,
    )
    return found


@pytest.fixture(scope="module")
def of_four(run_ranks: Any) -> list[dict[Any, list[tuple[float, float]]]]:
    return run_ranks(lambda: {case: losses(config) for case, config in CASES.items()}, 4, timeout_s=600)


@pytest.mark.parametrize("case", CASES, ids=", ".join)
def test_losses_and_norms_are_those_of_one_rank(of_four: Any, of_one_rank: Any, case: tuple[str, str, str]) -> None:
    model, _ = {**CUT, **WHOLE, **LOOKING_BACK}[case[0]]
    for of_rank in of_four:
        for row, expected in zip(of_rank[case], of_one_rank[id(model), case[2]], strict=True):
            assert row == pytest.approx(expected, rel=1e-5)


def test_separate_documents_train_another_model(of_one_rank: Any) -> None:
    for model in (SHARED, PRIVATE, NGRAMS):
        together, apart = (of_one_rank[id(model), documents] for documents in DOCUMENTS)
        assert abs(together[0][0] - apart[0][0]) > 1e-4


def logits_and_gradients(
    model: MemoryGPTModel, upstream: list[Tensor], calls: list[tuple[Tensor, Tensor, Tensor | None]]
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Logits [b, s, V] of each call, and the gradients that `upstream`, theirs, makes over all calls."""
    outs = [model(tokens, positions, bounds) for tokens, positions, bounds in calls]
    names, parameters = zip(*model.named_parameters(), strict=True)
    total = torch.stack([(out * grad).sum() for out, grad in zip(outs, upstream, strict=True)]).sum()
    return [out.detach() for out in outs], dict(zip(names, torch.autograd.grad(total, parameters), strict=True))


def test_separate_documents_are_each_alone(run_ranks: Any) -> None:
    """The plain model sees one document after the other; weights, logits and gradients in fp64."""

    def main() -> list[tuple[str, float]]:
        stretched = replace(SHARED, model=replace(SHARED.model, rotary_scaling=SCALING))
        apart = with_documents(stretched, "separate")
        with joined(stretched) as groups:
            batch = next(random_batches(apart, groups))
            make = [
                build_chunks(config, groups, vocab_size=VOCAB_SIZE, dtype=torch.float64)[0]
                for config in (apart, stretched)
            ]
            for model in make:
                model.begin_step()
            packed, plain = make
            tokens, positions = batch["tokens"], batch["position_ids"]
            upstream = torch.randn(*tokens.shape, 64, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
            (out,), gradients = logits_and_gradients(packed, [upstream], [(tokens, positions, batch[DOCUMENT_BOUNDS])])
            alone, grads, expected = [], [], []
            for ids, of_sequence, grad, logits in zip(tokens, positions, upstream, out, strict=True):
                starts = [i for i, position in enumerate(of_sequence.tolist()) if position == 0]
                for start, stop in itertools.pairwise([*starts, len(ids)]):
                    alone.append((ids[None, start:stop], torch.arange(stop - start)[None], None))
                    grads.append(grad[None, start:stop])
                    expected.append(logits[None, start:stop])
            assert len(alone) > 2 * len(tokens)
            outs, summed = logits_and_gradients(plain, grads, alone)
            # As generation asks for logits.
            outs.append(packed(*alone[0]).detach())
            expected.append(expected[0])
            differences = [("logits", float((a - b).abs().max())) for a, b in zip(outs, expected, strict=True)]
            for name, gradient in summed.items():
                differences.append((name, float((gradient - gradients[name]).abs().max() / gradient.abs().max())))
            return differences

    (differences,) = run_ranks(main, 1)
    assert max(difference for _, difference in differences) < 1e-10, differences
