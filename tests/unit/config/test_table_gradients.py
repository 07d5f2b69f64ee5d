"""`optimizer.table_gradients: auto`: what it takes, by counts made by hand, and where it says so."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megamem.families.ultramem_v2.config import UltraMemV2Config
from pretrain.config.optimizer import OptimizerConfig
from pretrain.config.schema import RunConfig
from pretrain.config.settled import settled
from pretrain.config.stages import load_config
from pretrain.config.table_gradients import MOST_READS, chosen
from pretrain.config.validate import validate
from pretrain.errors import ConfigError
from pretrain.planning.seconds.hardware import load_hardware
from tools import cli
from tools.plan.layouts import all_estimates, estimate

REPOSITORY = Path(__file__).parents[3]
QUICKSTART = REPOSITORY / "configs" / "quickstart.yaml"
KEYS = ("optimizer.tables=row_wise", "optimizer.table_gradients=auto")
# 8 sequences of 256 tokens read 64 rows each in one layer: 131,072 of 512^2 rows is one for two.
SMALL = "model.memory.num_keys=512"


def quickstart(*overrides: str) -> RunConfig:
    return load_config(QUICKSTART, [*KEYS, *overrides])


@pytest.mark.parametrize(("num_keys", "taken"), [(512, "rows"), (511, "dense")])
def test_rows_are_taken_up_to_one_read_for_two(num_keys: int, taken: str) -> None:
    config = quickstart(f"model.memory.num_keys={num_keys}")
    reads, rows = 8 * 256 * 64, num_keys**2
    assert (reads / rows <= MOST_READS) == (taken == "rows")
    choice = chosen(config)
    assert choice is not None
    assert choice.taken == taken
    assert f"a step reads {reads:,} times from {rows:,} rows, {reads / rows:.3g} times each" in choice.text
    assert choice.text.startswith(f"optimizer.table_gradients (auto): {taken}: ")
    assert settled(config).optimizer.table_gradients == taken


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (("optimizer.value_weight_decay=1000", "optimizer.lr=0.01"), "weight decay 1000 times"),
        (("train.kernels=naive",), "train.kernels is naive"),
    ],
)
def test_what_tables_cannot_have_falls_to_dense_with_the_reason(overrides: tuple[str, ...], reason: str) -> None:
    choice = chosen(quickstart(SMALL, *overrides))
    assert choice is not None
    assert choice.taken == "dense"
    assert reason in choice.reason


def test_rows_by_their_own_clock_take_rows_alone() -> None:
    """However often a step reads."""
    by_reads = ("optimizer.row_clock=reads", "optimizer.value_weight_decay=0.001", "model.memory.num_keys=511")
    choice = chosen(quickstart(*by_reads))
    assert choice is not None
    assert (choice.taken, choice.reason) == ("rows", "optimizer.row_clock is reads")
    for overrides, fix in (
        (("optimizer.table_gradients=dense",), "optimizer.row_clock is reads, and dense gradients"),
        (("train.kernels=naive",), "optimizer.row_clock is reads, and train.kernels is naive"),
        (
            ("optimizer.table_gradients=rows", "optimizer.value_weight_decay=1.0"),
            "set optimizer.value_weight_decay below 1 ",
        ),
    ):
        with pytest.raises(ConfigError, match=fix):
            validate(quickstart(*by_reads, *overrides), 1)
    # A decay that the rate would have made smaller.
    validate(quickstart(*by_reads, "optimizer.value_weight_decay=0.999", "optimizer.value_lr=10.0"), 1)


def test_rows_that_would_wait_for_no_update_are_refused() -> None:
    every = (
        "optimizer.table_gradients=rows",
        "optimizer.tables_every=4",
        "train.num_steps=400",
        "checkpoint.every_steps=20",
    )
    validate(quickstart(*every), 1)
    for overrides, words in (
        (
            ("train.num_steps=402",),
            "optimizer.tables_every is 4, and train.num_steps is 402, which is no multiple of it: add 2",
        ),
        (
            ("checkpoint.every_steps=5",),
            "checkpoint.every_steps is 5, which is no multiple of it: add 3, or set optimizer",
        ),
        (("optimizer.trained_rows={}",), "optimizer.trained_rows is set, which chooses rows for every step"),
    ):
        with pytest.raises(ConfigError, match=words):
            validate(quickstart(*every, *overrides), 1)


def test_tables_of_token_ids_without_a_vocabulary_are_dense() -> None:
    move = load_config(REPOSITORY / "lab" / "configs" / "compare" / "optimizers" / "move_row_wise.yaml", [*KEYS])
    choice = chosen(replace(move, model=replace(move.model, vocab_size=None)))
    assert choice is not None
    assert choice.taken == "dense"
    assert "model.vocab_size" in choice.reason


def test_nothing_is_chosen_where_nothing_was_left_open() -> None:
    for keys in (("optimizer.table_gradients=dense",), ("optimizer.table_gradients=rows",)):
        config = quickstart(SMALL, *keys)
        assert chosen(config) is None
        assert settled(config) == config
    assert chosen(load_config(QUICKSTART)) is None
    # Without a memory nothing reads the key.
    without = replace(quickstart(SMALL), model=replace(quickstart(SMALL).model, memory=None))
    assert chosen(without) is None


def test_a_dtype_is_that_of_dense_gradients_alone() -> None:
    dtype = "optimizer.table_gradient_dtype=bf16"
    assert settled(quickstart(SMALL, dtype)).optimizer.table_gradient_dtype == "fp32"
    assert settled(quickstart("model.memory.num_keys=511", dtype)).optimizer.table_gradient_dtype == "bf16"


def test_the_last_choice_is_what_is_validated_and_estimated() -> None:
    for num_ranks, taken, size in ((1, "rows", SMALL), (2, "rows", SMALL), (2, "dense", "model.memory.num_keys=511")):
        config = quickstart(size)
        assert validate(config, num_ranks).optimizer.table_gradients == taken
        sized = replace(config, model=replace(config.model, vocab_size=4096))
        found = estimate(sized, num_ranks, load_hardware("h100-80g"))
        assert found.config.optimizer.table_gradients == taken
        assert found == estimate(settled(sized), num_ranks, load_hardware("h100-80g"))


def test_every_layer_of_a_model_reads() -> None:
    memory = UltraMemV2Config(num_keys=512, value_dim=32, pre_value_dim=32, top_k=16)
    optimizer = OptimizerConfig(tables="row_wise", table_gradients="auto")
    config = quickstart(SMALL)
    model: Any = replace(config.model, memory=memory, num_layers=3)
    choice = chosen(replace(config, model=model, optimizer=optimizer))
    assert choice is not None
    reads = 8 * 256 * memory.lookup.rows * model.num_memory_layers
    assert f"reads {reads:,} times from {sum(b.num_rows for b in model.memory_plan.banks):,} rows" in choice.reason


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["config", "show"], "# optimizer.table_gradients (auto): rows: a step reads"),
        (["config", "check", "--elsewhere", "--ranks", "1"], "optimizer.table_gradients (auto): rows: a step reads"),
        (["config", "check", "--elsewhere", "--ranks", "2"], "optimizer.table_gradients (auto): rows: a step reads"),
        (
            ["plan", "--gpus", "1", "--gpu", "h100-80g", "model.vocab_size=4096", "--count", "0"],
            "optimizer.table_gradients (auto): rows: a step reads",
        ),
    ],
    ids=["show", "check 1", "check 2", "plan"],
)
def test_commands_say_what_was_chosen(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    name, *rest = words
    own = [rest.pop(0)] if name == "config" else []
    assert cli.main([name, *own, str(QUICKSTART), *KEYS, SMALL, *rest]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert [line for line in lines if line.startswith(said)]


@pytest.mark.parametrize("replicas", [1, 2])
def test_plans_and_runs_reduce_a_graphs_gradients_in_the_open(replicas: int) -> None:
    """A graph leaves no call of Python's that would start a reduction while backward passes."""
    config = quickstart("train.cuda_graph=microbatch")
    layout = settled(config).parallel
    assert (layout.overlap_grad_reduce, layout.overlap_param_gather) == (False, False)
    assert estimate(config, replicas, load_hardware("h100-80g")).config == settled(config) == validate(config, replicas)


def test_plans_name_no_layout_that_a_graph_cannot_hold() -> None:
    found = all_estimates(quickstart("train.cuda_graph=microbatch"), 4, load_hardware("h100-80g"))
    assert found
    for each in found:
        validate(each.config, 4)
