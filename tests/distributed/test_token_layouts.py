"""Memories that are indexed by the token train to the same weights on every layout: banks that several stages hold
copies of, columns that follow the heads, rows that are read once per chunk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import (
    MEMORY,
    SHARED,
    VOCAB_SIZE,
    TinyRun,
    answers_without_a_token,
    build,
    joined,
    on,
    second_steps,
    tiny_run,
)
from torch import Tensor

from megamem.addresses.ngrams import NgramAddressConfig
from megamem.config.memory import MemoryConfig
from megamem.config.model import LatentAttentionConfig, MoEConfig
from megamem.families.engram.config import EngramConfig
from megamem.families.lave.config import LaveConfig
from megamem.families.mome.config import MomeConfig
from megamem.families.move.config import MoveConfig
from megamem.families.ngram_embedding.config import NgramEmbeddingConfig
from megamem.families.residual_ngrams.config import ResidualNgramsConfig
from megamem.families.stem.config import StemConfig
from megamem.families.tide.config import TideConfig
from megamem.families.value_ngrams.config import ValueNgramsConfig
from megamem.parameters.shards import walk_shards
from megamem.placement.spans import PlacementConfig
from pretrain.config.schema import RunConfig
from tests.rotation import in_rotation

# The second shows the weights after the first one's update, and steps by moments.
STEPS = 2
# Tolerance of a weight, against its tensor's largest element on one rank. Engram's gate has a root, whose slope is up to
# 500, here after some eight roundings of a score: which ones they are depends on the machine's vectors.
# `test_layouts_fp64.py` tells rounding from anything else.
TOLERANCE, OF_ROOTS = 1e-5, 500 * 8 * 2.0**-24
HIDDEN = SHARED.model.hidden_size
VALUES: Any = {"vocab_size": VOCAB_SIZE, "value_dim": 16, "num_gate_heads": 2}
LATENTS = LatentAttentionConfig(latent_dim=12, rotary_dim=4)
QUERIES_TOO = replace(LATENTS, query_latent_dim=20)
OF_HEADS: Any = {"num_heads": 2, "value_dim": 8, "gate_channels": 7}
OF_LATENTS: Any = {"vocab_size": VOCAB_SIZE, "value_dim": 12, "num_gate_heads": 4}
EVERY_BLOCK = PlacementConfig()
NGRAMS = EngramConfig(value_dim=8, heads_per_order=2, rows_per_head=29, placement=PlacementConfig(every=2))
KINDS: dict[str, MemoryConfig | None] = {
    "move": MoveConfig(num_slots=3, **VALUES),
    "move, ungated": MoveConfig(num_slots=2, gated_standard_path=False, **VALUES),
    "lave": LaveConfig(gated_standard_path=True, placement=PlacementConfig(every=2), **VALUES),
    "tide": TideConfig(vocab_size=VOCAB_SIZE, value_dim=HIDDEN, num_tables=3),
    "tide, no gain, every second block": TideConfig(
        vocab_size=VOCAB_SIZE, value_dim=HIDDEN, num_tables=2, row_gain=False, placement=PlacementConfig(every=2)
    ),
    "move by n-grams": MoveConfig(
        num_slots=2,
        value_dim=16,
        num_gate_heads=2,
        address=NgramAddressConfig(max_order=3, heads_per_order=2, num_rows=60),
    ),
    "lave by n-grams, documents apart": LaveConfig(
        value_dim=16, num_gate_heads=2, address=NgramAddressConfig(rules="xor", max_order=3, num_rows=41)
    ),
    "value n-grams": ValueNgramsConfig(
        value_dim=4,
        gate_channels=7,
        address=NgramAddressConfig(max_order=3, heads_per_order=2, num_rows=60),
        placement=PlacementConfig(every=2),
    ),
    "value n-grams, one head of two, documents apart": ValueNgramsConfig(
        value_dim=4,
        into="one_head",
        gate_bias=True,
        address=NgramAddressConfig(heads_per_order=2, num_rows=60, signs="ids", num_sign_patterns=21),
    ),
    "value n-grams, one key/value head": ValueNgramsConfig(
        value_dim=8, address=NgramAddressConfig(max_order=3, num_rows=60)
    ),
    "ngram embedding": NgramEmbeddingConfig(
        value_dim=8,
        amplification="layer_norm",
        address=NgramAddressConfig(rules="polynomial", max_order=3, heads_per_order=2, num_rows=40, boundary_id=8),
    ),
    "residual n-grams": ResidualNgramsConfig(
        value_dim=HIDDEN // 2,
        address=NgramAddressConfig(rules="xor", max_order=3, num_rows=41, signs="hashed", num_sign_patterns=19),
    ),
    "residual n-grams without signs, every second block": ResidualNgramsConfig(
        value_dim=HIDDEN, address=NgramAddressConfig(max_order=3, num_rows=60), placement=PlacementConfig(every=2)
    ),
    "mome": MomeConfig(vocab_size=VOCAB_SIZE, num_slots=5, active_slots=3, one_table=True, **OF_HEADS),
    "mome by n-grams, routed by values": MomeConfig(
        num_slots=3,
        router_input="value",
        address=NgramAddressConfig(max_order=3, num_rows=60),
        placement=PlacementConfig(every=2),
        **OF_HEADS,
    ),
    "mome, one key/value head": MomeConfig(vocab_size=VOCAB_SIZE, active_slots=1, **OF_HEADS | {"num_heads": 1}),
    "mome routed by values, one key/value head": MomeConfig(
        vocab_size=VOCAB_SIZE, router_input="value", **OF_HEADS | {"num_heads": 1}
    ),
    "tide by n-grams": TideConfig(value_dim=HIDDEN, num_tables=2, address=NgramAddressConfig(max_order=3, num_rows=53)),
    "stem by n-grams": StemConfig(
        value_dim=24, address=NgramAddressConfig(max_order=3, num_rows=60), placement=PlacementConfig(blocks=(1, 3))
    ),
    "stem": StemConfig(vocab_size=VOCAB_SIZE, value_dim=24, placement=PlacementConfig(blocks=(1, 2, 3))),
    "engram": NGRAMS,
    "engram beside experts": NGRAMS,
    "engram beside learned keys": replace(NGRAMS, placement=PlacementConfig(blocks=(0, 2))),
    "engram beside learned keys, experts": replace(NGRAMS, placement=PlacementConfig(blocks=(2,))),
    "engram, documents apart": replace(NGRAMS, placement=PlacementConfig(blocks=(0, 3))),
    "engram, ple": EngramConfig(
        rules="ple",
        value_dim=8,
        heads_per_order=2,
        rows_per_head=29,
        max_order=4,
        boundary_id=8,
        projection_biases=False,
    ),
    "move, one key/value head": MoveConfig(
        num_slots=3, gated_standard_path=False, vocab_size=VOCAB_SIZE, value_dim=8, num_gate_heads=1
    ),
    "move, one key/value head, gated": MoveConfig(num_slots=2, vocab_size=VOCAB_SIZE, value_dim=8, num_gate_heads=2),
    "lave in blocks of learned keys": LaveConfig(**VALUES),
    "move in blocks of engram": MoveConfig(num_slots=2, **VALUES),
    "lave in blocks of stem": LaveConfig(**VALUES),
    # What all blocks read once passes those that have another memory, or none.
    "lave in blocks of residuals": LaveConfig(placement=PlacementConfig(blocks=(0, 1, 3)), **VALUES),
    "tide in blocks of lave": TideConfig(
        vocab_size=VOCAB_SIZE, value_dim=HIDDEN, num_tables=2, placement=PlacementConfig(blocks=(1, 2))
    ),
    "latents without a memory": None,
    "latents, of queries too, move": MoveConfig(
        num_slots=2, mixed_into="latents", placement=PlacementConfig(blocks=(1, 2)), **OF_LATENTS
    ),
    "latents, move": MoveConfig(num_slots=3, mixed_into="latents", **OF_LATENTS),
    "latents, move for values alone": MoveConfig(num_slots=2, gated_standard_path=False, **OF_LATENTS),
    "latents, engram": replace(NGRAMS, projection_biases=False),
    "latents, move, no rotary columns": MoveConfig(num_slots=2, mixed_into="latents", **OF_LATENTS),
    "latents, lave": LaveConfig(mixed_into="latents", placement=PlacementConfig(every=2), **OF_LATENTS),
}

TOGETHER: dict[str, tuple[tuple[str, PlacementConfig | None], tuple[str, PlacementConfig | None]]] = {
    "stem beside ngram embedding": (("ngram embedding", None), ("stem", None)),
    "mome beside value n-grams": (
        ("value n-grams", PlacementConfig(blocks=(1, 2))),
        ("mome", PlacementConfig(blocks=(0, 3))),
    ),
    "tide in blocks of move by n-grams": (("move by n-grams", None), ("tide", None)),
    # Both look back, at two tokens and at one.
    "engram beside bigrams, one head of two, documents apart": (
        ("engram, documents apart", None),
        ("value n-grams, one head of two, documents apart", PlacementConfig(blocks=(1, 2))),
    ),
    "tide, no gain, in blocks of mome by n-grams": (
        ("mome by n-grams, routed by values", None),
        ("tide, no gain, every second block", PlacementConfig(blocks=(1, 2))),
    ),
    "move, ungated, beside value n-grams, documents apart": (
        ("value n-grams, one head of two, documents apart", PlacementConfig(blocks=(1, 2))),
        ("move, ungated", PlacementConfig(blocks=(0, 3))),
    ),
    "tide by n-grams in blocks of lave": (("tide by n-grams", PlacementConfig(blocks=(1, 2))), ("lave", EVERY_BLOCK)),
    "latents, lave in blocks of engram": (("latents, engram", None), ("latents, lave", None)),
    "gated move beside value n-grams, one key/value head": (
        ("value n-grams, one key/value head", PlacementConfig(blocks=(1, 2))),
        ("move, one key/value head, gated", PlacementConfig(blocks=(0, 3))),
    ),
    "mome routed by values beside move, one key/value head": (
        ("mome routed by values, one key/value head", PlacementConfig(blocks=(1, 2))),
        ("move, one key/value head", PlacementConfig(blocks=(0, 3))),
    ),
    "stem by n-grams in blocks of mome, one key/value head": (
        ("stem by n-grams", None),
        ("mome, one key/value head", None),
    ),
}
"""Two kinds in one model, each with its blocks, where None are its own: they know nothing of each other but the residual stream,
and a weight's name tells which of them is wrong. Every stage has a layer of each that all of them hold."""
STANDS_FOR: dict[str, tuple[str, ...]] = {
    "move in blocks of engram": ("move", "engram"),
    "lave in blocks of residuals": ("lave", "residual n-grams"),
    # Its other half are blocks that have none.
    "latents, of queries too, move": ("latents without a memory",),
    "tide by n-grams in blocks of lave": ("tide in blocks of lave", "tide by n-grams"),
    # Its block with n-grams has no learned keys, and all have experts.
    "engram beside learned keys, experts": ("engram beside experts",),
} | {
    name: (one, other)
    for name, ((one, _), (other, _)) in TOGETHER.items()
    if name != "tide by n-grams in blocks of lave"
}
"""Kinds that a model has or differs from in nothing that a layout could show."""

