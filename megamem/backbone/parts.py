"""Modules that the blocks of a model are built from, the parts of a block without a memory, and what a slot changes of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import nn

from kernels.rotated_heads.op import RotatedHeads
from megamem.attention.kv_cache import CachingSelfAttention
from megamem.attention.latents import LatentAttention, LatentAttentionSubmodules
from megamem.chunk.side_stream import SideStream
from megamem.config.model import LatentAttentionConfig
from megamem.placement.block_plan import BlockPlan
from megamem.placement.placed import PlacedMemory
from megamem.placement.slots import SKIP


@dataclass
class BlockParts:
    """Parts of one block, which the slots of its memories change before it is built.

    Attributes:
        input_layernorm: makes the norm before attention.
        self_attention: spec of attention.
        pre_mlp_layernorm: makes the norm before the feed-forward.
        mlp: makes the feed-forward, or what stands beside it or in its place; None: attention's output is all that the
            block adds.
        entry: makes the memory before attention; None: there is none.
        adds_to_attention: attention's output joins the stream before what follows; else it is all that does, or nothing.
    """

    input_layernorm: Callable[..., nn.Module]
    self_attention: ModuleSpec
    pre_mlp_layernorm: Callable[..., nn.Module]
    mlp: Callable[..., nn.Module] | None
    entry: Callable[..., nn.Module] | None = None
    adds_to_attention: bool = True


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
        make_ffn: builds the feed-forward.
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
    make_ffn: Callable[..., nn.Module]
    latent: LatentAttentionConfig | None
    side_stream: SideStream

    def block(self) -> BlockParts:
        """The parts of a block without a memory."""
        return BlockParts(
            input_layernorm=self.norm,
            self_attention=self._attention(),
            pre_mlp_layernorm=self.norm,
            mlp=self.make_ffn,
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
        placed: its config, its slot, and where it reads and joins.
        plan: plan of its block.
        make_memory: builds its layer.
    """

    placed: PlacedMemory
    plan: BlockPlan
    make_memory: Callable[[], MegatronModule]

    def __post_init__(self) -> None:
        assert self.placed.span.is_skip == (self.placed.slot == SKIP)


BlockEdit: TypeAlias = Callable[[BlockParts, Site, Parts], None]
"""Edit of a slot (`megamem.placement.slots.Slot.edit_path`) in the parts that `Parts.block` names."""
