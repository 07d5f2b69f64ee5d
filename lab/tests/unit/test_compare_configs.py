"""The models of the shipped comparison are as equal as its rules say, by the closed formulas."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import pytest

from lab.studies.compare.rules import load_configs
from lab.studies.compare.tuning import read_tuning
from megamem.config.model import ModelConfig
from pretrain.config.schema import RunConfig
from pretrain.config.stages import load_config
from pretrain.config.validate import validate
from pretrain.planning.counts.formulas import count_parameters, forward_flops_per_token

CONFIGS = Path(__file__).parents[2] / "configs"
NAMES = ("dense", "memory_plus", "moe", "peer", "pkm", "ultramem", "ultramemv2", "ultramemv2_block", "ultramemv2_ring")
SPARSE = NAMES[1:]
MEMORIES = tuple(name for name in SPARSE if name != "moe")
# Their tables follow the vocabulary, and hold what its size makes them hold.
BY_TOKEN = ("lave", "move", "tide")
# They hold as much as the others', and read less of it: what is read is projected.
BY_NGRAM = ("engram", "engram_ple")


@dataclass(frozen=True)
class Size:
    """One folder of models.

    Attributes:
        tokens: tokens of a run.
        reads: table elements per token.
        expert_step: divisor of the width of an expert.
        tolerance: tolerance of the mixture's FLOPs.
    """

    folder: Path
    vocab_size: int
    tokens: int
    reads: int
    expert_step: int = 8
    tolerance: float = 0.01

    def load(self, name: str) -> RunConfig:
        return load_config(self.folder / f"{name}.yaml", [f"model.vocab_size={self.vocab_size}"])

    def flops(self, model: ModelConfig) -> float:
        return forward_flops_per_token(model, self.load("dense").train.sequence_length)

    def with_width(self, model: ModelConfig, change: int) -> ModelConfig:
        """The model with a wider or narrower feed-forward, or expert."""
        if model.moe is None:
            return replace(model, ffn_hidden_size=model.ffn_hidden_size + 8 * change)
        width = model.moe.expert_ffn_hidden_size + self.expert_step * change
        return replace(model, moe=replace(model.moe, expert_ffn_hidden_size=width))


FOLDER = CONFIGS / "compare"
SIZES = {
    "small": Size(FOLDER, 4096, 1_048_576, 4096, expert_step=1, tolerance=0.005),
    "medium": Size(FOLDER / "medium", 16384, 25_165_824, 65_536),
    "large": Size(FOLDER / "large", 16384, 67_108_864, 196_608),
}


@pytest.fixture(params=SIZES)
def size(request: pytest.FixtureRequest) -> Size:
    return SIZES[request.param]


def test_the_folder_is_one_comparison(size: Size) -> None:
    configs = load_configs([str(path) for path in sorted(size.folder.glob("*.yaml"))])
    assert tuple(config.name for config in configs.values()) == tuple(sorted((*NAMES, *BY_TOKEN, *BY_NGRAM)))
    for config in configs.values():
        validate(config, 2)
        assert config.train.num_steps * config.train.tokens_per_step == size.tokens


@pytest.mark.parametrize("name", [*SPARSE, *BY_TOKEN, *BY_NGRAM])
def test_flops_and_active_parameters_are_those_of_the_dense_model(size: Size, name: str) -> None:
    dense, model = size.load("dense").model, size.load(name).model
    assert size.flops(model) == pytest.approx(size.flops(dense), rel=size.tolerance if name == "moe" else 0.005)
    assert count_parameters(model).active == pytest.approx(count_parameters(dense).active, rel=0.01)


@pytest.mark.parametrize("name", [*SPARSE, *BY_TOKEN, *BY_NGRAM])
def test_no_neighbouring_width_is_nearer(size: Size, name: str) -> None:
    target, model = size.flops(size.load("dense").model), size.load(name).model
    distances = [abs(size.flops(size.with_width(model, change)) - target) for change in (-1, 0, 1)]
    assert min(distances) == distances[1]


@pytest.mark.parametrize("name", ["move", "tide"])
def test_no_other_number_of_slots_or_tables_comes_nearer_to_the_idle_experts(size: Size, name: str) -> None:
    model, idle = size.load(name).model, count_parameters(size.load("moe").model).idle_experts
    assert model.memory is not None
    one = size.vocab_size * model.memory.value_dim
    assert abs(count_parameters(model).tables - idle) <= one / 2


def test_a_table_of_values_per_block_is_all_that_lave_has(size: Size) -> None:
    model = size.load("lave").model
    assert model.memory is not None
    assert count_parameters(model).tables == model.num_layers * size.vocab_size * model.memory.value_dim


@pytest.mark.parametrize("name", [*MEMORIES, *BY_NGRAM])
def test_tables_hold_what_idle_experts_hold(size: Size, name: str) -> None:
    counts, mixture = count_parameters(size.load(name).model), count_parameters(size.load("moe").model)
    assert counts.tables == pytest.approx(mixture.idle_experts, rel=0.01)
    assert counts.total == pytest.approx(mixture.total, rel=0.01)
    assert counts.read_values == size.reads or (name in BY_NGRAM and counts.read_values < size.reads)


@pytest.mark.parametrize("name", [*NAMES, *BY_TOKEN, *BY_NGRAM])
def test_models_differ_in_the_feed_forward_and_memory_alone(size: Size, name: str) -> None:
    config, dense = size.load(name), size.load("dense")
    alike = replace(config.model, ffn_hidden_size=dense.model.ffn_hidden_size, moe=None, memory=None)
    assert alike == dense.model
    # Without tables there is no learning rate of tables.
    optimizer = replace(config.optimizer, value_lr_multiplier=dense.optimizer.value_lr_multiplier)
    assert replace(config, name="dense", model=alike, optimizer=optimizer) == dense


def test_block_and_ring_differ_in_the_pattern_alone(size: Size) -> None:
    block, ring = size.load("ultramemv2_block").model, size.load("ultramemv2_ring").model
    assert block.memory is not None
    assert replace(block, memory=replace(block.memory, sharing=replace(block.memory.sharing, pattern="ring"))) == ring


def test_optimizers_change_nothing_else_of_the_tuned_models() -> None:
    """With AdamW's settings, the tables' rates among them."""
    names = set()
    for path in sorted((FOLDER / "optimizers").glob("*.yaml")):
        config, model = load_config(path), path.stem.removesuffix("_muon").removesuffix("_row_wise")
        validate(config, 2)
        tuned = load_config(FOLDER / "tuned" / f"{model}.yaml")
        tables = "row_wise" if "_row_wise" in path.stem else "adamw"
        matrices = "muon" if path.stem.endswith("_muon") else "adamw"
        optimizer = replace(tuned.optimizer, tables=tables, matrices=matrices)
        assert config == replace(tuned, name=path.stem, optimizer=optimizer)
        assert (tables, matrices) != ("adamw", "adamw")
        names.add(path.stem)
    memories = ("move", "ultramem", "ultramemv2")
    assert names == {"dense_muon", *(f"{name}_row_wise{more}" for name in memories for more in ("", "_muon"))}


@pytest.mark.parametrize("path", sorted((FOLDER / "strong").glob("*.yaml")), ids=lambda path: path.stem)
def test_strong_models_cost_the_same_and_have_the_same_means(path: Path) -> None:
    size = SIZES["small"]
    config = load_config(path, [f"model.vocab_size={size.vocab_size}"])
    validate(config, 1)
    assert config.name == f"{path.stem}_strong"
    dense = load_config(FOLDER / "dense.yaml", [f"model.vocab_size={size.vocab_size}"])
    assert size.flops(config.model) == pytest.approx(size.flops(dense.model), rel=0.01)
    assert count_parameters(config.model).active == pytest.approx(count_parameters(dense.model).active, rel=0.01)
    assert (config.optimizer.matrices, config.optimizer.tables) == ("muon", "row_wise")
    assert config.model.qk_norm
    assert config.train == dense.train
    # Those without a memory of their own have value embeddings.
    kinds = {
        "dense": "lave",
        "moe": "lave",
        "moe_engram": "engram and lave",
        "ultramemv2": "ultramem_v2",
        "ultramemv2_embeddings": "ultramem_v2 and lave",
        "engram_embeddings": "engram and lave",
        "residual_embeddings": "residual_ngrams and lave",
        "embedding_embeddings": "ngram_embedding and lave",
        "value_and_embedding_ngrams": "value_ngrams and ngram_embedding",
    }
    assert config.model.memory_kinds == kinds.get(path.stem, path.stem)


@pytest.mark.parametrize("path", sorted((FOLDER / "strong" / "tuned").glob("*.yaml")), ids=lambda path: path.stem)
def test_tuned_strong_models_have_settings_that_the_search_tries(path: Path) -> None:
    own, found = load_config(FOLDER / "strong" / path.name), load_config(path)
    tried = read_tuning(FOLDER.parent / "tuning" / "strong.yaml").values
    changed = {name for name in vars(own.optimizer) if getattr(own.optimizer, name) != getattr(found.optimizer, name)}
    assert found == replace(own, optimizer=replace(own.optimizer, **{n: getattr(found.optimizer, n) for n in changed}))
    assert changed
    assert all(getattr(found.optimizer, name) in tried[f"optimizer.{name}"] for name in changed)


@pytest.mark.parametrize("path", sorted((FOLDER / "streams").glob("*.yaml")), ids=lambda path: path.stem)
def test_models_of_several_streams_cost_what_one_stream_does(path: Path) -> None:
    """They differ from the model of their base in the feed-forward's width alone; active parameters are not held to a rule."""
    size = SIZES["small"]
    overrides = [f"model.vocab_size={size.vocab_size}"]
    of_count, _, count = path.stem.rpartition("_")
    several = load_config(path, overrides)
    assert several.model.residual_streams is not None
    model = of_count.removesuffix(f"_{several.model.residual_streams.kind}")
    strong = {"strong": "dense", "engram_embeddings": "engram_embeddings"}
    base = FOLDER / (f"strong/tuned/{strong[model]}.yaml" if model in strong else f"tuned/{model}.yaml")
    one = load_config(base, overrides)
    assert several.name == f"{path.stem}_streams"
    assert several.model.num_streams == int(count)
    alike = replace(several.model, residual_streams=None, ffn_hidden_size=one.model.ffn_hidden_size)
    assert replace(several, name=one.name, model=alike) == one
    assert size.flops(several.model) == pytest.approx(size.flops(one.model), rel=0.005)


