"""Checkpoints that megatron-core itself saved of its plain GPTModel compute the same once they are imported."""

from __future__ import annotations

import enum
from argparse import Namespace
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from megatron.core import dist_checkpointing
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.transformer_config import TransformerConfig
from tiny_runs import MEMORY, SHARED, chunk_of, joined
from torch import Tensor

from pretrain.config.schema import ParallelConfig
from pretrain.convert.convert import convert
from pretrain.convert.format import ConversionTarget
from pretrain.convert.names import NATIVE
from pretrain.convert.registry import FORMATS, open_checkpoint
from pretrain.convert.resources import Resources
from pretrain.errors import CheckpointError, ConfigError

PADDED, SEQUENCE = 96, 16
RESOURCES = Resources(2, 2**31)


class Backend(enum.Enum):
    """An argument of Megatron-LM's that is no plain value."""

    AUTO = 1


ARGUMENTS: dict[str, Any] = {
    "num_layers": 3,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "ffn_hidden_size": 44,
    "kv_channels": 8,
    "group_query_attention": False,
    "num_query_groups": 1,
    "normalization": "RMSNorm",
    "norm_epsilon": 1e-5,
    "swiglu": True,
    "position_embedding_type": "rope",
    "rotary_base": 10000,
    "rotary_percent": 1.0,
    "add_bias_linear": False,
    "add_qkv_bias": False,
    "untie_embeddings_and_output_weights": False,
    "qk_layernorm": False,
    "vocab_size": None,
    "padded_vocab_size": PADDED,
    "use_rope_scaling": False,
    "rope_scaling_factor": 8.0,
    "num_experts": None,
    "attention_backend": Backend.AUTO,
    "params_dtype": torch.float32,
}


@dataclass(frozen=True)
class Saved:
    """A model and the way in which it is saved.

    Attributes:
        arguments: arguments that differ from `ARGUMENTS`.
        tensor: ranks that save it.
        metadata: argument of `sharded_state_dict`.
    """

    arguments: dict[str, Any]
    tensor: int = 1
    metadata: Any = None


SAVED = {
    "stacked, tied": Saved({"group_query_attention": True, "num_query_groups": 2, "add_qkv_bias": True}),
    "stacked, untied, qk_norm, tensor 2": Saved(
        {"untie_embeddings_and_output_weights": True, "qk_layernorm": True, "kv_channels": 12}, tensor=2
    ),
    "block by block, long": Saved(
        {"use_rope_scaling": True, "rotary_base": 500000, "vocab_size": 90},
        metadata={"non_homogeneous_layers": True},
    ),
    "halves alone, linear": Saved(
        {"rotary_seq_len_interpolation_factor": 4, "norm_epsilon": None, "layernorm_epsilon": 0.03},
        tensor=2,
        metadata={"non_homogeneous_layers": True, "singleton_local_shards": True},
    ),
    # Half of the experts on each rank.
    "experts, stacked": Saved({"num_experts": 4, "add_qkv_bias": True}, tensor=2),
    "experts, one by one": Saved(
        {"num_experts": 5, "moe_router_topk": 3, "moe_router_pre_softmax": True, "moe_ffn_hidden_size": 20},
        metadata={"singleton_local_shards": True},
    ),
    "experts, block by block": Saved(
        {"num_experts": 3, "moe_layer_freq": [1, 1, 1], "moe_router_topk_scaling_factor": 1.0},
        metadata={"non_homogeneous_layers": True},
    ),
}


def given(saved: Saved) -> dict[str, Any]:
    """Arguments of a model; those of newer versions have another name for one of them."""
    whole = ARGUMENTS | saved.arguments
    return {name: value for name, value in whole.items() if name != "norm_epsilon" or value is not None}


def tokens() -> Tensor:
    return torch.randint(0, 90, (2, SEQUENCE), generator=torch.Generator().manual_seed(5))


def experts_of(arguments: dict[str, Any], ranks: int) -> dict[str, Any]:
    """Options of a mixture of experts, whose experts are spread over the ranks."""
    if arguments["num_experts"] is None:
        return {}
    return {
        "num_moe_experts": arguments["num_experts"],
        "moe_ffn_hidden_size": arguments.get("moe_ffn_hidden_size"),
        "moe_router_topk": arguments.get("moe_router_topk", 2),
        "moe_router_pre_softmax": arguments.get("moe_router_pre_softmax", False),
        "moe_router_topk_scaling_factor": arguments.get("moe_router_topk_scaling_factor"),
        "moe_layer_freq": arguments.get("moe_layer_freq", 1),
        "moe_token_dispatcher_type": "alltoall",
        "moe_aux_loss_coeff": 0.01,
        "expert_model_parallel_size": ranks,
        "expert_tensor_parallel_size": 1,
    }