HALOS = "tensor 2 x context 2 x memory 2, recomputed"
FULL = "pipeline 2 x virtual 2, recomputed"
SELECTIVE = "tensor 2 x pipeline 2 x virtual 2 x memory 2, selectively recomputed"
LAYOUTS: dict[str, dict[str, Any]] = {
    "tensor 2 x memory 4": {"tensor": 2, "memory": 4},
    # One microbatch: a step of these ranks takes longest, and the other layouts have several.
    "tensor 4": {"tensor": 4, "micro_batch_size": 8},
    "context 2 x memory 2": {"context": 2, "memory": 2},
    # More microbatches than stages: the interleaved schedule has a steady phase only then.
    FULL: {"pipeline": 2, "virtual_pipeline": 2, "micro_batch_size": 1, "recompute": "full"},
    SELECTIVE: {"tensor": 2, "pipeline": 2, "virtual_pipeline": 2, "memory": 2, "recompute": "selective"},
    "pipeline 4": {"pipeline": 4, "micro_batch_size": 2},
    HALOS: {"tensor": 2, "context": 2, "memory": 2, "micro_batch_size": 8, "recompute": "full"},
}
# These meet every axis, on two layouts that have all of them. The others differ from them in a gate, a projection or a
# place, and meet the axis that bears on it: tensor-parallel ranks share their heads, and stages their tables.
EVERYWHERE = (
    "move",
    "lave",
    "tide",
    "stem",
    "latents, move",
    "engram",
    "engram beside learned keys",
    "move by n-grams",
    "value n-grams",
    "ngram embedding",
    "residual n-grams",
    "mome",
)
OF_EVERYWHERE = (
    "move in blocks of engram",
    "lave in blocks of residuals",
    "stem beside ngram embedding",
    "mome beside value n-grams",
    "tide in blocks of move by n-grams",
    "latents, move",
    "engram beside learned keys",
)
"""Models that have them."""
BY_ROW = ("tide", "tide in blocks of move by n-grams", "latents, move")
"""Kinds whose tables are updated by row: read by every block of a chunk at once, and copied on every stage."""
TRIED: dict[str, tuple[str, ...]] = {
    "tensor 2 x memory 4": (
        "move in blocks of engram",
        "residual n-grams without signs, every second block",
        "lave in blocks of learned keys",
    ),
    "tensor 4": (
        "gated move beside value n-grams, one key/value head",
        "mome routed by values beside move, one key/value head",
        "stem by n-grams in blocks of mome, one key/value head",
        "tide by n-grams in blocks of lave",
        "latents, of queries too, move",
        "latents, move for values alone",
        "move in blocks of engram",
        "lave in blocks of stem",
    ),
    "context 2 x memory 2": (
        "move, ungated, beside value n-grams, documents apart",
        "latents, move, no rotary columns",
        "latents, lave in blocks of engram",
    ),
    FULL: (
        "lave in blocks of residuals",
        "tide by n-grams in blocks of lave",
        "stem beside ngram embedding",
        "engram beside bigrams, one head of two, documents apart",
    ),
    SELECTIVE: (
        *OF_EVERYWHERE,
        "move, ungated, beside value n-grams, documents apart",
        "latents, move, no rotary columns",
        "latents, lave in blocks of engram",
    ),
    "pipeline 4": ("latents, move", "engram, ple"),
    HALOS: (
        *OF_EVERYWHERE,
        "tide, no gain, in blocks of mome by n-grams",
        "lave by n-grams, documents apart",
        "engram, ple",
        "engram beside bigrams, one head of two, documents apart",
        "engram beside learned keys, experts",
    ),
}
"""Kinds that are trained on each layout."""
MODELS = tuple(dict.fromkeys(kind for kinds in TRIED.values() for kind in kinds))
PAIRS = in_rotation([(kind, layout) for layout, kinds in TRIED.items() for kind in kinds])
RESUMED = in_rotation(
    [
        "move in blocks of engram",
        "tide in blocks of move by n-grams",
        "stem beside ngram embedding",
        "latents, move",
        "engram beside learned keys",
    ]
)
IN_HOST_MEMORY = in_rotation(["move in blocks of engram", "engram beside learned keys"], 2)
ALONE = tuple(dict.fromkeys([*(kind for kind, _ in PAIRS), *RESUMED, *IN_HOST_MEMORY]))
"""Kinds of this share, which one rank trains too."""


