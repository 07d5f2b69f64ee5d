"""Gradients of tables in bf16: what lookups, microbatches, replicas and stages add up is exact where bf16 can hold the
sums, and right in the mean where it cannot; of every family, on every axis; and a resumed run repeats it to the bit."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise, permutations
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from test_kinds_layouts import KINDS
from test_layouts import shards
from test_read_rows import config_of as of_model
from test_token_layouts import config_of as of_tokens
from tiny_runs import PRIVATE, SHARED, TinyRun, build, joined, on, tiny_run
from torch import Tensor, nn

from kernels.common.main_grad import MainGradient
from kernels.common.rounding import LEVELS
from kernels.common.table_gradient import gradient_of
from kernels.common.tables import SegmentAccumulate, table_gradient
from kernels.select import implementation_of
from megamem.config.model import ModelConfig
from megamem.parameters.declaration import Copy, mark_copy
from pretrain.config.schema import RunConfig
from pretrain.config.validate import validate
from pretrain.engine.tables.bf16_gradients import TableRoundings, reduce_scatter
from pretrain.engine.tables.pipeline_copies import sum_over_stages
from tests.rotation import in_rotation

MODELS: dict[str, ModelConfig] = {
    "shared": SHARED.model,
    "private": PRIVATE.model,
    **{kind: replace(SHARED.model, memory=KINDS[kind]) for kind in ("ultramem", "peer")},
    **{kind: of_tokens(kind).model for kind in ("move", "tide", "stem", "mome", "engram")},
}
LAYOUTS: dict[str, tuple[int, dict[str, Any], tuple[str, ...]]] = {
    "one rank": (1, {"micro_batch_size": 4}, tuple(MODELS)),
    "two microbatches, recomputed": (1, {"micro_batch_size": 2, "recompute": "full"}, ("shared", "engram")),
    "data 2": (2, {"micro_batch_size": 1}, ("shared", "move")),
    "data 2, nothing overlaps": (2, {"micro_batch_size": 1, "overlap": False}, ("private", "engram")),
    "pipeline 2": (2, {"pipeline": 2, "micro_batch_size": 1}, ("tide", "shared")),
    "context 2 x memory 2": (2, {"context": 2, "memory": 2, "micro_batch_size": 2}, ("move",)),
    "tensor 2 x data 2 x memory 2 of rows": (
        4,
        {"tensor": 2, "memory": 2, "memory_rows": 2, "micro_batch_size": 1},
        ("shared", "ultramem"),
    ),
    "pipeline 2 x virtual 2 x data 2": (4, {"pipeline": 2, "virtual_pipeline": 2, "micro_batch_size": 1}, ("private",)),
    "pipeline 2 x data 2": (4, {"pipeline": 2, "micro_batch_size": 1}, ("move",)),
    # configs/few_gpus/2.5b_120b_top256_on_8.yaml.
    "tensor 2 x pipeline 4 x memory 2 of rows": (
        8,
        {"tensor": 2, "pipeline": 4, "memory": 2, "memory_rows": 2, "micro_batch_size": 1},
        ("private",),
    ),
}
PAIRS = in_rotation([(layout, kind) for layout, (_, _, kinds) in LAYOUTS.items() for kind in kinds])


def laid_out(config: RunConfig, *, overlap: bool = True, **axes: Any) -> RunConfig:
    config = on(config, **axes)
    return replace(config, parallel=replace(config.parallel, overlap_grad_reduce=overlap, overlap_param_gather=overlap))


def config_of(
    model: ModelConfig, dtype: Literal["fp32", "bf16"], precision: Literal["fp32", "bf16"] = "bf16"
) -> RunConfig:
    config = of_model(model, "dense", precision)
    return replace(config, optimizer=replace(config.optimizer, table_gradient_dtype=dtype, clip_grad=0.0))


def test_lookups_of_a_step_are_rounded_by_numbers_of_their_own() -> None:
    """Again with the next update, and the same ones where a step is taken again."""
    roundings = TableRoundings(seed=3, name="banks.0.values", first=(0, 4), owner=[0, 1])

    def keys_of_step() -> list[int]:
        roundings.begin_step()
        return [roundings.next().key for _ in range(3)]

    first, again = keys_of_step(), keys_of_step()
    roundings.num_updates += 1
    following = keys_of_step()
    assert first == again
    assert len({*first, *following}) == 6
    # A rounding may use the numbers behind its key, too.
    assert min(abs(a - b) for a, b in pairwise(sorted({*first, *following}))) >= LEVELS


@dataclass(frozen=True)
class Step:
    """Results of a rank's first step.

    Attributes:
        loss, norm: figures of the step.
        gradients: this rank's shares of the tables' gradients.
    """

    loss: float
    norm: float
    gradients: list[Tensor]


def first_step(config: RunConfig, groups: Any) -> Step:
    run = build(config, groups)
    ((loss, norm),) = run.train(1)
    return Step(loss, norm, [share.gradient.clone() for rule in run.optimizer.rules for share in rule.shares])


@pytest.mark.parametrize("num_ranks", sorted({LAYOUTS[layout][0] for layout, _ in PAIRS}))
def test_gradients_are_those_in_fp32_to_rounding(run_ranks: Any, num_ranks: int) -> None:
    def main() -> dict[tuple[str, str], tuple[Step, Step]]:
        found = {}
        for layout, kind in PAIRS:
            size, axes, _ = LAYOUTS[layout]
            if size == num_ranks:
                configs = [laid_out(config_of(MODELS[kind], dtype), **axes) for dtype in ("fp32", "bf16")]
                validate(configs[1], num_ranks)
                with joined(configs[0]) as groups:
                    wide, narrow = (first_step(config, groups) for config in configs)
                found[layout, kind] = wide, narrow
        return found

    by_rank = run_ranks(main, num_ranks)
    for case in by_rank[0]:
        steps = [of_rank[case] for of_rank in by_rank]
        wide, narrow = (torch.cat([g.flatten() for pair in steps for g in pair[i].gradients]).double() for i in (0, 1))
        assert {g.dtype for pair in steps for g in pair[1].gradients} == {torch.bfloat16}, case
        errors = narrow - wide
        # A handful of roundings by less than 2^-8 of the sum so far.
        assert 2**-12 < float(errors.norm() / wide.norm()) < 2**-6, case
        assert abs(float(errors.sum())) < 5 * float(errors.norm()), case
        assert steps[0][0].loss == steps[0][1].loss, case
        assert abs(steps[0][0].norm / steps[0][1].norm - 1) < 2**-8, case


NUM_LOOKUPS = 8


def lookup(number: int, table: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Ids [3, 4], coefficients and vectors of a lookup in a whole table: whole numbers, whose sums bf16 can hold."""
    generator = torch.Generator().manual_seed(number)
    ids = torch.randint(len(table), (3, 4), generator=generator)
    coef, vec = (torch.randint(-2, 3, (3, n), generator=generator).float() for n in (4, table.shape[1]))
    return ids, coef.unsqueeze(2), vec