def plain_model(arguments: dict[str, Any], tensor: int, groups: Any) -> GPTModel:
    grouped = arguments["group_query_attention"]
    config = TransformerConfig(
        num_layers=arguments["num_layers"],
        hidden_size=arguments["hidden_size"],
        num_attention_heads=arguments["num_attention_heads"],
        num_query_groups=arguments["num_query_groups"] if grouped else None,
        kv_channels=arguments["kv_channels"],
        ffn_hidden_size=arguments["ffn_hidden_size"],
        normalization="RMSNorm",
        layernorm_epsilon=arguments.get("layernorm_epsilon", arguments.get("norm_epsilon")),
        qk_layernorm=arguments["qk_layernorm"],
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=arguments["add_qkv_bias"],
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        tensor_model_parallel_size=tensor,
        init_method_std=0.3,
        **experts_of(arguments, tensor),
    )
    spec = get_gpt_layer_local_spec(
        num_experts=arguments["num_experts"], qk_layernorm=arguments["qk_layernorm"], normalization="RMSNorm"
    )
    return GPTModel(
        config,
        spec,
        vocab_size=PADDED,
        max_sequence_length=64,
        share_embeddings_and_output_weights=not arguments["untie_embeddings_and_output_weights"],
        position_embedding_type="rope",
        rotary_base=arguments["rotary_base"],
        rope_scaling=arguments["use_rope_scaling"],
        seq_len_interpolation_factor=arguments.get("rotary_seq_len_interpolation_factor"),
        pg_collection=groups.megatron,
        parallel_output=False,
    )


@pytest.fixture(scope="module")
def saved(run_ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Tensor, Path]]:
    """Megatron's logits, and the folder that it saved, by name."""
    root = tmp_path_factory.mktemp("megatron")
    folders = {name: root / str(number) / "iter_0000007" for number, name in enumerate(SAVED)}

    def main_of(size: int) -> Any:
        def main() -> dict[str, Tensor]:
            found = {}
            if not hasattr(moe_utils, "te_general_gemm"):
                # The router of megatron-core 0.16 asks for it, which is there with Transformer Engine alone.
                vars(moe_utils)["te_general_gemm"] = None
            layout = replace(SHARED, parallel=ParallelConfig(tensor=size, memory=size))
            with joined(layout) as groups:
                for name, each in SAVED.items():
                    if each.tensor != size:
                        continue
                    arguments = given(each)
                    torch.manual_seed(3)
                    model = plain_model(arguments, size, groups).eval()
                    # Norms start at 1, which would hide where they stand; they are alike on all ranks.
                    generator = torch.Generator().manual_seed(4)
                    with torch.no_grad():
                        for parameter in model.parameters():
                            if parameter.dim() == 1:
                                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
                        positions = torch.arange(SEQUENCE).expand(2, -1)
                        later = torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1)
                        found[name] = model(tokens(), positions, later)
                    folders[name].mkdir(parents=True, exist_ok=True)
                    state = {
                        "model": model.sharded_state_dict(metadata=each.metadata),
                        "args": Namespace(**arguments),
                        "iteration": 7,
                        "checkpoint_version": 3.0,
                    }
                    dist_checkpointing.save(state, str(folders[name]))
            return found

        return main

    logits: dict[str, Tensor] = {}
    for size in (1, 2):
        logits |= run_ranks(main_of(size), size)[0]
    return {name: (logits[name], folders[name]) for name in SAVED}


@pytest.fixture(scope="module")
def imported(run_ranks: Any, saved: Any) -> dict[str, Tensor]:
    """Logits of our models of the same weights."""

    def main() -> dict[str, Tensor]:
        found = {}
        positions = torch.arange(SEQUENCE).expand(2, -1)
        with joined(SHARED) as groups:
            for name, (_, folder) in saved.items():
                opened = open_checkpoint(folder)
                config = replace(SHARED, model=opened.config.model)
                chunk = chunk_of(config, groups, opened.reader, opened.vocab_size)
                with torch.no_grad():
                    found[name] = chunk.eval()(tokens(), positions, None)
        return found

    (ours,) = run_ranks(main, 1)
    return dict(ours)


@pytest.mark.parametrize("name", SAVED)
def test_logits_are_those_of_megatron(saved: Any, imported: Any, name: str) -> None:
    expected, ours = saved[name][0], imported[name]
    known = SAVED[name].arguments.get("vocab_size") or PADDED
    scale = float(expected.abs().max())
    assert scale > 0.5
    torch.testing.assert_close(ours[..., :known], expected[..., :known], rtol=0, atol=1e-5 * scale)


