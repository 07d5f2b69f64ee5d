"""Ranks that are dry-run as on a GPU: nothing lies on the wrong side, and what does, when it is planted, is found with
its line.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any
from unittest.mock import patch

import pytest

from lab.maintenance.check_plan import CONFIGS, OF_STUDIES, on_few_ranks
from megamem.config.model import ModelConfig, MoEConfig
from megamem.families.midus.config import MidusConfig
from megamem.families.ultramem_v2.config import UltraMemV2Config
from megamem.placement.spans import PlacementConfig
from pretrain.config.context_ways import WAYS
from pretrain.config.optimizer import OptimizerConfig
from pretrain.config.schema import ParallelConfig, RunConfig, TrainConfig
from pretrain.config.stages import load_stages
from tests.deadline import launch_within
from tests.rotation import in_rotation

WORLD = 4
MEMORY = UltraMemV2Config(num_keys=64, value_dim=128, pre_value_dim=64, top_k=16)
SMALL = RunConfig(
    model=ModelConfig(
        num_layers=2,
        hidden_size=256,
        num_attention_heads=8,
        num_query_groups=4,
        ffn_hidden_size=512,
        vocab_size=1024,
        qk_norm=True,
        memory=MEMORY,
    ),
    parallel=ParallelConfig(tensor=2, memory=4),
    train=TrainConfig(sequence_length=512, micro_batch_size=1, global_batch_size=4, precision="bf16"),
)


@contextmanager
def moved_ids(least: int, num_bytes: dict[str, int]) -> Iterator[None]:
    """Adds up in `num_bytes`, by operation, what it reads and writes, by its schema, of tensors of so many integers."""
    import torch
    from torch.utils._pytree import tree_leaves

    from pretrain.planning.dryrun.gpu_work import GpuWork

    dispatch = GpuWork.__torch_dispatch__

    def counted(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = dispatch(self, func, types, args, kwargs)
        is_view = any(each.alias_info and not each.alias_info.is_write for each in func._schema.returns)
        if func.namespace != "prim" and not is_view and "empty" not in func._schema.name:
            tensors = {id(each): each for each in tree_leaves((args, kwargs, out)) if isinstance(each, torch.Tensor)}
            for each in tensors.values():
                if not each.is_floating_point() and each.numel() >= least:
                    num_bytes[func._schema.name] = num_bytes.get(func._schema.name, 0) + each.nbytes
        return out

    with patch.object(GpuWork, "__torch_dispatch__", counted):
        yield


def traffic_of(
    config: RunConfig, *plants: Callable[[], Any]
) -> tuple[list[tuple[str, str, str, int]], dict[str, float]]:
    """Kind, line, operation and number of everything that passes between host and device in a rank's step; and bytes of
    ids by operation, per entry that the rank looks up."""
    memory = config.model.memory
    assert memory is not None
    # The entries of all ranks of the group in a microbatch.
    num_entries = config.parallel.memory // config.parallel.tensor * config.train.sequence_length * memory.lookup.rows

    def main() -> tuple[list[tuple[str, str, str, int]], dict[str, float]]:
        from contextlib import ExitStack

        from lab.stand_in.watched import watched_run

        num_bytes: dict[str, int] = {}
        with ExitStack() as stack:
            stack.enter_context(moved_ids(num_entries, num_bytes))
            for plant in plants:
                stack.enter_context(plant())
            (report,) = watched_run(config, WORLD, [0])
        (training,) = report.traffic
        passes = report.counted.num_microbatches * config.model.num_layers
        per_entry = {op.partition("::")[2]: total / (num_entries * passes) for op, total in num_bytes.items()}
        found = [(found.kind.value, found.place.line, found.what, found.calls) for found in training.findings]
        return found, per_entry

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

    from megamem.backbone.norm import RMSNorm

    def planted(self: Any, x: Any) -> Any:
        scale = torch.ones(x.shape[-1])
        return self.normalise(x, self.weight * scale.to(x.device, non_blocking=True), self.eps)

    with patch.object(RMSNorm, "forward", planted):
        yield


PLANTS = (a_host_buffer_in_the_exchange, a_host_tensor_and_reads_in_the_loss, a_pageable_copy_in_the_norm)


def line_of(plant: Callable[..., Any], text: str) -> str:
    """The place of the plant's line with this text."""
    lines, first = inspect.getsourcelines(inspect.unwrap(plant))
    (number,) = (number for number, line in enumerate(lines, first) if text in line)
    return f"lab/tests/unit/test_stand_in_traffic.py:{number}"


