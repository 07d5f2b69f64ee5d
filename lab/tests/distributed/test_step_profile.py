"""Marks around the parts of a real step: they are all met, they add up, and the step computes what it does without
them.
"""

from __future__ import annotations

import gc
import time
import weakref
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from tiny_runs import PRIVATE, SHARED, VOCAB_SIZE, TinyRun, joined, on, tiny_run
from torch.utils.flop_counter import FlopCounterMode

from lab.bench import step_profile
from lab.bench.part_costs import Part, part_costs
from lab.bench.step_profile import StepPhase, measure_steps, profiled_steps
from lab.bench.timeline import Range, RangeTimes, Timeline
from megamem.config.model import ModelConfig, MoEConfig
from megamem.families.memory_plus.config import MemoryPlusConfig
from megamem.families.move.config import MoveConfig
from megamem.families.peer.config import PeerConfig
from parallel.exchange import Exchange
from pretrain.config.schema import RunConfig
from pretrain.engine.chunks import unwrap

NUM_STEPS = 2


def memory(config: RunConfig, **changed: Any) -> RunConfig:
    assert config.model.memory is not None
    return replace(config, model=replace(config.model, memory=replace(config.model.memory, **changed)))


def model(config: RunConfig, **changed: Any) -> RunConfig:
    return replace(config, model=replace(config.model, **changed))


ONE_RANK = {
    "v2": SHARED,
    "recomputed": on(SHARED, recompute="full"),
    "two heads, no pre-values": PRIVATE,
    "balance loss": memory(SHARED, key_balance_weight=0.1),
    "naive": replace(SHARED, train=replace(SHARED.train, kernels="naive")),
    "product keys": model(SHARED, memory=MemoryPlusConfig(num_keys=12, key_dim=8, value_dim=16, top_k=4)),
    "peer": model(SHARED, memory=PeerConfig(num_keys=12, key_dim=8, value_dim=32, top_k=4)),
    "offloaded": replace(SHARED, optimizer=replace(SHARED.optimizer, value_offload="cpu")),
    "dense": model(SHARED, memory=None),
    "experts": model(SHARED, memory=None, moe=MoEConfig(num_experts=4, top_k=2, expert_ffn_hidden_size=16)),
}
TWO_RANKS = {
    "memory 2": on(SHARED, memory=2),
    "tensor 2": on(SHARED, tensor=2, memory=2),
    "rows for the rank's own heads": on(
        model(SHARED, memory=MoveConfig(num_slots=2, vocab_size=VOCAB_SIZE, value_dim=16)), tensor=2, memory=2
    ),
    "pipeline 2": on(SHARED, pipeline=2),
    "interleaved": on(PRIVATE, pipeline=2, virtual_pipeline=2, micro_batch_size=2),
}


@dataclass(frozen=True)
class Profile:
    """Results of one configuration's steps.

    Attributes:
        intervals: times of the marked steps.
        wall_s: seconds that they took by the test's own clock.
        same: the steps computed what unmarked ones do.
        clean: no mark is left afterwards.
    """

    intervals: RangeTimes
    wall_s: float
    same: bool
    clean: bool


def profile(config: RunConfig) -> Profile:
    with tiny_run(config) as run:
        expected = run.train(1 + 2 * NUM_STEPS)
    with tiny_run(config) as run:
        before = attributes(run)
        history = run.train(1)
        started = time.perf_counter()
        intervals = profiled_steps(
            run.chunks, run.optimizer, Timeline(torch.device("cpu")), lambda: history.extend(run.train(1)), NUM_STEPS
        )
        wall_s = time.perf_counter() - started
        after = attributes(run)
        history += run.train(NUM_STEPS)
    return Profile(intervals, wall_s, history == expected, before == after)


def attributes(run: TinyRun) -> list[tuple[object, ...]]:
    """Identities of everything that marks are put on."""
    found: list[tuple[object, ...]] = [(id(vars(Exchange)[name]),) for name in ("gather", "to_columns", "to_tokens")]
    owners: list[Any] = [run.optimizer, *run.optimizer.chained_optimizers, run.bare[0].config]
    for chunk in run.chunks:
        owners += [*chunk.expert_parallel_buffers, *chunk.expert_parallel_bucket_groups, *unwrap(chunk).modules()]
    for owner in owners:
        names = ("timers", "finalize_model_grads_func", "kernels", "lookup", "side_stream")
        found.append((set(vars(owner)) - {"current_microbatch"}, [id(vars(owner).get(name)) for name in names]))
    return found


@pytest.fixture(scope="module")
def profiles(run_ranks: Any) -> dict[str, Profile]:
    """Profiles of rank 0."""
    on_one = run_ranks(lambda: {name: profile(config) for name, config in ONE_RANK.items()}, 1)[0]
    on_two = run_ranks(lambda: {name: profile(config) for name, config in TWO_RANKS.items()}, 2)[0]
    result: dict[str, Profile] = on_one | on_two
    return result