def wrong_sums(config: RunConfig, accumulate: SegmentAccumulate) -> tuple[int, list[str]]:
    """Shares of tables on this rank, and those whose sums over all lookups are not exact. A lookup is of one replica."""
    with tiny_run(config) as run:
        replica, replicas = run.groups.megatron.expt_dp.rank(), run.groups.megatron.expt_dp.size()
        run.chunks[0].zero_grad_buffer()
        wrong, expected = [], {}
        places = {table: place for rule in run.optimizer.rules for table, place in rule.places.items()}
        for table, place in places.items():
            rows, columns = (
                slice(a, a + n) for a, n in zip((place.first_row, place.first_column), table.shape, strict=True)
            )
            whole = torch.zeros(2 * 12 * 12, place.width)
            for number in range(NUM_LOOKUPS):
                ids, coef, vec = lookup(number, whole)
                whole.index_add_(0, ids.flatten(), (coef * vec.unsqueeze(1)).flatten(0, 1))
                if number % replicas == replica:
                    table_gradient(table, ids - rows.start, coef, vec[:, columns], accumulate=accumulate)
            # As autograd does behind a pass' last lookup.
            gradient = gradient_of(table)
            assert isinstance(gradient, MainGradient)
            gradient.add_up()
            expected[table] = whole[rows, columns].flatten()
        for chunk in run.chunks:
            chunk.finish_grad_sync()
        shares = [share for rule in run.optimizer.rules for share in rule.shares]
        for share in shares:
            wanted = expected[share.parameter][share.start : share.stop]
            assert wanted.any()
            if not torch.equal(share.gradient.float(), wanted):
                wrong.append(places[share.parameter].name)
        return len(shares), wrong


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_sums_that_bf16_can_hold_are_exact_on_every_layout(run_ranks: Any, num_ranks: int) -> None:
    layouts = [axes for size, axes, kinds in LAYOUTS.values() if size == num_ranks and "shared" in kinds]
    implementations: tuple[Any, ...] = ("naive", "torch", "cpu")

    def main() -> list[tuple[int, list[str]]]:
        config = config_of(SHARED.model, "bf16")
        return [
            wrong_sums(laid_out(config, **axes), implementation_of("segment_accumulate", implementations[number % 3]))
            for number, axes in enumerate(layouts * (3 if num_ranks == 1 else 1))
        ]

    for of_rank in run_ranks(main, num_ranks):
        assert all(num and not wrong for num, wrong in of_rank), of_rank


