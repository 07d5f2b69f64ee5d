"""Communication beside computation: weights that are gathered while forward runs change no bit, and gradients that are
reduced while backward does change roundings, as they are in other parts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.distributed import param_and_grad_buffer as buffers
from megatron.core.distributed.param_and_grad_buffer import shard_buffer
from tiny_runs import PRIVATE, SHARED, TinyRun, on, tiny_run
from torch import Tensor

from megamem.config.model import MoEConfig
from megamem.families.ultramem.config import UltraMemConfig
from megamem.placement.spans import PlacementConfig
from pretrain.config.schema import RunConfig
from pretrain.engine.megatron import ddp_config
from pretrain.engine.parts import parts_of
from pretrain.engine.weight_gathering import parts_of_banks, start_gathering
from tests.distributed.conftest import RunRanks
from tests.rotation import named_in_rotation

# The second reads gathered weights.
STEPS = 2
PART_ELEMENTS = 1000
"""Elements of a part that is communicated at once: a tiny model has many, where Megatron's default leaves one."""

CASES: dict[str, RunConfig] = {
    "shared tables": SHARED,
    "private tables": PRIVATE,
    "recomputed": on(SHARED, recompute="full"),
    "split tables": on(SHARED, memory=2),
    "tensor parallel": on(SHARED, tensor=2),
    "context parallel": on(SHARED, context=2),
    "two stages": on(SHARED, pipeline=2),
    "interleaved": on(PRIVATE, pipeline=2, virtual_pipeline=2, micro_batch_size=2),
    "loss in chunks": replace(PRIVATE, train=replace(PRIVATE.train, loss_chunk_tokens=15)),
    "loss in chunks, two stages": on(
        replace(SHARED, train=replace(SHARED.train, loss_chunk_tokens=15)), pipeline=2, micro_batch_size=2
    ),
    "skip": replace(
        PRIVATE,
        model=replace(
            PRIVATE.model,
            memory=UltraMemConfig(
                num_keys=12, key_dim=8, value_dim=16, top_k=4, placement=PlacementConfig(spans="0:1/2:3")
            ),
        ),
    ),
    "experts": replace(
        PRIVATE,
        model=replace(PRIVATE.model, memory=None, moe=MoEConfig(num_experts=4, top_k=2, expert_ffn_hidden_size=16)),
    ),
}
TRIED = named_in_rotation(CASES)


def forget_what_others_step(chunks: Sequence[DistributedDataParallel]) -> None:
    """Whoever reads a weight of another rank before it has come reads no number."""
    for part in (part for chunk in chunks for part in parts_of(chunk)):
        mine = part.intra_distributed_optimizer_instance_rank
        for bucket in part.buckets:
            shards = shard_buffer(bucket.param_data, part.intra_distributed_optimizer_instance_size)
            for rank, shard in enumerate(shards):
                if rank != mine:
                    shard.fill_(math.nan)
    start_gathering(chunks)


def small_parts(config: RunConfig, num_elements: int = PART_ELEMENTS) -> Any:
    return replace(ddp_config(config), bucket_size=num_elements)


def trained(
    config: RunConfig, *, reduce: bool, gather: bool
) -> tuple[list[tuple[float, float]], dict[str, Tensor], int]:
    """Losses and norms, weights at the end, and the number of parts."""
    config = replace(config, parallel=replace(config.parallel, overlap_grad_reduce=reduce, overlap_param_gather=gather))

    with (
        patch("pretrain.engine.build.ddp_config", small_parts),
        patch("pretrain.engine.optimizer.start_gathering", forget_what_others_step),
        tiny_run(config) as run,
    ):
        rows = run.train(STEPS)
        return rows, weights(run), sum(len(parts_of(chunk)) for chunk in run.chunks)


def weights(run: TinyRun) -> dict[str, Tensor]:
    return {
        f"{index}.{name}": parameter.detach().clone()
        for index, chunk in enumerate(run.bare)
        for name, parameter in chunk.named_parameters()
    }


@pytest.fixture(scope="module")
def compared(run_ranks: RunRanks) -> list[dict[str, Any]]:
    def main() -> dict[str, Any]:
        found = {}
        for name, config in TRIED.items():
            rows, after, parts = trained(config, reduce=True, gather=True)
            same_rows, same_after, _ = trained(config, reduce=True, gather=False)
            other_rows, _, _ = trained(config, reduce=False, gather=False)
            different = [key for key in after if not torch.equal(after[key], same_after[key])]
            found[name] = (rows, same_rows, other_rows, different, parts)
        return found

    return run_ranks(main, 2, timeout_s=200)