@pytest.mark.parametrize("name", [*ONE_RANK, *TWO_RANKS])
def test_parts_add_up_and_change_nothing(name: str, profiles: dict[str, Profile]) -> None:
    found = profiles[name]
    assert found.same
    assert found.clean
    assert all(seconds >= 0 for seconds in found.intervals.seconds.values())
    assert 0 < sum(found.intervals.seconds.values()) <= found.wall_s
    assert found.intervals.num_steps == NUM_STEPS
    assert {where.phase for where in found.intervals.seconds} <= set(StepPhase)
    assert {where.part for where in found.intervals.seconds} <= {"", *Part}


def per_step(found: Profile) -> Counter[Range]:
    assert all(number % NUM_STEPS == 0 for number in found.intervals.entries.values())
    return Counter({where: number // NUM_STEPS for where, number in found.intervals.entries.items()})


def passes(reads: int, *, has_pre: bool = True, recomputed: bool = False) -> Counter[Range]:
    """Entries into the parts of `reads` lookups per step."""
    gathers = {Part.GATHER_SUM, Part.GATHER_DOT} if has_pre else {Part.GATHER_SUM}
    forward = {Part.KEYS, Part.SELECTION, Part.SCORES, Part.ROWS, Part.WEIGHTING, Part.OTHER} | gathers
    backward = forward - {Part.SELECTION, Part.ROWS}
    counts = Counter({Range(StepPhase.FORWARD, part): reads for part in forward})
    counts.update({Range(StepPhase.BACKWARD, part): reads for part in backward})
    counts[Range(StepPhase.FORWARD, Part.PROJECTIONS)] = 2 * reads
    counts[Range(StepPhase.BACKWARD, Part.PROJECTIONS)] = (2 if has_pre else 1) * reads
    # Both tables of two layers are added up as one, but where each block has a backward pass of its own.
    counts[Range(StepPhase.BACKWARD, Part.TABLE_GRADIENT)] = (2 if recomputed else 1) * reads
    if recomputed:
        counts.update(
            {
                Range(StepPhase.BACKWARD, where.part): n
                for where, n in list(counts.items())
                if where.phase == StepPhase.FORWARD
            }
        )
    return counts


def of_passes(counts: Counter[Range]) -> Counter[Range]:
    return Counter(
        {
            s: n
            for s, n in counts.items()
            if s.phase in (StepPhase.FORWARD, StepPhase.BACKWARD) and s.part not in ("", Part.EXCHANGE)
        }
    )


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # 4 layers x 2 microbatches.
        ("v2", passes(8)),
        ("recomputed", passes(8, recomputed=True)),
        ("two heads, no pre-values", passes(8, has_pre=False)),
        ("balance loss", passes(8)),
        ("offloaded", passes(8)),
        # A microbatch per rank.
        ("memory 2", passes(4)),
        ("tensor 2", passes(8)),
        # Half of the layers.
        ("pipeline 2", passes(4)),
        # Twice the microbatches.
        ("interleaved", passes(8, has_pre=False)),
        ("dense", Counter()),
        ("experts", Counter()),
    ],
)
def test_every_part_is_entered_as_often_as_it_runs(
    name: str, expected: Counter[Range], profiles: dict[str, Profile]
) -> None:
    assert of_passes(per_step(profiles[name])) == expected


def test_phases_of_a_step(profiles: dict[str, Profile]) -> None:
    found = per_step(profiles["v2"])
    phases = {where.phase: number for where, number in found.items() if not where.part}
    assert phases == {
        StepPhase.FORWARD: 2,
        StepPhase.BACKWARD: 2,
        StepPhase.REDUCTION: 1,
        StepPhase.CLIPPING: 3,
        StepPhase.OPTIMIZER: 1,
    }
    once = {
        where: number
        for where, number in found.items()
        if where.part and where.phase not in (StepPhase.FORWARD, StepPhase.BACKWARD)
    }
    assert once == {
        Range(StepPhase.REST, Part.SINGULAR_VECTORS): 1,
        Range(StepPhase.REST, Part.ZEROING): 1,
        # Reduced, and divided by the number of tokens.
        Range(StepPhase.REDUCTION, Part.TABLE_REDUCTION): 2,
        Range(StepPhase.OPTIMIZER, Part.TABLE_STEP): 1,
    }
    assert Range(StepPhase.MESSAGES, "") in per_step(profiles["pipeline 2"])


def test_reading_for_heads_is_marked_in_both_passes(profiles: dict[str, Profile]) -> None:
    found = of_passes(per_step(profiles["rows for the rank's own heads"]))
    # 4 layers x 2 microbatches.
    assert {found[Range(phase, Part.WEIGHTING)] for phase in (StepPhase.FORWARD, StepPhase.BACKWARD)} == {8}


def test_without_a_memory_no_part_is_met(profiles: dict[str, Profile]) -> None:
    for name in ("dense", "experts"):
        assert not any(where.part for where in profiles[name].intervals.seconds)


