"""Prediction of further tokens: its definition in plain PyTorch, every layout against one rank, and what leaves it out."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_backbone import attention, normalised
from test_layouts import Shard, assembled, digests, shards
from tiny_runs import MEMORY, SHARED, VOCAB_SIZE, build, joined, on, random_batches
from torch import Tensor

from megamem.attention.documents import document_bounds
from megamem.config.model import ModelConfig, MultiTokenConfig
from pretrain.config.schema import DataConfig, RunConfig, TrainConfig
from pretrain.engine.build import build_chunks
from pretrain.engine.step import evaluation_loss
from pretrain.train.loop import take_step
from tests.rotation import in_rotation

NUM_STEPS = 2
TOLERANCE = 1e-5
TIED = replace(SHARED, model=replace(SHARED.model, multi_token_prediction=MultiTokenConfig(depth=2, loss_weight=0.5)))
EACH = replace(TIED, model=replace(TIED.model, memory=MEMORY))
"""A table per block, so that one block may be a chunk."""
UNTIED = replace(
    TIED, model=replace(TIED.model, tied_embeddings=False, multi_token_prediction=MultiTokenConfig(loss_weight=0.5))
)
SEPARATE = replace(TIED, data=replace(TIED.data, documents="separate"))


@dataclass(frozen=True)
class Layout:
    model: RunConfig
    num_ranks: int = 1
    axes: dict[str, Any] = field(default_factory=dict)


LAYOUTS = {
    "tied": Layout(TIED),
    "untied": Layout(UNTIED),
    "separate": Layout(SEPARATE),
    "tied, full recomputation": Layout(TIED, 1, {"recompute": "full", "micro_batch_size": 2}),
    "tied, data 2 x memory 2": Layout(TIED, 2, {"memory": 2, "recompute": "selective"}),
    "untied, tensor 2": Layout(UNTIED, 2, {"tensor": 2, "recompute": "full"}),
    "separate, context 2": Layout(SEPARATE, 2, {"context": 2}),
    "each": Layout(EACH),
    "each, pipeline 2 x virtual 2 x data 2": Layout(
        EACH, 4, {"pipeline": 2, "virtual_pipeline": 2, "micro_batch_size": 2}
    ),
    "tied, pipeline 2 x context 2": Layout(TIED, 4, {"pipeline": 2, "context": 2, "micro_batch_size": 2}),
    "tied, tensor 2 x context 2": Layout(TIED, 4, {"tensor": 2, "context": 2}),
    "separate, tensor 2 x pipeline 2": Layout(SEPARATE, 4, {"tensor": 2, "pipeline": 2, "recompute": "full"}),
}
SPLIT = in_rotation([name for name in LAYOUTS if "," in name])
ALONE = list(dict.fromkeys(name.partition(",")[0] for name in SPLIT))


@dataclass(frozen=True)
class Outcome:
    history: list[tuple[float, float, dict[str, float]]]
    initial: list[Shard]
    final: list[Shard]


def outcome(layout: Layout) -> Outcome:
    config = on(layout.model, **layout.axes)
    with joined(config) as groups:
        run = build(config, groups)
        initial = shards(run.bare)
        rows = [take_step(run.run, run.batches)[1] for _ in range(NUM_STEPS)]
        run.run.complete_weights()
        return Outcome([(row["loss"], row["grad_norm"], row["loss_ahead"]) for row in rows], initial, shards(run.bare))


@pytest.fixture(scope="module")
def outcomes(run_ranks: Any) -> dict[str, list[Outcome]]:
    """Outcomes by layout and rank."""
    result: dict[str, list[Outcome]] = {}
    for num_ranks in sorted({LAYOUTS[name].num_ranks for name in (*ALONE, *SPLIT)}):
        names = [name for name in (*ALONE, *SPLIT) if LAYOUTS[name].num_ranks == num_ranks]

        def main(names: list[str] = names) -> list[Outcome]:
            return [outcome(LAYOUTS[name]) for name in names]

        by_rank = run_ranks(main, num_ranks, timeout_s=600)
        result |= {name: [of_rank[index] for of_rank in by_rank] for index, name in enumerate(names)}
    return result


@pytest.mark.parametrize("name", SPLIT)
def test_losses_and_weights_are_those_of_one_rank(outcomes: dict[str, list[Outcome]], name: str) -> None:
    (reference,) = outcomes[name.partition(",")[0]]
    initial = assembled([shard for of_rank in outcomes[name] for shard in of_rank.initial])
    expected = assembled(reference.initial)
    assert initial.keys() == expected.keys()
    assert all(torch.equal(initial[key], expected[key]) for key in expected)
    for of_rank in outcomes[name]:
        for (loss, norm, ahead), (one_loss, one_norm, one_ahead) in zip(
            of_rank.history, reference.history, strict=True
        ):
            assert (loss, norm) == pytest.approx((one_loss, one_norm), rel=TOLERANCE)
            assert ahead == pytest.approx(one_ahead, rel=TOLERANCE)
    final = assembled([shard for of_rank in outcomes[name] for shard in of_rank.final])
    expected = assembled(reference.final)
    errors = {key: float((final[key] - expected[key]).abs().max() / expected[key].abs().max()) for key in expected}
    assert not {key: error for key, error in errors.items() if not error <= TOLERANCE}


@pytest.mark.parametrize("name", ALONE)
def test_every_parameter_of_the_branch_moves(outcomes: dict[str, list[Outcome]], name: str) -> None:
    (one,) = outcomes[name]
    before, after = assembled(one.initial), assembled(one.final)
    branch = {key for key in before if key.startswith("multi_token.")}
    depth = LAYOUTS[name].model.model.num_branch_blocks
    # Two norms before the projection, one behind the block; of the block two norms, two of heads, and four linears, of
    # which the first of the feed-forward is two entries in a checkpoint, and one name.
    assert len(branch) == depth * (4 + 8)
    assert not {key for key in before if torch.equal(before[key], after[key])}


PLAIN = ModelConfig(
    num_layers=2,
    hidden_size=24,
    num_attention_heads=4,
    num_query_groups=2,
    head_dim=8,
    ffn_hidden_size=20,
    vocab_size_multiple=16,
    multi_token_prediction=MultiTokenConfig(depth=2, loss_weight=0.7),
)


def plain_block(x: Tensor, weights: dict[str, Tensor], prefix: str) -> Tensor:
    read = normalised(x, weights[f"{prefix}input_layernorm.weight"], PLAIN.norm_epsilon)
    x = x + attention(read, weights, PLAIN, f"{prefix}self_attention.")
    read = normalised(x, weights[f"{prefix}pre_mlp_layernorm.weight"], PLAIN.norm_epsilon)
    gate, up = (read @ weights[f"{prefix}mlp.linear_fc1.weight"].T).chunk(2, dim=-1)
    return x + (gate * gate.sigmoid() * up) @ weights[f"{prefix}mlp.linear_fc2.weight"].T


def plain_losses(text: Tensor, counted: Tensor, weights: dict[str, Tensor]) -> list[Tensor]:
    """Summed nats of the next token and of each one further on, of one sequence of s + 1 ids; label i counts or not."""
    embedding, s = weights["embedding.word_embeddings.weight"], len(text) - 1
    x = embedding[text[:s]]
    for layer in range(PLAIN.num_layers):
        x = plain_block(x, weights, f"decoder.layers.{layer}.")
    state = normalised(x, weights["decoder.final_layernorm.weight"], PLAIN.norm_epsilon)
    sums = []
    for n in range(3):
        # Place i < s - n has the token n + 1 places on.
        logits = state @ embedding.T
        nats = logits.logsumexp(-1) - logits[torch.arange(len(state)), text[n + 1 :]]
        sums.append((nats * counted[n:]).sum())
        if n == 2:
            return sums
        prefix, short = f"multi_token.layers.{n}.", state[:-1]
        token = normalised(embedding[text[n + 1 : s]], weights[f"{prefix}embedding_norm.weight"], PLAIN.norm_epsilon)
        before = normalised(short, weights[f"{prefix}hidden_norm.weight"], PLAIN.norm_epsilon)
        x = torch.cat((token, before), -1) @ weights[f"{prefix}projection.weight"].T
        x = plain_block(x, weights, f"{prefix}block.")
        state = normalised(x, weights[f"{prefix}final_layernorm.weight"], PLAIN.norm_epsilon)
    raise AssertionError


def compare_with_the_definition(starts: tuple[tuple[int, ...], ...]) -> tuple[dict[str, float], dict[str, float]]:
    """Errors of sums of losses, and of gradients by parameter, over two sequences in fp64, whose documents begin at
    `starts`: each of several is a text of its own.
    """
    from megamem.backbone.multi_token import stacked, tokens_ahead

    data = DataConfig(documents="packed" if starts == ((0,), (0,)) else "separate")
    config = RunConfig(model=PLAIN, train=TrainConfig(sequence_length=12, loss_chunk_tokens=5), data=data)
    with joined(config) as groups:
        (chunk,) = build_chunks(config, groups, vocab_size=VOCAB_SIZE, dtype=torch.float64)
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for parameter in chunk.parameters():
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.copy_(1 + 0.3 * noise if parameter.dim() == 1 else 0.3 * noise)
        text = torch.randint(VOCAB_SIZE, (2, 13), generator=generator)
        counted = (torch.rand(2, 12, generator=generator) < 0.7).double()
        positions = torch.arange(12).repeat(2, 1)
        for sequence, own in enumerate(starts):
            for start in own[1:]:
                positions[sequence, start:] = torch.arange(12 - start)
                # The label of a document's last token is of the next one.
                counted[sequence, start - 1] = 0
        bounds = None if data.documents == "packed" else document_bounds(positions)
        batch = {"labels": text[:, 1:]}
        batch |= tokens_ahead(batch["labels"], counted, positions, 2)
        chunk.begin_step()
        losses = chunk(text[:, :-1], positions, bounds, labels=stacked(batch, 2))
        (losses * counted).sum().backward()
        weights = {name: p.detach().clone().requires_grad_() for name, p in chunk.named_parameters()}
        documents = [
            plain_losses(
                text[sequence, start : end + (end == 12)], counted[sequence, start : end - (end < 12)], weights
            )
            for sequence, own in enumerate(starts)
            for start, end in itertools.pairwise((*own, 12))
        ]
        sums = [torch.stack(parts).sum() for parts in zip(*documents, strict=True)]
        (sums[0] + 0.7 / 2 * (sums[1] + sums[2])).backward()
        measured = [float((losses * counted).sum()), *chunk.multi_token.sums[:, 0].tolist()]
        of_losses = {str(n): abs(a / float(b) - 1) for n, (a, b) in enumerate(zip(measured, sums, strict=True))}
        goes_on = [positions[:, n:] == positions[:, :-n] + n for n in (1, 2)]
        targets = [int((counted[:, n:] * on).sum()) for n, on in zip((1, 2), goes_on, strict=True)]
        assert chunk.multi_token.sums[:, 1].tolist() == targets
        gradients = {}
        for name, parameter in chunk.named_parameters():
            assert parameter.grad is not None, name
            expected = weights[name].grad
            assert expected is not None, name
            gradients[name] = float((parameter.grad - expected).abs().max() / expected.abs().max())
        return of_losses, gradients


@pytest.mark.parametrize("starts", [((0,), (0,)), ((0, 5), (0, 4, 8))], ids=["one document", "several"])
def test_losses_and_gradients_follow_the_definition(run_ranks: Any, starts: tuple[tuple[int, ...], ...]) -> None:
    """Megatron keeps rotary frequencies in fp32; all else is in fp64."""
    ((of_losses, gradients),) = run_ranks(lambda: compare_with_the_definition(starts), 1)
    assert set(of_losses) == {"0", "1", "2"}
    assert max(of_losses.values()) < 1e-6, of_losses
    assert max(gradients.values()) < 1e-5, gradients


def test_a_resumed_run_is_the_uninterrupted_one(run_ranks: Any, tmp_path: Path) -> None:
    """Bit for bit on its own layout, and from there to another within rounding."""
    config = on(TIED, tensor=2)

    def go_on() -> tuple[list[Any], list[Any], list[Any], list[Any]]:
        with joined(config) as groups:
            whole = build(config, groups)
            expected = whole.train(2)
            path = whole.save(tmp_path)
            expected = whole.train(2)
            resumed = build(config, groups)
            resumed.resume(path)
            return expected, resumed.train(2), digests(shards(whole.bare)), digests(shards(resumed.bare))

    def elsewhere() -> list[Any]:
        other = on(TIED, pipeline=2)
        with joined(other) as groups:
            run = build(other, groups)
            run.resume(next(tmp_path.glob("step_*")))
            return run.train(2)

    for expected, actual, weights, same in run_ranks(go_on, 2):
        assert actual == expected
        assert same == weights
    for history in run_ranks(elsewhere, 2):
        for actual, wanted in zip(history, expected, strict=True):
            assert actual == pytest.approx(wanted, rel=TOLERANCE)


def test_evaluation_leaves_it_out(run_ranks: Any) -> None:
    """The same loss as of the model without it, whose weights begin alike, to the bit."""
    without = replace(TIED, model=replace(TIED.model, multi_token_prediction=None))

    def losses() -> list[float]:
        found = []
        for config in (TIED, without):
            with joined(config) as groups:
                run = build(config, groups)
                loss = evaluation_loss(
                    run.bare,
                    [random_batches(config, groups)],
                    groups,
                    num_microbatches=2,
                    micro_batch_size=4,
                    sequence_length=config.train.sequence_length,
                )
                found.append(loss.mean)
        return found

    ((with_it, without_it),) = run_ranks(losses, 1)
    assert with_it == without_it
