"""A checkpoint of one file per rank: written, opened, and refused where it is not what it says.

Megatron's own models judge the files' content in `tests/distributed/test_megatron_ranks.py`.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from megamem.config import ModelConfig, MoEConfig
from megamem.families.ultramem_v2.config import UltraMemV2Config
from pretrain.checkpoint.store.paired import shapes_of
from pretrain.config.schema import OptimizerConfig, RunConfig, TrainConfig
from pretrain.convert.megatron_ranks.arguments import run_of
from pretrain.convert.megatron_ranks.folder import differing_copies, open_ranks, write_ranks
from pretrain.convert.megatron_ranks.layout import RankFile, RankLayout
from pretrain.convert.megatron_ranks.optimizer import MOMENTS
from pretrain.convert.megatron_ranks.pairs import extra_states, rank_pairs
from pretrain.errors import CheckpointError, ConfigError
from pretrain.state import RunState
from tests.in_memory import InMemory

VOCABULARY = 48
DENSE = ModelConfig(
    num_layers=4,
    hidden_size=24,
    num_attention_heads=4,
    num_query_groups=2,
    head_dim=8,
    ffn_hidden_size=20,
    vocab_size=45,
    vocab_size_multiple=16,
)
UNTIED = replace(DENSE, tied_embeddings=False, qk_norm=False, num_query_groups=None, rotary_base=500_000)
MIXTURE = replace(DENSE, moe=MoEConfig(num_experts=4, top_k=2, expert_ffn_hidden_size=12, renormalise=True))
MIXTURE = replace(MIXTURE, ffn_hidden_size=ModelConfig.ffn_hidden_size)
STATE = RunState(step=7, consumed_samples=56, consumed_tokens=56 * 16, num_updates=7)

CASES: dict[str, tuple[ModelConfig, RankLayout]] = {
    "one rank": (DENSE, RankLayout()),
    "one rank, local": (UNTIED, RankLayout(implementation="local")),
    "tensor 2 x pipeline 2, interleaved": (DENSE, RankLayout(tensor=2, pipeline=2, virtual_pipeline=2)),
    "pipeline 4": (UNTIED, RankLayout(pipeline=4)),
    "mixture": (MIXTURE, RankLayout(tensor=2, pipeline=2, expert=2)),
    "grouped mixture": (MIXTURE, RankLayout(expert=4, grouped_experts=True)),
}


def weights_of(model: ModelConfig, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """Random weights under our names."""
    shapes = shapes_of(pair.ours for pair in rank_pairs(model, VOCABULARY, RankLayout()))
    return {name: torch.randn(shape).to(dtype) for name, shape in shapes.items()}


def run_config(model: ModelConfig) -> RunConfig:
    return RunConfig(
        model=model,
        train=TrainConfig(sequence_length=16, precision="bf16", global_batch_size=8),
        optimizer=OptimizerConfig(lr=0.25),
    )


def write(folder: Path, model: ModelConfig, layout: RankLayout, weights: dict[str, Tensor] | None = None) -> Path:
    held = InMemory(weights_of(model) if weights is None else weights)
    return write_ranks(folder, held, config=run_config(model), state=STATE, layout=layout)


@pytest.mark.parametrize("case", CASES)
def test_what_is_written_is_read_again(case: str, tmp_path: Path) -> None:
    model, layout = CASES[case]
    weights = weights_of(model)
    path = write(tmp_path, model, layout, weights)
    assert path == tmp_path / "iter_0000007"
    for root in (tmp_path, path):
        opened = open_ranks(root)
        assert (opened.path, opened.iteration, opened.layout) == (path, 7, layout)
        # The padding of the vocabulary is not told from tokens there.
        assert opened.model == replace(
            model, vocab_size=VOCABULARY, num_query_groups=model.query_groups, head_dim=model.attention_head_dim
        )
    config, state = run_of(opened.arguments, opened.iteration)
    assert state == STATE
    assert config == replace(run_config(model), model=opened.model)
    ours = opened.as_ours()
    assert set(ours.tensors) == set(weights)
    for name, weight in weights.items():
        assert ours.read(ours.tensors[name].whole(name)).equal(weight), name
    assert differing_copies(opened) == []


def with_state(weights: dict[str, Tensor], *, main: bool) -> dict[str, Tensor]:
    """The same with random moments, and main weights of which the weights are the roundings."""
    state = {
        f"optimizer.state.{kind}.{name}": torch.randn(each.shape) for name, each in weights.items() for kind in MOMENTS
    }
    every = {**weights, **state}
    for name, each in weights.items():
        every[f"optimizer.state.param.{name}"] = torch.randn(each.shape) if main else each
    return every


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("case", ["one rank, local", "tensor 2 x pipeline 2, interleaved"])
def test_optimizer_state_there_and_back(case: str, precision: Literal["bf16", "fp32"], tmp_path: Path) -> None:
    model, layout = CASES[case]
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    every = with_state(weights_of(model, dtype), main=precision == "bf16")
    config = run_config(model)
    config = replace(config, train=replace(config.train, precision=precision))
    write_ranks(tmp_path, InMemory(every), config=config, state=STATE, layout=layout, with_optimizer=True)
    opened = open_ranks(tmp_path)
    assert opened.has_optimizer
    ours = opened.as_ours()
    assert set(ours.tensors) == set(every)
    for name, tensor in every.items():
        assert ours.read(ours.tensors[name].whole(name)).equal(tensor), name
    # Older versions of Megatron-LM have the groups in the other order.
    for file in opened.path.glob("*/model_optim_rng.pt"):
        changed(file, lambda tree: _other_order(tree["optimizer"]))
    ours = open_ranks(tmp_path).as_ours()
    for name, tensor in every.items():
        assert ours.read(ours.tensors[name].whole(name)).equal(tensor), name
    changed(file, lambda tree: tree["optimizer"].get("optimizer", tree["optimizer"])["state"].popitem())
    with pytest.raises(CheckpointError, match=f"{file}.*optimizer state that is not of the parameters"):
        open_ranks(tmp_path)


def _other_order(optimizer: dict[str, Any]) -> None:
    """Groups and their numbers as an optimizer gives them that has its groups in the other order."""
    adam = optimizer.get("optimizer", optimizer)
    adam["param_groups"].reverse()
    old = [number for group in adam["param_groups"] for number in group["params"]]
    adam["state"] = {new: adam["state"][number] for new, number in enumerate(old)}
    first = 0
    for group in adam["param_groups"]:
        group["params"] = list(range(first, first + len(group["params"])))
        first += len(group["params"])
    if "fp32_from_fp16_params" in optimizer:
        optimizer["fp32_from_fp16_params"].reverse()


def test_optimizer_state_of_mixtures_is_refused(tmp_path: Path) -> None:
    every = with_state(weights_of(MIXTURE), main=True)
    with pytest.raises(ConfigError, match="mixtures of experts"):
        write_ranks(
            tmp_path,
            InMemory(every),
            config=run_config(MIXTURE),
            state=STATE,
            layout=RankLayout(),
            with_optimizer=True,
        )


def test_the_folders_are_named_as_megatron_lm_names_them(tmp_path: Path) -> None:
    expected = {
        "one rank": ["mp_rank_00"],
        "pipeline 4": [f"mp_rank_00_{stage:03d}" for stage in range(4)],
        "grouped mixture": [f"mp_rank_00_{expert:03d}" for expert in range(4)],
        "mixture": [f"mp_rank_{t:02d}_{p:03d}_{e:03d}" for t in range(2) for p in range(2) for e in range(2)],
    }
    for case, names in expected.items():
        path = write(tmp_path / case, *CASES[case])
        assert sorted(each.name for each in path.iterdir()) == names
        assert (tmp_path / case / "latest_checkpointed_iteration.txt").read_text() == "7"


def test_a_file_is_what_torch_loads(tmp_path: Path) -> None:
    path = write(tmp_path, *CASES["tensor 2 x pipeline 2, interleaved"])
    with torch.serialization.safe_globals([argparse.Namespace]):
        tree = torch.load(path / "mp_rank_01_000" / "model_optim_rng.pt", map_location="cpu", weights_only=True)
    assert set(tree) == {
        "args",
        "checkpoint_version",
        "iteration",
        "model0",
        "model1",
        "num_floating_point_operations_so_far",
    }
    assert (tree["checkpoint_version"], tree["iteration"]) == (3.0, 7)
    args = tree["args"]
    assert (args.params_dtype, args.padded_vocab_size, args.make_vocab_size_divisible_by) == (torch.bfloat16, 48, 8)
    assert (args.virtual_pipeline_model_parallel_size, args.num_layers_per_virtual_pipeline_stage) == (2, 1)
    assert tree["model0"]["embedding.word_embeddings.weight"].shape == (24, 24)


def test_transformer_engines_names() -> None:
    """Names by hand: its linears keep the norm before them; behind a router it stands apart. All have extra state."""

    def block(model: ModelConfig, layout: RankLayout) -> set[str]:
        (chunk,) = layout.chunks(model, RankFile(0, 0, 0)).values()
        names = {pair.theirs.name.split("/")[2] for pair in rank_pairs(model, VOCABULARY, layout)}
        names |= set(extra_states(model, layout, chunk))
        start = "decoder.layers.3."
        return {name.removeprefix(start) for name in names if name.startswith(start)}

    attention = {
        "self_attention.linear_proj.weight",
        "self_attention.linear_qkv.layer_norm_weight",
        "self_attention.linear_qkv.weight",
        "self_attention.q_layernorm.weight",
        "self_attention.k_layernorm.weight",
        "self_attention.linear_proj._extra_state",
        "self_attention.linear_qkv._extra_state",
        "self_attention.core_attention._extra_state",
        "self_attention.q_layernorm._extra_state",
        "self_attention.k_layernorm._extra_state",
    }
    assert block(DENSE, RankLayout()) == attention | {
        "mlp.linear_fc1.layer_norm_weight",
        "mlp.linear_fc1.weight",
        "mlp.linear_fc2.weight",
        "mlp.linear_fc1._extra_state",
        "mlp.linear_fc2._extra_state",
    }
    assert block(MIXTURE, RankLayout(grouped_experts=True)) == attention | {
        "pre_mlp_layernorm.weight",
        "pre_mlp_layernorm._extra_state",
        "mlp.router.weight",
        *(f"mlp.experts.linear_fc{part}.weight{expert}" for part in (1, 2) for expert in range(4)),
        "mlp.experts.linear_fc1._extra_state",
        "mlp.experts.linear_fc2._extra_state",
    }


@pytest.mark.parametrize(
    ("model", "layout", "message"),
    [
        (replace(DENSE, memory=UltraMemV2Config()), RankLayout(), "ultramem_v2.*native"),
        (DENSE, RankLayout(pipeline=3), "pipeline x virtual pipeline 3 does not divide model.num_layers, 4"),
        (DENSE, RankLayout(tensor=4), "tensor 4 does not divide the number of query groups, 2"),
        (replace(DENSE, ffn_hidden_size=21), RankLayout(tensor=2), "width of the feed-forward, 21"),
        (replace(DENSE, vocab_size_multiple=47), RankLayout(tensor=2), "tensor 2 does not divide model.vocab_size"),
        (MIXTURE, RankLayout(expert=3), "expert 3 does not divide the number of experts, 4"),
        (DENSE, RankLayout(expert=2), "expert 2 does not divide the number of experts, 1"),
        (DENSE, RankLayout(virtual_pipeline=2), "needs a pipeline"),
        (MIXTURE, RankLayout(grouped_experts=True, implementation="local"), "grouped experts"),
    ],
)
def test_models_that_cannot_be_divided_so_are_refused(
    model: ModelConfig, layout: RankLayout, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        write(tmp_path / "ranks", model, layout, {"embedding.word_embeddings.weight": torch.zeros(VOCABULARY, 24)})
    assert not (tmp_path / "ranks").exists()


def test_an_iteration_is_not_written_twice(tmp_path: Path) -> None:
    write(tmp_path, *CASES["one rank"])
    with pytest.raises(CheckpointError, match="iter_0000007 is already there"):
        write(tmp_path, *CASES["one rank"])


def test_a_missing_weight_leaves_nothing_that_megatron_lm_would_load(tmp_path: Path) -> None:
    weights = weights_of(DENSE)
    del weights["decoder.layers.2.mlp.linear_fc2.weight"]
    with pytest.raises(CheckpointError, match=r"decoder\.layers\.2\.mlp\.linear_fc2\.weight is missing"):
        write(tmp_path / "ranks", DENSE, RankLayout(), weights)
    assert not (tmp_path / "ranks").exists()


def changed(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change what a file holds."""
    tree = torch.load(path, weights_only=False)
    change(tree)
    torch.save(tree, path)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("normalization", "LayerNorm", "normalization = LayerNorm.*must be RMSNorm"),
        ("swiglu", False, "swiglu = False"),
        ("add_bias_linear", True, "add_bias_linear = True"),
        ("rotary_percent", 0.5, "rotary_percent = 0.5"),
        ("rotary_seq_len_interpolation_factor", 2, "rotary_seq_len_interpolation_factor = 2"),
        ("rotary_base", 10000.5, "rotary_base is 10000.5, and only whole numbers"),
        ("fp16", True, "fp16 = True"),
        ("num_layers", "4", "num_layers = 4: a number"),
        ("num_layers", 5, "pipeline x virtual pipeline 4 does not divide model.num_layers, 5"),
        ("hidden_size", 32, r"has shape \(24, 24\), and its args ask for \(24, 32\)"),
        ("kv_channels", 7, "needs an even one"),
        ("qk_layernorm", False, r"[kq]_layernorm\.weight.* is not known"),
        ("tensor_model_parallel_size", 1, "have no place for"),
        ("expert_model_parallel_size", 2, "expert 2 does not divide the number of experts, 1"),
        ("transformer_impl", "inference", "transformer_impl = inference"),
    ],
)
def test_arguments_that_ours_cannot_be_are_refused(name: str, value: object, message: str, tmp_path: Path) -> None:
    path = write(tmp_path, *CASES["tensor 2 x pipeline 2, interleaved"])
    changed(path / "mp_rank_00_000" / "model_optim_rng.pt", lambda tree: setattr(tree["args"], name, value))
    with pytest.raises(CheckpointError, match=message):
        open_ranks(tmp_path)


