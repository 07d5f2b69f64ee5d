"""Pipelines whose chunks hold different numbers of blocks, or none, train what one rank trains, and share its
checkpoints.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_checkpoint_layouts import STATE, read_all
from test_layouts import Shard, assembled, shards
from tiny_runs import PRIVATE, SHARED, on, save_run, tiny_run

from megamem.placement.spans import PlacementConfig
from pretrain.checkpoint.folder import read_state
from pretrain.checkpoint.run_entries import restore_run
from pretrain.config.schema import RunConfig
from pretrain.config.validate import validate
from tests.rotation import named_in_rotation

NUM_STEPS = 2
# Tolerance of a loss or a gradient norm, against one rank.
TOLERANCE = 1e-5

assert PRIVATE.model.memory is not None
TIED = replace(PRIVATE, model=replace(PRIVATE.model, tied_embeddings=True))
LAST_ONLY = replace(
    PRIVATE,
    model=replace(PRIVATE.model, memory=replace(PRIVATE.model.memory, placement=PlacementConfig(blocks=(3,)))),
)
"""One memory, in the last block."""
MODELS = {"shared": SHARED, "private": PRIVATE, "tied": TIED, "last only": LAST_ONLY}


@dataclass(frozen=True)
class Uneven:
    """A model on stages of different depth."""

    model: str
    text: str
    pipeline: int = 2
    virtual_pipeline: int = 1
    tensor: int = 1
    data: int = 1
    recompute: Any = "none"

    @property
    def num_ranks(self) -> int:
        return self.tensor * self.pipeline * self.data

    @property
    def config(self) -> RunConfig:
        config = on(
            MODELS[self.model],
            tensor=self.tensor,
            pipeline=self.pipeline,
            virtual_pipeline=self.virtual_pipeline,
            micro_batch_size=2,
            recompute=self.recompute,
        )
        return replace(config, parallel=replace(config.parallel, pipeline_layout=self.text))


LAYOUTS = {
    "three blocks and one": Uneven("private", "Ettt|tL"),
    "tied, one block and three": Uneven("tied", "Et|tttL"),
    "embedding alone": Uneven("shared", "E|ttttL"),
    "loss alone, tied": Uneven("shared", "Ett|tt|L", pipeline=3),
    "loss alone, recomputed": Uneven("private", "Et|ttt|L", pipeline=3, recompute="full"),
    "a stage without memory": Uneven("last only", "Ettt|tL"),
    "interleaved": Uneven("private", "Et|t|tt|L", virtual_pipeline=2),
    "interleaved, tied, embedding and loss alone": Uneven("tied", "E|ttt|t|L", virtual_pipeline=2),
    "interleaved, shared": Uneven("shared", "E|tt|tt|L", virtual_pipeline=2),
    "tensor 2": Uneven("private", "Ettt|tL", tensor=2),
    "tensor 2, embedding alone": Uneven("shared", "E|ttttL", tensor=2, recompute="full"),
    "data 2, interleaved": Uneven("tied", "Ett|t|t|L", virtual_pipeline=2, data=2),
    "pipeline 4, tied": Uneven("shared", "E|tt|tt|L", pipeline=4),
}
TRIED = named_in_rotation(LAYOUTS)


@dataclass(frozen=True)
class Outcome:
    """Results of one rank."""

    history: list[tuple[float, float]]
    initial: list[Shard]
    final: list[Shard]


def outcome(config: RunConfig) -> Outcome:
    with tiny_run(config) as run:
        initial = shards(run.bare)
        return Outcome(run.train(NUM_STEPS), initial, shards(run.bare))


@pytest.fixture(scope="module")
def one_rank(run_ranks: Any) -> dict[str, Outcome]:
    models = {layout.model for layout in TRIED.values()}
    (found,) = run_ranks(lambda: {model: outcome(MODELS[model]) for model in sorted(models)}, 1, timeout_s=600)
    return dict(found)


@pytest.fixture(scope="module")
def outcomes(run_ranks: Any) -> dict[str, list[Outcome]]:
    """Outcomes by layout and rank."""
    result: dict[str, list[Outcome]] = {}
    for num_ranks in sorted({layout.num_ranks for layout in TRIED.values()}):
        names = [name for name, layout in TRIED.items() if layout.num_ranks == num_ranks]
        by_rank = run_ranks(
            lambda names=names: [outcome(LAYOUTS[name].config) for name in names], num_ranks, timeout_s=900
        )
        result |= {name: [of_rank[index] for of_rank in by_rank] for index, name in enumerate(names)}
    return result


@pytest.mark.parametrize("name", TRIED)
def test_losses_norms_and_weights_equal_those_of_one_rank(
    outcomes: dict[str, list[Outcome]], one_rank: dict[str, Outcome], name: str
) -> None:
    layout, ranks = LAYOUTS[name], outcomes[name]
    validate(layout.config, layout.num_ranks)
    reference = one_rank[layout.model]
    for of_rank in ranks:
        assert of_rank.history == ranks[0].history
    for actual, expected in zip(ranks[0].history, reference.history, strict=True):
        assert actual == pytest.approx(expected, rel=TOLERANCE)
    before, after = assembled(reference.initial), assembled(reference.final)
    initial = assembled([shard for of_rank in ranks for shard in of_rank.initial])
    final = assembled([shard for of_rank in ranks for shard in of_rank.final])
    assert initial.keys() == before.keys()
    assert not [key for key in before if not torch.equal(initial[key], before[key])]
    errors = {
        key: float((final[key] - after[key]).abs().max() / (after[key] - before[key]).abs().max()) for key in after
    }
    assert not {key: error for key, error in errors.items() if not error <= 1e-2}


@pytest.mark.parametrize("name", TRIED)
def test_every_block_is_on_one_chunk(outcomes: dict[str, list[Outcome]], name: str) -> None:
    """Every block is also on the stage that the text says."""
    layout = LAYOUTS[name]
    parts = layout.text.split("|")
    stage_of, block = {}, 0
    for index, part in enumerate(parts):
        for _ in range(part.count("t")):
            stage_of[block], block = index % layout.pipeline, block + 1
    per_stage = layout.tensor * layout.data
    for rank, of_rank in enumerate(outcomes[name]):
        held = {int(s.key.split(".")[2]) for s in of_rank.final if s.key.startswith("decoder.layers.")}
        assert held == {block for block, stage in stage_of.items() if stage == rank // per_stage}


PAIRS = {
    "shared": [
        (on(SHARED, pipeline=2, micro_batch_size=1), LAYOUTS["embedding alone"].config),
        (LAYOUTS["interleaved, shared"].config, on(SHARED, tensor=2, micro_batch_size=1)),
    ],
    "tied": [
        (on(TIED, pipeline=2, virtual_pipeline=2, micro_batch_size=1), LAYOUTS["tied, one block and three"].config),
        (LAYOUTS["interleaved, tied, embedding and loss alone"].config, on(TIED, pipeline=2, micro_batch_size=1)),
        (LAYOUTS["tied, one block and three"].config, LAYOUTS["interleaved, tied, embedding and loss alone"].config),
    ],
}


@pytest.mark.parametrize("model", PAIRS)
def test_checkpoints_move_between_even_and_uneven_layouts(run_ranks: Any, tmp_path: Path, model: str) -> None:
    pairs = PAIRS[model]

    def main() -> list[list[tuple[float, float]]]:
        histories = []
        for number, (source, target) in enumerate(pairs):
            with tiny_run(source) as run:
                run.train(1)
                save_run(run.config, STATE, run.chunks, run.optimizer, tmp_path / f"{number} source")
                histories.append(run.train(1))
            with tiny_run(replace(target, seed=99)) as run:
                saved = read_state(tmp_path / f"{number} source" / "step_00000001")
                assert saved.run == STATE
                restore_run(saved, run.chunks, run.optimizer)
                save_run(run.config, STATE, run.chunks, run.optimizer, tmp_path / f"{number} target")
        return histories

    histories = run_ranks(main, 2, timeout_s=600)[0]
    for history in histories:
        for here, there in zip(history, histories[0], strict=True):
            assert here == pytest.approx(there, rel=TOLERANCE)
    for number in range(len(pairs)):
        written, rewritten = (read_all(tmp_path / f"{number} {end}" / "step_00000001") for end in ("source", "target"))
        assert written.keys() == rewritten.keys()
        assert not [key for key in written if not torch.equal(written[key], rewritten[key])]
