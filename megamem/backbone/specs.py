"""The modules of the backbone: Megatron's local linears with our norms and attention, or all of Transformer Engine's."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import partial

from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from kernels.select import Kernels
from megamem.backbone.moe import moe_spec
from megamem.backbone.norm import HeadNorm
from megamem.backbone.parts import Parts
from megamem.backbone.swiglu import activation_of
from megamem.chunk.machinery import Machinery
from megamem.config.model import ModelConfig, MoEConfig


def backbone_parts(config: TransformerConfig, model: ModelConfig, machinery: Machinery) -> Parts:
    """The modules that blocks are built from.

    Args:
        config: Megatron's config of the whole model.
        model: ours. `implementation` says whether linears, norms and attention are Megatron's local ones with those of the
            machinery, or all Transformer Engine's.

    Raises:
        ValueError: Transformer Engine is asked for and not installed.
    """
    te = model.implementation == "transformer_engine"
    if te and importlib.util.find_spec("transformer_engine") is None:
        raise ValueError(
            "model.implementation is transformer_engine, which is not installed: pip install 'megamem[te]', or use "
            "model.implementation: local"
        )
    provider = TESpecProvider() if te else LocalSpecProvider()
    return Parts(
        column_linear=provider.column_parallel_linear(),
        row_linear=provider.row_parallel_linear(),
        norm=provider.layer_norm() if te else machinery.norm,
        head_norm=(provider.layer_norm(for_qk=True) if te else HeadNorm) if model.qk_norm else IdentityOp,
        latent_norm=(provider.layer_norm(for_qk=True) if te else machinery.norm) if model.qk_norm else IdentityOp,
        rotated_heads=None if te else machinery.kernels.rotated_heads,
        core=provider.core_attention() if te else machinery.attention_core,
        make_ffn=_ffn(provider, machinery.groups, config.ffn_hidden_size, model.moe, machinery.kernels),
        latent=model.latent_attention,
        side_stream=machinery.side_stream,
    )


def _ffn(
    provider: LocalSpecProvider | TESpecProvider,
    groups: ProcessGroupCollection,
    width: int,
    moe: MoEConfig | None,
    kernels: Kernels,
) -> Callable[..., nn.Module]:
    """Makes the feed-forward."""
    linears = MLPSubmodules(
        linear_fc1=provider.column_parallel_linear(),
        linear_fc2=provider.row_parallel_linear(),
        activation_func=activation_of(kernels.swiglu),
    )
    if moe is not None:
        return partial(build_module, moe_spec(linears, moe.balance_sequences), pg_collection=groups)
    dense = ModuleSpec(module=MLP, params={"ffn_hidden_size": width}, submodules=linears)
    return partial(build_module, dense, tp_group=groups.tp)
