"""Layer specs of the backbone: which module fills each of Megatron's slots."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Literal

from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from megamem.attention import SdpaCoreAttention
from megamem.block import FfnWithMemory
from megamem.layers.layer import MemoryLayer
from megamem.norm import RMSNorm

# Builds the memory layer of a global 0-based layer, or is None for a block without one.
MemoryMaker = Callable[[int], Callable[[], MemoryLayer] | None]


def block_spec(
    layers: range,
    *,
    implementation: Literal["local", "transformer_engine"],
    qk_norm: bool,
    memory_of: MemoryMaker,
    groups: ProcessGroupCollection,
) -> TransformerBlockSubmodules:
    """The specs of one model chunk's layers.

    Args:
        layers: global 0-based numbers of the chunk's layers.
        implementation: Megatron's local linears with our norm and SDPA attention, or Transformer Engine's linears, norms and attention.
        qk_norm: normalise queries and keys per head.
        memory_of: what each layer's memory is built by.
        groups: the model's process groups.

    Raises:
        ValueError: if Transformer Engine is asked for and not installed.
    """
    if implementation == "transformer_engine" and importlib.util.find_spec("transformer_engine") is None:
        raise ValueError(
            "model.implementation is transformer_engine, which is not installed: pip install 'megamem[te]', or use model.implementation: local"
        )
    te = implementation == "transformer_engine"
    provider = TESpecProvider() if te else LocalSpecProvider()
    norm = provider.layer_norm() if te else RMSNorm
    qk = (provider.layer_norm(for_qk=True) if te else RMSNorm) if qk_norm else IdentityOp
    attention = ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=provider.column_parallel_linear(),
            core_attention=provider.core_attention() if te else SdpaCoreAttention,
            linear_proj=provider.row_parallel_linear(),
            q_layernorm=qk,
            k_layernorm=qk,
        ),
    )
    ffn = MLPSubmodules(linear_fc1=provider.column_parallel_linear(), linear_fc2=provider.row_parallel_linear())
    specs = [
        ModuleSpec(
            module=TransformerLayer,
            submodules=TransformerLayerSubmodules(
                input_layernorm=norm,
                self_attention=attention,
                self_attn_bda=get_bias_dropout_add,
                pre_mlp_layernorm=norm,
                mlp=_mlp_slot(ffn, memory_of(layer), groups),
                mlp_bda=get_bias_dropout_add,
            ),
        )
        for layer in layers
    ]
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=norm)


def _mlp_slot(
    ffn: MLPSubmodules, make_memory: Callable[[], MemoryLayer] | None, groups: ProcessGroupCollection
) -> ModuleSpec:
    if make_memory is None:
        return ModuleSpec(module=MLP, submodules=ffn)
    return ModuleSpec(module=FfnWithMemory, params={"ffn": ffn, "make_memory": make_memory, "tp_group": groups.tp})
