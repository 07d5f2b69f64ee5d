"""Contents of Megatron-LM's rank files, against Megatron-core's own GPTModel on as many ranks.

The oracle is Megatron's: its layer specs build the model of each rank, its `sharded_state_dict` says which part of
which global tensor each of its weights is, and its `state_dict_for_save_checkpoint` what it would write.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megamem.config import ModelConfig, MoEConfig
from megamem.rotary_config import RotaryScalingConfig
from parallel.cpu import cuda_on_cpu
from parallel.groups import ParallelSizes, initialise_groups
from pretrain.checkpoint.store.paired import shapes_of
from pretrain.checkpoint.store.tensors import Region
from pretrain.config.schema import RunConfig, TrainConfig
from pretrain.convert.megatron_ranks.folder import write_ranks
from pretrain.convert.megatron_ranks.layout import RankFile, RankLayout
from pretrain.convert.megatron_ranks.pairs import extra_states, rank_pairs
from pretrain.engine.build import build_chunks
from pretrain.state import RunState
from tests.in_memory import InMemory

VOCABULARY = 48
DENSE = ModelConfig(
    num_layers=4, hidden_size=24, num_attention_heads=4, num_query_groups=2, head_dim=8, ffn_hidden_size=20
)
UNTIED = replace(DENSE, tied_embeddings=False, qk_norm=False, num_query_groups=None)
MIXTURE = replace(DENSE, moe=MoEConfig(num_experts=4, top_k=2, expert_ffn_hidden_size=12))

CASES: dict[str, tuple[ModelConfig, RankLayout]] = {
    "tensor 2": (DENSE, RankLayout(implementation="local", tensor=2)),
    "untied, tensor 2": (UNTIED, RankLayout(implementation="local", tensor=2)),
    "pipeline 2": (DENSE, RankLayout(implementation="local", pipeline=2)),
    "pipeline 2, interleaved": (DENSE, RankLayout(implementation="local", pipeline=2, virtual_pipeline=2)),
    "mixture": (MIXTURE, RankLayout(implementation="local", expert=2)),
    "mixture, tensor 2 x expert 2": (MIXTURE, RankLayout(implementation="local", tensor=2, expert=2)),
    "tensor 2 x pipeline 2": (UNTIED, RankLayout(implementation="local", tensor=2, pipeline=2)),
    "tensor 2 x pipeline 2, interleaved": (
        DENSE,
        RankLayout(implementation="local", tensor=2, pipeline=2, virtual_pipeline=2),
    ),
    "mixture, pipeline 2 x expert 2": (MIXTURE, RankLayout(implementation="local", pipeline=2, expert=2)),
}


def transformer_config(model: ModelConfig, layout: RankLayout) -> TransformerConfig:
    """Configuration as Megatron-LM makes it of its arguments."""
    experts: dict[str, Any] = {}
    if model.moe is not None:
        experts = {
            "num_moe_experts": model.moe.num_experts,
            "moe_ffn_hidden_size": model.moe.expert_ffn_hidden_size,
            "moe_router_topk": model.moe.top_k,
            "expert_model_parallel_size": layout.expert,
            "expert_tensor_parallel_size": layout.tensor,
            "moe_token_dispatcher_type": "alltoall",
            "moe_router_pre_softmax": not model.moe.renormalise,
        }
    return TransformerConfig(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.query_groups,
        kv_channels=model.attention_head_dim,
        ffn_hidden_size=model.ffn_hidden_size,
        normalization="RMSNorm",
        layernorm_epsilon=model.norm_epsilon,
        qk_layernorm=model.qk_norm,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        perform_initialization=False,
        use_cpu_initialization=True,
        pipeline_dtype=torch.float32,
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=layout.virtual_pipeline if layout.virtual_pipeline > 1 else None,
        hetereogenous_dist_checkpoint=True,
        **experts,
    )


def megatron_chunks(model: ModelConfig, layout: RankLayout) -> list[GPTModel]:
    """This rank's models, built with Megatron's parts alone, on groups of their own."""
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=layout.virtual_pipeline if layout.virtual_pipeline > 1 else None,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=layout.tensor,
        create_gloo_process_groups=False,
    )
    model_parallel_cuda_manual_seed(1)
    return models_of_rank(model, layout)


def models_of_rank(model: ModelConfig, layout: RankLayout) -> list[GPTModel]:
    """This rank's models, on the groups that there are."""
    config = transformer_config(model, layout)
    spec = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts, qk_layernorm=model.qk_norm, normalization="RMSNorm"
    )
    chunks = []
    for index in range(layout.virtual_pipeline):
        stage = index if layout.virtual_pipeline > 1 else None
        first = parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage)
        last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage)
        chunks.append(
            GPTModel(
                config,
                spec,
                VOCABULARY,
                16,
                pre_process=first,
                post_process=last,
                share_embeddings_and_output_weights=model.tied_embeddings,
                position_embedding_type="rope",
                rotary_base=model.rotary_base,
                rope_scaling=model.rotary_scaling is not None,
                rope_scaling_factor=model.rotary_scaling.factor if model.rotary_scaling is not None else 8.0,
                pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
                vp_stage=stage,
            )
        )
    return chunks


