"""Gradients of the rows that a step reads make the update that dense ones make, to the bit: losses, norms, weights and
state, of every family. Of more than two replicas and copies, whose sums dense gradients add up in another order, they are
close.

Batches are so small that most rows of a table are not read in a step, and some in none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from test_checkpoint_layouts import read_all
from test_kinds_layouts import KINDS
from test_layouts import shards
from test_token_layouts import config_of as of_tokens
from tiny_runs import PRIVATE, SHARED, build, joined, on, tiny_run
from torch import Tensor

from kernels.common.row_gradient import RowGradient, distinct_rows
from megamem.config.model import ModelConfig
from megamem.placement.spans import PlacementConfig
from pretrain.config.schema import RunConfig
from pretrain.config.table_gradients import with_chosen_gradients
from pretrain.config.validate import validate
from pretrain.engine.tables.row_gradients import row_gradient_of
from pretrain.errors import ConfigError
from tests.rotation import in_rotation

NUM_STEPS = 3
# Layouts differ in the sums of a step alone: the second one reads what the first has made of rows and moments.
STEPS_ON_LAYOUTS = 2
MODELS: dict[str, ModelConfig] = {
    "shared": SHARED.model,
    "private": PRIVATE.model,
    **{kind: replace(SHARED.model, memory=memory) for kind, memory in KINDS.items() if "," not in kind},
    **{
        kind: of_tokens(kind).model
        for kind in (
            "move",
            "lave",
            "tide",
            "stem",
            "engram",
            "engram, ple",
            "move by n-grams",
            "ngram embedding",
            "residual n-grams",
            "mome",
            "mome by n-grams, routed by values",
        )
    },
    "two families": of_tokens("engram beside learned keys").model,
}
assert MODELS["move"].memory is not None
# One reader in the first of two stages, and two in the second.
UNEVEN = replace(MODELS["move"].memory, placement=PlacementConfig(blocks=(0, 2, 3)))
MODELS["move, unevenly"] = replace(MODELS["move"], memory=UNEVEN)
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, {"micro_batch_size": 4}),
    "one rank, two microbatches, recomputed": (1, {"micro_batch_size": 2, "recompute": "full"}),
    "memory 2 of rows": (2, {"memory": 2, "memory_rows": 2, "micro_batch_size": 2}),
    "tensor 2 x memory 4, 2 of rows": (4, {"tensor": 2, "memory": 4, "memory_rows": 2, "micro_batch_size": 1}),
    "pipeline 2 x virtual 2 x memory 2": (
        4,
        {"pipeline": 2, "virtual_pipeline": 2, "memory": 2, "micro_batch_size": 1},
    ),
    "context 2 x memory 2": (2, {"context": 2, "memory": 2, "micro_batch_size": 2}),
    "pipeline 2": (2, {"pipeline": 2, "micro_batch_size": 2}),
}
# With two replicas of each part of a table; "data 4" has four.
REPLICAS: dict[str, tuple[int, dict[str, Any]]] = {
    "data 2": (2, {"micro_batch_size": 1}),
    "context 2": (2, {"context": 2, "micro_batch_size": 2}),
    "tensor 2 x data 2 x memory 2": (4, {"tensor": 2, "memory": 2, "micro_batch_size": 1}),
    "data 4 x memory 2 of rows": (4, {"memory": 2, "memory_rows": 2, "micro_batch_size": 1}),
    "pipeline 2 x virtual 2 x data 2": (4, {"pipeline": 2, "virtual_pipeline": 2, "micro_batch_size": 1}),
    "pipeline 2 x data 2": (4, {"pipeline": 2, "micro_batch_size": 1}),
    "data 4": (4, {"micro_batch_size": 1}),
}
TRIED: dict[str, tuple[str, ...]] = {
    "one rank": tuple(kind for kind in MODELS if kind != "move, unevenly"),
    "one rank, two microbatches, recomputed": ("ultramem", "engram"),
    "memory 2 of rows": ("shared", "ultramem"),
    "tensor 2 x memory 4, 2 of rows": ("shared",),
    # Token memories have a copy of their bank on every stage.
    "pipeline 2 x virtual 2 x memory 2": ("private", "tide"),
    "context 2 x memory 2": ("stem", "two families", "move by n-grams", "mome"),
    "pipeline 2": (
        "tide",
        "residual n-grams",
        "move, unevenly",
        "lave",
        "mome by n-grams, routed by values",
    ),
}

# Rows of tokens are not split. The others meet one kind at least on each of these.
TRIED_WITH_REPLICAS: dict[str, tuple[str, ...]] = {
    "data 2": ("shared", "move"),
    "context 2": ("move",),
    "tensor 2 x data 2 x memory 2": ("shared", "move"),
    "data 4 x memory 2 of rows": ("ultramem",),
    "pipeline 2 x virtual 2 x data 2": ("private",),
    "pipeline 2 x data 2": ("move, unevenly",),
    "data 4": ("shared",),
}
assert TRIED_WITH_REPLICAS.keys() == REPLICAS.keys()


def config_of(
    model: ModelConfig, table_gradients: Literal["dense", "rows"], precision: Literal["fp32", "bf16"]
) -> RunConfig:
    optimizer = replace(
        SHARED.optimizer, tables="row_wise", table_gradients=table_gradients, value_weight_decay=0.0, beta2=0.9
    )
    train = replace(SHARED.train, precision=precision, global_batch_size=4, sequence_length=8)
    return replace(SHARED, model=model, optimizer=optimizer, train=train)


@dataclass(frozen=True)
class Trained:
    """Results of a rank: loss and norm of each step, weights, and state of the tables by the name of its entry."""

    steps: Sequence[object]
    weights: dict[str, Tensor]
    state: dict[str, Tensor]


def trained(config: RunConfig, groups: Any, num_steps: int) -> Trained:
    run = build(config, groups)
    steps = run.train(num_steps)
    entries = run.optimizer.sharded_state_dict([chunk.sharded_state_dict() for chunk in run.bare])
    state = {key: entry.data.clone() for key, entry in entries.items() if ".row_" in key}
    return Trained(steps, {shard.key: shard.data.clone() for shard in shards(run.bare)}, state)


def differences(one: Trained, other: Trained) -> list[str]:
    assert one.weights.keys() == other.weights.keys()
    assert one.state.keys() == other.state.keys()
    found = [name for name in one.weights if not torch.equal(one.weights[name], other.weights[name])]
    found += [name for name in one.state if not torch.equal(one.state[name], other.state[name])]
    return found if one.steps == other.steps else [*found, f"{one.steps} {other.steps}"]


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_rows_make_the_update_that_dense_gradients_make(run_ranks: Any, num_ranks: int) -> None:
    num_steps = NUM_STEPS if num_ranks == 1 else STEPS_ON_LAYOUTS
    cases: list[tuple[str, str, Any]] = [
        (layout, kind, "fp32" if number % 2 else "bf16")
        for layout, kinds in TRIED.items()
        for number, kind in enumerate(kinds)
        if LAYOUTS[layout][0] == num_ranks
    ]

    def main() -> dict[tuple[str, ...], tuple[list[str], float]]:
        found = {}
        # Two ranks read copies of a bank on two stages, rows that are split, and tokens of both: none is like another.
        for layout, kind, precision in cases if num_ranks == 2 else in_rotation(cases):
            ways: Any = ("dense", "rows")
            configs = [on(config_of(MODELS[kind], way, precision), **LAYOUTS[layout][1]) for way in ways]
            validate(configs[1], num_ranks)
            with joined(configs[0]) as groups:
                dense, rows = (trained(config, groups, num_steps) for config in configs)
            last = torch.cat([part for key, part in rows.state.items() if ".row_last_update." in key])
            found[layout, kind] = differences(dense, rows), float((last < num_steps).float().mean())
        return found

    for by_rank in run_ranks(main, num_ranks):
        assert {names: different for names, (different, _) in by_rank.items() if different} == {}
        # Of the larger tables' rows many were not read in the last step, or in none.
        assert all(
            stale > 0.1 for (_, kind), (_, stale) in by_rank.items() if kind in ("shared", "private", "ultramem")
        )


def test_no_gradient_is_dense_and_a_resumed_run_is_the_straight_one(run_ranks: Any, tmp_path: Path) -> None:
    """Killed behind a save, on another layout, and by dense gradients: the same bits; and AdamW goes on with moments as
    of the save."""
    rows = config_of(SHARED.model, "rows", "bf16")
    dense = config_of(SHARED.model, "dense", "bf16")

    def straight() -> list[str]:
        with tiny_run(rows) as run:
            run.train(2)
            run.save(tmp_path)
            tables = [table for bank in run.bare[0].own_banks for table in bank.parameters()]
            assert all(table.grad is None and not hasattr(table, "main_grad") for table in tables)
            gradients = [row_gradient_of(table) for table in tables]
            assert all(gradient is not None and gradient.sums is None for gradient in gradients)
            run.train(1)
            expected = {shard.key: shard.data.clone() for shard in shards(run.bare)}
        different = []
        for config in (rows, dense):
            with tiny_run(config) as run:
                run.resume(tmp_path / "step_00000002")
                run.train(1)
                found = {shard.key: shard.data for shard in shards(run.bare)}
                different += [key for key in expected if not torch.equal(found[key], expected[key])]
        return different

    assert run_ranks(straight, 1) == [[]]
    elements = on(replace(dense, optimizer=replace(dense.optimizer, tables="adamw")), memory=2, micro_batch_size=2)

    def to_elements() -> None:
        with tiny_run(elements) as run:
            run.resume(tmp_path / "step_00000002")
            run.save(tmp_path / "elements")

    run_ranks(to_elements, 2)
    before, after = read_all(tmp_path / "step_00000002"), read_all(tmp_path / "elements" / "step_00000002")
    names = [name.removeprefix("optimizer.state.row_last_update.") for name in before if ".row_last_update." in name]
    assert len(names) == 4
    for name in names:
        moments, last = (before[f"optimizer.state.{part}.{name}"] for part in ("row_exp_avg_sq", "row_last_update"))
        assert set(last.tolist()) == {0.0, 1.0, 2.0}
        current = moments.double() * 0.9 ** (2 - last.double())
        of_elements = after[f"optimizer.state.exp_avg_sq.{name}"].double()
        assert torch.allclose(of_elements, current.unsqueeze(1).expand_as(of_elements), rtol=1e-6, atol=0)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_replicas_update_the_rows_that_any_of_them_read(run_ranks: Any, tmp_path: Path, num_ranks: int) -> None:
    """As dense gradients do, in the same checkpoint: two addends have one sum. A norm counts each row once, in another order."""
    cases: list[tuple[str, str, Any]] = [
        (layout, kind, "fp32" if number else "bf16")
        for layout, kinds in TRIED_WITH_REPLICAS.items()
        for number, kind in enumerate(kinds)
        if REPLICAS[layout][0] == num_ranks
    ]

    def main() -> dict[tuple[str, str], tuple[list[str], float, bool]]:
        found = {}
        for layout, kind, precision in in_rotation(cases):
            ways: Any = ("dense", "rows")
            configs = [on(config_of(MODELS[kind], way, precision), **REPLICAS[layout][1]) for way in ways]
            validate(configs[1], num_ranks)
            with joined(configs[0]) as groups:
                runs = [build(config, groups) for config in configs]
                dense, rows = (torch.tensor(run.train(STEPS_ON_LAYOUTS), dtype=torch.float64) for run in runs)
                saved = [run.save(tmp_path / f"{layout} {kind} {way}") for run, way in zip(runs, ways, strict=True)]
                dist.barrier()
            tensors = [read_all(path) for path in saved] if dist.get_rank() == 0 else [{}, {}]
            tensors[1] = {name: part for name, part in tensors[1].items() if ".scale." not in name}
            same = tensors[0].keys() == tensors[1].keys()
            different = [name for name in tensors[0] if not torch.equal(*(each[name] for each in tensors))]
            found[layout, kind] = different, float((rows / dense - 1).abs().max()), same
        return found

    by_rank = run_ranks(main, num_ranks)
    for (layout, kind), (different, of_steps, same) in by_rank[0].items():
        assert same
        # In another order a sum has another last bit.
        assert layout in ("data 4", "pipeline 2 x data 2") or different == [], (layout, kind)
        # 1.2e-8 on one processor, less on others: products round as their libraries choose.
        assert of_steps < 3e-8, (layout, kind)
    # Every replica has the same norms, and losses.
    assert len({str(sorted((key, of_steps) for key, (_, of_steps, _) in rank.items())) for rank in by_rank}) == 1


def test_a_run_goes_on_with_other_replicas(run_ranks: Any, tmp_path: Path) -> None:
    """Saved by two replicas, loaded by one and by four, and saved again: the same tensors."""
    config = config_of(SHARED.model, "rows", "bf16")
    config = replace(config, optimizer=replace(config.optimizer, value_weight_decay=0.5))

    def go_on(source: str | None, target: str, micro_batch_size: int) -> None:
        with tiny_run(on(config, micro_batch_size=micro_batch_size)) as run:
            if source is None:
                run.train(2)
            else:
                run.resume(tmp_path / source / "step_00000002")
            run.save(tmp_path / target)

    run_ranks(lambda: go_on(None, "two", 2), 2)
    run_ranks(lambda: go_on("two", "one", 4), 1)
    run_ranks(lambda: go_on("one", "four", 1), 4)
    first, *others = (read_all(tmp_path / name / "step_00000002") for name in ("two", "one", "four"))
    for other in others:
        assert first.keys() == other.keys()
        assert [name for name in first if not torch.equal(first[name], other[name])] == []


def test_copies_go_on_as_the_straight_run_and_on_one_stage(run_ranks: Any, tmp_path: Path) -> None:
    """A checkpoint of two stages with a copy each has one, which a resumed run goes on with to the bit."""
    config = config_of(MODELS["tide"], "rows", "bf16")
    config = replace(config, optimizer=replace(config.optimizer, value_weight_decay=0.5))
    saved = tmp_path / "two" / "step_00000002"

    def of_two_stages() -> None:
        stages = on(config, pipeline=2, micro_batch_size=1)
        with tiny_run(stages) as run:
            run.train(2)
            run.save(tmp_path / "two")
            run.train(1)
            run.save(tmp_path / "straight")
        with tiny_run(stages) as run:
            run.resume(saved)
            run.train(1)
            run.save(tmp_path / "resumed")

    def of_one() -> None:
        with tiny_run(on(config, micro_batch_size=1)) as run:
            run.resume(saved)
            run.save(tmp_path / "one")

    run_ranks(of_two_stages, 2)
    run_ranks(of_one, 1)
    for one, other in (("straight/step_00000003", "resumed/step_00000003"), ("two/step_00000002", "one/step_00000002")):
        first, second = read_all(tmp_path / one), read_all(tmp_path / other)
        assert any(".scale." in name for name in first)
        assert first.keys() == second.keys()
        assert [name for name in first if not torch.equal(first[name], second[name])] == []


def test_copies_of_which_other_rows_are_chosen_have_dense_gradients() -> None:
    config = on(config_of(MODELS["mome"], "rows", "fp32"), pipeline=2, micro_batch_size=1)
    with pytest.raises(
        ConfigError, match=r"table_gradients is rows, and model\.memory\.kind is mome, .* give each layer a table"
    ):
        validate(config, 2)
    taken = with_chosen_gradients(replace(config, optimizer=replace(config.optimizer, table_gradients="auto")))
    assert taken.optimizer.table_gradients == "dense"
    validate(taken, 2)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        # The tables' rate is 6e-3 at most.
        ({"optimizer": {"value_weight_decay": 167.0}}, ("is 1 or more", "value_weight_decay below 166.667")),
        ({"train": {"kernels": "naive"}}, ("train.kernels is naive", "train.kernels: auto")),
    ],
    ids=["decay", "twins"],
)
def test_what_cannot_have_rows_is_refused(change: dict[str, Any], words: tuple[str, ...]) -> None:
    config = config_of(SHARED.model, "rows", "fp32")
    config = replace(config, train=replace(config.train, **change.get("train", {})))
    config = replace(config, optimizer=replace(config.optimizer, **change.get("optimizer", {})))
    with pytest.raises(ConfigError) as refused:
        validate(config, 1)
    assert all(word in str(refused.value) for word in ("optimizer.table_gradients is rows", *words))
    validate(replace(config, optimizer=replace(config.optimizer, table_gradients="dense")), 1)


def test_rows_without_a_count_are_padded_with_the_first() -> None:
    """As on a GPU, here by a subclass without values to look at: as many rows as there could be."""

    class Uncounted(torch.Tensor):
        pass

    ids = [torch.tensor([[5, 2], [9, 5]]), torch.tensor([2, -1, 7])]
    counted, places = distinct_rows(ids, 8)
    assert counted.rows.tolist() == [2, 5, 7]
    assert [slots.tolist() for slots in places] == [[[1, 0], [-1, 1]], [0, -1, 2]]
    padded, of_padded = distinct_rows([part.as_subclass(Uncounted) for part in ids], 8)
    assert padded.sources is not None
    assert padded.rows.tolist() == [2, 5, 7, 2, 2, 2, 2]
    assert padded.sources.tolist() == [0, 1, 2, 0, 0, 0, 0]
    assert [slots.tolist() for slots in of_padded] == [slots.tolist() for slots in places]
    halved, places = distinct_rows([part.as_subclass(Uncounted) for part in (ids[0], ids[0].flip(0))], 8, repeats=2)
    assert halved.rows.tolist() == [2, 5, 2, 2]
    assert [slots.tolist() for slots in places] == [[[1, 0], [-1, 1]], [[-1, 1], [1, 0]]]
    nobody, (places,) = distinct_rows([torch.tensor([8, -3]).as_subclass(Uncounted)], 8)
    assert nobody.rows.tolist() == [7, 7]
    assert places.tolist() == [-1, -1]
    assert RowGradient(8, 2).sums is None