# Numbers of four ranks [4, 16], in every order. From 256 on bf16 has even ones alone; sums are 259, a tie, and 2.
SUMMANDS = torch.tensor(sorted({*permutations((256, 1, 1, 1)), *permutations((256, 1, 1, -256))})).t()
SUMS_ROUNDED_ONCE = SUMMANDS.sum(0).to(torch.bfloat16).tolist()


def test_four_replicas_round_the_sum_once(run_ranks: Any) -> None:
    """Partial sums in bf16 would lose ones, whichever replica has the large number."""

    def main() -> list[float]:
        assert dist.group.WORLD is not None
        # Every replica's share has all sums.
        gradient = SUMMANDS[dist.get_rank()].to(torch.bfloat16).repeat(4)
        reduce_scatter(gradient, dist.group.WORLD)
        share: list[float] = gradient.chunk(4)[dist.get_rank()].tolist()
        return share

    assert run_ranks(main, 4) == [SUMS_ROUNDED_ONCE] * 4


def test_four_stages_round_the_sum_of_their_copies_once(run_ranks: Any) -> None:
    """The gradients of a bank of which each stage has a copy, and no replicas."""

    def main() -> list[float]:
        assert dist.group.WORLD is not None
        stage = dist.get_rank()
        alone, _ = dist.new_subgroups(group_size=1)
        table = nn.Parameter(torch.empty(SUMMANDS.shape[1]))
        mark_copy(table, Copy(stage, 4))
        gradient = SUMMANDS[stage].to(torch.bfloat16)
        part = SimpleNamespace(
            buckets=[SimpleNamespace(params_list=[table], grad_data=gradient)],
            intra_distributed_optimizer_instance_group=alone,
        )
        chunk: Any = SimpleNamespace(bucket_groups=[], expert_parallel_bucket_groups=[part])
        sum_over_stages([chunk], dist.group.WORLD)
        summed: list[float] = gradient.tolist()
        return summed

    assert run_ranks(main, 4) == [SUMS_ROUNDED_ONCE] * 4


def test_a_resumed_run_rounds_the_same_way(run_ranks: Any, tmp_path: Path) -> None:
    """Weights and state to the bit, on two replicas."""
    config = laid_out(config_of(SHARED.model, "bf16"), micro_batch_size=1)

    def weights(run: TinyRun) -> dict[str, Tensor]:
        return {shard.key: shard.data for shard in shards(run.bare)}

    def main() -> tuple[list[str], bool]:
        with tiny_run(config) as run:
            run.train(2)
            run.save(tmp_path)
            run.train(2)
            straight = weights(run)
        with tiny_run(config) as run:
            run.resume(tmp_path / "step_00000002")
            before = weights(run)
            run.train(2)
            resumed = weights(run)
        moved = all(not torch.equal(resumed[key], before[key]) for key in before if key.startswith("banks."))
        return [key for key in straight if not torch.equal(straight[key], resumed[key])], moved

    assert run_ranks(main, 2) == [([], True)] * 2