def config_of(kind: str) -> RunConfig:
    model = replace(SHARED.model, memory=None)
    if kind.startswith("latents"):
        latent = QUERIES_TOO if "of queries too" in kind else LATENTS
        if "no rotary columns" in kind:
            latent = replace(latent, rotary_dim=0)
        model = replace(model, num_query_groups=None, latent_attention=latent)
    if "one key/value head" in kind:
        model = replace(model, num_query_groups=1)
    if "experts" in kind:
        model = replace(model, moe=MoEConfig(num_experts=4, top_k=2, expert_ffn_hidden_size=24))
    data = replace(SHARED.data, documents="separate" if "documents apart" in kind else "joined")
    optimizer = replace(SHARED.optimizer, tables="row_wise") if kind in BY_ROW else SHARED.optimizer
    if kind in TOGETHER:
        memory, second = (
            replace(KINDS[of], placement=at) if at is not None else KINDS[of]  # type: ignore[type-var]
            for of, at in TOGETHER[kind]
        )
    else:
        memory, second = KINDS[kind], None
    if "beside learned keys" in kind:
        assert memory is not None
        free = tuple(sorted({0, 1, 2, 3} - set(memory.placement.blocks or ())))[:2]
        second, memory = memory, replace(MEMORY, placement=PlacementConfig(blocks=free))
    if kind in KINDS and "in blocks of" in kind:
        residuals = replace(KINDS["residual n-grams"], placement=PlacementConfig(blocks=(0, 2, 3)))
        others = {"engram": NGRAMS, "stem": KINDS["stem"], "residuals": residuals, "lave": LaveConfig(**VALUES)}
        second, memory = memory, others.get(kind.split()[-1], MEMORY)
    return replace(SHARED, model=replace(model, memory=memory, second_memory=second), optimizer=optimizer, data=data)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_meets_the_axes_that_bear_on_it(kind: str) -> None:
    models = {kind, *(name for name, kinds in STANDS_FOR.items() if kind in kinds)}
    met = {axis for name, kinds in TRIED.items() if models & {*kinds} for axis in LAYOUTS[name]}
    axes = {axis for sizes in LAYOUTS.values() for axis in sizes} - {"micro_batch_size"}
    assert met >= (axes if kind in EVERYWHERE else {"tensor"})