@pytest.mark.parametrize("name", TRIED)
def test_the_losses_stay(compared: list[dict[str, Any]], name: str) -> None:
    for of_rank in compared:
        rows, same_rows, other_rows, different, parts = of_rank[name]
        assert all(math.isfinite(value) for row in rows for value in row)
        assert rows == same_rows
        assert different == []
        assert parts > 2
        for row, other in zip(rows, other_rows, strict=True):
            assert row == pytest.approx(other, rel=1e-6)


@pytest.mark.parametrize("beside", [True, False])
def test_weights_of_one_rank_alone_are_in_no_collective(run_ranks: RunRanks, beside: bool) -> None:
    """Each rank has its own columns of split tables, and a copy of the rest."""
    config = on(SHARED, memory=2)
    config = replace(config, parallel=replace(config.parallel, overlap_grad_reduce=beside, overlap_param_gather=beside))

    def main() -> tuple[list[int], list[tuple[float, float]], list[tuple[float, float]]]:
        sizes: list[int] = []

        def telling(collective: Any) -> Any:
            def call(*arguments: Any, group: Any, **options: Any) -> Any:
                sizes.append(group.size())
                return collective(*arguments, group=group, **options)

            return call

        with (
            patch.object(buffers, "dist_all_gather_func", telling(buffers.dist_all_gather_func)),
            patch.object(buffers, "dist_reduce_scatter_func", telling(buffers.dist_reduce_scatter_func)),
        ):
            with tiny_run(config) as run:
                spared = run.train(STEPS)
            told = list(sizes)
            with patch("pretrain.engine.build.take_over_parts"), tiny_run(config) as run:
                return told, spared, run.train(STEPS)

    for sizes, spared, as_megatron in run_ranks(main, 2):
        assert set(sizes) == {2}
        assert spared == as_megatron


def test_a_checkpoint_knows_nothing_of_parts(run_ranks: RunRanks, tmp_path: Path) -> None:
    """Each part is split over the ranks by itself, behind padding: another number of parts, other shares."""

    def main() -> tuple[Any, Any]:
        with patch("pretrain.engine.build.ddp_config", small_parts), tiny_run(SHARED) as run:
            run.train(2)
            path = run.save(tmp_path)
            straight = run.train(2)
        with tiny_run(SHARED) as run:
            assert sum(len(parts_of(chunk)) for chunk in run.chunks) == 2
            run.resume(path)
            return straight, run.train(2)

    for straight, resumed in run_ranks(main, 2):
        for row, other in zip(straight, resumed, strict=True):
            assert row == pytest.approx(other, rel=1e-6)


def test_tables_of_a_bank_are_gathered_together_before_it_is_read(run_ranks: RunRanks) -> None:
    """Values and pre-values are parts of their own; those of a bank are all under way when the one before is read."""

    def main() -> list[list[bool]]:
        with patch("pretrain.engine.build.ddp_config", partial(small_parts, num_elements=1)), tiny_run(SHARED) as run:
            (model,), (chunk,) = run.bare, run.chunks
            banks = parts_of_banks(chunk, model)
            assert [len(parts) for parts in banks.values()] == [2, 2]

            found: list[list[bool]] = []

            def tell(*_: Any) -> None:
                found.append([part.param_gather_dispatched for parts in banks.values() for part in parts])

            model.decoder.layers[0].register_forward_pre_hook(tell)
            model.memory_layers[0].register_forward_hook(tell)
            run.train(STEPS)
        return found[-2:]

    for after_update, when_first_is_read in run_ranks(main, 2):
        assert after_update == [True, True, False, False]
        assert when_first_is_read == [True, True, True, True]


def test_a_loss_in_chunks_waits_for_its_weight(run_ranks: RunRanks) -> None:
    """It reads the output projection, here a part of its own, without that module's forward, which would wait."""

    def main() -> list[str]:
        events: list[str] = []
        with patch("pretrain.engine.build.ddp_config", small_parts), tiny_run(CASES["loss in chunks"]) as run:
            (model,), (chunk,) = run.bare, run.chunks
            part = chunk.param_to_bucket_group[model.output_weight]
            assert set(part.param_to_bucket) == {model.output_weight}
            finish = part.finish_param_sync

            def finish_and_tell(**named: Any) -> None:
                events.append("waited")
                finish(**named)

            assert model.chunked_loss is not None
            forward = model.chunked_loss.forward

            def forward_and_tell(*arguments: Any) -> Tensor:
                events.append("read")
                return forward(*arguments)

            with (
                patch.object(part, "finish_param_sync", finish_and_tell),
                patch.object(model.chunked_loss, "forward", forward_and_tell),
            ):
                run.train(1)
        return events

    for events in run_ranks(main, 2):
        assert events[:2] == ["waited", "read"]