def our_name(key: str) -> str:
    """Our name of what Megatron's distributed checkpoints call `key`."""
    key = re.sub(r"self_attention\.linear_qkv\.layer_norm_", "input_layernorm.", key)
    return re.sub(r"mlp\.linear_fc1\.layer_norm_", "pre_mlp_layernorm.", key)


def value_of(name: str, region: Region) -> Tensor:
    """A region of our tensor of this name, whose elements tell their name and place."""
    places = torch.zeros(region.shape)
    for dim, (start, size) in enumerate(zip(region.offset, region.shape, strict=True)):
        along = torch.arange(start, start + size, dtype=torch.float32)
        places = places * 1000 + along.view(-1, *(1,) * (len(region.shape) - 1 - dim))
    return places + 1_000_000 * (sum(map(ord, name)) % 13)


def fill(chunk: GPTModel) -> None:
    """Set a chunk's weights to what its own sharded entries say they are parts of."""
    for entry in list(nested_values(chunk.sharded_state_dict())):
        parts = nested_values(entry.build()) if isinstance(entry, ShardedTensorFactory) else [entry]
        for part in parts:
            if isinstance(part, ShardedTensor):
                offset, skipped = part.global_offset, part.prepend_axis_num
                name = our_name(part.key)
                if skipped:
                    # Experts are stacked: ours are named by their number.
                    name = name.replace("experts.experts.", f"experts.{offset[0]}.")
                region = Region(name, tuple(offset[skipped:]), tuple(part.local_shape))
                part.data.detach().copy_(value_of(name, region))


def written(model: ModelConfig, layout: RankLayout, file: RankFile) -> dict[str, dict[str, Tensor | None]]:
    """The models that our pairs put into a file."""
    prefix = f"{layout.folder(file)}/"
    pairs = [pair for pair in rank_pairs(model, VOCABULARY, layout) if pair.theirs.name.startswith(prefix)]
    found: dict[str, dict[str, Tensor | None]] = {}
    for name, shape in shapes_of(pair.theirs for pair in pairs).items():
        _, key, local = name.split("/")
        tensor = torch.full(shape, torch.nan)
        for pair in pairs:
            if pair.theirs.name == name:
                place = tuple(slice(a, a + n) for a, n in zip(pair.theirs.offset, pair.theirs.shape, strict=True))
                tensor[place] = value_of(pair.ours.name, pair.ours)
        found.setdefault(key, {})[local] = tensor
    for key, chunk in layout.chunks(model, file).items():
        found[key].update(dict.fromkeys(extra_states(model, layout, chunk)))
    return found


