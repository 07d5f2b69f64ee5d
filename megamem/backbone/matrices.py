"""Hidden matrices in the modules that Megatron makes: attention's projections and those of feed-forwards.

Megatron stores matrices that have one input in one parameter. For an optimizer of matrices they are as many as their
outputs: queries, keys and values of all heads, and gate and up projection.
"""

from __future__ import annotations

from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.mlp import MLP
from torch import nn

from megamem.attention.latents import LatentAttention
from megamem.parameters.declaration import Matrices


def backbone_matrices(model: nn.Module) -> dict[nn.Parameter, Matrices]:
    """The parameters of a model's attention and feed-forwards, experts among them, that consist of hidden matrices."""
    found: dict[nn.Parameter, Matrices] = {}
    for module in model.modules():
        for name, matrices in _of_linears(module).items():
            # Some inserted blocks have no output projection, and no latents of queries.
            weight = getattr(getattr(module, name, None), "weight", None)
            if isinstance(weight, nn.Parameter):
                found[weight] = matrices
    return found


def _of_linears(module: nn.Module) -> dict[str, Matrices]:
    """The matrices of a module's linears, by the linear's name."""
    match module:
        case SelfAttention():
            # Of each key/value head its queries' rows, then the key's and the value's.
            head = module.hidden_size_per_attention_head
            queries = module.num_attention_heads_per_partition // module.num_query_groups_per_partition * head
            return {"linear_qkv": Matrices((queries, head, head)), "linear_proj": Matrices()}
        case LatentAttention():
            head, (_, rotary) = module.hidden_size_per_attention_head, module.widths
            return {
                "linear_q_proj": Matrices(),
                "linear_q_down_proj": Matrices(),
                "linear_q_up_proj": Matrices(),
                # Latents and the rotary key; of each head its key without the rotary part, and its value.
                "linear_kv_down_proj": Matrices(module.widths if rotary else ()),
                "linear_kv_up_proj": Matrices((head - rotary, head)),
                "linear_proj": Matrices(),
            }
        case MLP():
            # Of each tensor-parallel rank its rows of the gate, then those of the up projection.
            half = module.linear_fc1.weight.shape[0] // 2
            return {"linear_fc1": Matrices((half, half)), "linear_fc2": Matrices()}
    return {}