@dataclass(frozen=True)
class Trained:
    """Results of a few steps on one rank.

    Attributes:
        steps: loss and gradient norm of each.
        weights: its shards of the weights after them, with name, place and the shape of the whole.
    """

    steps: list[tuple[float, float]]
    weights: list[tuple[str, tuple[int, ...], tuple[int, ...], Tensor]]

    @property
    def whole_weights(self) -> dict[str, Tensor]:
        """Weights by name, of a rank that holds all shards."""
        whole: dict[str, Tensor] = {}
        for name, offset, shape, weight in self.weights:
            whole.setdefault(name, torch.full(shape, torch.nan))[place_of(offset, weight)] = weight
        return whole


def place_of(offset: tuple[int, ...], shard: Tensor) -> tuple[slice, ...]:
    return tuple(slice(start, start + size) for start, size in zip(offset, shard.shape, strict=True))


def train(run: TinyRun) -> Trained:
    steps = run.train(STEPS)
    shards = [shard for chunk in run.bare for _, shard in walk_shards(chunk.sharded_state_dict())]
    return Trained(
        steps,
        [
            (each.key, tuple(each.global_offset), tuple(each.global_shape), each.data.detach().clone())
            for each in shards
        ],
    )


@pytest.fixture(scope="module")
def trained(run_ranks: Any) -> dict[str, dict[str, list[Trained]]]:
    """Results of every rank, by layout and kind."""
    kinds_on = {layout: [kind for kind, on_it in PAIRS if on_it == layout] for _, layout in PAIRS}

    def main(layouts: Sequence[str]) -> dict[str, dict[str, Trained]]:
        found: dict[str, dict[str, Trained]] = {}
        for name in layouts:
            sizes = LAYOUTS.get(name, {})
            with joined(on(config_of("move"), **sizes)) as groups:
                found[name] = {
                    kind: train(build(on(config_of(kind), **sizes), groups)) for kind in kinds_on.get(name, ALONE)
                }
        return found

    by_rank = [
        *(run_ranks(lambda: main(["one rank"]), 1)),
        *(run_ranks(lambda: main(list(kinds_on)), 4, timeout_s=600)),
    ]
    layouts = dict.fromkeys(name for of_rank in by_rank for name in of_rank)
    return {
        layout: {
            kind: [of_rank[layout][kind] for of_rank in by_rank if kind in of_rank.get(layout, {})] for kind in ALONE
        }
        for layout in layouts
    }


