"""Models of two families of memories: which there may be, and how layers and banks are numbered."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megamem.config.model import ModelConfig
from megamem.families.engram.config import EngramConfig
from megamem.families.lave.config import LaveConfig
from megamem.families.midus.config import MidusConfig
from megamem.families.move.config import MoveConfig
from megamem.families.residual_ngrams.config import ResidualNgramsConfig
from megamem.families.stem.config import StemConfig
from megamem.families.tide.config import TideConfig
from megamem.families.ultramem.config import UltraMemConfig
from megamem.families.ultramem_v2.config import UltraMemV2Config
from megamem.placement.block_plan import paired_in_attention, plan_blocks
from megamem.placement.sharing import SharingConfig
from megamem.placement.spans import PlacementConfig
from pretrain.config.optimizer import OptimizerConfig
from pretrain.config.schema import ParallelConfig, RunConfig, TrainConfig
from pretrain.config.stages import load_config
from pretrain.config.validate import validate
from pretrain.errors import ConfigError
from pretrain.planning.counts.pipeline_stages import stages_of

LEARNED = UltraMemV2Config(num_keys=12, value_dim=16, top_k=4, placement=PlacementConfig(blocks=(1, 3)))
NGRAMS = EngramConfig(rows_per_head=31, heads_per_order=2, value_dim=8, placement=PlacementConfig(blocks=(0, 2)))
TOKENS: Any = {"vocab_size": 61, "value_dim": 32, "num_gate_heads": 4}
EMBEDDINGS = LaveConfig(**TOKENS)
MODEL = ModelConfig(num_layers=4, hidden_size=32, vocab_size=61, memory=LEARNED, second_memory=NGRAMS)


def test_layers_count_by_blocks_and_banks_by_families() -> None:
    """Two layers of learned keys share a bank, which comes first; each layer of n-grams has its own behind it."""
    shared = replace(LEARNED, sharing=SharingConfig("block", 2))
    model = replace(MODEL, memory=shared)
    assert [layer.name for layer in model.memory_layers] == [
        "decoder.layers.0.entry.memory",
        "decoder.layers.1.mlp.memory",
        "decoder.layers.2.entry.memory",
        "decoder.layers.3.mlp.memory",
    ]
    plan = model.memory_plan
    assert [(bank.index, bank.layers) for bank in plan.banks] == [(0, (1, 3)), (1, (0,)), (2, (2,))]
    assert [view.bank for view in plan.views] == [1, 0, 2, 0]
    assert [view.banks_before for view in plan.views] == [1, 0, 1, 0]
    assert [model.family_of_bank(bank).kind for bank in range(3)] == ["ultramem_v2", "engram", "engram"]
    # Rows are those of a model of n-grams alone.
    alone = replace(model, memory=NGRAMS, second_memory=None)
    assert [bank.num_rows for bank in plan.banks[1:]] == [bank.num_rows for bank in alone.memory_plan.banks]
    assert model.memory_kinds == "ultramem_v2 and engram"


def test_a_block_may_have_one_memory_in_attention_and_one_outside_of_it() -> None:
    """Names tell them apart; the plan of a block has both, and figures of blocks are of the one outside."""
    for other, module in ((replace(LEARNED, placement=PlacementConfig(query_group=2)), "mlp"), (NGRAMS, "entry")):
        model = replace(MODEL, memory=EMBEDDINGS, second_memory=other)
        both = [block for block in range(4) if module == "mlp" or block in (0, 2)]
        names = {layer.name for layer in model.memory_layers}
        assert names == {f"decoder.layers.{block}.self_attention.memory" for block in range(4)} | {
            f"decoder.layers.{block}.{module}.memory" for block in both
        }
        assert paired_in_attention(model) == {f"decoder.layers.{block}.self_attention.memory" for block in both}
        plans = plan_blocks(model)
        assert [block for block, plan in plans.items() if len(plan.memories) == 2] == both
        assert all(plan.has_ffn and plan.adds_attention and plan.has_memory_in_attention for plan in plans.values())
    # The stream that is lent, and the block that it is lent by, are those of the one outside.
    assert [
        plans_of.queried
        for plans_of in plan_blocks(
            replace(MODEL, memory=replace(LEARNED, placement=PlacementConfig(query_group=2)), second_memory=EMBEDDINGS)
        ).values()
    ] == [None, 0, None, 2]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"second_memory": replace(LEARNED, placement=PlacementConfig(blocks=(0,)))},
            "second_memory.kind is ultramem_v2",
        ),
        ({"second_memory": replace(NGRAMS, placement=PlacementConfig(blocks=(0, 3)))}, "both have a layer in block 3"),
        (
            {"memory": EMBEDDINGS, "second_memory": MoveConfig(**TOKENS)},
            "both have a layer in block 0, which has room for one in attention and one outside of it",
        ),
        (
            {
                "memory": TideConfig(vocab_size=61, value_dim=32, placement=PlacementConfig(blocks=(0,))),
                "second_memory": ResidualNgramsConfig(value_dim=32, placement=PlacementConfig(blocks=(1,))),
            },
            "model.memory.kind is tide and model.second_memory.kind residual_ngrams, and layers of both read their tables together",
        ),
        (
            {
                "memory": replace(LEARNED, placement=PlacementConfig(blocks=(1, 3), query_group=2)),
                "second_memory": TideConfig(vocab_size=61, value_dim=32, placement=PlacementConfig(blocks=(0,))),
            },
            "blocks hand on what layers of kind tide have read together, and nothing else: set query_group: 1",
        ),
        ({"memory": StemConfig(vocab_size=61), "second_memory": LEARNED}, "both have a layer in block 1"),
        (
            {"second_memory": MidusConfig(num_heads=4, num_keys=32, placement=PlacementConfig(blocks=(0,)))},
            "model.second_memory.kind is midus",
        ),
        (
            {
                "memory": replace(LEARNED, placement=PlacementConfig(blocks=(1, 3), query_group=2)),
                "second_memory": UltraMemConfig(
                    num_keys=12, value_dim=16, top_k=4, placement=PlacementConfig(spans="0:2")
                ),
            },
            "model.memory.placement.query_group is 2 and that of model.second_memory 1",
        ),
        ({"second_memory": replace(NGRAMS, boundary_id=61)}, "model.second_memory.boundary_id is 61"),
        (
            {"second_memory": replace(NGRAMS, placement=PlacementConfig(blocks=(4,)))},
            "block 4 is not one of num_layers = 4",
        ),
    ],
)
def test_two_families_that_a_model_cannot_have_are_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words.replace(".", r"\.")):
        replace(MODEL, **change)


def test_messages_name_the_section(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(
        "model:\n  memory: {num_keys: 40, placement: {blocks: [1]}}\n"
        "  second_memory: {kind: engram, rules: ple, token_map: x, compressed_vocab_size: 3,\n"
        "    placement: {blocks: [0]}}\n"
    )
    with pytest.raises(ConfigError, match=r"model\.second_memory\.token_map is x, but rules are ple"):
        load_config(path)
    hashed = [f"model.second_memory.{key}=null" for key in ("token_map", "compressed_vocab_size")]
    with pytest.raises(ConfigError, match=r"model\.second_memory\.top_k has no effect unless kind is"):
        load_config(path, ["model.second_memory.top_k=3", *hashed])
    with pytest.raises(ConfigError, match=r"model\.second_memory\.placement\.position has no effect unless"):
        load_config(path, [*hashed, "model.second_memory.placement.position=instead"])
    # Without the first there is none.
    path.write_text(path.read_text().replace("rules: ple, token_map: x, compressed_vocab_size: 3,", ""))
    assert load_config(path).model.memory_kinds == "ultramem_v2 and engram"
    dense = load_config(path, ["model.memory=null"])
    assert (dense.model.memories, dense.model.second_memory) == ((), None)


def test_layouts_are_held_against_both() -> None:
    run = RunConfig(
        model=replace(MODEL, memory=replace(LEARNED, sharing=SharingConfig("block", 2))),
        train=TrainConfig(sequence_length=16, kernels="torch"),
    )
    validate(run, 1)
    for parallel, words in (
        (ParallelConfig(memory=16), r"model\.second_memory\.value_dim is 8, which parallel\.memory 16 does not divide"),
        (ParallelConfig(memory=2, memory_rows=2), r"rows of model\.second_memory\.kind engram"),
        (ParallelConfig(pipeline=2), r"model\.memory\.sharing\.group is 2"),
    ):
        with pytest.raises(ConfigError, match=words):
            validate(replace(run, parallel=parallel), 16)
    in_files = OptimizerConfig(
        tables="row_wise", table_gradients="rows", value_weight_decay=0.0, table_folder="somewhere"
    )
    # Rows of one family are known before a step: its tables lie in files, and those of the other do not.
    validate(replace(run, optimizer=in_files), 1)
    keys = UltraMemConfig(num_keys=12, value_dim=16, top_k=4, placement=PlacementConfig(blocks=(0,)))
    learned = replace(run, optimizer=in_files, model=replace(run.model, second_memory=keys))
    words = r"model\.memory\.kind is ultramem_v2 and model\.second_memory\.kind is ultramem, whose rows are not known"
    with pytest.raises(ConfigError, match=words):
        validate(learned, 1)


def test_skips_cross_blocks_of_the_other_family() -> None:
    skipping = UltraMemConfig(num_keys=12, top_k=6, placement=PlacementConfig(spans="0:2"))
    model = replace(MODEL, memory=replace(NGRAMS, placement=PlacementConfig(blocks=(1,))), second_memory=skipping)
    assert [(span.read, span.add) for span in model.memory_spans] == [(0, 2), (1, 1)]


def test_every_stage_has_a_reader_of_the_bank_of_which_it_holds_a_copy() -> None:
    """Another family's blocks are none."""
    embeddings = MoveConfig(**TOKENS, placement=PlacementConfig(blocks=(0, 1)))
    run = RunConfig(
        model=replace(MODEL, second_memory=embeddings),
        train=TrainConfig(sequence_length=16, kernels="torch"),
        parallel=ParallelConfig(pipeline=2),
    )
    with pytest.raises(ConfigError, match=r"stage 1 of parallel\.pipeline 2 has no block with a memory"):
        validate(run, 2)
    everywhere = replace(embeddings, placement=PlacementConfig())
    both = replace(run, model=replace(run.model, second_memory=everywhere))
    validate(both, 2)
    for stage in stages_of(both):
        copies = [bank for bank in stage.trained_banks if bank.on_every_stage]
        assert sum(bank.elements for bank in copies) == 61 * everywhere.num_slots * 32
