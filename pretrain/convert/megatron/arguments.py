"""Megatron-LM's arguments, which it saves beside a model's tensors, as a model of ours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megamem.attention.rotary_config import RotaryScalingConfig
from megamem.config.model import ModelConfig, MoEConfig
from pretrain.errors import CheckpointError

# Arguments whose values change what a model computes, with Megatron-LM's default and the values that are ours. Those
# that add weights need no line: a tensor that the model does not have is refused.
_PLAIN: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "normalization": ("LayerNorm", ("RMSNorm",)),
    "swiglu": (False, (True,)),
    "position_embedding_type": ("learned_absolute", ("rope",)),
    "add_bias_linear": (True, (False,)),
    "rotary_percent": (1.0, (1.0,)),
    "rotary_interleaved": (False, (False,)),
    "no_rope_freq": (None, (None,)),
    "apply_layernorm_1p": (False, (False,)),
    "layernorm_zero_centered_gamma": (False, (False,)),
    "apply_residual_connection_post_layernorm": (False, (False,)),
    "qk_l2_norm": (False, (False,)),
    "softmax_scale": (None, (None,)),
    "window_size": (None, (None,)),
    "softmax_type": ("vanilla", ("vanilla",)),
    "attention_output_gate": (False, (False,)),
    "experimental_attention_variant": (None, (None,)),
    "multi_latent_attention": (False, (False,)),
    "mtp_num_layers": (None, (None, 0)),
    "glu_linear_offset": (0.0, (0.0,)),
    "activation_func_clamp_value": (None, (None,)),
    "use_mup": (False, (False,)),
    "heterogeneous_layers_config_path": (None, (None,)),
    "hybrid_override_pattern": (None, (None,)),
    "hybrid_layer_pattern": (None, (None,)),
}
# The same, of experts.
_PLAIN_EXPERTS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "moe_router_score_function": ("softmax", ("softmax",)),
    "moe_router_topk_scaling_factor": (None, (None, 1.0)),
    "moe_router_num_groups": (None, (None,)),
    "moe_router_group_topk": (None, (None,)),
    "moe_router_topk_limited_devices": (None, (None,)),
    "moe_router_force_load_balancing": (False, (False,)),
    "moe_expert_capacity_factor": (None, (None,)),
    "moe_expert_rank_capacity_factor": (None, (None,)),
    "moe_apply_probs_on_input": (False, (False,)),
    "moe_mlp_glu_interleave_size": (None, (None,)),
    "moe_shared_expert_intermediate_size": (None, (None,)),
    "moe_latent_size": (None, (None,)),
}
# Ways of balancing experts that leave the choice to the router's scores.
_BALANCED = ("none", "aux_loss", "seq_aux_loss", "global_aux_loss")
# Megatron-core's constants of `use_rope_scaling`, which is Llama 3.1's.
_LLAMA3: dict[str, Any] = {"original_length": 8192, "low_frequency_factor": 1.0, "high_frequency_factor": 4.0}


def model_of(arguments: Mapping[str, Any], origin: str) -> ModelConfig:
    """The model that the arguments describe; options that they leave out have Megatron-LM's defaults.

    Args:
        arguments: values by name.
        origin: name of the arguments in messages.

    Raises:
        CheckpointError: the model is none that ours can be; the message names the argument and the value of what they
            cannot.
    """
    _check_plain(arguments, _PLAIN, origin)
    heads, hidden = _whole(arguments, "num_attention_heads", origin), _whole(arguments, "hidden_size", origin)
    groups = heads
    if arguments.get("group_query_attention", False):
        groups = _whole(arguments, "num_query_groups", origin)
    head_dim = _whole(arguments, "kv_channels", origin)
    # By its name in Megatron-LM up to 2025, and by that in Megatron-core.
    epsilon = "norm_epsilon" if "norm_epsilon" in arguments else "layernorm_epsilon"
    # Rows of the embedding, where only their padded number is known.
    padded = _whole(arguments, "padded_vocab_size", origin)
    moe = _experts(arguments, origin)
    # Experts have a width of their own.
    dense: dict[str, Any] = {} if moe is not None else {"ffn_hidden_size": _whole(arguments, "ffn_hidden_size", origin)}
    try:
        return ModelConfig(
            num_layers=_whole(arguments, "num_layers", origin),
            hidden_size=hidden,
            num_attention_heads=heads,
            num_query_groups=None if groups == heads else groups,
            head_dim=None if head_dim * heads == hidden else head_dim,
            moe=moe,
            **dense,
            vocab_size=_whole(arguments, "vocab_size", origin, padded),
            tied_embeddings=not arguments.get("untie_embeddings_and_output_weights", False),
            qk_norm=bool(arguments.get("qk_layernorm", False)),
            qkv_bias=bool(arguments.get("add_qkv_bias", False)),
            norm_epsilon=_number(arguments, epsilon, origin),
            rotary_base=_whole(arguments, "rotary_base", origin),
            rotary_scaling=_scaling(arguments, origin),
        )
    except ValueError as error:
        raise CheckpointError(f"{origin}: {error}") from error


def _check_plain(arguments: Mapping[str, Any], plain: Mapping[str, tuple[Any, tuple[Any, ...]]], origin: str) -> None:
    for key, (default, ours) in plain.items():
        value = arguments.get(key, default)
        # 0 and 1 are no answers to yes or no.
        if not any(isinstance(value, bool) == isinstance(each, bool) and value == each for each in ours):
            raise _refused(origin, key, value, f"imported models have {ours[0]}")


def _experts(arguments: Mapping[str, Any], origin: str) -> MoEConfig | None:
    if arguments.get("num_experts") is None:
        return None
    _check_plain(arguments, _PLAIN_EXPERTS, origin)
    # 1, or which blocks have experts.
    frequency = arguments.get("moe_layer_freq", 1)
    if any(each != 1 for each in (frequency if isinstance(frequency, list) else [frequency])):
        raise _refused(origin, "moe_layer_freq", frequency, "imported models have experts in every block")
    balance = arguments.get("moe_router_load_balancing_type", "aux_loss")
    if any(each not in _BALANCED for each in (balance if isinstance(balance, list) else [balance])):
        raise _refused(origin, "moe_router_load_balancing_type", balance, f"it may be {', '.join(_BALANCED)}")
    width = "ffn_hidden_size" if arguments.get("moe_ffn_hidden_size") is None else "moe_ffn_hidden_size"
    try:
        return MoEConfig(
            num_experts=_whole(arguments, "num_experts", origin),
            top_k=_whole(arguments, "moe_router_topk", origin, 2),
            expert_ffn_hidden_size=_whole(arguments, width, origin),
            # A softmax over the chosen is one over all, divided by the sum of theirs.
            renormalise=not arguments.get("moe_router_pre_softmax", False),
        )
    except ValueError as error:
        raise CheckpointError(f"{origin}: {error}") from error


def _scaling(arguments: Mapping[str, Any], origin: str) -> RotaryScalingConfig | None:
    factor = arguments.get("rotary_seq_len_interpolation_factor")
    if arguments.get("use_rope_scaling", False):
        if factor is not None:
            raise _refused(origin, "rotary_seq_len_interpolation_factor", factor, "use_rope_scaling is set, too")
        return RotaryScalingConfig("llama3", _number(arguments, "rope_scaling_factor", origin), **_LLAMA3)
    if factor is None:
        return None
    return RotaryScalingConfig("linear", _number(arguments, "rotary_seq_len_interpolation_factor", origin))


def _whole(arguments: Mapping[str, Any], key: str, origin: str, default: int | None = None) -> int:
    value = arguments.get(key)
    value = default if value is None else value
    if type(value) is not int or value < 1:
        raise _refused(origin, key, value, "it must be a whole number from 1 on")
    return value


def _number(arguments: Mapping[str, Any], key: str, origin: str) -> float:
    value = arguments.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _refused(origin, key, value, "it must be a number")
    return float(value)


def _refused(origin: str, key: str, value: Any, why: str) -> CheckpointError:
    return CheckpointError(f"{origin}: the argument {key} is {value}: {why}")