def differences(model: ModelConfig, layout: RankLayout) -> list[str]:
    """Differences of this rank's models from what would be in its file."""
    with cuda_on_cpu():
        chunks = megatron_chunks(model, layout)
        file = RankFile(
            parallel_state.get_tensor_model_parallel_rank(),
            parallel_state.get_pipeline_model_parallel_rank(),
            parallel_state.get_expert_model_parallel_rank(),
        )
        ours = written(model, layout, file)
        found = [] if len(ours) == len(chunks) else [f"chunks {len(ours)} != {len(chunks)}"]
        for chunk, (key, mine) in zip(chunks, ours.items(), strict=True):
            fill(chunk)
            theirs = chunk.state_dict_for_save_checkpoint()
            found += [f"{key}: {name}" for name in set(theirs) ^ set(mine)]
            for name, tensor in theirs.items():
                if isinstance(tensor, Tensor) != isinstance(mine.get(name), Tensor):
                    found.append(f"{key}: {name} is not a tensor on both sides")
                elif isinstance(tensor, Tensor) and not tensor.equal(mine[name]):
                    found.append(f"{key}: {name} {tuple(tensor.shape)} differs")
            # Megatron-LM loads so, and strictly.
            chunk.load_state_dict(mine, strict=True)
        parallel_state.destroy_model_parallel()
    return found


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_files_hold_what_megatron_would_write(num_ranks: int, run_ranks: Any) -> None:
    cases = {
        name: case for name, case in CASES.items() if case[1].tensor * case[1].pipeline * case[1].expert == num_ranks
    }
    for by_case in run_ranks(lambda: {name: differences(*case) for name, case in cases.items()}, num_ranks):
        assert by_case == {name: [] for name in cases}


def largest_difference(model: ModelConfig, folder: Path) -> float:
    """Largest difference of our model's logits to Megatron's after it has loaded the file that ours was written to."""
    layout = RankLayout(implementation="local")
    config = RunConfig(model=model, train=TrainConfig(sequence_length=16))
    with cuda_on_cpu():
        groups = initialise_groups(ParallelSizes(), device=torch.device("cpu"), timeout_minutes=1, seed=1)
        (ours,) = build_chunks(config, groups, vocab_size=VOCABULARY)
        ours.begin_step()
        # Gains are ones at the start, which one could mistake for each other.
        with torch.no_grad():
            for number, gain in enumerate(each for each in ours.parameters() if each.dim() == 1):
                gain.mul_(1 + torch.rand(len(gain), generator=torch.Generator().manual_seed(number)))
        weights = {name.replace(".local_experts.", "."): each.detach() for name, each in ours.named_parameters()}
        path = write_ranks(
            folder, InMemory(weights), config=config, state=RunState(step=3), layout=layout
        )  # As Megatron-LM loads it.
        tree = torch.load(path / "mp_rank_00" / "model_optim_rng.pt", map_location="cpu", weights_only=False)
        (theirs,) = models_of_rank(model, layout)
        theirs.load_state_dict(tree["model"], strict=True)
        ids = torch.randint(VOCABULARY, (2, 16), generator=torch.Generator().manual_seed(3))
        places = torch.arange(16).expand(2, -1)
        masked = torch.ones(16, 16, dtype=torch.bool).triu(1)[None, None]
        with torch.no_grad():
            one, two = ours(ids, places), theirs(ids, places, masked)
        parallel_state.destroy_model_parallel()
    return float((one - two).abs().max() / two.abs().max())