def test_a_checkpoint_becomes_a_runs_folder(saved: Any, tmp_path: Path) -> None:
    """Found by Megatron-LM's own file, bit for bit, as a run that has not begun."""
    folder = saved["stacked, tied"][1]
    (folder.parent / "latest_checkpointed_iteration.txt").write_text("7")
    opened = open_checkpoint(folder.parent)
    assert opened.path == folder
    target = ConversionTarget(ParallelConfig(), with_optimizer=False, dtype=None, max_file_bytes=1 << 30)
    convert(opened, FORMATS[NATIVE], tmp_path / "run", target, RESOURCES, on_start=lambda *_: lambda _: None)
    run = open_checkpoint(tmp_path / "run")
    assert (run.state.step, run.config.model) == (0, opened.config.model)
    source = opened.reader
    for name, info in run.reader.tensors.items():
        assert torch.equal(run.reader.read(info.whole(name)), source.read(info.whole(name)))
    assert {name for name in run.reader.tensors if "layers.2" in name} == {
        f"decoder.layers.2.{part}"
        for part in (
            "input_layernorm.weight",
            "self_attention.linear_qkv.weight",
            "self_attention.linear_qkv.bias",
            "self_attention.linear_proj.weight",
            "pre_mlp_layernorm.weight",
            "mlp.linear_fc1.weight",
            "mlp.linear_fc2.weight",
        )
    }


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"normalization": "LayerNorm"}, "normalization is LayerNorm: imported models have RMSNorm"),
        ({"add_bias_linear": True}, "add_bias_linear is True: imported models have False"),
        ({"num_experts": 8}, "mlp.router.weight is missing"),
        ({"num_experts": 8, "moe_router_score_function": "sigmoid"}, "moe_router_score_function is sigmoid"),
        ({"num_experts": 8, "moe_layer_freq": [0, 1, 1]}, r"moe_layer_freq is \[0, 1, 1\]: .* in every block"),
        ({"num_experts": 8, "moe_router_load_balancing_type": "sinkhorn"}, "it may be none, aux_loss"),
        ({"num_experts": 8, "moe_router_topk": 9}, "top_k is 9, more than num_experts = 8"),
        ({"rotary_percent": 0.5}, "rotary_percent is 0.5"),
        ({"attention_output_gate": Backend.AUTO}, "attention_output_gate is <.*Backend, not loaded>"),
        ({"norm_epsilon": "1e-5"}, "norm_epsilon is 1e-5: it must be a number"),
        ({"hidden_size": Backend.AUTO}, "hidden_size is .*: it must be a whole number"),
        ({"num_layers": 10_000}, "num_layers is 10000, and the checkpoint holds the attention of 3 blocks"),
        ({"num_layers": 10**9}, "num_layers is 1000000000: it must be at most 10000"),
        ({"qk_layernorm": True}, "q_layernorm.weight is missing"),
        ({"ffn_hidden_size": 20}, "linear_fc1.weight has the shape"),
        ({"untie_embeddings_and_output_weights": True}, "output_layer.weight is missing"),
    ],
)
def test_a_model_that_ours_cannot_be_is_refused(
    saved: Any, tmp_path: Path, arguments: dict[str, Any], text: str
) -> None:
    for path in saved["stacked, tied"][1].iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "common.pt").unlink(missing_ok=True)
    torch.save({"args": Namespace(**ARGUMENTS | SAVED["stacked, tied"].arguments | arguments)}, tmp_path / "common.pt")
    with pytest.raises(CheckpointError, match=text):
        open_checkpoint(tmp_path)


def test_without_arguments_a_configuration_is_named(saved: Any, tmp_path: Path) -> None:
    folder = saved["stacked, tied"][1]
    known = open_checkpoint(folder).config
    for path in folder.iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "common.pt").unlink(missing_ok=True)
    torch.save({"iteration": 7}, tmp_path / "common.pt")
    with pytest.raises(ConfigError, match="name a configuration with --config FILE"):
        open_checkpoint(tmp_path)
    assert open_checkpoint(tmp_path, None, known).config == known
    for config, text in (
        (replace(known, model=replace(known.model, vocab_size=None)), "model.vocab_size is null"),
        (replace(known, model=replace(known.model, memory=MEMORY)), "model.memory is set"),
    ):
        with pytest.raises(ConfigError, match=text):
            open_checkpoint(tmp_path, None, config)


def test_a_folder_without_the_named_checkpoint_is_refused(saved: Any, tmp_path: Path) -> None:
    folder = saved["stacked, tied"][1]
    with pytest.raises(ConfigError, match=r"--step is 3, and .* is one checkpoint"):
        open_checkpoint(folder, 3)
    latest = tmp_path / "latest_checkpointed_iteration.txt"
    for text, said in (
        ("7", "iter_0000007 has no .metadata"),
        ("release", "release has no"),
        ("../..", "no iteration"),
    ):
        latest.write_text(text)
        with pytest.raises(CheckpointError, match=said):
            open_checkpoint(tmp_path)
    (tmp_path / "iter_0000004").symlink_to(folder)
    assert open_checkpoint(tmp_path, 4).path == tmp_path / "iter_0000004"
