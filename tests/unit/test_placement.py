"""Blocks with a memory, what they share, and the layouts that they allow."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megamem.config.model import ModelConfig, MoEConfig
from megamem.families.stem.config import StemConfig
from megamem.families.tide.config import TideConfig
from megamem.families.ultramem_v2.config import UltraMemV2Config
from megamem.placement.block_plan import UncutBlocks, unsplittable_units
from megamem.placement.sharing import SharingConfig
from megamem.placement.spans import PlacementConfig, Span, parse_spans, pending_before
from megamem.retrieval.initial import sigma_values
from parallel.pipeline_layout import model_chunks, split_units
from pretrain.config.loader import from_dict, to_dict
from pretrain.config.schema import ParallelConfig, RunConfig
from pretrain.config.validate import validate
from pretrain.errors import ConfigError


def model(num_layers: int = 8, sharing: SharingConfig | None = None, **placement: Any) -> ModelConfig:
    memory = UltraMemV2Config(placement=PlacementConfig(**placement), sharing=sharing or SharingConfig())
    return ModelConfig(num_layers=num_layers, memory=memory)


def reads(config: ModelConfig) -> list[int]:
    return [span.read for span in config.memory_spans]


def test_by_default_every_block_has_a_memory() -> None:
    assert reads(model(3)) == [0, 1, 2]
    assert not any(span.is_skip for span in model(3).memory_spans)
    assert ModelConfig().num_memory_layers == 0


@pytest.mark.parametrize(("every", "blocks"), [(2, [1, 3, 5, 7]), (3, [2, 5]), (8, [7])])
def test_every_nth_is_the_last_of_each_n(every: int, blocks: list[int]) -> None:
    assert reads(model(every=every)) == blocks
    assert model(every=every).num_memory_layers == len(blocks)


def test_a_list_of_blocks() -> None:
    assert reads(model(blocks=(0, 3, 4))) == [0, 3, 4]


def test_the_released_notation_of_spans() -> None:
    config = model(18, spans="2:5/6:9/10:13/14:17")
    assert config.memory_spans == (Span(2, 5), Span(6, 9), Span(10, 13), Span(14, 17))
    assert parse_spans("1:1/3:3") == (Span(1, 1), Span(3, 3))


def test_what_is_pending_at_a_block() -> None:
    spans = parse_spans("0:2/1:3/4:4")
    pending = [[(span.read, span.add) for span in pending_before(spans, block)] for block in range(5)]
    assert pending == [[], [(0, 2)], [(0, 2), (1, 3)], [(1, 3)], []]


def test_layers_in_a_row_read_with_the_stream_of_the_first() -> None:
    assert [(span.read, span.queried) for span in model(blocks=(0, 2, 3, 6, 7), query_group=2).memory_spans] == [
        (0, None),
        (2, 0),
        (3, None),
        (6, 3),
        (7, None),
    ]


@pytest.mark.parametrize(
    ("placement", "message"),
    [
        ({"every": 0}, r"PlacementConfig\.every is 0: it must be at least 1"),
        ({"every": 9}, r"placement\.every is 9, more than num_layers = 8: no block would have a memory"),
        ({"blocks": (3, 1)}, r"placement\.blocks is \[3, 1\]: list 0-based blocks in ascending order"),
        ({"blocks": (1, 1)}, r"placement\.blocks is \[1, 1\]: .* each once"),
        ({"blocks": ()}, r"placement\.blocks is \[\]: .*leave model\.memory out"),
        (
            {"blocks": (1, 8)},
            r"placement\.blocks is \[1, 8\], but block 8 is not one of num_layers = 8: they count from 0 to 7",
        ),
        ({"spans": "2-5"}, r"placement\.spans is '2-5': write read:add pairs .* as in 2:5/6:9"),
        ({"spans": "5:2"}, r"placement\.spans is '5:2', where 5:2 adds before it reads"),
        ({"spans": "4:5/2:3"}, r"where 2:3 follows 4:5: sort the pairs"),
        ({"spans": "2:3/2:5"}, r"where 2:5 follows 2:3: .* let each block read once"),
        ({"query_group": 0}, r"PlacementConfig\.query_group is 0: it must be at least 1"),
        ({"query_group": 2, "position": "instead"}, r"query_group is 2, but position is instead, where nothing but"),
        ({"spans": "2:8"}, r"placement\.spans is 2:8, but block 8 is not one of num_layers = 8"),
    ],
)
def test_impossible_placements_are_refused(placement: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        model(**placement)


def test_groups_are_of_memory_layers() -> None:
    with pytest.raises(ValueError, match=r"group is 3, which does not divide the 4 memory layers"):
        model(every=2, sharing=SharingConfig("block", 3))
    with pytest.raises(ValueError, match=r"group is 3, more than the 2 memory layers"):
        model(blocks=(1, 6), sharing=SharingConfig("ring", 3))


def test_layers_of_the_deepest_model_are_counted() -> None:
    assert model(10_000, every=2).num_memory_layers == 5_000


def test_every_memory_is_as_large_as_a_feed_forward() -> None:
    """The L of Eq. 26 comes from the feed-forward's output projection, which is scaled by the depth: fewer memories are
    not larger ones.
    """
    everywhere, sparse = model(8), model(8, every=4)
    assert everywhere.memory is not None
    assert sparse.memory is not None
    assert sigma_values(sparse, sparse.memory, 0.3) == sigma_values(everywhere, everywhere.memory, 0.3)


def test_what_a_chunk_must_hold_whole() -> None:
    assert unsplittable_units(model()) == ()
    assert unsplittable_units(model(spans="0:2/3:3/5:6")) == (UncutBlocks(0, 2, "span"), UncutBlocks(5, 6, "span"))
    assert unsplittable_units(model(blocks=(0, 3, 5, 6, 7), query_group=3)) == (
        UncutBlocks(0, 3, "query"),
        UncutBlocks(0, 5, "query"),
        UncutBlocks(6, 7, "query"),
    )
    shared = model(every=2, sharing=SharingConfig("block", 2))
    assert unsplittable_units(shared) == (UncutBlocks(1, 3, "group"), UncutBlocks(5, 7, "group"))
    halves, quarters = (model_chunks(8, pipeline=count, virtual_pipeline=1, layout=None) for count in (2, 4))
    assert split_units(unsplittable_units(shared), halves) == ()
    assert split_units(unsplittable_units(shared), quarters) == unsplittable_units(shared)


def run(config: ModelConfig, **parallel: int) -> RunConfig:
    data = to_dict(RunConfig(model=config, parallel=ParallelConfig(**parallel)))
    data["data"]["datasets"] = [{"path": "corpus"}]
    return from_dict(data, "a test")


@pytest.mark.parametrize(
    ("config", "parallel", "message"),
    [
        (
            model(spans="1:4/6:7"),
            {"pipeline": 2},
            r"placement\.spans has 1:4, but parallel\.pipeline 2 x virtual_pipeline 1 puts 4 blocks into a chunk, and blocks 1 and 4 into "
            r"different ones, where the output cannot follow: the nearest layouts that work are pipeline 1 x virtual_pipeline 1$",
        ),
        (
            model(spans="0:1/2:3/4:5"),
            {"pipeline": 2, "virtual_pipeline": 4},
            r"placement\.spans has 0:1, .* pipeline 2 x virtual_pipeline 2, pipeline 2 x virtual_pipeline 1",
        ),
        (
            model(query_group=4),
            {"pipeline": 4},
            r"placement\.query_group is 4, but parallel\.pipeline 4 x virtual_pipeline 1 puts 2 blocks into a chunk, and the memory of block "
            r"2, which reads with the stream of block 0, into another one: the nearest layouts that work are pipeline 2 x virtual_pipeline 1",
        ),
        (
            model(every=2, sharing=SharingConfig("block", 2)),
            {"pipeline": 4},
            r"sharing\.group is 2, but parallel\.pipeline 4 x virtual_pipeline 1 puts 2 blocks into a chunk, which would split a group: the "
            r"nearest layouts that work are pipeline 2 x virtual_pipeline 1",
        ),
        (
            model(blocks=(2, 5), sharing=SharingConfig("ring", 2)),
            {"pipeline": 2},
            r"sharing\.pattern is ring, where all layers read each other's tables: they must stand on one stage",
        ),
        (
            replace(ModelConfig(num_layers=8), moe=MoEConfig(num_experts=6, top_k=2)),
            {"memory": 4},
            r"model\.moe\.num_experts is 6, which parallel\.memory 4 does not divide",
        ),
        (
            replace(model(), moe=MoEConfig(num_experts=6, top_k=2)),
            {"memory": 4},
            r"holds equally many experts \(the experts and the tables are split over the same group\)",
        ),
    ],
)
def test_layouts_that_split_something_are_refused(config: ModelConfig, parallel: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        validate(run(config, **parallel), None)


@pytest.mark.parametrize(
    ("config", "parallel"),
    [
        (model(spans="0:3/1:2/4:7"), {"pipeline": 2}),
        (model(query_group=4), {"pipeline": 2}),
        (model(blocks=(0, 3, 6), query_group=2), {"pipeline": 2}),
        (model(blocks=(0, 3), sharing=SharingConfig("ring", 2)), {"pipeline": 2}),
        (replace(ModelConfig(num_layers=8), moe=MoEConfig(num_experts=8, top_k=2)), {"memory": 4, "tensor": 2}),
        (replace(model(), moe=MoEConfig(num_experts=8, top_k=2)), {"memory": 4, "tensor": 2}),
    ],
)
def test_layouts_that_split_nothing_are_taken(config: ModelConfig, parallel: dict[str, int]) -> None:
    validate(run(config, **parallel), None)


@pytest.mark.parametrize(
    ("moe", "message"),
    [
        ({"num_experts": 4, "top_k": 5}, r"model\.moe\.top_k is 5, more than num_experts = 4"),
        ({"top_k": 0}, r"MoEConfig\.top_k is 0: it must be at least 1"),
        ({"top_k": 1, "renormalise": True}, r"renormalise is true with top_k = 1"),
        ({"z_loss_weight": -0.1}, r"z_loss_weight is -0\.1: it must not be negative"),
    ],
)
def test_impossible_mixtures_are_refused(moe: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MoEConfig(**moe)


def test_a_mixture_needs_a_block_to_stand_in() -> None:
    with pytest.raises(
        ValueError, match=r"position is instead in every block, which leaves no feed-forward for model\.moe"
    ):
        replace(model(position="instead"), moe=MoEConfig())
    replace(model(every=2, position="instead"), moe=MoEConfig())
    stem = StemConfig(vocab_size=61)
    with pytest.raises(
        ValueError, match=r"kind is stem in every block, which leaves no feed-forward for model\.moe: name fewer blocks"
    ):
        ModelConfig(memory=stem, moe=MoEConfig())
    ModelConfig(memory=replace(stem, placement=PlacementConfig(every=2)), moe=MoEConfig())


def test_layers_that_read_together_add_where_they_read() -> None:
    tide = TideConfig(vocab_size=61)
    with pytest.raises(
        ValueError, match=r"placement\.spans is 0:1, but layers of kind tide read their tables together"
    ):
        replace(tide, placement=PlacementConfig(spans="0:1"))
    replace(tide, placement=PlacementConfig(spans="1:1"))