def test_a_plain_megatron_model_computes_the_same(
    run_ranks: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Megatron's router asks for it by name where there is no Transformer Engine.
    monkeypatch.setattr("megatron.core.transformer.moe.moe_utils.te_general_gemm", None, raising=False)
    models = {
        "dense": replace(DENSE, rotary_base=50, norm_epsilon=0.01, vocab_size_multiple=16),
        "untied": replace(UNTIED, vocab_size_multiple=16),
        "mixture": replace(MIXTURE, vocab_size_multiple=16),
        # Its lowest frequency turns less than once over 8192 positions, and the one before a few times.
        "stretched": replace(
            DENSE,
            rotary_base=5_000_000,
            rotary_scaling=RotaryScalingConfig("llama3", factor=100.0),
            vocab_size_multiple=16,
        ),
    }

    def compare() -> dict[str, float]:
        return {name: largest_difference(model, tmp_path / name) for name, model in models.items()}

    (found,) = run_ranks(compare, 1)
    for name, difference in found.items():
        assert difference < 1e-5, name


def moments_elsewhere(model: ModelConfig, layout: RankLayout, folder: Path) -> list[str]:
    """Names of this rank's parameters for which Megatron's optimizer, after it has loaded our file, has other moments
    than the parameter's own: the double of its elements, and their squares.
    """
    with cuda_on_cpu():
        chunks = megatron_chunks(model, layout)
        settings = DistributedDataParallelConfig(use_distributed_optimizer=False)
        wrapped = [
            DistributedDataParallel(chunk.config, settings, chunk, disable_bucketing=index > 0)
            for index, chunk in enumerate(chunks)
        ]
        optimizer = get_megatron_optimizer(
            OptimizerConfig(optimizer="adam", lr=1e-3, min_lr=1e-4), wrapped, use_gloo_process_groups=False
        )
        file = RankFile(
            parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_pipeline_model_parallel_rank(), 0
        )
        path = folder / "iter_0000003" / layout.folder(file) / "model_optim_rng.pt"
        tree = torch.load(path, map_location="cpu", weights_only=False)
        for chunk, key in zip(chunks, layout.chunks(model, file), strict=True):
            chunk.load_state_dict(tree[key], strict=True)
        optimizer.load_state_dict(tree["optimizer"])
        (plain,) = optimizer.chained_optimizers
        found = []
        for chunk in chunks:
            for name, parameter in chunk.named_parameters():
                state = plain.optimizer.state[parameter]
                if not state["exp_avg"].equal(2 * parameter) or not state["exp_avg_sq"].equal(parameter**2):
                    found.append(name)
                if state["step"] != 3:
                    found.append(f"{name}: step {state['step']}")
        parallel_state.destroy_model_parallel()
    return found


@pytest.mark.parametrize("num_ranks", [1, 4])
def test_megatrons_optimizer_goes_on_with_the_moments(num_ranks: int, run_ranks: Any, tmp_path: Path) -> None:
    cases = {
        1: {"one rank": (DENSE, RankLayout(implementation="local"))},
        4: {name: CASES[name] for name in ("tensor 2 x pipeline 2", "tensor 2 x pipeline 2, interleaved")},
    }[num_ranks]
    for name, (model, layout) in cases.items():
        model = replace(model, vocab_size_multiple=16)
        shapes = shapes_of(pair.ours for pair in rank_pairs(model, VOCABULARY, RankLayout()))
        weights = {each: torch.randn(shape) for each, shape in shapes.items()}
        state = {f"optimizer.state.exp_avg.{each}": 2 * weight for each, weight in weights.items()}
        squares = {f"optimizer.state.exp_avg_sq.{each}": weight**2 for each, weight in weights.items()}
        config = RunConfig(model=model, train=TrainConfig(sequence_length=16))
        write_ranks(
            tmp_path / name,
            InMemory({**weights, **state, **squares}),
            config=config,
            state=RunState(step=3, consumed_samples=96, num_updates=3),
            layout=layout,
            with_optimizer=True,
        )

    def load() -> dict[str, list[str]]:
        return {name: moments_elsewhere(*case, tmp_path / name) for name, case in cases.items()}

    for by_case in run_ranks(load, num_ranks):
        assert by_case == {name: [] for name in cases}
