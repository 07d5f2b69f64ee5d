"""Modules that the blocks of a model are built from, Megatron's own block of them, and what a slot edits in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules

from kernels.rotated_heads.op import RotatedHeads
from megamem.attention.kv_cache import CachingSelfAttention
from megamem.attention.latents import LatentAttention, LatentAttentionSubmodules
from megamem.config import LatentAttentionConfig
from megamem.placement.block_plan import BlockPlan
from megamem.placement.slots import SKIP, Slot
from megamem.placement.spans import Span
from megamem.side_stream import SideStream


@dataclass(frozen=True)
class Parts:
    """The modules.

    Attributes:
        column_linear: linear whose columns tensor-parallel ranks split.
        row_linear: linear whose rows they split.
        head_norm: norm of query and key heads.
        latent_norm: norm of latents.
        rotated_heads: normalises and turns heads (`megamem.attention.kv_cache.CachingSelfAttention`); None: Megatron
            does.
        core: attention of heads (`megamem.attention.core`).
        ffn: the feed-forward where Megatron's layer builds it.
        make_ffn: builds it elsewhere.
        latent: settings of latent attention; None: keys and values have projections of their own.
        side_stream: stream on which the memory of a block runs beside its feed-forward.
    """

    column_linear: Any
    row_linear: Any
    norm: Any
    head_norm: Any
    latent_norm: Any
    rotated_heads: RotatedHeads | None
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
        params = {"attn_mask_type": AttnMaskType.causal, "rotated_heads": self.rotated_heads}
        if self.latent is not None:
            return ModuleSpec(
                module=LatentAttention,
                params={**params, "latent": self.latent},
                submodules=LatentAttentionSubmodules(
                    linear=self.column_linear,
                    core_attention=self.core,
                    linear_proj=self.row_linear,
                    layernorm=self.latent_norm,
                ),
            )
        return ModuleSpec(
            module=CachingSelfAttention,
            params=params,
            submodules=SelfAttentionSubmodules(
                linear_qkv=self.column_linear,
                core_attention=self.core,
                linear_proj=self.row_linear,
                q_layernorm=self.head_norm,
                k_layernorm=self.head_norm,
            ),
        )


@dataclass(frozen=True)
class Site:
    """One memory of the model.

    Attributes:
        slot: place in the block at which it acts.
        plan: plan of its block.
        span: the block that it reads in, and the one after which its output joins; the same in every slot but `SKIP`.
        make_memory: builds its layer.
    """

    slot: Slot
    plan: BlockPlan
    span: Span
    make_memory: Callable[[], MegatronModule]

    def __post_init__(self) -> None:
        assert self.span.is_skip == (self.slot == SKIP)


BlockEdit: TypeAlias = Callable[[TransformerLayerSubmodules, Site, Parts], None]
"""Edit of a slot (`megamem.placement.slots.Slot.edit_path`) in a block that `Parts.block` has made."""
