"""Uneven pipeline layouts: every block once and in order, as Megatron reads them, and refused where they split what
belongs together.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

from megamem.config.model import ModelConfig
from megamem.families.ultramem_v2.config import UltraMemV2Config
from megamem.placement.block_plan import UncutBlocks
from megamem.placement.sharing import SharingConfig
from megamem.placement.spans import PlacementConfig
from parallel.pipeline_layout import (
    chunks_of_stage,
    layout_text,
    model_chunks,
    nearest_layouts,
    parse_layout,
    split_units,
)
from pretrain.config.schema import ParallelConfig, RunConfig, TrainConfig
from pretrain.config.validate import validate
from pretrain.engine.megatron import transformer_config
from pretrain.errors import ConfigError
from tools.config.sections import extra_sections


@st.composite
def sizes(draw: st.DrawFn) -> tuple[int, int, list[int]]:
    """Stages, chunks per stage, and blocks of every chunk."""
    pipeline, virtual = draw(st.integers(2, 6)), draw(st.integers(1, 4))
    count = pipeline * virtual
    middle = draw(st.lists(st.integers(1, 5), min_size=count - 2, max_size=count - 2))
    return pipeline, virtual, [draw(st.integers(0, 5)), *middle, draw(st.integers(0, 5))]


def text_of(parts: list[int]) -> str:
    return "E" + "|".join("t" * size for size in parts) + "L"


@given(sizes())
def test_every_block_stands_once_and_in_order(case: tuple[int, int, list[int]]) -> None:
    pipeline, virtual, parts = case
    num_layers = sum(parts)
    chunks = model_chunks(num_layers, pipeline=pipeline, virtual_pipeline=virtual, layout=text_of(parts))
    assert [len(chunk.layers) for chunk in chunks] == parts
    assert list(itertools.chain(*(chunk.layers for chunk in chunks))) == list(range(num_layers))
    assert [chunk.has_embedding for chunk in chunks] == [True] + [False] * (len(parts) - 1)
    assert [chunk.has_loss for chunk in chunks] == [False] * (len(parts) - 1) + [True]
    assert parse_layout(layout_text(chunks), num_layers) == chunks
    stages = [chunks_of_stage(chunks, pipeline=pipeline, pipeline_rank=stage) for stage in range(pipeline)]
    assert [len(stage) for stage in stages] == [virtual] * pipeline
    # Interleaved: the depth goes through all stages once per virtual stage.
    assert tuple(stages[index % pipeline][index // pipeline] for index in range(len(parts))) == chunks


@given(sizes())
def test_megatron_reads_the_same_from_the_text(case: tuple[int, int, list[int]]) -> None:
    pipeline, virtual, parts = case
    text = layout_text(parse_layout(text_of(parts), sum(parts)))
    theirs = PipelineParallelLayerLayout(text, pipeline)
    theirs.validate_layer_layout(sum(parts), None)  # type: ignore[arg-type]
    for stage, chunk in itertools.product(range(pipeline), range(virtual)):
        assert theirs.layout[stage][chunk].count(LayerType.decoder) == parts[chunk * pipeline + stage]


REPEATED = st.recursive(
    st.sampled_from(["t", "tt", "t*3", "t|", "|t", "t*2|t"]),
    lambda inner: st.lists(inner, min_size=1, max_size=4).map("".join),
    max_leaves=6,
)


@given(st.lists(st.tuples(REPEATED, st.integers(0, 3)), max_size=4))
def test_repetitions_are_megatrons(pieces: list[tuple[str, int]]) -> None:
    text = "Et" + "".join(f"({piece})*{count}" if count else piece for piece, count in pieces) + "tL"
    theirs = PipelineParallelLayerLayout.parse_str_to_list(text)
    num_layers = sum(part.count(LayerType.decoder) for part in theirs)
    if any(not part for part in theirs):
        with pytest.raises(ValueError, match=r"part \d+ of \d+ is empty"):
            parse_layout(text, num_layers)
    else:
        ours = parse_layout(text, num_layers)
        assert [len(chunk.layers) for chunk in ours] == [part.count(LayerType.decoder) for part in theirs]


def test_without_a_text_chunks_are_equal() -> None:
    chunks = model_chunks(12, pipeline=3, virtual_pipeline=2, layout=None)
    assert [chunk.layers for chunk in chunks] == [range(start, start + 2) for start in range(0, 12, 2)]
    assert [chunk.layers for chunk in chunks_of_stage(chunks, pipeline=3, pipeline_rank=1)] == [
        range(2, 4),
        range(8, 10),
    ]
    assert [(c.has_embedding, c.has_loss) for c in model_chunks(3, pipeline=1, virtual_pipeline=1, layout=None)] == [
        (True, True)
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tt|ttL", "must begin with E"),
        ("Ett|tt", "end with L"),
        ("Ett|EttL", "must begin with E"),
        ("EttL|tt", "end with L"),
        ("Ett|tL", "holds 3 blocks, but model.num_layers is 4"),
        ("Ett||ttL", "part 2 of 3 is empty"),
        ("|Ett|ttL", "part 1 of 3 is empty"),
        ("Ett|tmL", "'m' means nothing"),
        ("E(t*2|(t)*2)L", r"'\(' means nothing"),
        ("Et*0|t*4L", r"t\*0 repeats 0 times: use 1 to"),
        ("Et*100000|tL", r"repeats 100000 times"),
        ("", "must begin with E"),
    ],
)
def test_a_text_that_is_no_layout_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as refused:
        parse_layout(text, 4)
    assert f"parallel.pipeline_layout is {text!r}" in str(refused.value)


def test_spaces_line_breaks_and_commas_mean_nothing() -> None:
    assert parse_layout("Et t,\n | t\tt L", 4) == parse_layout("Ett|ttL", 4)


GROUPS = [UncutBlocks(first, first + 1, "group") for first in range(0, 8, 2)]


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 8), min_size=1, max_size=4).map(sorted),
    st.sampled_from([[], GROUPS, [UncutBlocks(1, 5, "span")]]),
)
def test_the_nearest_layouts_are_the_nearest(edges: list[int], units: list[UncutBlocks]) -> None:
    bounds = [0, *edges, 8]
    parts = [stop - start for start, stop in itertools.pairwise(bounds)]
    if 0 in parts[1:-1]:
        return
    chunks = parse_layout(text_of(parts), 8)

    def cost(candidate: tuple[int, ...]) -> int:
        return sum(abs(a - b) for a, b in zip(candidate, edges, strict=True))

    every = [
        candidate
        for candidate in itertools.combinations_with_replacement(range(9), len(edges))
        if all(a < b for a, b in itertools.pairwise(candidate))
        and not any(unit.first < edge <= unit.last for unit in units for edge in candidate)
    ]
    found = nearest_layouts(units, chunks, num_layers=8, limit=3)
    for layout in found:
        assert not split_units(units, layout)
        assert parse_layout(layout_text(layout), 8) == layout
    costs = [cost(tuple(chunk.layers.stop for chunk in layout[:-1])) for layout in found]
    assert costs == sorted(map(cost, every))[:3]
    assert len(set(found)) == len(found)
    assert (costs[:1] == [0]) == (not split_units(units, chunks))


def run(layout: str | None, *, pipeline: int = 2, virtual: int = 1, **model: Any) -> RunConfig:
    return RunConfig(
        model=replace(ModelConfig(num_layers=8, num_attention_heads=4, hidden_size=32), **model),
        parallel=ParallelConfig(pipeline=pipeline, virtual_pipeline=virtual, pipeline_layout=layout),
        train=TrainConfig(global_batch_size=8, micro_batch_size=1),
    )


PAIRS = UltraMemV2Config(
    num_keys=12, key_dim=8, value_dim=16, pre_value_dim=8, top_k=4, sharing=SharingConfig("block", 2)
)


@pytest.mark.parametrize(
    "config",
    [
        run("Et*3|t*5L", memory=None),
        run("E|t*8L", memory=PAIRS),
        run("Et*2|t*6L", memory=PAIRS),
        run("E|(t*4|)*2L", pipeline=4, memory=PAIRS),
        run("Ett|tt|ttt|tL", virtual=2, memory=None),
        # All of a ring on one stage of three.
        run("E|t*8|L", pipeline=3, memory=replace(PAIRS, sharing=SharingConfig("ring", 2))),
    ],
)
def test_layouts_that_work(config: RunConfig) -> None:
    validate(config, None)
    layout = transformer_config(config, dtype=torch.float32, on_gpu=False).pipeline_model_parallel_layout
    assert layout.flatten_layout == [LayerType.embedding, *[LayerType.decoder] * 8, LayerType.loss]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            run("Et*3|t*5L", memory=PAIRS),
            r"'Et\*3\|t\*5L', which splits blocks 2\.\.3: those .* stand on one chunk: the nearest layouts that work are Ett\|t\*6L, Et\*4\|t\*4L, E\|t\*8L",
        ),
        (
            run("Et|t|t*5|tL", pipeline=4, memory=PAIRS),
            r"splits blocks 0\.\.1, 6\.\.7: .* that work are E\|tt\|t\*4\|ttL",
        ),
        (
            run("Ett|t*6L", memory=replace(PAIRS, sharing=SharingConfig(), placement=PlacementConfig(spans="1:4"))),
            r"splits blocks 1\.\.4: .* Et\|t\*7L",
        ),
        (
            run("Et*2|t*6L", memory=replace(PAIRS, sharing=SharingConfig("ring", 2))),
            r"splits blocks 0\.\.7: .* E\|t\*8L, Et\*8\|L",
        ),
        (
            run("E|tt|tt|tt|ttL", pipeline=5, memory=replace(PAIRS, sharing=SharingConfig("ring", 2))),
            r"use fewer chunks",
        ),
        (
            run("Et*4|t*4L", pipeline=4),
            r"has 2 parts, but parallel.pipeline 4 x virtual_pipeline 1 makes 4 chunks: write 4 parts",
        ),
        (run("Ett|tt|tt|ttL"), r"makes 2 chunks: set parallel.virtual_pipeline: 2, or write 2 parts"),
        (run("Et*4|t*3L"), r"holds 7 blocks, but model.num_layers is 8"),
    ],
)
def test_layouts_that_cannot_be_are_refused_before_anything_starts(config: RunConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        validate(config, None)


def test_config_show_says_which_blocks_stand_where() -> None:
    (section,) = [
        s for s in extra_sections(run("E|tt|t*5|tL", virtual=2, memory=None)) if s.title.startswith("pipeline")
    ]
    assert section.lines == ("stage 0: embedding; blocks 2..6", "stage 1: blocks 0..1; block 7, loss")
    assert not [s for s in extra_sections(run(None, memory=None)) if s.title.startswith("pipeline")]
    with pytest.raises(ConfigError, match="holds 3 blocks"):
        extra_sections(run("Ett|tL", memory=None))
