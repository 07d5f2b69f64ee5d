"""Layer specs of the backbone: which module fills each of Megatron's slots."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from megamem.attention import SdpaCoreAttention
from megamem.block import AttentionWithMemory, CoreWithMemory, FfnWithMemory, HeadsToTokens, MemoryBlock, without_stream
from megamem.config import LatentAttentionConfig, MoEConfig
from megamem.kv_cache import CachingSelfAttention
from megamem.latent_attention import LatentAttention, LatentAttentionSubmodules, LatentAttentionWithMemory
from megamem.moe import moe_spec
from megamem.norm import LayerNorm, RMSNorm
from megamem.side_stream import SideStream
from megamem.slots import Site, Slot
from megamem.spans import pending_before
from megamem.swiglu import swiglu


def block_spec(
    layers: range,
    *,
    config: TransformerConfig,
    implementation: Literal["local", "transformer_engine"],
    attention_core: type[SdpaCoreAttention],
    qk_norm: bool,
    latent: LatentAttentionConfig | None,
    moe: MoEConfig | None,
    sites: Mapping[int, Site],
    groups: ProcessGroupCollection,
    side_stream: SideStream,
) -> TransformerBlockSubmodules:
    """The specs of one model chunk's layers.

    Args:
        layers: global 0-based numbers of the chunk's layers.
        config: of the whole model.
        implementation: Megatron's local linears with our norm and `attention_core`, or all of Transformer Engine's.
        latent: of latent attention; None: keys and values have projections of their own.
        moe: a mixture of experts as the feed-forward; None: the dense one.
        sites: the chunk's memories, by the layer that they read in.
        side_stream: where the memory of a block runs beside its feed-forward.

    Raises:
        ValueError: if Transformer Engine is asked for and not installed.
    """
    if implementation == "transformer_engine" and importlib.util.find_spec("transformer_engine") is None:
        raise ValueError(
            "model.implementation is transformer_engine, which is not installed: pip install 'megamem[te]', or use "
            "model.implementation: local"
        )
    te = implementation == "transformer_engine"
    provider = TESpecProvider() if te else LocalSpecProvider()
    ffn, ffn_arguments = _ffn(provider, groups, config.ffn_hidden_size, moe)
    parts = _Parts(
        column_linear=provider.column_parallel_linear(),
        row_linear=provider.row_parallel_linear(),
        norm=provider.layer_norm() if te else RMSNorm,
        qk_norm=(provider.layer_norm(for_qk=True) if te else RMSNorm) if qk_norm else IdentityOp,
        core=provider.core_attention() if te else attention_core,
        ffn=ffn,
        make_ffn=partial(build_module, ffn, **ffn_arguments),
        latent=latent,
        side_stream=side_stream,
    )
    spans = [site.span for site in sites.values()]
    specs = []
    for layer in layers:
        site, block = sites.get(layer), parts.block()
        if site is not None:
            parts.add_memory(block, site)
        joins = tuple(span.add == layer for span in pending_before(spans, layer))
        specs.append(_layer(block, site, joins))
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=parts.norm)


@dataclass(frozen=True)
class _Parts:
    """Modules that the blocks of a model are built from.

    Attributes:
        column_linear: whose columns tensor-parallel ranks split.
        row_linear: whose rows they split.
        qk_norm: of queries and keys, or of latents.
        core: see `megamem.attention`.
        ffn: the feed-forward where Megatron's layer builds it.
        make_ffn: builds it elsewhere.
        latent: see `block_spec`, as `side_stream`.
    """

    column_linear: Any
    row_linear: Any
    norm: Any
    qk_norm: Any
    core: Any
    ffn: ModuleSpec
    make_ffn: Callable[..., Any]
    latent: LatentAttentionConfig | None
    side_stream: SideStream

    def block(self) -> TransformerLayerSubmodules:
        """Megatron's own block."""
        return TransformerLayerSubmodules(
            input_layernorm=self.norm,
            self_attention=self._attention(),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=self.norm,
            mlp=self.ffn,
            mlp_bda=get_bias_dropout_add,
        )

    def _attention(self) -> ModuleSpec:
        causal = {"attn_mask_type": AttnMaskType.causal}
        if self.latent is not None:
            return ModuleSpec(
                module=LatentAttention,
                params={**causal, "latent": self.latent},
                submodules=LatentAttentionSubmodules(
                    linear=self.column_linear,
                    core_attention=self.core,
                    linear_proj=self.row_linear,
                    layernorm=self.qk_norm,
                ),
            )
        return ModuleSpec(
            module=CachingSelfAttention,
            params=causal,
            submodules=SelfAttentionSubmodules(
                linear_qkv=self.column_linear,
                core_attention=self.core,
                linear_proj=self.row_linear,
                q_layernorm=self.qk_norm,
                k_layernorm=self.qk_norm,
            ),
        )

    def add_memory(self, block: TransformerLayerSubmodules, site: Site) -> None:
        """Change what the slot of a memory asks for, and nothing else, in a block that `block` has made."""
        attention: Any = block.self_attention
        heads = attention.submodules
        if site.layer_norm:
            block.input_layernorm = LayerNorm
        match site.slot:
            case Slot.BESIDE | Slot.INSTEAD | Slot.SKIP | Slot.INSERTED | Slot.STREAM_AND_HEADS | Slot.PROJECTED:
                around = {"make_ffn": self.make_ffn, "site": site, "side_stream": self.side_stream}
                block.mlp = ModuleSpec(module=FfnWithMemory, params=around)
                if site.slot.is_inserted:
                    block.pre_mlp_layernorm = IdentityOp
                if not site.slot.has_output_projection:
                    heads.linear_proj = HeadsToTokens
                if site.slot is Slot.PROJECTED:
                    block.self_attn_bda = without_stream
            case Slot.VALUES | Slot.LATENTS:
                attention.params["site"] = site
                attention.module = AttentionWithMemory if self.latent is None else LatentAttentionWithMemory
            case Slot.HEADS:
                heads.core_attention = partial(CoreWithMemory, make_core=self.core, site=site)
            case Slot.BLOCK:
                heads.core_attention = partial(CoreWithMemory, make_core=self.core, site=site)
                heads.linear_proj = HeadsToTokens
                block.pre_mlp_layernorm, block.mlp, block.mlp_bda = IdentityOp, IdentityOp, IdentityFuncOp


def _layer(block: TransformerLayerSubmodules, site: Site | None, joins: tuple[bool, ...]) -> ModuleSpec:
    """The layer around a block; `joins` says of each memory under way before it whether it is added after it."""
    if site is None and not any(joins):
        return ModuleSpec(module=TransformerLayer, submodules=block)
    return ModuleSpec(
        module=MemoryBlock,
        params={
            "slot": site and site.slot,
            "joins": joins,
            "reads_once": site is not None and site.reads_once,
        },
        submodules=block,
    )


def _ffn(
    provider: LocalSpecProvider | TESpecProvider,
    groups: ProcessGroupCollection,
    width: int,
    moe: MoEConfig | None,
) -> tuple[ModuleSpec, dict[str, Any]]:
    """The feed-forward, and the groups that Megatron's layer hands to it where it stands alone."""
    linears = MLPSubmodules(
        linear_fc1=provider.column_parallel_linear(),
        linear_fc2=provider.row_parallel_linear(),
        activation_func=swiglu,
    )
    if moe is not None:
        return moe_spec(linears, moe.balance_sequences), {"pg_collection": groups}
    dense = ModuleSpec(module=MLP, params={"ffn_hidden_size": width}, submodules=linears)
    return dense, {"tp_group": groups.tp}
