"""The part of a rank that an allocation belongs to: decided by the innermost line of code that a reader would name."""

from __future__ import annotations

import sys
from types import CodeType

from pretrain.planning.bytes.memory_parts import MemoryPart

BY_MODULE = (
    ("pretrain.engine.tables.value_offload", MemoryPart.HOST),
    ("pretrain.planning.dryrun.no_files", MemoryPart.FILES),
    ("pretrain.planning.dryrun.tables", MemoryPart.MEMORY),
    ("parallel.exchange", MemoryPart.EXCHANGE),
    ("parallel.sharded_bank", MemoryPart.EXCHANGE),
    ("parallel.context", MemoryPart.ATTENTION),
    ("megamem.attention", MemoryPart.ATTENTION),
    ("megamem.backbone.chunked_loss", MemoryPart.LOSS),
    ("megamem.layers", MemoryPart.MEMORY),
    ("megamem.families", MemoryPart.MEMORY),
    ("megamem.banks.shuffle", MemoryPart.MEMORY),
    ("megamem.blocks", MemoryPart.RESIDUAL),
    ("megamem.residual_streams", MemoryPart.RESIDUAL),
    ("kernels.softmax_gradient", MemoryPart.LOSS),
    ("kernels.softmax_sums", MemoryPart.LOSS),
    ("kernels.rms_norm", MemoryPart.RESIDUAL),
    ("kernels.mix_streams", MemoryPart.RESIDUAL),
    ("kernels.weigh_streams", MemoryPart.RESIDUAL),
    ("kernels.normal_product", MemoryPart.RESIDUAL),
    ("kernels.doubly_stochastic", MemoryPart.RESIDUAL),
    ("kernels.rotated_heads", MemoryPart.ATTENTION),
    ("kernels.swiglu", MemoryPart.FEED_FORWARD),
    ("kernels", MemoryPart.MEMORY),
    ("megatron.core.tensor_parallel.cross_entropy", MemoryPart.LOSS),
    ("megatron.core.models.common.language_module", MemoryPart.LOSS),
    ("megatron.core.transformer.attention", MemoryPart.ATTENTION),
    ("megatron.core.transformer.mlp", MemoryPart.FEED_FORWARD),
    ("megatron.core.transformer.moe", MemoryPart.FEED_FORWARD),
    ("megatron.core.pipeline_parallel.p2p_communication", MemoryPart.MESSAGES),
    ("megatron.core.models.common.embeddings.rope_utils", MemoryPart.ATTENTION),
    ("megatron.core.models.common.embeddings", MemoryPart.RESIDUAL),
    ("megamem.model", MemoryPart.LOSS),
    # The engine of autograd alone: custom functions and checkpoints pass through the other modules of the package.
    ("torch.autograd.graph", MemoryPart.BACKWARD),
)
"""Modules, and packages with all that is in them; the first that matches. Linears and norms are called from everywhere:
their callers decide. One that does not exist would put its bytes under OTHER in silence."""
# Not its package: see above.
_AUTOGRAD = "torch.autograd"
_known: dict[CodeType, MemoryPart | None] = {}


def part_of_caller() -> MemoryPart:
    """The part that the innermost named line on the stack belongs to."""
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code not in _known:
            _known[code] = part_of_module(frame.f_globals.get("__name__", ""))
        if (part := _known[code]) is not None:
            return part
        frame = frame.f_back  # type: ignore[assignment]
    return MemoryPart.OTHER


def part_of_module(name: str) -> MemoryPart | None:
    """The part that a module's lines belong to; None: their callers decide."""
    if name == _AUTOGRAD:
        return MemoryPart.BACKWARD
    return next((part for named, part in BY_MODULE if name == named or name.startswith(f"{named}.")), None)
