"""Our configuration as the arguments that Megatron-LM keeps in its checkpoints, and back."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from typing import Any

import torch

from megamem.config import ModelConfig, MoEConfig
from megamem.rotary_config import RotaryScalingConfig
from pretrain.config.schema import OptimizerConfig, RunConfig, TrainConfig
from pretrain.convert.megatron_ranks.layout import RankLayout
from pretrain.errors import CheckpointError, ConfigError
from pretrain.state import RunState

# What our models are, in arguments that Megatron-LM takes from a checkpoint (`--use-checkpoint-args`).
_OURS: dict[str, Any] = {
    "position_embedding_type": "rope",
    "add_position_embedding": True,
    "use_rotary_position_embeddings": False,
    "rotary_percent": 1.0,
    "rotary_interleaved": False,
    "normalization": "RMSNorm",
    "apply_layernorm_1p": False,
    "swiglu": True,
    "squared_relu": False,
    "add_bias_linear": False,
    "add_qkv_bias": False,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "apply_query_key_layer_scaling": False,
}
_OUR_MIXTURES: dict[str, Any] = {
    "moe_layer_freq": 1,
    "moe_router_score_function": "softmax",
    "moe_router_dtype": "fp32",
    "moe_token_dispatcher_type": "alltoall",
    "moe_shared_expert_intermediate_size": None,
    "moe_router_enable_expert_bias": False,
    "moe_router_topk_scaling_factor": None,
}
# The balance loss whose statistics are those of one sequence, as a file may have it.
_OF_SEQUENCES = ("seq_aux_loss", ["seq_aux_loss"])
# Without a default of Megatron-LM's that we could rely on.
_NEEDED = ("position_embedding_type", "normalization", "swiglu", "add_bias_linear")
# What changes a model's computation or the names of its weights, and which values leave both as ours.
_ACCEPTED: dict[str, tuple[Any, ...]] = {
    "position_embedding_type": ("rope",),
    "normalization": ("RMSNorm",),
    "swiglu": (True,),
    "add_bias_linear": (False,),
    "add_qkv_bias": (False,),
    "rotary_percent": (1.0,),
    "rotary_interleaved": (False,),
    "rotary_seq_len_interpolation_factor": (None, 1),
    "no_rope_freq": (None,),
    "apply_layernorm_1p": (False,),
    "squared_relu": (False,),
    "quick_geglu": (False,),
    "glu_linear_offset": (0.0,),
    "activation_func_clamp_value": (None,),
    "softmax_type": ("vanilla",),
    "use_transformer_engine_op_fuser": (False,),
    "multi_latent_attention": (False,),
    "qk_l2_norm": (False,),
    "window_size": (None,),
    "attention_output_gate": (False,),
    "mtp_num_layers": (None, 0),
    "heterogeneous_layers_config_path": (None,),
    "heterogeneous_layers_config_encoded_json": (None,),
    "hybrid_layer_pattern": (None,),
    "hybrid_override_pattern": (None,),
    "pipeline_model_parallel_layout": (None,),
    "decoder_first_pipeline_num_layers": (None,),
    "decoder_last_pipeline_num_layers": (None,),
    "account_for_embedding_in_pipeline_split": (False,),
    "account_for_loss_in_pipeline_split": (False,),
    "moe_layer_freq": (1, None),
    "moe_router_score_function": ("softmax",),
    "moe_router_enable_expert_bias": (False,),
    "moe_router_topk_scaling_factor": (None, 1.0),
    "moe_router_num_groups": (None,),
    "moe_shared_expert_intermediate_size": (None,),
    "moe_router_group_topk": (None,),
    "moe_apply_probs_on_input": (False,),
    "moe_latent_size": (None,),
    "moe_single_grouped_weight": (False,),
    "fp16": (False,),
}


def arguments_of(
    config: RunConfig, state: RunState, layout: RankLayout, *, vocabulary: int, with_optimizer: bool
) -> Namespace:
    """What Megatron-LM's argument parser would have made of a run.

    Args:
        config: the run's.
        state: how far it has come.
        layout: of the files.
        vocabulary: rows of the embedding, padding included.
        with_optimizer: whether the files hold the optimizer's state.

    Raises:
        ConfigError: Megatron-LM would pad the vocabulary to another size on this layout, or has no such rotary scaling.
    """
    model, train = config.model, config.train
    if model.vocab_size_multiple % layout.tensor:
        raise ConfigError(
            f"tensor {layout.tensor} does not divide model.vocab_size_multiple, {model.vocab_size_multiple}, to a "
            "multiple of which Megatron-LM would pad the vocabulary per rank: choose a divisor"
        )
    return Namespace(
        **_arguments_of_model(model, grouped_experts=layout.grouped_experts),
        seq_length=train.sequence_length,
        max_position_embeddings=train.sequence_length,
        tokenizer_type="NullTokenizer",
        vocab_size=model.vocab_size or vocabulary,
        make_vocab_size_divisible_by=model.vocab_size_multiple // layout.tensor,
        padded_vocab_size=vocabulary,
        **_arguments_of_layout(layout, model.num_layers),
        use_mcore_models=True,
        ckpt_format="torch",
        use_distributed_optimizer=False,
        no_save_optim=not with_optimizer,
        no_save_rng=True,
        **_arguments_of_training(train, config.optimizer, state),
    )


def _arguments_of_model(model: ModelConfig, *, grouped_experts: bool) -> dict[str, Any]:
    """But for its vocabulary, the padding of which depends on the layout."""
    if model.rotary_scaling is not None and model.rotary_scaling != _their_scaling(model.rotary_scaling):
        raise ConfigError(
            f"model.rotary_scaling is {model.rotary_scaling.kind}, and Megatron-LM's GPT models have llama3 alone, with "
            "original_length 8192 and frequency factors 1 and 4: convert to huggingface"
        )
    mixture: dict[str, Any] = {"num_experts": None}
    if model.moe is not None:
        mixture = {
            **_OUR_MIXTURES,
            "num_experts": model.moe.num_experts,
            "moe_ffn_hidden_size": model.moe.expert_ffn_hidden_size,
            "moe_router_topk": model.moe.top_k,
            "moe_router_pre_softmax": not model.moe.renormalise,
            "moe_aux_loss_coeff": model.moe.balance_loss_weight,
            "moe_router_load_balancing_type": "seq_aux_loss" if model.moe.balance_sequences == 1 else "aux_loss",
            "moe_z_loss_coeff": model.moe.z_loss_weight or None,
            "moe_grouped_gemm": grouped_experts,
        }
    return {
        **_OURS,
        **mixture,
        "num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "ffn_hidden_size": model.ffn_hidden_size if model.moe is None else model.moe.expert_ffn_hidden_size,
        "num_attention_heads": model.num_attention_heads,
        "group_query_attention": model.query_groups != model.num_attention_heads,
        "num_query_groups": model.query_groups,
        "kv_channels": model.attention_head_dim,
        "qk_layernorm": model.qk_norm,
        "norm_epsilon": model.norm_epsilon,
        "rotary_base": model.rotary_base,
        "use_rope_scaling": model.rotary_scaling is not None,
        "rope_scaling_factor": model.rotary_scaling.factor if model.rotary_scaling is not None else 8.0,
        "untie_embeddings_and_output_weights": not model.tied_embeddings,
    }


def _arguments_of_layout(layout: RankLayout, num_layers: int) -> dict[str, Any]:
    virtual = layout.virtual_pipeline if layout.virtual_pipeline > 1 else None
    return {
        "tensor_model_parallel_size": layout.tensor,
        "pipeline_model_parallel_size": layout.pipeline,
        "virtual_pipeline_model_parallel_size": virtual,
        "num_layers_per_virtual_pipeline_stage": virtual and num_layers // layout.pipeline // virtual,
        "expert_model_parallel_size": layout.expert,
        "expert_tensor_parallel_size": layout.tensor,
        "context_parallel_size": 1,
        "world_size": layout.tensor * layout.pipeline * layout.expert,
        "data_parallel_random_init": False,
        "transformer_impl": layout.implementation,
    }


def _arguments_of_training(train: TrainConfig, optimizer: OptimizerConfig, state: RunState) -> dict[str, Any]:
    bf16 = train.precision == "bf16"
    return {
        "bf16": bf16,
        "fp16": False,
        "params_dtype": torch.bfloat16 if bf16 else torch.float32,
        "global_batch_size": train.global_batch_size,
        "micro_batch_size": train.micro_batch_size,
        "train_iters": train.num_steps,
        "iteration": state.step,
        "consumed_train_samples": state.consumed_samples,
        "skipped_train_samples": 0,
        "consumed_valid_samples": 0,
        "lr": optimizer.lr,
        "min_lr": optimizer.min_lr,
        "weight_decay": optimizer.weight_decay,
        "adam_beta1": optimizer.beta1,
        "adam_beta2": optimizer.beta2,
        "adam_eps": optimizer.epsilon,
        "clip_grad": optimizer.clip_grad,
    }


def model_of(arguments: Mapping[str, Any]) -> ModelConfig:
    """The model that Megatron-LM's arguments describe. All rows of its vocabulary count as token ids.

    Args:
        arguments: by name, as `vars` of the checkpoint's `args`.

    Raises:
        CheckpointError: it is a model that ours cannot be, or an argument is missing or of no sense.
    """
    absent = [name for name in _NEEDED if name not in arguments]
    if absent:
        raise CheckpointError(f"its args lack {', '.join(absent)}: it is not a checkpoint of Megatron-LM's GPT models")
    has_experts = bool(arguments.get("num_experts"))
    for name, accepted in _ACCEPTED.items():
        if name in arguments and arguments[name] not in accepted and (has_experts or not name.startswith("moe_")):
            raise CheckpointError(
                f"its args have {name} = {str(arguments[name])[:100]}, which is not supported; {name} must be "
                f"{' or '.join(map(str, accepted))}"
            )
    heads = _integer(arguments, "num_attention_heads")
    grouped = bool(arguments.get("group_query_attention"))
    rows = _integer(arguments, "padded_vocab_size")
    try:
        return ModelConfig(
            num_layers=_integer(arguments, "num_layers"),
            hidden_size=_integer(arguments, "hidden_size"),
            num_attention_heads=heads,
            num_query_groups=_integer(arguments, "num_query_groups") if grouped else heads,
            head_dim=_integer(arguments, "kv_channels"),
            # A mixture has no dense feed-forward, and its width no effect.
            ffn_hidden_size=ModelConfig.ffn_hidden_size if has_experts else _integer(arguments, "ffn_hidden_size"),
            vocab_size=rows,
            vocab_size_multiple=_integer(arguments, "make_vocab_size_divisible_by")
            * _integer(arguments, "tensor_model_parallel_size"),
            tied_embeddings=not arguments.get("untie_embeddings_and_output_weights"),
            qk_norm=bool(arguments.get("qk_layernorm")),
            norm_epsilon=float(arguments.get("norm_epsilon", 1e-5)),
            rotary_base=_whole(arguments, "rotary_base", 10000),
            rotary_scaling=_scaling_of(arguments),
            moe=_mixture_of(arguments) if has_experts else None,
        )
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"its args describe no model of ours: {error}") from error


def run_of(arguments: Mapping[str, Any], iteration: int) -> tuple[RunConfig, RunState]:
    """A run of ours that goes on from a checkpoint with these arguments, and how far it has come.

    Its length, batches, precision and AdamW's settings are theirs; data sets and schedule are for the user to say.

    Args:
        arguments: by name, as `vars` of the checkpoint's `args`.
        iteration: optimizer steps done.

    Raises:
        CheckpointError: see `model_of`.
    """
    length = _integer(arguments, "seq_length")
    samples = arguments.get("consumed_train_samples")
    samples = samples if type(samples) is int and samples >= 0 else 0
    state = RunState(step=iteration, consumed_samples=samples, consumed_tokens=samples * length, num_updates=iteration)
    model = model_of(arguments)
    try:
        train = TrainConfig(
            **_given(arguments, num_steps="train_iters", global_batch_size="global_batch_size"),
            **_given(arguments, micro_batch_size="micro_batch_size"),
            sequence_length=length,
            precision="bf16" if arguments.get("bf16") else "fp32",
        )
        optimizer = OptimizerConfig(
            **_given(arguments, lr="lr", min_lr="min_lr", weight_decay="weight_decay", clip_grad="clip_grad"),
            **_given(arguments, beta1="adam_beta1", beta2="adam_beta2", epsilon="adam_eps"),
        )
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"its args describe no run of ours: {error}") from error
    return RunConfig(model=model, train=train, optimizer=optimizer), state


def _given(arguments: Mapping[str, Any], **names: str) -> dict[str, Any]:
    """Our settings that the arguments have, by our names."""
    return {ours: arguments[theirs] for ours, theirs in names.items() if arguments.get(theirs) is not None}


def _their_scaling(scaling: RotaryScalingConfig) -> RotaryScalingConfig:
    """What Megatron-LM has of the same factor: all but that is fixed in its code."""
    return RotaryScalingConfig("llama3", factor=scaling.factor)


def _scaling_of(arguments: Mapping[str, Any]) -> RotaryScalingConfig | None:
    if not arguments.get("use_rope_scaling"):
        return None
    return RotaryScalingConfig("llama3", factor=float(arguments.get("rope_scaling_factor", 8.0)))


def _mixture_of(arguments: Mapping[str, Any]) -> MoEConfig:
    width = "moe_ffn_hidden_size" if arguments.get("moe_ffn_hidden_size") else "ffn_hidden_size"
    balance = float(arguments.get("moe_aux_loss_coeff") or 0.0)
    # Megatron's other statistics are those of a microbatch.
    of_sequence = not balance or arguments.get("moe_router_load_balancing_type") in _OF_SEQUENCES
    return MoEConfig(
        num_experts=_integer(arguments, "num_experts"),
        top_k=_integer(arguments, "moe_router_topk"),
        expert_ffn_hidden_size=_integer(arguments, width),
        renormalise=not arguments.get("moe_router_pre_softmax"),
        balance_loss_weight=balance,
        balance_sequences=1 if of_sequence else _integer({"micro_batch_size": 1, **arguments}, "micro_batch_size"),
        z_loss_weight=float(arguments.get("moe_z_loss_coeff") or 0.0),
    )


def layout_of(arguments: Mapping[str, Any]) -> RankLayout:
    """How the files of a checkpoint with these arguments divide the model.

    Raises:
        CheckpointError: its experts are split otherwise than the rest, or an argument is missing or of no sense.
    """
    tensor = _integer(arguments, "tensor_model_parallel_size")
    expert_tensor = arguments.get("expert_tensor_parallel_size")
    if arguments.get("num_experts") and expert_tensor not in (None, tensor):
        raise CheckpointError(
            f"its args have expert_tensor_parallel_size = {expert_tensor} and tensor_model_parallel_size = {tensor}: only "
            "equal sizes are supported"
        )
    implementation = arguments.get("transformer_impl", "transformer_engine")
    if implementation not in ("local", "transformer_engine"):
        raise CheckpointError(f"its args have transformer_impl = {str(implementation)[:100]}, which is not supported")
    return RankLayout(
        tensor=tensor,
        pipeline=_integer(arguments, "pipeline_model_parallel_size"),
        virtual_pipeline=arguments.get("virtual_pipeline_model_parallel_size") or 1,
        expert=arguments.get("expert_model_parallel_size") or 1,
        implementation=implementation,
        grouped_experts=bool(arguments.get("num_experts") and arguments.get("moe_grouped_gemm")),
    )


def _whole(arguments: Mapping[str, Any], name: str, default: int) -> int:
    """A whole number, which may be written as one with a point."""
    value = arguments.get(name, default)
    if int(value) != value:
        raise ValueError(f"{name} is {value}, and only whole numbers are supported")
    return int(value)


def _integer(arguments: Mapping[str, Any], name: str) -> int:
    value = arguments.get(name)
    if type(value) is not int or value < 1:
        raise CheckpointError(f"its args have {name} = {str(value)[:100]}: a number of 1 or more is needed")
    return value