@pytest.fixture(scope="module")
def clean() -> tuple[list[tuple[str, str, str, int]], dict[str, float]]:
    return traffic_of(SMALL)


@pytest.fixture(scope="module")
def planted() -> set[tuple[str, str, str]]:
    return {(kind, line, what) for kind, line, what, _ in traffic_of(SMALL, *PLANTS)[0]}


def test_a_step_copies_its_batch_and_reads_its_loss(clean: Any) -> None:
    by_kind: dict[str, int] = {}
    findings, _ = clean
    for kind, _, _, calls in findings:
        by_kind[kind] = by_kind.get(kind, 0) + calls
    # Tokens, labels, positions and mask of each of two microbatches; the loss, the norms, and 0.16.1's number of tokens.
    assert by_kind == {"pinned copies": 8, "host reads": 2 + (version("megatron-core") == "0.16.1")}
    assert {line.partition(":")[0] for kind, line, *_ in findings if kind == "pinned copies"} == {
        "pretrain/data/loader.py"
    }


def test_ids_of_32_bits_are_all_that_a_lookup_moves_of_ids(clean: Any) -> None:
    _, per_entry = clean
    # Twice each; of the sort's results the rows are searched twice for blocks, and both are read for two tables.
    assert per_entry == {
        "_allgather_base_": 4,
        "triton_gather_dot": 2 * 4,
        "triton_gather_sum": 2 * 4,
        "sort": 4 + 4 + 8,
        "searchsorted": 2 * 4,
        "triton_segment_accumulate": 2 * (4 + 8),
    }


def test_parts_of_rows_move_ids_once_more(clean: Any) -> None:
    """Each becomes its place in the part; nothing is masked."""
    _, columns = clean
    _, rows = traffic_of(replace(SMALL, parallel=replace(SMALL.parallel, memory_rows=2)))
    assert rows == columns | {"sub": 2 * 4}


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


QUICK = [
    str(CONFIGS / "quickstart.yaml"),
    *(str(OF_STUDIES / "compare" / f"{name}.yaml") for name in ("lave", "ultramem")),
]
"""Configurations that take a few seconds: a memory of each slot; `make check-plan` has all that are shipped."""
DENSE = replace(SMALL, model=replace(SMALL.model, memory=None))
LAYOUTS = {
    **{
        f"context, {way}": replace(
            DENSE,
            parallel=ParallelConfig(context=4, context_attention=way),
            train=replace(SMALL.train, sequence_length=2048, global_batch_size=1),
        )
        for way in WAYS
    },
    "interleaved, recomputed": replace(
        SMALL,
        model=replace(SMALL.model, num_layers=4),
        parallel=ParallelConfig(pipeline=2, virtual_pipeline=2, memory=2),
        train=replace(SMALL.train, recompute="full", global_batch_size=4),
    ),
    "stepped on the host": replace(
        SMALL,
        model=replace(SMALL.model, memory=replace(MEMORY, num_keys=512)),
        optimizer=OptimizerConfig(value_offload="cpu"),
    ),
    "partly trained": replace(
        SMALL,
        model=replace(
            SMALL.model,
            num_layers=6,
            memory=MidusConfig(num_heads=8, value_dim=32, placement=PlacementConfig(blocks=(2, 5))),
        ),
        optimizer=OptimizerConfig(trained_layers=(3, 6)),
    ),
    "mixture": replace(
        DENSE,
        model=replace(DENSE.model, moe=MoEConfig(num_experts=8, top_k=2, expert_ffn_hidden_size=64)),
        parallel=ParallelConfig(memory=4),
        train=replace(SMALL.train, recompute="full"),
    ),
}


@dataclass(frozen=True)
class Kept:
    """Budgets of a run's commands, as its dry run met them.

    Attributes:
        excesses: traffic beyond what is allowed.
        units: by command, the units that allowances count by.
        reached: command, kind and source of allowances that were used up.
    """

    excesses: list[str]
    units: dict[str, dict[str, int]]
    reached: set[tuple[str, str, str]]


