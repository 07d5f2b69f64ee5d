"""The one adapter from our config to Megatron's."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.transformer.transformer_config import TransformerConfig

from parallel.groups import ParallelSizes
from parallel.pipeline_layout import ModelChunk, model_chunks
from pretrain.config.context_ways import Way, context_way
from pretrain.config.schema import RunConfig
from pretrain.engine.tables.pipeline_copies import finalize_with_copies

_TE_WAYS: dict[Way, str] = {"gather": "all_gather", "heads": "a2a", "ring": "p2p"}


def parallel_sizes(config: RunConfig) -> ParallelSizes:
    """The layout's axes."""
    layout = config.parallel
    return ParallelSizes(
        tensor=layout.tensor,
        pipeline=layout.pipeline,
        virtual_pipeline=layout.virtual_pipeline,
        context=layout.context,
        memory=layout.memory,
        memory_rows=layout.memory_rows,
    )


def parameter_dtype(config: RunConfig) -> torch.dtype:
    """The dtype of weights and activations."""
    return torch.bfloat16 if config.train.precision == "bf16" else torch.float32


def transformer_config(config: RunConfig, *, dtype: torch.dtype, on_gpu: bool) -> TransformerConfig:
    """Megatron's model config: `dtype` is that of weights, activations and pipeline messages."""
    model, layout = config.model, config.parallel
    interleaved = layout.virtual_pipeline > 1
    result = TransformerConfig(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.query_groups,
        kv_channels=model.attention_head_dim,
        # Queries and keys are turned whole, so that a factor of both is one of their scores.
        softmax_scale=(
            None
            if model.rotary_scaling is None
            else model.rotary_scaling.score_factor / math.sqrt(model.attention_head_dim)
        ),
        ffn_hidden_size=model.ffn_hidden_size if model.moe is None else model.moe.expert_ffn_hidden_size,
        normalization="RMSNorm",
        layernorm_epsilon=model.norm_epsilon,
        qk_layernorm=model.qk_norm,
        gated_linear_unit=True,
        activation_func=F.silu,
        # Not Transformer Engine's, but the one that the spec names: `megamem.backbone.swiglu`.
        use_te_activation_func=True,
        add_bias_linear=False,
        add_qkv_bias=model.qkv_bias,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        # Our own generator fills the weights: Megatron's depends on the pipeline layout.
        perform_initialization=False,
        use_cpu_initialization=not on_gpu,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        tensor_model_parallel_size=layout.tensor,
        sequence_parallel=layout.tensor > 1,
        pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=layout.virtual_pipeline if interleaved else None,
        pipeline_model_parallel_layout=None if layout.pipeline_layout is None else _megatron_layout(config),
        context_parallel_size=layout.context,
        # Read by Transformer Engine's attention; ours is another class for each way.
        cp_comm_type=_TE_WAYS[context_way(config)] if layout.context > 1 else None,
        # Interleaved schedules with batched p2p exchange the messages of two chunks without a word of warning.
        overlap_p2p_comm=interleaved,
        batch_p2p_comm=not interleaved,
        # For a defect of torch before 2.0: the host would wait for the device at every message.
        batch_p2p_sync=False,
        # By Apex for Megatron's linears, by Transformer Engine for its own.
        gradient_accumulation_fusion="weight_gradients" in config.train.apex,
        # In Megatron's own code, the lookup of embeddings reads this.
        deterministic_mode=config.train.deterministic,
        # Layers carry their global number in checkpoint names, whatever stage they are on.
        hetereogenous_dist_checkpoint=True,
        calculate_per_token_loss=True,
        **_recompute(config),
        **_experts(config, dtype),
    )
    result.finalize_model_grads_func = finalize_with_copies
    return result


def run_chunks(config: RunConfig) -> tuple[ModelChunk, ...]:
    """Contents of the model's chunks, in the order of the depth.

    Raises:
        ValueError: the layout is malformed or does not fit (`parallel.pipeline_layout.model_chunks`).
    """
    layout = config.parallel
    return model_chunks(
        config.model.num_layers,
        pipeline=layout.pipeline,
        virtual_pipeline=layout.virtual_pipeline,
        layout=layout.pipeline_layout,
    )


def _megatron_layout(config: RunConfig) -> list[list[str]]:
    """The chunks in Megatron's own words."""
    return [
        ["embedding"] * chunk.has_embedding + ["decoder"] * len(chunk.layers) + ["loss"] * chunk.has_loss
        for chunk in run_chunks(config)
    ]


def _recompute(config: RunConfig) -> dict[str, object]:
    match config.train.recompute:
        case "full":
            return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
        case "selective":
            return {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
    return {}


def _experts(config: RunConfig, dtype: torch.dtype) -> dict[str, object]:
    """Megatron's mixture of experts, with the experts spread over the memory group and no token dropped."""
    moe = config.model.moe
    if moe is None:
        return {}
    return {
        "num_moe_experts": moe.num_experts,
        "moe_ffn_hidden_size": moe.expert_ffn_hidden_size,
        "moe_router_topk": moe.top_k,
        # Softmax over all experts before the selection, or over those selected, which equals the former, renormalised.
        "moe_router_pre_softmax": not moe.renormalise,
        "moe_router_dtype": "fp64" if dtype == torch.float64 else "fp32",
        # Over groups of sequences, see `megamem.backbone.moe.Router`.
        "moe_router_load_balancing_type": "seq_aux_loss",
        "moe_aux_loss_coeff": moe.balance_loss_weight,
        "moe_z_loss_coeff": moe.z_loss_weight or None,
        "moe_token_dispatcher_type": "alltoall",
        "expert_model_parallel_size": config.parallel.memory,
        "expert_tensor_parallel_size": 1,
    }


def ddp_config(config: RunConfig) -> DistributedDataParallelConfig:
    """Gradients in fp32 buffers, reduced once per step, with optimizer state split over the replicas."""
    return DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=True,
        overlap_grad_reduce=config.parallel.overlap_grad_reduce,
        overlap_param_gather=config.parallel.overlap_param_gather,
    )


def optimizer_config(config: RunConfig, dtype: torch.dtype) -> MegatronOptimizerConfig:
    """Config of Megatron's optimizer. AdamW is ours, with rates and decays from `pretrain.config.schedule`."""
    return MegatronOptimizerConfig(
        clip_grad=config.optimizer.clip_grad,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=True,
    )
