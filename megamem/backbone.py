"""Layer specs of the backbone: which module fills each of Megatron's slots."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import nn

from megamem.attention import SdpaCoreAttention
from megamem.block import FfnWithMemory, SkipInsertionLayer
from megamem.layers.layer import MemoryLayer
from megamem.moe import moe_spec
from megamem.norm import RMSNorm
from megamem.side_stream import SideStream
from megamem.spans import Span, pending_before

# Builds the memory layer of a global 0-based layer, or is None for a block without one.
MemoryMaker = Callable[[int], Callable[[], MemoryLayer] | None]


def block_spec(
    layers: range,
    *,
    config: TransformerConfig,
    implementation: Literal["local", "transformer_engine"],
    attention_core: type[SdpaCoreAttention],
    qk_norm: bool,
    memory_of: MemoryMaker,
    memory_replaces_ffn: bool,
    spans: Sequence[Span],
    groups: ProcessGroupCollection,
    side_stream: SideStream,
) -> TransformerBlockSubmodules:
    """The specs of one model chunk's layers.

    Args:
        layers: global 0-based numbers of the chunk's layers.
        config: Megatron's config of the model; with `num_moe_experts` the feed-forward is a mixture of experts.
        implementation: Megatron's local linears with our norm and SDPA attention, or Transformer Engine's linears, norms and attention.
        attention_core: what attends in the former.
        qk_norm: normalise queries and keys per head.
        memory_of: what each layer's memory is built by.
        memory_replaces_ffn: layers with a memory have no feed-forward.
        spans: where every memory of the model reads and adds.
        groups: the model's process groups.
        side_stream: where the memory of a block runs beside its feed-forward.

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
            core_attention=provider.core_attention() if te else attention_core,
            linear_proj=provider.row_parallel_linear(),
            q_layernorm=qk,
            k_layernorm=qk,
        ),
    )
    linears = MLPSubmodules(linear_fc1=provider.column_parallel_linear(), linear_fc2=provider.row_parallel_linear())
    slots = _MlpSlots(config, linears, groups, side_stream)
    specs = []
    for layer in layers:
        make_memory = memory_of(layer)
        skips = any(span.read == layer and span.is_skip for span in spans)
        submodules = TransformerLayerSubmodules(
            input_layernorm=norm,
            self_attention=attention,
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=norm,
            mlp=slots.dense() if make_memory is None else slots.with_memory(make_memory, memory_replaces_ffn, skips),
            mlp_bda=get_bias_dropout_add,
        )
        specs.append(_layer_spec(layer, submodules, spans, skips))
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=norm)


def _layer_spec(layer: int, submodules: TransformerLayerSubmodules, spans: Sequence[Span], skips: bool) -> ModuleSpec:
    """Megatron's layer, or ours where the output of a skipping memory comes or goes."""
    joins = tuple(span.add == layer for span in pending_before(spans, layer))
    if not skips and not any(joins):
        return ModuleSpec(module=TransformerLayer, submodules=submodules)
    return ModuleSpec(module=SkipInsertionLayer, params={"joins": joins, "reads": skips}, submodules=submodules)


class _MlpSlots:
    """What may stand in the `mlp` slot."""

    def __init__(
        self,
        config: TransformerConfig,
        linears: MLPSubmodules,
        groups: ProcessGroupCollection,
        side_stream: SideStream,
    ) -> None:
        self._side_stream = side_stream
        self._ffn_arguments: dict[str, Any]
        if config.num_moe_experts is not None:
            self._ffn, self._ffn_arguments = moe_spec(linears), {"pg_collection": groups}
        else:
            self._ffn = ModuleSpec(module=MLP, params={"ffn_hidden_size": config.ffn_hidden_size}, submodules=linears)
            self._ffn_arguments = {"tp_group": groups.tp}

    def dense(self) -> ModuleSpec:
        """The feed-forward alone; Megatron's layer hands it the groups."""
        return self._ffn

    def with_memory(self, make_memory: Callable[[], MemoryLayer], replaces_ffn: bool, skips: bool) -> ModuleSpec:
        """The feed-forward with a memory, or the memory in its place."""
        make_ffn: Callable[..., nn.Module] | None = partial(build_module, self._ffn, **self._ffn_arguments)
        return ModuleSpec(
            module=FfnWithMemory,
            params={
                "make_ffn": None if replaces_ffn else make_ffn,
                "make_memory": make_memory,
                "skips": skips,
                "side_stream": self._side_stream,
            },
        )
