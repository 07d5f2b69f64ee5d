"""Ranks that are dry-run as on a GPU: nothing lies on the wrong side, and what does, when it is planted, is found with
its line.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest

from megamem.config import ModelConfig
from megamem.families.ultramem_v2.config import UltraMemV2Config
from pretrain.config.schema import ParallelConfig, RunConfig, TrainConfig
from tests.deadline import launch_within

WORLD = 4
SMALL = RunConfig(
    model=ModelConfig(
        num_layers=2,
        hidden_size=256,
        num_attention_heads=8,
        num_query_groups=4,
        ffn_hidden_size=512,
        vocab_size=1024,
        qk_norm=True,
        memory=UltraMemV2Config(num_keys=64, value_dim=128, pre_value_dim=64, top_k=16),
    ),
    parallel=ParallelConfig(tensor=2, memory=4),
    train=TrainConfig(sequence_length=512, micro_batch_size=1, global_batch_size=4, precision="bf16"),
)


def traffic_of(config: RunConfig, *plants: Callable[[], Any]) -> list[tuple[str, str, str, int]]:
    """Kind, line, operation and number of everything that passes between host and device in a rank's step."""

    def main() -> list[tuple[str, str, str, int]]:
        from contextlib import ExitStack

        from pretrain.planning.dryrun.rank import dry_run

        with ExitStack() as stack:
            for plant in plants:
                stack.enter_context(plant())
            (report,) = dry_run(config, WORLD, [0], as_gpu=True)
        return [(found.kind.value, found.place.line, found.what, found.calls) for found in report.traffic]

    return launch_within(main, 1, timeout_s=120, num_threads=1)[0]


@contextmanager
def a_host_buffer_in_the_exchange() -> Iterator[None]:
    import torch
    import torch.distributed as dist

    def all_to_all(self: Any, x: Any, send: Any, receive: Any) -> Any:
        out = torch.empty(sum(receive), *x.shape[1:], dtype=x.dtype)
        dist.all_to_all_single(out, x.contiguous(), list(receive), list(send), group=self.group)
        return out.to(x.device)

    with patch("parallel.exchange.Exchange._all_to_all", all_to_all):
        yield


@contextmanager
def a_host_tensor_and_reads_in_the_loss() -> Iterator[None]:
    import torch

    from pretrain.engine import step

    loss = step._loss

    def planted(loss_mask: Any, losses: Any) -> Any:
        halves = losses * torch.full((losses.shape[-1],), 0.5)
        if losses.sum().item() < 0 or bool((losses > 0).all()):
            losses = losses + 0
        losses = losses + losses[losses > 0].sum()
        return loss(loss_mask, losses + halves)

    with patch("pretrain.engine.step._loss", planted):
        yield


@contextmanager
def a_pageable_copy_in_the_norm() -> Iterator[None]:
    import torch

    from megamem import norm

    normalise = norm.rms_normalise

    def planted(x: Any, gain: Any, epsilon: float) -> Any:
        scale = torch.ones(x.shape[-1])
        return normalise(x, gain * scale.to(x.device, non_blocking=True), epsilon)

    with patch("megamem.norm.rms_normalise", planted):
        yield


PLANTS = (a_host_buffer_in_the_exchange, a_host_tensor_and_reads_in_the_loss, a_pageable_copy_in_the_norm)


def line_of(plant: Callable[..., Any], text: str) -> str:
    """The place of the plant's line with this text."""
    lines, first = inspect.getsourcelines(inspect.unwrap(plant))
    (number,) = (number for number, line in enumerate(lines, first) if text in line)
    return f"tests/unit/test_dryrun_as_gpu.py:{number}"


@pytest.fixture(scope="module")
def clean() -> list[tuple[str, str, str, int]]:
    return traffic_of(SMALL)


@pytest.fixture(scope="module")
def planted() -> set[tuple[str, str, str]]:
    return {(kind, line, what) for kind, line, what, _ in traffic_of(SMALL, *PLANTS)}


def test_a_step_copies_its_batch_and_reads_its_loss(clean: list[tuple[str, str, str, int]]) -> None:
    by_kind: dict[str, int] = {}
    for kind, _, _, calls in clean:
        by_kind[kind] = by_kind.get(kind, 0) + calls
    # Tokens, labels, positions and mask of each of two microbatches; the loss, the norms, and Megatron's number of tokens.
    assert by_kind == {"pinned copies": 8, "host reads": 3}
    assert {line.partition(":")[0] for kind, line, *_ in clean if kind == "pinned copies"} == {
        "pretrain/data/loader.py"
    }


@pytest.mark.parametrize(
    ("plant", "text", "kind", "what"),
    [
        (PLANTS[0], "out = torch.empty", "host tensors", "empty"),
        (PLANTS[0], "dist.all_to_all_single", "mixed devices", "c10d::alltoall_base_"),
        (PLANTS[0], "out.to(x.device)", "pageable copies", "copy to the device"),
        (PLANTS[1], "torch.full", "host tensors", "full"),
        (PLANTS[1], "torch.full", "mixed devices", "mul"),
        (PLANTS[1], ".item()", "host reads", "item"),
        (PLANTS[1], "losses[losses > 0]", "host reads", "index"),
        (PLANTS[2], "torch.ones", "host tensors", "ones"),
        (PLANTS[2], "scale.to", "pageable copies", "copy to the device"),
    ],
)
def test_a_planted_defect_is_found_with_its_line(
    planted: set[tuple[str, str, str]], plant: Callable[..., Any], text: str, kind: str, what: str
) -> None:
    assert (kind, line_of(plant, text), what) in planted
