"""Models with several residual streams train to the same weights on every layout: streams are sent between stages, with the
weights that they are read with next, cut with their sequences, and made again in backward."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_layouts_fp64 import check
from test_layouts_fp64 import train as train_in_fp64
from test_token_layouts import FULL, HALOS, NGRAMS, OF_ROOTS, SELECTIVE, Trained, place_of, train
from test_token_layouts import KINDS as TOKEN_KINDS
from test_token_layouts import LAYOUTS as TOKEN_LAYOUTS
from tiny_runs import MEMORY, SHARED, answers_without_a_token, build, joined, on, second_steps, tiny_run
from torch import Tensor

from megamem.config.memory import MemoryConfig
from megamem.config.model import LatentAttentionConfig, MoEConfig
from megamem.families.engram.config import EngramConfig
from megamem.families.ultramem.config import UltraMemConfig
from megamem.placement.spans import PlacementConfig
from megamem.residual_streams.config import ResidualStreamsConfig
from pretrain.config.schema import RunConfig
from tests.rotation import in_rotation, named_in_rotation

STREAMS = {
    "mhc": ResidualStreamsConfig(count=3, iterations=4),
    "single pass": ResidualStreamsConfig(kind="single_pass", iterations=4),
    "gated": ResidualStreamsConfig(kind="gated", count=2, rank=12),
    "plain": ResidualStreamsConfig(kind="plain", count=3),
    "static": ResidualStreamsConfig(kind="plain", count=2, dynamic=False),
}
# Chunks of two blocks, for what ties two together.
IN_PAIRS = "tensor 2 x pipeline 2, recomputed"
MIXED_AGAIN = "tensor 2 x pipeline 2, streams mixed again"
LAYOUTS = TOKEN_LAYOUTS | {
    IN_PAIRS: {"tensor": 2, "pipeline": 2, "recompute": "full"},
    MIXED_AGAIN: {"tensor": 2, "pipeline": 2, "recompute_streams": 2},
    # Chunks of one block, of which two are on a stage.
    SELECTIVE: TOKEN_LAYOUTS[SELECTIVE] | {"recompute_streams": 1},
}
# 1e-5 as everywhere; maps of streams add some roundings of their own.
TOLERANCE = 2e-5
PLE = EngramConfig(
    rules="ple",
    value_dim=8,
    heads_per_order=2,
    rows_per_head=29,
    boundary_id=8,
    projection_biases=False,
    placement=PlacementConfig(blocks=(1, 2)),
)


TIED = ("learned keys that join later", "one query", "residual n-grams", "move")


@dataclass(frozen=True)
class Model:
    """A kind of streams with a kind of memory, and more parts of a model."""

    streams: str
    memory: MemoryConfig | None
    parts: dict[str, Any]
    muon: bool = False


MODELS = {
    "mhc": Model("mhc", None, {}),
    "mhc, learned keys, muon": Model("mhc", MEMORY, {}, muon=True),
    "mhc, engram, experts": Model("mhc", NGRAMS, {"moe": MoEConfig(num_experts=4, top_k=2, expert_ffn_hidden_size=24)}),
    "single pass, learned keys that join later": Model(
        "single pass",
        UltraMemConfig(num_keys=12, key_dim=8, value_dim=16, top_k=4, placement=PlacementConfig(spans="0:1/1:1/2:3")),
        {},
    ),
    "single pass, engram": Model("single pass", replace(NGRAMS, conv_kernel=0), {"tied_embeddings": False}),
    "single pass, ngram embedding": Model("single pass", TOKEN_KINDS["ngram embedding"], {}),
    "gated, ple, muon": Model("gated", PLE, {}, muon=True),
    "gated, residual n-grams": Model("gated", TOKEN_KINDS["residual n-grams"], {}),
    "plain, one query": Model("plain", replace(MEMORY, placement=PlacementConfig(query_group=2)), {}),
    "plain, latents, move": Model(
        "plain",
        TOKEN_KINDS["latents, move"],
        {"num_query_groups": None, "latent_attention": LatentAttentionConfig(latent_dim=12, rotary_dim=4)},
    ),
    "static, in place of feed-forwards": Model(
        "static", replace(MEMORY, placement=PlacementConfig(blocks=(1, 3), position="instead")), {}
    ),
}
# One of each kind of streams meets every axis.
EVERYWHERE = (
    "mhc, learned keys, muon",
    "mhc, engram, experts",
    "single pass, engram",
    "gated, ple, muon",
    "plain, latents, move",
    "static, in place of feed-forwards",
)
TRIED: dict[str, tuple[str, ...]] = {
    FULL: ("mhc", "single pass, ngram embedding", "gated, residual n-grams"),
    SELECTIVE: EVERYWHERE,
    IN_PAIRS: ("single pass, learned keys that join later", "plain, one query"),
    MIXED_AGAIN: ("single pass, learned keys that join later", "plain, one query"),
    HALOS: (*EVERYWHERE, "gated, residual n-grams"),
    "pipeline 4": ("mhc", "static, in place of feed-forwards"),
}
PAIRS = in_rotation([(name, layout) for layout, names in TRIED.items() for name in names])
RESUMED_ON = named_in_rotation(
    {
        "mhc, engram, experts": ("pipeline 4", "tensor 2 x memory 4"),
        "single pass, engram": ("pipeline 4",),
        "gated, ple, muon": ("tensor 2 x memory 4",),
    }
)
WITHOUT_A_BLOCK = in_rotation(["mhc, engram, experts", "single pass, ngram embedding"], 2)
ALONE = list(dict.fromkeys([*(name for name, _ in PAIRS), *RESUMED_ON, *WITHOUT_A_BLOCK]))
"""Models of this share, which one rank trains too."""


def config_of(name: str) -> RunConfig:
    model = MODELS[name]
    optimizer = replace(SHARED.optimizer, matrices="muon") if model.muon else SHARED.optimizer
    own = replace(SHARED.model, memory=model.memory, residual_streams=STREAMS[model.streams], **model.parts)
    return replace(SHARED, model=own, optimizer=optimizer)


@pytest.mark.parametrize("name", MODELS)
def test_every_model_meets_the_axes_that_bear_on_it(name: str) -> None:
    met = {axis for layout, names in TRIED.items() if name in names for axis in LAYOUTS[layout]}
    assert met >= ({"tensor", "pipeline", "context", "memory", "recompute"} if name in EVERYWHERE else {"recompute"})


@pytest.fixture(scope="module")
def alone(run_ranks: Any) -> dict[str, list[tuple[Trained, list[str]]]]:
    """Results of one rank, twice, by model, with the weights of sites that have no gradient in the last step."""

    def main() -> dict[str, list[tuple[Trained, list[str]]]]:
        found: dict[str, list[tuple[Trained, list[str]]]] = {}
        with joined(on(config_of("mhc"))) as groups:
            for name, blocks in itertools.product(ALONE, (None, 3)):
                run = build(on(config_of(name), recompute_streams=blocks), groups)
                sites = {k: p for k, p in run.bare[0].named_parameters() if "streams." in k or "streams_end." in k}
                assert sites
                # Maps of plain streams begin at 0, and their norms get a gradient behind the first step.
                of_model = train(run)
                silent = [key for key, weight in sites.items() if not weight.main_grad.any()]
                found.setdefault(name, []).append((of_model, silent))
        return found

    return run_ranks(main, 1)[0]  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def trained(run_ranks: Any) -> dict[str, dict[str, list[Trained]]]:
    """Results of every rank, by layout and model."""

    names_on = {layout: [name for name, on_it in PAIRS if on_it == layout] for _, layout in PAIRS}

    def main() -> dict[str, dict[str, Trained]]:
        found: dict[str, dict[str, Trained]] = {}
        for layout, names in names_on.items():
            sizes = LAYOUTS[layout]
            with joined(on(config_of("mhc"), **sizes)) as groups:
                found[layout] = {name: train(build(on(config_of(name), **sizes), groups)) for name in names}
        return found

    by_rank = run_ranks(main, 4, timeout_s=600)
    return {
        layout: {name: [of_rank[layout][name] for of_rank in by_rank] for name in names}
        for layout, names in names_on.items()
    }


@pytest.mark.parametrize(("name", "layout"), PAIRS)
def test_steps_are_the_same_on_every_layout(
    alone: dict[str, Any], trained: dict[str, Any], name: str, layout: str
) -> None:
    """Losses, norms, and all weights after the steps; copies of a weight are the same to the bit."""
    (of_one, _), ranks = alone[name][0], trained[layout][name]
    for (loss, norm), (expected_loss, expected_norm) in zip(ranks[0].steps, of_one.steps, strict=True):
        assert loss == pytest.approx(expected_loss, rel=1e-5)
        assert norm == pytest.approx(expected_norm, rel=1e-4)
    expected = of_one.whole_weights
    seen: dict[tuple[str, tuple[int, ...]], Tensor] = {}
    for key, offset, _, weight in (shard for rank in ranks for shard in rank.weights):
        error = (weight - expected[key][place_of(offset, weight)]).abs().max() / expected[key].abs().max().clamp_min(
            1e-3
        )
        assert error <= (2 * OF_ROOTS if "engram" in name or "ple" in name else TOLERANCE), (key, float(error))
        assert torch.equal(seen.setdefault((key, offset), weight), weight), f"copies of {key} differ"
    assert {key for key, _ in seen} == set(expected)


@pytest.mark.parametrize("name", ALONE)
def test_runs_repeat_to_the_bit(alone: dict[str, Any], name: str) -> None:
    """Streams are kept in the first one, and in the second mixed again."""
    (first, _), (again, _) = alone[name]
    assert first.steps == again.steps
    assert all(torch.equal(one[-1], other[-1]) for one, other in zip(first.weights, again.weights, strict=True))


@pytest.mark.parametrize("name", ALONE)
def test_every_weight_of_sites_gets_a_gradient(alone: dict[str, Any], name: str) -> None:
    assert [silent for _, silent in alone[name]] == [[], []]


def test_sent_streams_are_those_of_one_rank_to_ten_digits(run_ranks: Any) -> None:
    """In fp64, by plain gradient steps: what is left of a difference in fp32 is rounding and nothing else."""
    # Copies of a table, and what ties two blocks together, are not for these stages.
    # By these steps a model of learned keys has all that one without a memory has.
    names = in_rotation([name for name in MODELS if name.split(", ")[-1] not in TIED and name != "mhc"])
    layouts: dict[str, dict[str, Any]] = {
        "stages": {"pipeline": 2, "virtual_pipeline": 2, "recompute": "full"},
        "cut": {"context": 2, "memory": 2},
    }
    of_one = run_ranks(lambda: [train_in_fp64(config_of(name)) for name in names], 1)[0]
    for sizes in layouts.values():
        by_rank = run_ranks(
            lambda s=sizes: [train_in_fp64(on(config_of(name), **s)) for name in names], 2, timeout_s=300
        )
        for expected, *of_model in zip(of_one, *by_rank, strict=True):
            check([shard for of_rank in of_model for shard in of_rank], expected)


@pytest.mark.parametrize("name", WITHOUT_A_BLOCK)
def test_stages_without_a_block_pass_streams_on(run_ranks: Any, alone: dict[str, Any], name: str) -> None:
    """Streams start behind the embedding alone, and end before the loss alone."""
    config = on(config_of(name), pipeline=4, micro_batch_size=2)
    config = replace(config, parallel=replace(config.parallel, pipeline_layout="E|tt|tt|L"))

    def main() -> list[tuple[float, float]]:
        with tiny_run(config) as run:
            return run.train(2)

    expected = alone[name][0][0].steps
    for steps in run_ranks(main, 4):
        for (loss, norm), (expected_loss, expected_norm) in zip(steps, expected, strict=True):
            assert loss == pytest.approx(expected_loss, rel=1e-5)
            assert norm == pytest.approx(expected_norm, rel=1e-4)


@pytest.mark.parametrize("name", in_rotation(["single pass, engram", "gated, ple, muon"], 2))
def test_bf16_streams_are_sent_as_they_are(run_ranks: Any, name: str) -> None:
    """Weights in fp32 travel as their bits: the loss over stages is that of one rank to the bit, and so is the next one but
    for the order in which gradients are summed."""
    config = config_of(name)
    # A tied embedding's gradient is the sum of two, each rounded on its stage.
    config = replace(
        config,
        model=replace(config.model, tied_embeddings=False),
        train=replace(config.train, precision="bf16"),
    )

    def main(sizes: dict[str, Any]) -> list[tuple[float, float]]:
        with tiny_run(on(config, micro_batch_size=2, **sizes)) as run:
            return run.train(2)

    of_one, staged = run_ranks(lambda: main({}), 1)[0], run_ranks(lambda: main({"pipeline": 2}), 2)[0]
    assert staged[0][0] == of_one[0][0]
    assert staged[0][1] == pytest.approx(of_one[0][1], rel=1e-6)
    assert staged[1] == pytest.approx(of_one[1], rel=1e-4)


@pytest.mark.parametrize("name", RESUMED_ON)
def test_what_one_layout_saves_another_one_resumes(
    run_ranks: Any, tmp_path: Path, alone: dict[str, Any], name: str
) -> None:
    # Each model is cut one way again, and one of them both ways.
    layouts = [LAYOUTS[layout] for layout in RESUMED_ON[name]]
    ranks = run_ranks(lambda: second_steps(config_of(name), tmp_path, LAYOUTS[SELECTIVE], layouts), 4)
    for steps in ranks[0]:
        (loss, norm), (expected_loss, expected_norm) = steps[0], alone[name][0][0].steps[1]
        assert loss == pytest.approx(expected_loss, rel=1e-5)
        assert norm == pytest.approx(expected_norm, rel=1e-4)


def test_a_rank_without_a_token_answers_for_its_columns(run_ranks: Any) -> None:
    names = [name for name in MODELS if MODELS[name].memory is not None and "experts" not in name]
    configs = [config_of(name) for name in names]
    assert run_ranks(lambda: answers_without_a_token(configs), 2) == [len(names)] * 2