@pytest.mark.parametrize(("kind", "layout"), PAIRS)
def test_steps_are_the_same_on_every_layout(trained: dict[str, Any], kind: str, layout: str) -> None:
    """Losses, norms, and all weights after the steps; every copy of a bank is the same to the bit."""
    (alone,) = trained["one rank"][kind]
    ranks = trained[layout][kind]
    assert len(ranks) == 4
    for (loss, norm), (expected_loss, expected_norm) in zip(ranks[0].steps, alone.steps, strict=True):
        assert loss == pytest.approx(expected_loss, rel=1e-5)
        assert norm == pytest.approx(expected_norm, rel=1e-4)
    expected = alone.whole_weights
    seen: dict[tuple[str, tuple[int, ...]], Tensor] = {}
    for name, offset, _, weight in (shard for rank in ranks for shard in rank.weights):
        error = (weight - expected[name][place_of(offset, weight)]).abs().max() / expected[name].abs().max().clamp_min(
            1e-3
        )
        assert error <= (OF_ROOTS if "engram" in kind else TOLERANCE), name
        assert torch.equal(seen.setdefault((name, offset), weight), weight), f"copies of {name} differ"
    assert {name for name, _ in seen} == set(expected)


def test_rows_of_tokens_that_never_come_are_decayed_and_no_more(run_ranks: Any) -> None:
    """Their gradients and moments are zero: AdamW without decay leaves them, and with it scales them."""

    def main(decay: float) -> tuple[Tensor, Tensor]:
        config = config_of("move")
        memory = replace(KINDS["move"], vocab_size=VOCAB_SIZE + 4)
        config = replace(
            config,
            model=replace(config.model, memory=memory),
            optimizer=replace(config.optimizer, value_weight_decay=decay),
        )
        with tiny_run(config) as run:
            table = run.bare[0].banks["0"].get_parameter("values")
            before = table.detach()[-12:].clone()
            run.train(2)
            return before, table.detach()[-12:].clone()

    kept, after = run_ranks(lambda: main(0.0), 1)[0]
    assert torch.equal(kept, after)
    kept, after = run_ranks(lambda: main(0.5), 1)[0]
    ratio = (after / kept).mean()
    assert 0.99 < ratio < 1
    assert torch.allclose(after, kept * ratio, rtol=1e-5)