@pytest.mark.parametrize("model", ["dense", "ultramemv2", "ultramem", "move", "engram"])
def test_models_of_rising_widths_differ_in_nothing_else(model: str) -> None:
    folder = FOLDER / "widths"
    base = load_config(folder / f"{model}_032.yaml")
    assert base.model.width_rules.ratio == 1
    for factor in (2, 4, 8):
        wide = load_config(folder / f"{model}_{32 * factor:03d}.yaml")
        expected = replace(
            base.model,
            hidden_size=32 * factor,
            num_attention_heads=factor,
            num_query_groups=factor,
            ffn_hidden_size=base.model.ffn_hidden_size * factor,
            # Values that nothing projects are as wide as the stream.
            memory=replace(base.model.memory, value_dim=32 * factor, num_gate_heads=factor)
            if model == "move"
            else base.model.memory,
        )
        assert wide == replace(base, name=wide.name, model=expected)
    plain, four = (load_config(folder / f"{model}_128{more}.yaml") for more in ("_plain", ""))
    assert plain == replace(four, name=plain.name, model=replace(four.model, mup=None))


def test_tables_of_rising_numbers_of_rows_cost_the_same() -> None:
    dense = SIZES["small"].load("dense").model
    rows = []
    for path in sorted((FOLDER / "rows").glob("*.yaml")):
        model = load_config(path, ["model.vocab_size=4096"]).model
        assert forward_flops_per_token(model, 256) == pytest.approx(forward_flops_per_token(dense, 256), rel=0.005)
        assert count_parameters(model).active == pytest.approx(count_parameters(dense).active, rel=0.015)
        rows.append(count_parameters(model).tables / (4 * 64))
        assert path.stem == f"rows_{rows[-1]:05.0f}"
    assert all(3.9 < more / fewer < 4.1 for fewer, more in pairwise(rows))
    assert len(rows) == 4


