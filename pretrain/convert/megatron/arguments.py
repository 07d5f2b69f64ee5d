"""Megatron-LM's arguments, which it saves beside a model's tensors, as a model of ours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megamem.config import ModelConfig
from megamem.rotary_config import RotaryScalingConfig
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
    "num_experts": (None, (None,)),
    "mtp_num_layers": (None, (None, 0)),
    "glu_linear_offset": (0.0, (0.0,)),
    "activation_func_clamp_value": (None, (None,)),
    "use_mup": (False, (False,)),
    "heterogeneous_layers_config_path": (None, (None,)),
    "hybrid_override_pattern": (None, (None,)),
    "hybrid_layer_pattern": (None, (None,)),
}
# Megatron-core's constants of `use_rope_scaling`, which is Llama 3.1's.
_LLAMA3: dict[str, Any] = {"original_length": 8192, "low_frequency_factor": 1.0, "high_frequency_factor": 4.0}


def model_of(arguments: Mapping[str, Any], origin: str) -> ModelConfig:
    """The model that the arguments describe; options that they leave out have Megatron-LM's defaults.

    Args:
        arguments: by name.
        origin: what to call them in messages.

    Raises:
        CheckpointError: naming argument and value of what our models cannot be.
    """
    for key, (default, ours) in _PLAIN.items():
        value = arguments.get(key, default)
        # 0 and 1 are no answers to yes or no.
        if not any(isinstance(value, bool) == isinstance(each, bool) and value == each for each in ours):
            raise _refused(origin, key, value, f"imported models have {ours[0]}")
    heads, hidden = _whole(arguments, "num_attention_heads", origin), _whole(arguments, "hidden_size", origin)
    groups = heads
    if arguments.get("group_query_attention", False):
        groups = _whole(arguments, "num_query_groups", origin)
    head_dim = _whole(arguments, "kv_channels", origin)
    # By its name in Megatron-LM up to 2025, and by that in Megatron-core.
    epsilon = "norm_epsilon" if "norm_epsilon" in arguments else "layernorm_epsilon"
    # Rows of the embedding, where only their padded number is known.
    padded = _whole(arguments, "padded_vocab_size", origin)
    try:
        return ModelConfig(
            num_layers=_whole(arguments, "num_layers", origin),
            hidden_size=hidden,
            num_attention_heads=heads,
            num_query_groups=None if groups == heads else groups,
            head_dim=None if head_dim * heads == hidden else head_dim,
            ffn_hidden_size=_whole(arguments, "ffn_hidden_size", origin),
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
