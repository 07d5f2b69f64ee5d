"""Layer specs of the backbone: the blocks of a chunk, with the edits of their memories' slots."""

from __future__ import annotations

import importlib.util
import pkgutil
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal

from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from kernels.select import Kernels
from megamem.attention.core import SdpaCoreAttention
from megamem.backbone.moe import moe_spec
from megamem.backbone.norm import HeadNorm, LayerNorm, RMSNorm
from megamem.backbone.parts import BlockEdit, Parts, Site
from megamem.backbone.swiglu import activation_of
from megamem.block import MemoryBlock
from megamem.config import LatentAttentionConfig, MoEConfig
from megamem.placement.spans import pending_before
from megamem.side_stream import SideStream


def backbone_parts(
    config: TransformerConfig,
    *,
    implementation: Literal["local", "transformer_engine"],
    attention_core: type[SdpaCoreAttention],
    norm: type[RMSNorm],
    qk_norm: bool,
    latent: LatentAttentionConfig | None,
    moe: MoEConfig | None,
    kernels: Kernels,
    groups: ProcessGroupCollection,
    side_stream: SideStream,
) -> Parts:
    """The modules that blocks are built from.

    Args:
        config: Megatron's config of the whole model.
        implementation: Megatron's local linears with our `norm` and `attention_core`, or all of Transformer Engine's.
        latent: settings of latent attention; None: keys and values have projections of their own.
        moe: a mixture of experts as the feed-forward; None: the dense one.
        kernels: kernels of what stands between products.
        side_stream: stream on which the memory of a block runs beside its feed-forward.

    Raises:
        ValueError: Transformer Engine is asked for and not installed.
    """
    if implementation == "transformer_engine" and importlib.util.find_spec("transformer_engine") is None:
        raise ValueError(
            "model.implementation is transformer_engine, which is not installed: pip install 'megamem[te]', or use "
            "model.implementation: local"
        )
    te = implementation == "transformer_engine"
    provider = TESpecProvider() if te else LocalSpecProvider()
    ffn, ffn_arguments = _ffn(provider, groups, config.ffn_hidden_size, moe, kernels)
    return Parts(
        column_linear=provider.column_parallel_linear(),
        row_linear=provider.row_parallel_linear(),
        norm=provider.layer_norm() if te else norm,
        head_norm=(provider.layer_norm(for_qk=True) if te else HeadNorm) if qk_norm else IdentityOp,
        latent_norm=(provider.layer_norm(for_qk=True) if te else norm) if qk_norm else IdentityOp,
        rotated_heads=None if te else kernels.rotated_heads,
        core=provider.core_attention() if te else attention_core,
        ffn=ffn,
        make_ffn=partial(build_module, ffn, **ffn_arguments),
        latent=latent,
        side_stream=side_stream,
    )


def block_spec(layers: range, parts: Parts, sites: Mapping[int, Sequence[Site]]) -> TransformerBlockSubmodules:
    """The specs of one model chunk's layers.

    Args:
        layers: global 0-based numbers of the chunk's layers.
        sites: the chunk's memories, by the layer that they read in.
    """
    spans = [site.span for of_layer in sites.values() for site in of_layer]
    specs = []
    for layer in layers:
        of_layer, block = tuple(sites.get(layer, ())), parts.block()
        for site in of_layer:
            _edit(block, site, parts)
        joins = tuple(span.add == layer for span in pending_before(spans, layer))
        specs.append(_layer(block, of_layer, joins))
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=parts.norm)


def _edit(block: TransformerLayerSubmodules, site: Site, parts: Parts) -> None:
    """Let the slot of a memory change its block."""
    if site.plan.has_layer_norm:
        block.input_layernorm = LayerNorm
    edit: BlockEdit = pkgutil.resolve_name(site.slot.edit_path)
    edit(block, site, parts)


def _layer(block: TransformerLayerSubmodules, sites: tuple[Site, ...], joins: tuple[bool, ...]) -> ModuleSpec:
    """The layer around a block; `joins` says of each memory under way before it whether it is added after it."""
    if not sites and not any(joins):
        return ModuleSpec(module=TransformerLayer, submodules=block)
    # Of two memories one is in attention, which asks for no block of its own.
    own = [layer for site in sites if (layer := pkgutil.resolve_name(site.slot.layer_path)) is not MemoryBlock]
    (layer,) = own or (MemoryBlock,)
    return ModuleSpec(module=layer, params={"sites": sites, "joins": joins}, submodules=block)


def _ffn(
    provider: LocalSpecProvider | TESpecProvider,
    groups: ProcessGroupCollection,
    width: int,
    moe: MoEConfig | None,
    kernels: Kernels,
) -> tuple[ModuleSpec, dict[str, Any]]:
    """The feed-forward, and the groups that Megatron's layer hands to it where it stands alone."""
    linears = MLPSubmodules(
        linear_fc1=provider.column_parallel_linear(),
        linear_fc2=provider.row_parallel_linear(),
        activation_func=activation_of(kernels.swiglu),
    )
    if moe is not None:
        return moe_spec(linears, moe.balance_sequences), {"pg_collection": groups}
    dense = ModuleSpec(module=MLP, params={"ffn_hidden_size": width}, submodules=linears)
    return dense, {"tp_group": groups.tp}