@pytest.mark.parametrize("path", sorted((FOLDER / "allocation").glob("*.yaml")), ids=lambda path: path.stem)
def test_sparse_parameters_are_allocated_as_the_name_says(path: Path) -> None:
    """To n-grams or learned keys so many percent of what the mixture of experts leaves idle, and to others the rest."""
    size = SIZES["small"]
    first, percent, second = path.stem.split("_")
    config = load_config(path, [f"model.vocab_size={size.vocab_size}"])
    validate(config, 2)
    assert config.name == path.stem.replace("_", "-")
    idle = count_parameters(size.load("moe").model).idle_experts
    counts, model = count_parameters(config.model), config.model
    assert counts.tables + counts.idle_experts == pytest.approx(idle, rel=0.005)
    assert size.flops(model) == pytest.approx(size.flops(size.load("dense").model), rel=0.005)
    kinds = {"ngrams": "engram", "keys": "ultramem_v2"}
    of_first = sum(
        bank.num_rows * model.family_of_bank(bank.index).row_width
        for bank in model.memory_plan.banks
        if model.family_of_bank(bank.index).kind == kinds[first]
    )
    # A key more per side of the smallest grid is 3 %.
    assert of_first == pytest.approx(int(percent) / 100 * idle, rel=0.015)
    assert (model.moe is not None) == (second == "experts")
    assert {memory.kind for memory in model.memories} == {kinds[each] for each in (first, second) if each != "experts"}