def budgets_of(runs: Mapping[str, tuple[RunConfig, int]]) -> dict[str, Kept]:
    """Dry-run each of these, and compare its commands with their budgets."""

    def main() -> dict[str, Kept]:
        from lab.stand_in.watched import watched_run

        kept = {}
        for name, (config, num_ranks) in runs.items():
            (report,) = watched_run(config, num_ranks, [0], all_commands=True)
            reached = set()
            for each in report.traffic:
                calls = Counter[tuple[str, str]]()
                for finding in each.findings:
                    calls[finding.kind, finding.place.source] += finding.calls
                    if calls[finding.kind, finding.place.source] == each.allowed(finding):
                        reached.add((each.command, str(finding.kind), finding.place.source))
            kept[name] = Kept(report.excesses, {each.command: dict(each.units) for each in report.traffic}, reached)
        return kept

    return launch_within(main, 1, timeout_s=280, num_threads=1)[0]


@pytest.mark.parametrize("path", in_rotation(QUICK), ids=lambda path: path.rpartition("configs/")[2])
def test_commands_stay_within_their_budgets(path: str) -> None:
    kept = budgets_of({path: on_few_ranks(load_stages(path)[0])})[path]
    assert kept.excesses == []
    assert set(kept.units) == {"training", "evaluation", "saving", "restoring", "generation"}


def test_layouts_stay_within_the_budgets_of_commands() -> None:
    """Within and no further: an allowance that none of them uses up is too generous."""
    from lab.stand_in.budgets import ALLOWED

    found = budgets_of({name: (config, WORLD) for name, config in LAYOUTS.items()})
    assert {name: kept.excesses for name, kept in found.items() if kept.excesses} == {}
    training = {name: kept.units["training"] for name, kept in found.items()}
    assert [name for name, units in training.items() if units["window"]] == ["stepped on the host"]
    # Twice through two layers, for each of two microbatches of four sequences on four ranks.
    assert [units["mixture"] for name, units in training.items() if units["mixture"]] == [4]
    assert [name for name, units in training.items() if units["chunk"] == 2] == ["interleaved, recomputed"]
    allowed = {(command, str(rule.kind), rule.source) for command, rules in ALLOWED.items() for rule in rules}
    if version("megatron-core") != "0.16.1":
        allowed.remove(("training", "host reads", "megatron.core.distributed.finalize_model_grads"))
    assert allowed == set().union(*(kept.reached for kept in found.values()))


def test_traffic_beyond_a_budget_is_told_with_its_line() -> None:
    from lab.stand_in.budgets import CommandTraffic
    from lab.stand_in.host_traffic import LineTraffic, Traffic
    from pretrain.planning.dryrun.lines import CallSite

    copies = LineTraffic(Traffic.PINNED, CallSite("pretrain/data/loader.py:96"), "copy to the device", 8, 64)
    read = LineTraffic(Traffic.READ, CallSite("megamem/banks/bank.py:7"), "item", 1, 4)
    assert CommandTraffic("training", (copies,), {"microbatch": 2}).excesses == ()
    first, second = CommandTraffic("training", (copies, read), {"microbatch": 1}).excesses
    assert str(first) == "8 pinned copies (copy to the device) from pretrain/data/loader.py:96, where 4 may be"
    assert str(second) == "1 host reads (item) from megamem/banks/bank.py:7, where none may be"


def test_scratch_is_that_of_pytorchs_sources() -> None:
    import torch

    from pretrain.planning.dryrun import gpu_work

    keys = torch.empty(1 << 20, dtype=torch.int32, device="meta")
    # Positions, and the second halves of the double buffers of keys and positions.
    assert gpu_work._sort(keys, stable=True) == (8 + 4 + 8) << 20
    assert gpu_work._sort(torch.empty(300, 64, device="meta")) == 0
    heads = torch.empty(2, 256, 8, 64, dtype=torch.bfloat16, device="meta")
    shared = torch.empty(2, 256, 4, 64, dtype=torch.bfloat16, device="meta")
    of_query = 4 * 2 * 8 * 256 * (64 + 1)
    assert gpu_work._flash_backward(heads, heads, heads) == of_query
    assert gpu_work._flash_backward(heads, heads, shared) == of_query + 2 * heads.nbytes
