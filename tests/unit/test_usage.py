"""Figures observed on a memory layer: counts, means, and the names they are logged under."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from megamem.config.memory import ObservedQuantities
from megamem.layers.usage import LayerUsage, UsageCollector, block_number
from megamem.placement.sharing import LayerView
from pretrain.train.trackers import scalars

WINDOW = LayerView(bank=0, first_row=90, num_rows=64, num_bank_rows=100)


def usage() -> LayerUsage:
    return LayerUsage(WINDOW, torch.zeros(WINDOW.num_rows, dtype=torch.int32))


def record(of: LayerUsage, rows: list[list[int]], seed: int = 0) -> tuple[Tensor, Tensor]:
    """Random scores [T, 1, J, 2] and outputs [T, 5] for the rows."""
    g = torch.Generator().manual_seed(seed)
    scores = torch.randn(len(rows), 1, len(rows[0]), 2, generator=g)
    out = 3 + torch.randn(len(rows), 5, generator=g)
    of.record(torch.tensor(rows), scores, out)
    return scores, out


def test_rows_are_counted_from_the_start_of_the_window() -> None:
    """The window is rows 90..99 and 0..53 of a bank of 100."""
    observed = usage()
    record(observed, [[90, 99], [0, 53], [0, 0]])
    counts = observed.counts.tolist()
    assert (counts[0], counts[9], counts[10], counts[63]) == (1, 1, 3, 1)
    assert sum(counts) == 6


def test_a_router_is_told_by_its_last_place_and_its_entropy() -> None:
    """The router is even over four places for one token, and all on the last for the other."""
    observed = usage()
    router = torch.tensor([[0.25] * 4, [0.0, 0.0, 0.0, 1.0]])
    observed.record(torch.zeros(2, 3, dtype=torch.int64), None, torch.zeros(2, 5), router)
    assert observed.sums[-2:].tolist() == pytest.approx([0.25 + 1.0, math.log(4)])


def test_sums_are_those_of_all_tokens() -> None:
    observed = usage()
    scores, out = zip(record(observed, [[0, 1]] * 4), record(observed, [[2, 3]] * 3, seed=1), strict=True)
    all_scores, all_out = torch.cat(scores).double(), torch.cat(out).double()
    num_tokens, *means = (observed.sums / observed.sums[0].clamp_min(1)).tolist()
    assert (float(observed.sums[0]), num_tokens) == (7, 1)
    expected = (all_scores[:, :, 0].mean(), all_scores.mean(), all_out.mean(), all_out.square().mean())
    assert means == pytest.approx([*(float(value) for value in expected), 0.0, 0.0], rel=1e-6)
    observed.reset()
    assert not observed.counts.any()
    assert not observed.sums.any()


class Layer:
    """A memory layer, as far as the collector asks."""

    def __init__(self, block: int, cores: Tensor | None) -> None:
        self.name, self.view = f"decoder.layers.{block}.mlp.memory", WINDOW
        self.cores, self.usage = cores, None


@pytest.fixture
def world() -> object:
    """A process group of this process alone."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield torch.distributed.group.WORLD
    torch.distributed.destroy_process_group()


def test_figures_of_known_use(world: torch.distributed.ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    # Of 64 rows several slices, the last one short.
    monkeypatch.setattr("megamem.layers.usage._SLICE_ELEMENTS", 10)
    cores = torch.diag_embed(torch.tensor([[[3.0, 1.0]], [[1.0, -3.0]]]))
    layers = [Layer(1, cores), Layer(3, cores / 2)]
    collector = UsageCollector(
        layers, num_blocks=5, observed=ObservedQuantities(True, (1, 2)), stage_group=world, device=torch.device("cpu")
    )
    collector.start()
    assert layers[0].usage is not None
    assert layers[1].usage is not None
    even = [[(90 + i) % 100, (90 + i + 1) % 100] for i in range(0, 64, 2)]
    _, out = record(layers[0].usage, even)
    record(layers[1].usage, [[0, 0]] * 7)
    figures = collector.finish()
    assert [layer.usage for layer in layers] == [None, None]
    assert set(figures) == {1, 3}
    assert figures[1]["coverage"] == 1
    # 64 reads and 14 of 64 rows: each read misses a row with a probability of 63 / 64.
    assert figures[1]["even_coverage"] == pytest.approx(1 - (63 / 64) ** 64)
    assert figures[3]["even_coverage"] == pytest.approx(1 - (63 / 64) ** 14)
    assert figures[1]["kl_to_uniform"] == pytest.approx(0, abs=1e-12)
    assert figures[1]["output_std"] == pytest.approx(float(out.double().std(correction=0)), rel=1e-5)
    assert figures[1]["singular_values"] == [pytest.approx([4, 2])]
    assert figures[3]["coverage"] == 1 / 64
    assert figures[3]["kl_to_uniform"] == pytest.approx(math.log(64))
    assert figures[3]["singular_values"] == [pytest.approx([2, 1])]


def test_layers_without_cores_have_no_singular_values(world: torch.distributed.ProcessGroup) -> None:
    layers = [Layer(0, None)]
    collector = UsageCollector(
        layers, num_blocks=1, observed=ObservedQuantities(True), stage_group=world, device=torch.device("cpu")
    )
    collector.start()
    assert layers[0].usage is not None
    record(layers[0].usage, [[0, 1]])
    assert set(collector.finish()[0]) == {
        "coverage", "even_coverage", "kl_to_uniform", "top1_score", "topk_score", "output_std",
    }  # fmt: skip


def test_a_stage_without_memory_takes_part(world: torch.distributed.ProcessGroup) -> None:
    collector = UsageCollector(
        [], num_blocks=2, observed=ObservedQuantities(True, (1, 2)), stage_group=world, device=torch.device("cpu")
    )
    collector.start()
    assert collector.finish() == {}


def test_block_numbers_come_from_the_layers_name() -> None:
    assert block_number("decoder.layers.17.mlp.memory") == 17


def test_trackers_get_one_scalar_per_figure() -> None:
    row = {"step": 4, "loss": 2.5, "memory": {"3": {"coverage": 0.5, "singular_values": [[2.0, 1.0]]}}}
    assert dict(scalars(row)) == {
        "step": 4,
        "loss": 2.5,
        "memory/3/coverage": 0.5,
        "memory/3/singular_values/0/0": 2.0,
        "memory/3/singular_values/0/1": 1.0,
    }