@pytest.mark.parametrize("kind", RESUMED)
def test_what_one_layout_saves_another_one_resumes(
    run_ranks: Any, tmp_path: Path, trained: dict[str, Any], kind: str
) -> None:
    layouts = (LAYOUTS["pipeline 4"], LAYOUTS["tensor 2 x memory 4"])
    ranks = run_ranks(lambda: second_steps(config_of(kind), tmp_path, LAYOUTS[SELECTIVE], layouts), 4)
    for steps in ranks[0]:
        for (loss, norm), (expected_loss, expected_norm) in zip(
            steps, trained["one rank"][kind][0].steps[1:], strict=True
        ):
            assert loss == pytest.approx(expected_loss, rel=1e-5)
            assert norm == pytest.approx(expected_norm, rel=1e-4)


@pytest.mark.parametrize("kind", IN_HOST_MEMORY)
def test_tables_in_host_memory_are_stepped_alike(run_ranks: Any, trained: dict[str, Any], kind: str) -> None:
    """The copies on other stages do not count in the norm there either."""
    config = config_of(kind)
    config = replace(config, optimizer=replace(config.optimizer, value_offload="cpu"))

    def main() -> list[tuple[float, float]]:
        with tiny_run(on(config, pipeline=2, micro_batch_size=4)) as run:
            return run.train(STEPS)

    for (loss, norm), (expected_loss, expected_norm) in zip(
        run_ranks(main, 2)[0], trained["one rank"][kind][0].steps, strict=True
    ):
        assert loss == pytest.approx(expected_loss, rel=1e-5)
        assert norm == pytest.approx(expected_norm, rel=1e-4)


def test_a_rank_without_a_token_answers_for_its_columns(run_ranks: Any) -> None:
    """Ranks of a group that has one rank generate do so. Experts are refused there: they are split, too."""
    kinds = in_rotation([kind for kind in MODELS if "experts" not in kind])
    configs = [config_of(kind) for kind in kinds]
    assert run_ranks(lambda: answers_without_a_token(configs), 2) == [len(kinds)] * 2
