"""Widths that parameters of Megatron's modules, and of the backbone's own norms, follow (`model.mup`).

What is not listed does not: gains, biases and embeddings, whose outputs alone are as wide as the model. Inner widths of
feed-forwards and experts are taken to grow as the model does, and so is the number of attention's heads.
"""

from __future__ import annotations

from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.mlp import MLP
from torch import nn

from megamem.attention.latents import LatentAttention
from megamem.backbone.multi_token import MultiTokenPrediction
from megamem.config.width import Width
from megamem.parameters.declaration import set_width


def set_backbone_widths(model: nn.Module) -> None:
    """Say of the parameters of a model chunk, which are declared already, how they follow its width."""
    for module in model.modules():
        for name, width in _of_weights(module).items():
            # Some inserted blocks have no output projection, some models no norms, and some chunks no last one.
            weight = getattr(getattr(module, name, None), "weight", None)
            if isinstance(weight, nn.Parameter):
                set_width(weight, width)
    last = [getattr(model.decoder, "final_layernorm", None)]
    if isinstance(ahead := getattr(model, "multi_token", None), MultiTokenPrediction):
        last += [layer.final_layernorm for layer in ahead.layers]
    for norm in last:
        if norm is not None:
            set_width(norm.weight, Width.LOGITS)


def _of_weights(module: nn.Module) -> dict[str, Width]:
    """Width of the weight of a module's parts, by the part's name."""
    match module:
        case SelfAttention():
            return {"linear_qkv": Width.BOTH, "q_layernorm": Width.HEADS, "linear_proj": Width.BOTH}
        case LatentAttention():
            return {
                "linear_q_proj": Width.BOTH,
                "linear_q_down_proj": Width.INPUTS,
                "linear_q_up_proj": Width.OUTPUTS,
                "linear_kv_down_proj": Width.INPUTS,
                "linear_kv_up_proj": Width.OUTPUTS,
                "linear_proj": Width.BOTH,
            }
        case MLP():
            return {"linear_fc1": Width.BOTH, "linear_fc2": Width.BOTH}
    return {}