def test_mixtures_have_arguments_of_their_own(tmp_path: Path) -> None:
    path = write(tmp_path, *CASES["mixture"])
    for name, value in (("moe_router_score_function", "sigmoid"), ("expert_tensor_parallel_size", 1)):
        changed(path / "mp_rank_00_000_000" / "model_optim_rng.pt", lambda tree: setattr(tree["args"], name, value))  # noqa: B023
        with pytest.raises(CheckpointError, match=f"{name} = {value}"):
            open_ranks(path)
        shown = {"moe_router_score_function": "softmax", "expert_tensor_parallel_size": 2}[name]
        changed(path / "mp_rank_00_000_000" / "model_optim_rng.pt", lambda tree: setattr(tree["args"], name, shown))  # noqa: B023


def test_incomplete_and_foreign_folders_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path, *CASES["tensor 2 x pipeline 2, interleaved"])
    file = path / "mp_rank_01_001" / "model_optim_rng.pt"

    def refused(message: str, at: Path = tmp_path) -> None:
        with pytest.raises(CheckpointError, match=message):
            open_ranks(at)

    changed(file, lambda tree: tree["model1"].popitem())
    refused(re.escape("mp_rank_01_001/model1/") + ".* is missing")
    torch.save([1], file)
    refused("holds a list")
    torch.save({"model": {}}, file)
    refused("no args")
    torch.save({"args": argparse.Namespace(a=1), "checkpoint_version": 2.0}, file)
    refused("checkpoint_version 2.0")
    file.unlink()
    refused("mp_rank_01_001.*does not exist")
    file.parent.rmdir()
    refused("incomplete.*mp_rank_01_001")
    tracker = tmp_path / "latest_checkpointed_iteration.txt"
    tracker.write_text("8")
    refused("iter_0000008 does not exist")
    tracker.write_text("../..")
    refused("no iteration")
    refused("no folder mp_rank", path / "mp_rank_00_000")
    refused("does not exist", tmp_path / "nowhere")


def test_copies_that_differ_are_named(tmp_path: Path) -> None:
    path = write(tmp_path, *CASES["tensor 2 x pipeline 2, interleaved"])
    norm = "decoder.layers.0.self_attention.q_layernorm.weight"
    changed(path / "mp_rank_01_000" / "model_optim_rng.pt", lambda tree: tree["model1"][norm].view(-1)[3].add_(1))
    (problem,) = differing_copies(open_ranks(tmp_path))
    assert problem == f"mp_rank_00_000/model1/{norm} and mp_rank_01_000/model1/{norm}"
