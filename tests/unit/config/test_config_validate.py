"""Checks across sections: each refusal, its message and the layouts that it suggests."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from megamem.placement.block_plan import UncutBlocks
from pretrain.config.layout_rules import nearest_pipelines
from pretrain.config.schema import RunConfig
from pretrain.config.validate import validate
from pretrain.errors import ConfigError
from tests.plain_config import parse_config


def run(settings: Mapping[str, Any]) -> RunConfig:
    """A configuration from dotted keys."""
    tree: dict[str, Any] = {}
    for key, value in settings.items():
        *path, name = key.split(".")
        owner = tree
        for segment in path:
            owner = owner.setdefault(segment, {})
        owner[name] = value
    return parse_config(tree, RunConfig)


def refusal(settings: Mapping[str, Any], world_size: int | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        validate(run(settings), world_size)
    return str(caught.value)


SHARED = {"model.memory.sharing.pattern": "block", "model.memory.sharing.group": 2, "model.num_layers": 8}


@pytest.mark.parametrize(
    ("settings", "world_size"),
    [
        ({}, None),
        ({}, 1),
        ({"model.memory": {}}, 2),
        ({"parallel.tensor": 2, "parallel.pipeline": 2, "model.memory": {}}, 4),
        ({"parallel.pipeline": 2, "parallel.virtual_pipeline": 2, "model.memory": {}}, 2),
        ({**SHARED, "parallel.pipeline": 2, "parallel.virtual_pipeline": 2}, 4),
        ({"model.memory.sharing.pattern": "ring", "model.memory.sharing.group": 4}, 8),
        ({"optimizer.schedule": "wsd", "optimizer.decay_steps": 50, "optimizer.warmup_steps": 50}, 1),
        ({"optimizer.schedule": "constant", "optimizer.lr": 1e-6}, 1),
        ({"model.num_query_groups": 2, "parallel.tensor": 2}, 2),
        ({"model.num_query_groups": 1, "parallel.tensor": 4}, 4),
        ({"model.latent_attention": {"latent_dim": 12, "rotary_dim": 4}, "parallel.tensor": 2}, 2),
        ({"train.sequence_length": 255}, 2),
        ({"name": "2.5b_run-1", "data.datasets": [{"path": "x"}]}, 1),
    ],
)
def test_what_can_run(settings: Mapping[str, Any], world_size: int | None) -> None:
    validate(run(settings), world_size)


@pytest.mark.parametrize(
    ("settings", "world_size", "message"),
    [
        ({"name": "a/b"}, None, "name is 'a/b': it names a folder, so use letters, digits and . _ - + ="),
        ({"name": "a b"}, None, "name is 'a b': it names a folder, so use letters, digits and . _ - + ="),
        (
            {"train.num_steps": 10**30},
            None,
            f"train.num_steps is {10**30}, in which a run reads more than 9,223,372,036,854,775,807 tokens: lower it",
        ),
        # ranks
        (
            {"parallel.tensor": 2, "parallel.pipeline": 2},
            6,
            "the run has 6 ranks, which is not a multiple of parallel.tensor 2 x pipeline 2 x context 1 = 4: start 4 or 8 ranks or change the layout",
        ),
        (
            {"parallel.tensor": 4},
            3,
            "the run has 3 ranks, which is not a multiple of parallel.tensor 4 x pipeline 1 x context 1 = 4: start 4 ranks or change the layout",
        ),
        # batch
        (
            {"train.global_batch_size": 30},
            None,
            "train.global_batch_size is 30, which is not a multiple of train.micro_batch_size 4 = 4: use 28 or 32, or train.micro_batch_size 2",
        ),
        (
            {"train.global_batch_size": 8},
            3,
            "train.global_batch_size is 8, which is not a multiple of train.micro_batch_size 4 x data-parallel size 3 = 12: use 12",
        ),
        (
            {"train.global_batch_size": 12, "parallel.pipeline": 2, "parallel.virtual_pipeline": 2},
            2,
            "train.global_batch_size is 12, which gives 3 microbatches per rank: with parallel.virtual_pipeline 2 their number must be "
            "a multiple of parallel.pipeline 2: use 8 or 16",
        ),
        # tensor
        (
            {"parallel.tensor": 8, "model.num_attention_heads": 4},
            None,
            "model.num_attention_heads is 4, which parallel.tensor 8 does not divide: each tensor-parallel rank holds an equal part",
        ),
        (
            {
                "parallel.tensor": 2,
                "model.num_attention_heads": 6,
                "model.head_dim": 8,
                "model.num_query_groups": 3,
            },
            None,
            "model.num_query_groups is 3, which parallel.tensor 2 does not divide: each tensor-parallel rank holds an equal part",
        ),
        (
            {"parallel.tensor": 2, "model.latent_attention": {"latent_dim": 9, "rotary_dim": 4}},
            None,
            "model.latent_attention.latent_dim + rotary_dim is 13, which parallel.tensor 2 does not divide: each "
            "tensor-parallel rank holds an equal part",
        ),
        (
            {
                "parallel.tensor": 2,
                "model.latent_attention": {"latent_dim": 12, "rotary_dim": 4, "query_latent_dim": 9},
            },
            None,
            "model.latent_attention.query_latent_dim is 9, which parallel.tensor 2 does not divide: each "
            "tensor-parallel rank holds an equal part",
        ),
        (
            {"parallel.tensor": 2, "model.ffn_hidden_size": 255},
            None,
            "model.ffn_hidden_size is 255, which parallel.tensor 2 does not divide: each tensor-parallel rank holds an equal part",
        ),
        (
            {"parallel.tensor": 2, "model.vocab_size_multiple": 1},
            None,
            "model.vocab_size_multiple is 1, which parallel.tensor 2 does not divide: each tensor-parallel rank holds an equal part",
        ),
        # sequence
        (
            {"parallel.tensor": 2, "train.sequence_length": 255},
            None,
            "train.sequence_length is 255, which must be a multiple of 2 with parallel.tensor 2 and context 1: use 254 or 256",
        ),
        # pipeline
        (
            {"parallel.pipeline": 3},
            None,
            "model.num_layers is 4, which parallel.pipeline 3 x virtual_pipeline 1 = 3 chunks do not divide: the nearest layouts that work are "
            "pipeline 4 x virtual_pipeline 1, pipeline 2 x virtual_pipeline 1, pipeline 2 x virtual_pipeline 2, pipeline 1 x virtual_pipeline 1",
        ),
        (
            {**SHARED, "parallel.pipeline": 8},
            None,
            "model.memory.sharing.group is 2, but parallel.pipeline 8 x virtual_pipeline 1 puts 1 layers into a chunk, which would split a group: "
            "the nearest layouts that work are pipeline 4 x virtual_pipeline 1, pipeline 2 x virtual_pipeline 1, "
            "pipeline 2 x virtual_pipeline 2, pipeline 1 x virtual_pipeline 1",
        ),
        (
            {"model.memory.sharing.pattern": "ring", "model.memory.sharing.group": 2, "parallel.pipeline": 2},
            None,
            "model.memory.sharing.pattern is ring, where all layers read each other's tables: they must stand on one stage, but "
            "parallel.pipeline 2 x virtual_pipeline 1 makes 2 chunks: use parallel.pipeline: 1, or pattern: block",
        ),
        # schedule
        (
            {"optimizer.lr": 1e-5},
            None,
            "optimizer.min_lr is 0.0001, above optimizer.lr 1e-05: the schedule ends there, so lower it",
        ),
        (
            {"optimizer.schedule": "wsd"},
            None,
            "optimizer.decay_steps is 0, and optimizer.schedule wsd ends with a decay of that many steps: set it, or use schedule: constant",
        ),
        (
            {"optimizer.schedule": "wsd", "optimizer.decay_steps": 60, "optimizer.warmup_steps": 50},
            None,
            "optimizer.warmup_steps 50 and optimizer.decay_steps 60 need 110 steps, but train.num_steps is 100: shorten them or train longer",
        ),
        (
            {"optimizer.warmup_steps": 101},
            None,
            "optimizer.warmup_steps 101 need 101 steps, but train.num_steps is 100: shorten them or train longer",
        ),
        # graphs
        *(
            (
                {"train.cuda_graph": "microbatch", **settings},
                None,
                f"train.cuda_graph is microbatch, and {problem}, or use train.cuda_graph: none",
            )
            for settings, problem in (
                (
                    {"parallel.tensor": 2},
                    "parallel.tensor is 2, so that a microbatch has messages between ranks: use parallel.tensor: 1",
                ),
                (
                    {"model.memory": {}, "parallel.memory": 2},
                    "parallel.memory is 2, whose lookups run on a stream of their own: use parallel.overlap_memory: false",
                ),
                (
                    {"data.documents": "separate"},
                    "data.documents is separate, whose bounds are read on the host: use data.documents: joined",
                ),
                (
                    {"train.recompute": "full"},
                    "train.recompute is full, which restores states of random numbers on the host: use train.recompute: none",
                ),
                (
                    {"model.memory": {}, "train.kernels": "torch"},
                    "train.kernels is torch, whose sums by index may wait for the host: use train.kernels: auto",
                ),
                (
                    {"model.moe": {"num_experts": 4, "top_k": 2, "expert_ffn_hidden_size": 16}},
                    "model.moe is set, whose experts' numbers of tokens are read on the host: use a dense feed-forward",
                ),
                (
                    {
                        "model.memory": {},
                        "optimizer.tables": "row_wise",
                        "optimizer.table_gradients": "rows",
                        "optimizer.value_weight_decay": 0.0,
                    },
                    "optimizer.table_gradients is rows, whose number is another one for every microbatch: use "
                    "optimizer.table_gradients: dense",
                ),
                (
                    {
                        "model.memory": {},
                        "optimizer.tables": "row_wise",
                        "optimizer.table_gradients": "dense",
                        "optimizer.table_gradient_dtype": "bf16",
                    },
                    "optimizer.table_gradient_dtype is bf16, whose roundings are numbered on the host: use "
                    "optimizer.table_gradient_dtype: fp32",
                ),
            )
        ),
        # data
        (
            {"data.datasets": [{"path": ""}]},
            None,
            "data.datasets.0.path is empty: give the folder that `megamem data prepare` wrote",
        ),
    ],
)
def test_what_cannot_run(settings: Mapping[str, Any], world_size: int | None, message: str) -> None:
    assert refusal(settings, world_size) == message


@pytest.mark.parametrize(
    ("tensor", "context", "length", "message"),
    [
        (1, 2, 258, "must be a multiple of 4 with parallel.tensor 1 and context 2: use 256 or 260"),
        (2, 2, 258, "must be a multiple of 4 with parallel.tensor 2 and context 2: use 256 or 260"),
        (4, 2, 260, "must be a multiple of 8 with parallel.tensor 4 and context 2: use 256 or 264"),
        (1, 4, 6, "must be a multiple of 8 with parallel.tensor 1 and context 4: use 8"),
    ],
)
def test_sequences_are_cut_into_equal_parts(tensor: int, context: int, length: int, message: str) -> None:
    sizes = {"parallel.tensor": tensor, "parallel.context": context, "train.sequence_length": length}
    assert refusal(sizes) == f"train.sequence_length is {length}, which {message}"


def test_a_memory_group_must_split_the_tables_and_the_ranks_evenly() -> None:
    message = refusal({"parallel.memory": 3, "model.memory": {}}, 4)
    assert (
        "model.memory.value_dim is 64, which parallel.memory 3 does not divide: each rank holds an equal part"
        in message
    )
    assert "model.memory.pre_value_dim is 64, which parallel.memory 3 does not divide" in message
    assert (
        "parallel.memory is 3, which does not divide the 4 ranks of a pipeline stage (tensor x context x data): use 4 or 2"
    ) in message


def test_rows_are_split_evenly_over_some_of_the_group() -> None:
    def rows(parts: int, group: int, **memory: object) -> dict[str, Any]:
        memory_keys = {f"model.memory.{key}": value for key, value in memory.items()}
        keys = {"parallel.memory": group, "parallel.memory_rows": parts, "train.global_batch_size": 24}
        return {**keys, "model.memory": {}, **memory_keys}

    validate(run({**rows(4, 8), "train.global_batch_size": 32}), 8)
    # The two parts of the columns divide the widths, the group does not.
    validate(run(rows(3, 6, num_keys=96)), 6)
    assert refusal(rows(4, 6), 6) == (
        "parallel.memory_rows is 4, which does not divide parallel.memory 6: equally many ranks hold each part of the "
        "rows, use parallel.memory_rows 2"
    )
    assert refusal(rows(3, 6, num_keys=64), 6).endswith(
        "rows, which parallel.memory_rows 3 does not divide: each rank holds an equal part of them, use "
        "parallel.memory_rows 1 or a model.memory.num_keys that is a multiple of 3"
    )
    assert (
        "model.memory.value_dim is 64, which parallel.memory 6 / memory_rows 2 does not divide: each rank"
        in refusal(rows(2, 6), 6)
    )


def test_rows_that_no_shuffle_spreads_are_not_split() -> None:
    settings = {"model.memory.kind": "move", "parallel.memory": 2, "parallel.memory_rows": 2, "model.vocab_size": 1024}
    assert (
        "parallel.memory_rows is 2, but rows of model.memory.kind move are read as often as their tokens come, which no "
        "shuffle spreads over the parts: use parallel.memory_rows: 1"
    ) in refusal(settings, 2)


def test_a_table_without_parts_has_no_parts_of_rows() -> None:
    with pytest.raises(ConfigError, match=r"parallel\.memory_rows .*parallel\.memory is above 1"):
        run({"parallel.memory_rows": 2, "model.memory": {}})
    whole = RunConfig()
    whole = replace(whole, parallel=replace(whole.parallel, memory_rows=2))
    with pytest.raises(ConfigError, match=r"^parallel.memory_rows is 2, which does not divide parallel.memory 1"):
        validate(whole, 1)


def test_a_dense_model_has_no_table_to_split() -> None:
    import dataclasses

    config = RunConfig()
    # The loader refuses the option too; a configuration made in code has not been through it.
    split = dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, memory=2))
    with pytest.raises(
        ConfigError, match=r"^parallel.memory is 2, but model.memory is null: there is no table to split"
    ):
        validate(split, 2)


@pytest.mark.parametrize(
    ("settings", "module", "message"),
    [
        (
            {"model.implementation": "transformer_engine"},
            "transformer_engine",
            'model.implementation is transformer_engine, but transformer_engine is not installed: pip install "megamem[te]", or change the option',
        ),
        (
            {"logging.tensorboard": True},
            "tensorboard",
            'logging.tensorboard is true, but tensorboard is not installed: pip install "megamem[tracking]", or change the option',
        ),
        (
            {"logging.wandb_mode": "offline"},
            "wandb",
            'logging.wandb_mode is offline, but wandb is not installed: pip install "megamem[tracking]", or change the option',
        ),
    ],
)
def test_optional_packages(
    monkeypatch: pytest.MonkeyPatch, settings: Mapping[str, Any], module: str, message: str
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == module else object())
    assert refusal(settings) == message
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    validate(run(settings), None)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"health.hang_minutes": 3.0, "parallel.timeout_minutes": 2.5},
            "health.hang_minutes is 3.0, and after parallel.timeout_minutes 2.5 a collective ends the run before the ranks "
            "have written their stacks: lower the one or raise the other",
        ),
        (
            {"health.spikes.action": "rewind"},
            "health.spikes.action is rewind, and checkpoint.every_steps is 0: there would be no checkpoint to go back to. "
            "Set checkpoint.every_steps, or use skip",
        ),
        (
            {
                "health.spikes.action": "skip",
                "health.spikes.loss_deviations": None,
                "health.spikes.grad_norm_deviations": None,
            },
            "health.spikes.action is skip, and both loss_deviations and grad_norm_deviations are null: nothing would be "
            "judged. Set one of them",
        ),
    ],
)
def test_rules_of_health_that_could_do_nothing(settings: Mapping[str, Any], message: str) -> None:
    assert refusal(settings) == message


def test_all_problems_are_reported_at_once() -> None:
    message = refusal(
        {
            "parallel.tensor": 8,
            "train.global_batch_size": 30,
            "optimizer.lr": 1e-5,
            "optimizer.warmup_steps": 200,
        },
        8,
    )
    assert message.startswith("4 problems in the configuration:\n  - ")


@pytest.mark.parametrize(
    ("num_layers", "group"), [(1, 1), (4, 1), (4, 2), (6, 3), (24, 1), (24, 2), (24, 3), (60, 1), (60, 2), (60, 3)]
)
def test_suggested_layouts_work(num_layers: int, group: int) -> None:
    layouts = nearest_pipelines(
        num_layers,
        [UncutBlocks(first, first + group - 1, "group") for first in range(0, num_layers, group)],
        pipeline=5,
        virtual=2,
    )
    assert layouts
    for pipeline, virtual in layouts:
        assert (num_layers // group) % (pipeline * virtual) == 0
        assert virtual == 1 or pipeline > 1


def test_kernels_that_cannot_run_here_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    memory = {"model.memory": {}}
    message = refusal({**memory, "train.kernels": "triton"}, 1)
    assert message.startswith("train.kernels is triton, which needs")
    assert "use auto" in message
    # Nothing is known of the machine that a configuration is only looked at for.
    validate(run({**memory, "train.kernels": "triton"}), None)
    monkeypatch.setattr("kernels.implementations.shutil.which", lambda name: None)
    monkeypatch.delenv("CXX", raising=False)
    assert "train.kernels is cpu, which needs a C++ compiler" in refusal({**memory, "train.kernels": "cpu"}, 1)
    validate(run({**memory, "train.kernels": "auto"}), 1)


def test_kernels_are_not_refused_for_gpus_that_torch_may_not_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    validate(run({"model.memory": {}, "train.kernels": "cpu"}), 1)