def test_naive_gathers_keep_their_table_gradient_inside(profiles: dict[str, Profile]) -> None:
    found = of_passes(per_step(profiles["naive"]))
    expected = passes(8)
    del expected[Range(StepPhase.BACKWARD, Part.TABLE_GRADIENT)]
    assert found == expected


def test_the_exchange_is_marked_in_both_passes(profiles: dict[str, Profile]) -> None:
    """Five collectives forward, four backward."""
    found = per_step(profiles["memory 2"])
    assert (found[Range(StepPhase.FORWARD, Part.EXCHANGE)], found[Range(StepPhase.BACKWARD, Part.EXCHANGE)]) == (
        5 * 4,
        4 * 4,
    )
    assert Part.EXCHANGE not in {where.part for where in per_step(profiles["v2"])}


def test_models_are_gone_when_they_are_measured(run_ranks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next one needs the memory of the device."""
    names = ("v2", "dense", "experts")

    def measured(config: RunConfig) -> tuple[int, int, int]:
        models: list[weakref.ref[Any]] = []

        class Watched(step_profile.SyntheticRun):
            def __init__(self, *arguments: Any) -> None:
                super().__init__(*arguments)
                models.extend(weakref.ref(part) for part in (*self.chunks, self.optimizer, self.chunks[0].buffers[0]))

        monkeypatch.setattr(step_profile, "SyntheticRun", Watched)
        with joined(config) as groups:
            (times,) = measure_steps([model(config, vocab_size=VOCAB_SIZE)], groups, rounds=3, steps=2)
        gc.collect()
        return len(times.step_s), times.marked.num_steps, sum(model() is not None for model in models)

    found = run_ranks(lambda: {name: measured(ONE_RANK[name]) for name in names}, 1)[0]
    assert found == dict.fromkeys(names, (3, 6, 0))


def test_matrix_products_cost_what_the_formulas_say(run_ranks: Any) -> None:
    """Against PyTorch's own count of what the layers' methods do, forward and backward."""

    def counted(config: RunConfig) -> dict[str, int]:
        sums: Counter[str] = Counter()
        with tiny_run(config) as run:
            for layer in run.bare[0].memory_layers:
                x = torch.randn(64, config.model.hidden_size, requires_grad=True)
                values = torch.randn(64, layer.memory.lookup.bins * layer.memory.value_dim, requires_grad=True)
                for part, compute in (
                    (Part.KEYS, lambda: sum(scores.sum() for scores in layer.key_scores(x))),  # noqa: B023
                    (Part.PROJECTIONS, lambda: layer.project(values, x).sum()),  # noqa: B023
                    (Part.PROJECTIONS, lambda: pre.sum() if (pre := layer.pre_input(x)) is not None else x.sum()),  # noqa: B023
                ):
                    with FlopCounterMode(display=False) as counter:
                        compute().backward()
                    sums[part] += counter.get_total_flops()
        return dict(sums)

    configs = {name: ONE_RANK[name] for name in ("v2", "two heads, no pre-values", "product keys")}
    found = run_ranks(lambda: {name: counted(config) for name, config in configs.items()}, 1)[0]
    for name, config in configs.items():
        tokens = config.train.global_batch_size * config.train.sequence_length
        costs = part_costs(config, 1)
        for part in (Part.KEYS, Part.PROJECTIONS):
            assert found[name][part] * tokens / 64 == costs[part].flops


def test_bytes_of_tables() -> None:
    """The bytes by hand: 128 tokens, 4 layers of 4 rows with 16 + 8 columns, 2 banks of 2 x 12^2 rows."""
    costs = part_costs(SHARED, 1)
    reads = 128 * 4 * 4
    assert costs[Part.GATHER_SUM].num_bytes == 2 * reads * 16 * 4
    assert costs[Part.GATHER_DOT].num_bytes == 2 * reads * 8 * 4
    assert costs[Part.TABLE_GRADIENT].num_bytes == reads * 24 * 8
    elements = 2 * (2 * 144) * 24
    assert costs[Part.TABLE_STEP].num_bytes == elements * 28
    assert costs[Part.ZEROING].num_bytes == elements * 4
    assert Part.EXCHANGE not in costs
    split = part_costs(on(SHARED, memory=2), 2)
    assert split[Part.GATHER_SUM].num_bytes == reads * 16 * 4
    assert split[Part.ZEROING].num_bytes == elements * 2
    assert split[Part.EXCHANGE].num_bytes
    bf16 = part_costs(replace(SHARED, train=replace(SHARED.train, precision="bf16")), 1)
    assert bf16[Part.TABLE_STEP].num_bytes == elements * 30
    assert bf16[Part.GATHER_SUM].num_bytes == reads * 16 * 4
    assert part_costs(replace(SHARED, model=ModelConfig()), 1) == {}
    assert Part.TABLE_STEP not in part_costs(ONE_RANK["offloaded"], 1)
